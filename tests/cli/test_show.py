"""``kinformer show``: what it tells agrees with the model that is built."""

import json
import re

import pytest
import torch

import kinformer
from kinformer.core.state import nbytes, value
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.cli.family import setting_rows
from kinformer.lab.drawing.text import described, formulas


@pytest.mark.parametrize("name", ["gpt", "linear-transformer", "fast-weights"])
def test_the_figures_are_those_of_the_model(cli, name):
    code, out, _ = cli("show", name, "--recipe", "tiny", "--json", "--set", "layers=3", "--vocab-size", "100")
    told = json.loads(out)
    model = kinformer.build(name, recipe="tiny", vocab_size=100, set={"layers": 3})
    assert code == 0
    assert told["parameters"]["total"] == sum(each.numel() for each in model.parameters())
    assert sum(told["parameters"]["parts"].values()) == told["parameters"]["total"]
    assert len(told["config"]["layers"]) == 3 and told["config"]["input"]["vocab_size"] == 100
    for length in (1, 128):
        with torch.no_grad():
            _, state = model(torch.zeros(1, length, dtype=torch.int64))
        assert told["state_bytes"][str(length)] == nbytes(value(state))


def test_the_text_holds_the_record_config_parameters_state_and_pattern(cli):
    local = 'layers.0.mixer.pattern={"kind": "local", "window": 4}'
    code, out, err = cli("show", "gpt", "--recipe", "tiny", "--set", local, "--set", "dropout=0.1")
    assert (code, err) == (0, "")
    for expected in (
        "Radford et al. 2019",
        "exact limit: is exact attention",
        "departure: bytes are the default vocabulary",
        "layers 1: decoder",
        "window = 4",
        "dropout = 0.1",
        "parameters: 37,760",
        "positions end at 128",
        "pattern causal",
        "pattern local",
        "· ■ ■ ■ ■ ·",
    ):
        assert expected in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_training_of_a_paper_is_shown(cli):
    _, out, _ = cli("show", "deep-char", "--recipe", "paper", "--brief")
    assert "training unless set otherwise: steps = 4000000, batch_size = 16" in out and "momentum = 0.99" in out
    assert "training unless" not in cli("show", "deep-char", "--recipe", "tiny", "--brief")[1]


def test_a_name_may_be_written_in_capitals(cli, text_file, tmp_path):
    assert cli("show", "GPT", "--recipe", "tiny") == cli("show", "gpt", "--recipe", "tiny")
    small = ["--recipe", "tiny", "--steps", 1, "--length", 16, "--batch-size", 2, "--device", "cpu"]
    assert cli("train", "GPT", *small, "--data", text_file, "--out", tmp_path / "run")[0] == 0
    assert kinformer.open_run(tmp_path / "run").member == "gpt"


def test_a_run_is_shown_with_its_own_config(cli, make_run):
    folder = make_run("gpt", dim=24, layers=3)
    told = json.loads(cli("show", folder, "--json")[1])
    config = kinformer.open_run(folder).config
    assert (told["name"], told["recipe"], told["config"]["dim"], len(told["config"]["layers"])) == (
        "gpt",
        "tiny",
        24,
        3,
    )
    assert told["parameters"]["total"] == sum(each.numel() for each in config.build().parameters())
    assert "dim = 24" in cli("show", folder)[1]
    assert json.loads(cli("show", folder, "--set", "dim=8", "--json")[1])["config"]["dim"] == 8
    for option, given in (("--recipe", "small"), ("--vocab-size", 9)):
        code, _, err = cli("show", folder, option, given)
        assert code == 2 and f"{option} {given}: the run in" in err
    assert "is not a run folder" in cli("show", folder.parent)[2]


def test_a_tokenizer_is_a_path(cli, tmp_path):
    code, _, err = cli("train", "gpt", "--tokenizer", "gpt2", "--out", tmp_path / "run")
    assert code == 2 and "--tokenizer gpt2: is not a file; give the path of a tokenizer.json" in err


@pytest.mark.parametrize(
    ("name", "recipe", "told"),
    [
        ("longformer", "tiny", "pattern band, 1 global token"),
        ("big-bird", "tiny", "pattern big_bird (queries down"),
        ("big-bird", "tiny-etc", "pattern big_bird, global input of 3 tokens"),
        ("blockbert", "tiny", "pattern blockwise"),
    ],
)
def test_an_encoder_has_a_pattern_and_no_state(cli, name, recipe, told):
    code, out, err = cli("show", name, "--recipe", recipe)
    assert (code, err) == (0, "")
    assert "no state: it reads whole texts; positions end at 128" in out and told in out
    facts = json.loads(cli("show", name, "--recipe", recipe, "--json")[1])
    assert not facts["causal"] and facts["growth"] == "none" and set(facts["state_bytes"].values()) == {0}
    model = kinformer.build(name, recipe=recipe)
    assert facts["parameters"]["total"] == sum(each.numel() for each in model.parameters())
    assert all("·" in "".join(picture["rows"]) for picture in facts["patterns"])


