"""``kinformer calibrate``: the threshold in the run, what uses it and reports it, mistakes."""

import json
from dataclasses import replace

import pytest

from kinformer.lab.runs.run import open_run

FEW = ("--prompts", 60, "--risk", 0.2, "--prompt-tokens", 8, "--new-tokens", 4, "--thresholds", 4, "--threads", 1)


@pytest.fixture(scope="module")
def calm_run(make_run):
    return make_run("calm")


@pytest.mark.parametrize("consistency", ["textual", "risk"])
def test_the_threshold_is_kept_and_used(cli, calm_run, consistency, monkeypatch):
    from kinformer.lab.tasks import next_token_evaluation as calibrate

    monkeypatch.setattr(calibrate, "saved", lambda model, exits, tokens: replace(exits, flops_saved=0.1))
    code, out, err = cli("calibrate", calm_run, *FEW, "--consistency", consistency, "--json")
    assert code == 0, err
    found, run = json.loads(out), open_run(calm_run)
    assert found["threshold"] in [each["threshold"] for each in found["tested"]] and found["measured"] <= 0.2
    assert run.config.stack.rule.thresholds == (found["threshold"],)
    assert run.data["calibration"]["threshold"] == found["threshold"]
    assert run.data["calibration"]["consistency"] == consistency
    assert run.model().stack.rule.thresholds == (found["threshold"],) * 2
    code, out, _ = cli("calibrate", calm_run, *FEW, "--consistency", consistency)
    assert code == 0 and f"threshold {found['threshold']:.4f} has a loss of at most 0.2" in out


def test_reports_of_evaluate_and_generate(cli, calm_run):
    at = ("--set", "stack.rule.thresholds=[0.02]", "--threads", 1)
    code, out, err = cli("evaluate", calm_run, *at, "--first", 300, "--json")
    assert code == 0, err
    facts = json.loads(out)
    counts = facts["exits"]["tokens_by_layers"]
    assert list(counts) == ["1", "2", "3"] and sum(counts.values()) == 299 and counts["1"] > 0
    mean = sum(int(layers) * count for layers, count in counts.items()) / 299
    assert facts["layers_per_token"] == facts["exits"]["layers_per_token"] == pytest.approx(mean)
    assert facts["exits"]["speedup"] > 0 and facts["all_layers_bits_per_byte"] != facts["bits_per_byte"]
    _, plain, _ = cli("evaluate", calm_run, "--set", "stack.rule.thresholds=[]", "--first", 300, "--json")
    assert json.loads(plain)["bits_per_byte"] == facts["all_layers_bits_per_byte"] and "exits" not in json.loads(plain)
    code, out, err = cli("generate", calm_run, *at, "--prompt", "wind", "--max-new-tokens", 9, "--samples", 2, "--json")
    assert code == 0, err
    exits = json.loads(out)["exits"]
    assert sum(exits["tokens_by_layers"].values()) == 16 and exits["flops_saved"] < 1 and exits["layers"] == 3
    _, out, err = cli("generate", calm_run, *at, "--prompt", "wind", "--max-new-tokens", 9)
    assert "of 3 layers per token" in err


def test_no_threshold_may_be_careful_enough(cli, calm_run, monkeypatch):
    from kinformer.lab.calibration import risk

    monkeypatch.setattr(risk, "dissimilarity", lambda left, right: (left >= 0).mean(1))
    code, out, err = cli("calibrate", calm_run, *FEW)
    assert code == 0 and "all tokens go through all layers" in out, err
    run = open_run(calm_run)
    assert run.config.stack.rule.thresholds == () and run.data["calibration"]["threshold"] is None


def test_a_threshold_that_costs_more_than_it_saves_is_not_kept(cli, calm_run, monkeypatch):
    from kinformer.lab.tasks import next_token_evaluation as calibrate

    monkeypatch.setattr(calibrate, "saved", lambda model, exits, tokens: replace(exits, flops_saved=-0.25))
    code, out, err = cli("calibrate", calm_run, *FEW)
    assert code == 0 and "cost as much as they save or more" in out and "not kept" in out, err
    run = open_run(calm_run)
    assert run.config.stack.rule.thresholds == () and run.data["calibration"]["threshold"] is None
    assert json.loads(cli("calibrate", calm_run, *FEW, "--json")[1])["threshold"] is None


