"""Every command has a function of the package that does the same, and whose result is usable in Python."""

import json

import pytest

import kinformer
from kinformer.lab.cli.main import COMMANDS
from kinformer.lab.comparison import bench as benching
from kinformer.lab.comparison import compare as comparing
from kinformer.lab.comparison.speed import Floor
from kinformer.runtime.errors import KinformerError, as_flags

OTHER_NAMES = {"chat": "stream", "list": "members", "import": "import_checkpoint"}
ABOUT_THE_SHELL = {"completion", "launch"}


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - ABOUT_THE_SHELL))
def test_every_command_has_its_function(command):
    name = OTHER_NAMES.get(command, command)
    assert name in kinformer.__all__ and callable(getattr(kinformer, name))


def test_names_of_functions_are_not_those_of_folders():
    """An import of such a folder would put the folder in the place of the function."""
    from pathlib import Path

    folders = {path.parent.name for path in Path(kinformer.__file__).parent.glob("*/__init__.py")}
    assert folders & set(kinformer.__all__) == set()


def test_members_are_what_list_lists(cli):
    listed = json.loads(cli("list", "--json")[1])
    with as_flags():
        assert json.loads(json.dumps([member.facts for member in kinformer.members()])) == listed


def test_show(cli):
    described = kinformer.show("gpt", recipe="tiny", set={"layers": 3})
    assert described.member.name == "gpt" and len(described.config.layers) == 3
    out = cli("show", "gpt", "--recipe", "tiny", "--set", "layers=3", "--json")[1]
    assert json.loads(json.dumps(described.facts)) == json.loads(out)


def test_estimate(cli):
    costs = kinformer.estimate("gpt", recipe="tiny", length=128, batch_size=1)
    facts = json.loads(cli("estimate", "gpt", "--recipe", "tiny", "--length", 128, "--json")[1])
    assert vars(costs).keys() == facts.keys()
    for name in (
        "parameters",
        "flops_forward",
        "flops_inference",
        "flops_step",
        "train_bytes",
        "inference_bytes",
        "state_bytes",
    ):
        assert getattr(costs, name) == facts[name] > 0
    assert kinformer.estimate("gpt", recipe="tiny", length=128, batch_size=2).flops_forward == 2 * costs.flops_forward


def test_draw(tmp_path):
    pytest.importorskip("matplotlib")
    drawing = kinformer.draw("longformer", recipe="tiny", out=tmp_path / "picture.svg")
    assert drawing.out == tmp_path / "picture.svg" and drawing.out.read_text().startswith("<?xml")
    assert drawing.facts["kind"] == "member" and len(drawing.lines) == drawing.facts["drawn"] > 0


def test_bench(monkeypatch):
    monkeypatch.setattr(benching, "measure_floor", lambda device: Floor(1e12, 1e10, 2e12, 1e-7, 1e-6))
    times = kinformer.bench(["linear-transformer"], recipe="tiny", lengths=[8, 16], work="forward", rounds=1)
    assert {(timing.member, timing.length) for timing in times.timings} == {
        (name, length) for name in ("gpt", "linear-transformer") for length in (8, 16)
    }
    assert all(timing.seconds > 0 for timing in times.timings) and not times.failed


def test_compare_and_merge(text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparing, "memory_of", lambda *_: None)
    sizes = {"recipe": "tiny", "length": 16, "batch_size": 4, "steps": 4, "sweep": 0, "lengths": [16], "rounds": 1}
    single = {"data": text_file, "first": 300, "contexts": "1x", "device": "cpu"}
    report = kinformer.compare(["gpt"], out=tmp_path / "one", **sizes, **single)
    assert [entrant.name for entrant in report.finished] == ["gpt"] and report.command.startswith("kinformer.compare(")
    assert report.finished[0].values[0] > 0 and (tmp_path / "one" / "comparison.md").exists()
    file = tmp_path / "one" / "comparison.json"
    assert kinformer.compare(merge=[file], out=tmp_path / "both").entrants[0].name == "gpt"
    assert capsys.readouterr() == ("", "")


def test_calibrate(make_run, capsys):
    run = make_run("calm")
    few = {"prompts": 60, "risk": 0.2, "prompt_tokens": 8, "new_tokens": 4, "thresholds": 4}
    result = kinformer.calibrate(run, **few)
    assert result.chosen is not None and result.chosen.risk <= 0.2
    saves = result.exits is not None and result.exits.saves  # a threshold that costs more is not written
    assert kinformer.open_run(run).config.stack.rule.thresholds == ((result.chosen.threshold,) if saves else ())
    assert kinformer.calibrate(run, search=5, tolerance=9.0, first=300).thresholds
    assert capsys.readouterr() == ("", "")


def test_index(linear_run, text_file, tmp_path, capsys):
    indexed = kinformer.index(linear_run, datastore=tmp_path / "store", data=text_file, first=300, device="cpu")
    assert indexed.store.entries == indexed.new == indexed.facts["entries"] > 200
    assert kinformer.evaluate(linear_run, datastore=tmp_path / "store", first=300).facts["datastore"]
    assert kinformer.index(linear_run, datastore=tmp_path / "store", data=text_file, first=300).new == 0
    assert capsys.readouterr() == ("", "")


def test_import_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "theirs")
    imported = kinformer.import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    assert imported.run.member == "gpt" and imported.facts["parameters"] == imported.parameters > 0
    assert kinformer.load(tmp_path / "run").config == imported.run.config


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kinformer.estimate("gtp"), "did you mean 'gpt'"),
        (lambda: kinformer.estimate("gpt", lenght=3), "estimate: 'lenght' is not an option; did you mean 'length'"),
        (lambda: kinformer.estimate("gpt", length=0), "length is 0 but must be 1 or more"),
        (lambda: kinformer.estimate("gpt", length="long"), "length is 'long' but must be a whole number or left out"),
        (lambda: kinformer.estimate("gpt", precision="fp8"), "precision is 'fp8' but must be one of fp32, bf16-mixed"),
        (lambda: kinformer.show("no-such"), "'no-such' is unknown"),
        (lambda: kinformer.draw("longformer", layer=0), "layer is 0 but must be 1 or more"),
        (lambda: kinformer.bench(["gpt"], work="sleep"), "'sleep' is unknown"),
        (lambda: kinformer.bench(["gpt"], lengths=["many"]), "is not a list of whole numbers"),
        (lambda: kinformer.compare(["gpt"], sweep=2), "does not have a middle"),
        (lambda: kinformer.calibrate("no/run", risk=2.0), "risk is 2 but must be above 0 and below 1"),
        (lambda: kinformer.index("no/run", datastore="x"), "is not a run folder"),
        (lambda: kinformer.import_checkpoint("no/folder", "out"), "no/folder"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KinformerError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