def test_of_many_pictures_some_are_shown(cli):
    out = cli("show", "big-bird", "--recipe", "benchmark")[1]
    assert "and 8 more; see them all with: kinformer draw big-bird --recipe benchmark" in out


def test_sizes_stop_where_positions_end(cli):
    lengths = json.loads(cli("show", "gpt", "--recipe", "tiny", "--json")[1])["state_bytes"]
    assert list(lengths) == ["1", "128"]
    lengths = json.loads(cli("show", "linear-transformer", "--recipe", "tiny", "--json")[1])["state_bytes"]
    assert list(lengths)[-1] == "65536" and len(set(lengths.values())) == 1


def test_equal_neighbours_are_told_once():
    config = configure("gpt", "tiny", set={"layers": 4, "layers.2.dropout": 0.5})
    lines = [line for line, _ in setting_rows(config, "", brief=True, explain=False)]
    layers = [line for line in lines if line.startswith("layers")]
    assert layers == ["layers 0 to 1: decoder", "layers 2: decoder", "layers 3: decoder"]


def test_it_begins_with_what_it_computes(cli):
    out = cli("show", "linear-transformer", "--recipe", "tiny")[1]
    head = out.split("exact limit")[0]
    assert "S_t = a_t S_(t-1) + phi(k_t) v_t^T" in head and "a_t = 1" in head and "z_t = a_t z_(t-1)" in head
    assert "delta" not in head and "beta" not in head
    assert "feature map elu: The feature map elu(x) + 1 (Katharopoulos et al. 2020, equation 7)" in head
    assert "shapes: x and y [batch, time, 32]; N = layers = 2, d_model = dim = 32, h = num_heads = 2" in head
    told = json.loads(cli("show", "retnet", "--recipe", "tiny", "--set", "layers.0.mixer.num_heads=4", "--json")[1])
    assert [each["slot"] for each in told["computes"]] == ["mixer", "position", "feature_map", "decay"]
    assert told["symbols"]["num_heads"] == ["h", [2, 4]] and told["symbols"]["dim"] == ["d_model", 32]


def test_formulas_are_those_of_the_settings():
    def lines(name, **changes):
        return "\n".join(line for formula in formulas(configure(name, "tiny", set=changes)) for line in formula.lines)

    assert "beta_t" not in lines("performer") and "[sin(W x'), cos(W x')]" not in lines("performer")
    assert "[sin(W x'), cos(W x')]" in lines("performer", **{"layers.*.mixer.feature_map.form": "trigonometric"})
    assert "beta_t" in lines("gated-deltanet") and "z_t" not in lines("gla")
    assert "bias_rate" not in lines("mixtral") and "balance" in lines("mixtral")
    assert "g_cmp" in lines("nsa") and "g_cmp" not in lines("moba")


@pytest.mark.parametrize("member", kinformer.members(), ids=lambda member: member.name)
def test_every_member_says_what_its_mixers_compute(member):
    config = configure(member.name, "tiny")
    found = formulas(config)
    assert any(each.slot in ("mixer", "encoder_mixer", "layer") for each in found)
    assert all(each.says and "\n" not in each.says for each in found)
    assert not any(re.search(r"\bal\.$", each.says) for each in found)


def test_mixers_say_their_formulas():
    lacking = {kind for kind, config in kinds()["mixer"].items() if "\n    " not in described(config)}
    assert lacking == {"segment_memory", "memorizing"}  # softmax attention to what they remember


def test_settings_at_their_defaults_are_folded(cli):
    out = cli("show", "gpt", "--brief", "--recipe", "tiny", "--set", "layers.*.mixer.bias=false")[1]
    assert "bias = False" in out and "(at their defaults: num_heads" not in out and "impl = auto" not in out
    assert "impl = auto" in cli("show", "gpt", "--recipe", "tiny")[1]


def test_folding_hides_nothing_that_differs():
    lines = [line.strip() for line, _ in setting_rows(configure("retnet", "tiny"), "", brief=True, explain=False)]
    mixer = lines[lines.index("mixer: linear") :]
    assert "decay: fixed" in mixer and "gate = True" in mixer
    assert any(line.startswith("(at their defaults: ") and "rule" in line.split(", ") for line in mixer)