def test_thresholds_of_every_exit_by_search(cli, calm_run):
    flags = ("--search", 200, "--first", 600, "--threads", 1)
    code, out, err = cli("calibrate", calm_run, *flags, "--tolerance", 0.5, "--json")
    assert code == 0, err
    found, run = json.loads(out), open_run(calm_run)
    assert run.config.stack.rule.thresholds == tuple(found["thresholds"]) and len(found["thresholds"]) == 2
    assert found["bits_per_byte"] <= found["all_layers_bits_per_byte"] + 0.5 and found["exits"]["layers_per_token"] < 3
    code, out, _ = cli("evaluate", calm_run, "--split", "validation", "--first", 600, "--json", "--threads", 1)
    assert json.loads(out)["bits_per_byte"] == pytest.approx(found["bits_per_byte"])
    code, out, _ = cli("calibrate", calm_run, *flags, "--tolerance", 0.5)
    assert code == 0 and "bits per byte, with all layers" in out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--risk", 0), "--risk is 0 but must be above 0 and below 1"),
        (("--confidence", 1), "--confidence is 1 but must be above 0 and below 1"),
        (("--prompts", 100, "--bound", "hoeffding"), "too few to tell a risk of at most 0.05 with confidence 0.95"),
        (("--thresholds", 1), "--thresholds"),
        (("--new-tokens", 9999), "too few for 1000 samples of 10063"),
        (("--search", 9, "--risk", 0.2), "--risk: is of a calibration that bounds a risk"),
        (("--tolerance", 0.2), "--tolerance: is for --search"),
        (("--search", 9, "--tolerance", -1), "--tolerance is -1 but must be 0 or more"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--split", "tset"), "--split"),
        (("--beam", 2), "--beam 2: is of translations"),
        (("--decay-tokens", 0), "--decay-tokens is 0 but must be above 0"),
        (("--after", "2;3"), "is not a list of layers; write as in 2,4"),
        (("--after", 9), "stack.after is [9], but there are 3 layers"),
        (("--search", 9, "--decay-tokens", 4), "--decay-tokens: is of a calibration that bounds a risk"),
    ],
)
def test_mistakes(cli, calm_run, flags, told):
    code, _, err = cli("calibrate", calm_run, *flags)
    assert code == 2 and told in err and len(err.strip().splitlines()) == 1


def test_runs_without_such_exits_are_refused(cli, gpt_run):
    code, _, err = cli("calibrate", gpt_run)
    assert code == 2 and "no token leaves early; give one of calm" in err


def test_thresholds_that_fall_with_the_position_are_kept(cli, calm_run, monkeypatch):
    from kinformer.lab.tasks import next_token_evaluation as calibrate

    monkeypatch.setattr(calibrate, "saved", lambda model, exits, tokens: replace(exits, flops_saved=0.1))
    for flags in (("--decay-tokens", 6), ()):  # the second time, the run's own
        code, out, err = cli("calibrate", calm_run, *FEW, *flags, "--json")
        assert code == 0, err
        run = open_run(calm_run)
        assert json.loads(out)["decay_tokens"] == run.config.stack.rule.decay_tokens == 6
        assert run.config.stack.rule.thresholds == (json.loads(out)["threshold"],)
        assert run.data["calibration"]["decay_tokens"] == (6 if flags else None)
        assert run.model().stack.rule.decay_tokens == 6


@pytest.mark.parametrize("way", [FEW, ("--search", 20, "--tolerance", 3, "--first", 300, "--threads", 1)])
def test_exits_are_kept_where_they_are_asked_for(cli, make_run, way, monkeypatch):
    """Tokens then leave behind these layers alone, with the same weights, and may go back to all exits."""
    from kinformer.lab.tasks import next_token_evaluation as calibrate

    monkeypatch.setattr(calibrate, "saved", lambda model, exits, tokens: replace(exits, flops_saved=0.1))
    folder = make_run("calm")
    for after in ((2,), (1, 2)):
        named = ",".join(map(str, after))
        code, out, err = cli("calibrate", folder, *way, "--after", named, "--json")
        assert code == 0, err
        run = open_run(folder)
        assert run.config.stack.after == after and run.data["calibration"]["after"] == named
        model = run.model()
        assert model.stack.exits == (*(layer - 1 for layer in after), 2)
        assert len(model.stack.rule.thresholds) == (len(after) if json.loads(out).get("threshold", True) else 0)


def test_exits_with_heads_of_their_own_stay(cli, make_run):
    folder = make_run("calm", **{"head.tied": False, "stack.classifiers": "separate"})
    code, _, err = cli("calibrate", folder, *FEW, "--after", "2")
    assert code == 2 and "has learnt a separate head" in err
