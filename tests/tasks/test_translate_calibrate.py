"""Calibration of early exits in translation: the threshold in the run, what uses and reports it, its risk, mistakes."""

import json
from dataclasses import replace

import pytest

import kinformer
from kinformer.lab.calibration.risk import dissimilarity
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError

FEW = {"prompts": 20, "risk": 0.3, "confidence": 0.7, "thresholds": 4, "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    for name, word in (("en", "line"), ("de", "Zeile")):
        (folder / f"train.{name}").write_text("".join(f"{word} {index}\n" for index in range(40)))
        (folder / f"val.{name}").write_text("".join(f"{word} {index}\n" for index in range(40, 64)))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, pairs):
    changes = {"dim": 16, "layers": 3, "encoder.layers": 1, "stack": "exits", "stack.rule": "softmax_response"}
    return kinformer.train(
        "vanilla", data=pairs, out=tmp_path_factory.mktemp("runs") / "run", recipe="tiny", steps=60, length=20,
        batch_size=8, lr=0.01, validation_tokens=100, device="cpu", threads=1, tokenizer="bytes", objective="exits",
        set=changes,
    )  # fmt: skip


@pytest.fixture
def cheap(monkeypatch):
    """What is saved is not measured but a tenth."""
    from kinformer.lab.tasks import translate as generate

    monkeypatch.setattr(generate, "saved", lambda model, exits, *_, **__: replace(exits, flops_saved=0.1))


@pytest.mark.parametrize("consistency", ["textual", "risk"])
def test_the_threshold_is_kept_and_its_loss_is_that_of_the_translations(run, pairs, consistency, cheap):
    found = kinformer.calibrate(run.folder, consistency=consistency, beam=1, **FEW)
    kept = open_run(run.folder)
    assert found.chosen is not None and kept.config.stack.rule.thresholds == (found.chosen.threshold,)
    assert kept.data["calibration"]["beam"] == 1 and kept.data["calibration"]["consistency"] == consistency
    lines = [(pairs / f"val.{name}").read_text().splitlines() for name in ("en", "de")]
    whole, early = (written(run.folder, lines[0], at) for at in ([], [found.chosen.threshold]))
    truth = [list(line.encode()) for line in lines[1]]
    losses = {"textual": dissimilarity(early, whole)}
    losses["risk"] = (dissimilarity(early, truth) - dissimilarity(whole, truth)).clip(0)
    all_pairs = kinformer.calibrate(run.folder, consistency=consistency, beam=1, **FEW | {"prompts": 24})
    step = next(each for each in all_pairs.tested if each.threshold == found.chosen.threshold)
    assert step.risk == pytest.approx(float(losses[consistency].mean()))


def written(folder, lines, thresholds):
    from kinformer.lab.runs.inference import generate
    from kinformer.lab.runs.options import GenerateOptions

    options = GenerateOptions(
        device="cpu", threads=1, set={"stack.rule.thresholds": thresholds}, task_options={"beam": 1}
    )
    return [sample.tokens for sample in generate(folder, "\n".join(lines), options).samples]


def test_evaluate_and_generate_report_what_left(cli, run):
    pytest.importorskip("sacrebleu")
    at = ("--set", "stack.rule.thresholds=[0.3]", "--beam", 2, "--threads", 1)
    code, out, err = cli("evaluate", run.folder, *at, "--first", 2, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["layers_per_token"] == facts["exits"]["layers_per_token"] < 3 and facts["all_layers_bleu"] >= 0
    _, plain, _ = cli("evaluate", run.folder, "--set", "stack.rule.thresholds=[]", "--beam", 2, "--first", 2, "--json")
    assert json.loads(plain)["bleu"] == facts["all_layers_bleu"] and "exits" not in json.loads(plain)
    code, out, err = cli("generate", run.folder, *at, "--prompt", "line 3", "--json")
    assert code == 0, err
    assert json.loads(out)["exits"]["layers"] == 3 and json.loads(out)["exits"]["flops_saved"] < 1


def test_a_threshold_that_makes_the_run_dearer_is_not_kept(cli, run, monkeypatch):
    from kinformer.lab.tasks import translate as generate

    monkeypatch.setattr(generate, "saved", lambda model, exits, *_, **__: replace(exits, flops_saved=-0.25))
    flags = [f"--{name}={value}" for name, value in FEW.items()]
    code, out, err = cli("calibrate", run.folder, *flags, "--beam", 1)
    assert code == 0 and "cost as much as they save or more" in out and "not kept" in out, err
    assert open_run(run.folder).config.stack.rule.thresholds == ()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prompts": 25}, "holds 24 pairs, too few for 25 samples"),
        ({"new_tokens": 8}, "new_tokens 8: is of running text"),
        ({"search": 9}, "looks at running text, which runs of the task translate do not read"),
    ],
)
def test_mistakes(run, options, told):
    few = {} if "search" in options else FEW
    with pytest.raises(KinformerError, match=told):
        kinformer.calibrate(run.folder, **few | options)
