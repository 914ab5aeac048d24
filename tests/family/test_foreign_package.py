"""A package of somebody else adds parts and a member: as config objects, and by name through its entry points."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

import kinformer
from kinformer.core.config import from_dict, override, to_dict
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure, model_config, storable
from kinformer.family.kinds import kinds
from kinformer.family.table import FAMILY, MEMBERS, member
from kinformer.lab.cli.main import main
from kinformer.lab.tasks.table import ALL, task_for
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.plugins import warn_once
from kinformer.testing import verify_config, verify_mixer
from tests.cli.conftest import make_run  # noqa: F401 (a fixture)
from tests.family.foreign import MODULE, PARTS, look_again, write_metadata, write_module

MIXER = {"layers.*.mixer": "leaky"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of packages that are installed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    look_again()


@pytest.fixture
def module(folder):
    """Parts that no entry point names."""
    write_module(folder)
    look_again()
    return importlib.import_module(MODULE)


@pytest.fixture
def package(folder):
    """The same parts and a member in an installed package; returns its folder."""
    write_module(folder)
    write_metadata(folder)
    look_again()
    return folder


def install(folder, **changes):
    write_metadata(folder, **changes)
    look_again()


@pytest.fixture
def told(capsys):
    """Runs a command line; returns its exit code, standard output and standard error."""

    def run(*arguments):
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def fails(message, call, *arguments, **options):
    with pytest.raises(KinformerError) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert message in text and text[-1] in ".?" and "\n" not in text


def test_a_config_object_is_taken_as_it_is(module):
    mixer = module.Leaky.Config(num_heads=2, decays=(0.5, 0.7))
    config = configure("gpt", "tiny", set={"layers.*.mixer": mixer})
    assert [layer.mixer for layer in config.layers] == [mixer] * 2 and config.layers[0].mixer is mixer
    layers = [config.layers[0], {"kind": "decoder", "mixer": mixer}, "decoder"]
    fails("needs mixer", override, config, {"layers": layers}, kinds())
    assert [layer.mixer for layer in override(config, {"layers": layers[:2]}, kinds()).layers] == [mixer] * 2
    inside = override(config, {"layers.*.mixer.num_heads": "8", "layers.0.mixer.decays": [0.5]}, kinds())
    assert inside.layers[0].mixer == module.Leaky.Config(num_heads=8, decays=(0.5,))
    assert inside.layers[1].mixer == mixer.replace(num_heads=8)
    model = kinformer.build("gpt", recipe="tiny", set={"layers.*.mixer": mixer})
    assert model(torch.zeros(1, 5, dtype=torch.long))[0].shape == (1, 5, 256)


def test_parts_of_attention_are_taken_as_they_are(module):
    parts = {
        "layers.*.mixer.pattern": module.SameParity.Config(),
        "layers.*.mixer.position": module.LogDistance.Config(),
        "layers.*.mixer.score": module.WidthScaledDot.Config(),
    }
    torch.manual_seed(0)
    model = kinformer.build("gpt", recipe="tiny", set=parts).double().eval()
    tokens = torch.randint(256, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = model(tokens)
        left, state = model(tokens[:, :8])
        right, _ = model(tokens[:, 8:], state)
        changed, _ = model(tokens.index_fill(1, torch.tensor([19]), 0))
    assert torch.allclose(torch.cat([left, right], dim=1), whole, atol=1e-9, rtol=0)
    assert torch.equal(changed[:, 20], whole[:, 20]) and not torch.equal(changed[:, 19], whole[:, 19])
    linear = kinformer.build(
        "linear-transformer", recipe="tiny", set={"layers.*.mixer.feature_map": module.Softplus.Config()}
    )
    assert isinstance(linear.stack.units[0].mixer.feature_map, module.Softplus)


def test_a_run_of_a_foreign_mixer_is_traced_and_drawn(package, told, tmp_path, make_run):  # noqa: F811
    run = make_run("gpt", **MIXER)
    (first, second) = kinformer.trace(run, "wind sings").attention
    age = torch.arange(10)[:, None] - torch.arange(10)
    assert torch.allclose(first.weights[0], torch.where(age >= 0, 0.9 ** age.clamp_min(0), 0.0), atol=1e-6)
    assert torch.allclose(second.weights @ second.values, second.outputs, atol=1e-5) and second.implied
    code, out, err = told("draw", str(run), "--out", str(tmp_path / "leaky.svg"))
    assert code == 0 and "leaky" in out and (tmp_path / "leaky.svg").stat().st_size > 1000, err


def test_a_config_of_another_slot_is_refused(module):
    pattern = module.SameParity.Config()
    message = "mixer: the pattern 'same_parity' has the slot 'pattern', but a config with the slot 'mixer' belongs here"
    fails(f"layers.*.{message}", configure, "gpt", "tiny", set={"layers.*.mixer": pattern})
    fails("gate of the mixer 'leaky': the pattern 'same_parity' has the slot", module.Leaky.Config, gate=pattern)


def test_the_foreign_mixer_keeps_the_contract(module):
    verify_mixer(lambda: module.Leaky.Config().build(8), dim=8)


def test_parts_are_found_by_name(package):
    assert all(kind in kinds()[slot] for slot, _, kind in (name.partition(".") for name in PARTS))
    kinformer.build("gpt", recipe="tiny")
    near = "layers.0.mixer: 'leeky' is not a known mixer; did you mean 'leaky'?"
    fails(near, configure, "gpt", "tiny", set={"layers.0.mixer": "leeky"})
    assert MODULE not in sys.modules
    data = {"kind": "leaky", "num_heads": 2, "gate": "elu"}
    config = configure("gpt", "tiny", set={"layers.*.mixer": data, "layers.*.mixer.gate": "softplus"})
    module = sys.modules[MODULE]
    assert config.layers[1].mixer == module.Leaky.Config(num_heads=2)
    assert len(kinds()["mixer"]) == len(list(kinds()["mixer"])) == len({*kinds()["mixer"]})
    verify_config(config.layers[0].mixer, kinds(), dim=8)


def test_a_config_says_which_package_a_part_comes_from(package):
    config = configure("gpt", "tiny", set=MIXER)
    data = json.loads(json.dumps(to_dict(config)))
    assert data["layers"][0]["mixer"] == {
        "kind": "leaky",
        "package": "foreign-parts 1.2",
        "num_heads": 4,
        "decays": [0.9],
        "gate": {"kind": "softplus", "package": "foreign-parts 1.2"},
    }
    assert "package" not in data["layers"][0]["feed_forward"]
    assert from_dict(ModelConfig, data, kinds()) == config and storable(config) == data
    install(package, version="1.3")
    assert to_dict(model_config(data))["layers"][0]["mixer"]["package"] == "foreign-parts 1.3"


def test_what_a_missing_package_was_is_told(package):
    data = to_dict(configure("gpt", "tiny", set=MIXER))
    install(package, version="2.0", entries={})
    start = "config.layers.0.mixer: the mixer 'leaky' comes from the package 'foreign-parts' (1.2), "
    fails(f"{start}but version 2.0 of it, which is installed, has none of that name; install", model_config, data)
    write_metadata(package, name="others", entries={"kinformer.parts": PARTS})
    look_again()
    fails(f"{start}but here it is part of the package 'others' (1.2); install the former", model_config, data)
    for place in package.iterdir():
        place.rename(package.parent / place.name)
    look_again()
    fails(f"{start}which is not installed; install it.", model_config, data)
    del data["layers"][0]["mixer"]["package"]
    fails(
        "config.layers.0.mixer: 'leaky' is not a known mixer; valid names are causal_sinkhorn, chosen_blocks, ",
        model_config,
        data,
    )
    message = "layers.0.feed_forward: the feed_forward 'gelu' comes from the package '3', which is not installed"
    fails(message, configure, "gpt", "tiny", set={"layers.0.feed_forward": {"kind": "gelu", "package": 3}})


def test_a_name_that_is_taken_twice_is_refused_when_it_is_used(package):
    write_metadata(package, name="others", entries={"kinformer.parts": {**PARTS, "mixer.softmax": "Leaky.Config"}})
    look_again()
    kinformer.build("linear-transformer", recipe="tiny")
    both = "the mixer 'leaky' is in the package 'foreign-parts' (1.2) and in the package 'others' (1.2), so"
    fails(both, configure, "linear-transformer", "tiny", set=MIXER)
    own = "the mixer 'softmax' is in Kinformer itself and in the package 'others' (1.2), so"
    fails(own, configure, "linear-transformer", "tiny", set={"layers.*.mixer": "softmax"})
    config = configure("gpt", "tiny")
    assert "package" not in to_dict(config)["layers"][0]["mixer"]
    fails(own, storable, config)


def test_what_cannot_be_had_is_told_when_it_is_used(package):
    wrong = {
        "mixer.nothing": "Nothing",
        "mixer.tiny": "tiny",
        "mixer.mine": "Leaky.Config",
        "pattern.leaky": "Leaky.Config",
    }
    members = {"leaky": "MEMBER", "leeky": "MEMBER", "gpt": "MEMBER"}
    install(package, entries={"kinformer.parts": wrong, "kinformer.members": members})
    for kind, message in {
        "nothing": "of the package 'foreign-parts' (1.2) cannot be imported from foreign_parts:Nothing (Attribute",
        "tiny": "but must be a config class with the slot 'mixer' and the kind 'tiny'; correct the entry point",
        "mine": "but must be a config class with the slot 'mixer' and the kind 'mine'; correct the entry point",
    }.items():
        fails(message, configure, "linear-transformer", "tiny", set={"layers.*.mixer": kind})
    fails("the member 'gpt' is in Kinformer itself and in the package 'foreign-parts' (1.2), so", member, "gpt")
    with pytest.warns(UserWarning) as warned:
        found = kinformer.members()
    assert [one.name for one in found] == [*MEMBERS, "leaky"]
    assert [str(each.message)[:18] for each in warned] == ["the member 'gpt' i", "the member 'leeky'"]


def test_the_member_is_one_of_the_family(package, told):
    assert member("leaky").title == "Leaky averages"
    assert [one.name for one in kinformer.members()] == [*MEMBERS, "leaky"]
    assert "leaky" not in MEMBERS
    assert FAMILY.package("gpt") is None and member("leaky", FAMILY.package("leaky")).name == "leaky"
    fails("the member 'leaky' comes from the package 'others' (3), but here it is part of", member, "leaky", "others 3")
    fails("the member 'mine' comes from the package 'others' (3), which is not installed", member, "mine", "others 3")
    fails("member: 'leeky' is unknown; did you mean 'leaky'?", member, "leeky")
    code, out, err = told("list", "--json")
    assert (code, err) == (0, "") and json.loads(out)[-1]["paper"] == "Nobody 2026, Averages That Leak"
    code, out, err = told("show", "leaky", "--recipe", "tiny")
    assert (code, err) == (0, "") and "package = foreign-parts 1.2" in out and "mixer: leaky" in out
    code, out, _ = told("show", "gpt", "--recipe", "tiny", "--set", "layers.*.mixer.pattern=same_parity")
    assert code == 0 and "pattern: same_parity" in out


@pytest.mark.parametrize("fault", ["import no_such_module", "raise SystemExit(3)", "1 / 0", "raise BaseException"])
def test_a_broken_package_breaks_nothing_else(package, told, fault):
    write_module(package, source=fault)
    code, out, err = told("list", "--json")
    assert code == 0 and [one["name"] for one in json.loads(out)] == list(MEMBERS)
    assert err.startswith("kinformer: the member 'leaky' of the package 'foreign-parts' (1.2) cannot be imported from")
    assert err.endswith("mend that package, or uninstall it.\n") and err.count("\n") == 1
    assert told("show", "gpt", "--recipe", "tiny")[0] == 0
    code, _, err = told("show", "leaky", "--recipe", "tiny")
    assert code == 2 and "the member 'leaky' of the package 'foreign-parts' (1.2) cannot be imported" in err


def test_a_broken_package_is_told_of_once(package):
    write_module(package, source="1 / 0")
    warn_once.cache_clear()
    with pytest.warns(UserWarning) as warned:
        for _ in range(5):
            kinformer.members()
            kinformer.tasks()
    assert [str(each.message)[:16] for each in warned] == ["the member 'leak", "the task 'next-b"]


def test_a_package_that_interrupts_is_named(package, told):
    write_module(package, source="raise KeyboardInterrupt")
    code, _, err = told("show", "leaky", "--recipe", "tiny")
    assert code == 130 and err == (
        "kinformer: interrupted while the member 'leaky' of the package 'foreign-parts' (1.2) was imported from "
        "foreign_parts:MEMBER.\n"
    )


def test_names_are_read_without_an_import(package):
    assert "leaky" in FAMILY and "leaky" in list(FAMILY) and "next-byte" in list(ALL)
    assert FAMILY.package("leaky") == "foreign-parts 1.2" and "leaky" in kinds()["mixer"]
    assert task_for("next-token", configure("gpt", "tiny"), "gpt").name == "next-token"
    fails("member: 'leeky' is unknown; did you mean 'leaky'?", member, "leeky")
    assert MODULE not in sys.modules


def test_a_config_that_no_name_leads_to_is_not_stored(module):
    config = configure("gpt", "tiny", set={"layers.0.mixer": module.Leaky.Config()})
    message = "add the entry point 'mixer.leaky' to the group 'kinformer.parts' of the package that defines"
    fails(f"{message} foreign_parts, and install that package.", storable, config)
    for name in MEMBERS:
        config = configure(name, "tiny")
        assert storable(config) == to_dict(config)
    start = type("Mine", (type(config.initialisation),), {})()
    fails("is another one when it is read again", storable, config.replace(initialisation=start))


def test_a_run_is_trained_and_told_when_its_package_is_missing(package, told, tmp_path, text_file):
    """A run of this process is read by others, with the package and without it."""

    def command(*arguments, path=str(package)):
        paths = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-m", "kinformer", *arguments]
        return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)

    run = str(tmp_path / "run")
    settings = ("--recipe", "tiny", "--steps", "2", "--length", "16", "--batch-size", "2")
    code, _, err = told("train", "leaky", *settings, "--task", "next-byte", "--data", str(text_file), "--out", run)
    assert code == 0, err
    generate = ("generate", run, "--prompt", "a", "--max-new-tokens", "3")
    assert (done := command(*generate)).returncode == 0, done.stderr
    done = command(*generate, path=None)
    assert done.returncode == 2 and done.stderr.endswith(
        "the member 'leaky' comes from the package 'foreign-parts' (1.2), which is not installed; install it.\n"
    )
    done = command("train", "leaky", "--out", run, "--resume", path=None)
    assert done.returncode == 2 and "comes from the package 'foreign-parts' (1.2)" in done.stderr
