from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from kinformer.family.build import build
from kinformer.heads.classes import TokenClassificationHead
from kinformer.lab.data import IGNORED, Corpus, open_corpus
from kinformer.lab.data.masking import Bigrams
from kinformer.lab.tasks import classify as label_rows
from kinformer.lab.tasks.classify import Classification, LabelledBatch, Labels, measure_labels
from kinformer.lab.tasks.mlm import MaskedBatch, MaskedLanguage, MaskedTokens, measure_masked
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.lab.training.loop import validate
from tests.training.tiny import CPU, SETTINGS, curve, gap, labelled, rewound, rows, train, trainer, weights

MASKED: dict[str, Any] = {"model": {"member": "bert"}, "objective": "masked-language"}
LABELS: dict[str, Any] = {"model": {"member": "bert"}, "objective": "classification", "length": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "masked": MASKED,
    "masked, dropout": MASKED | {"model": {"member": "bert", "dropout": 0.1, "layers.*.dropout": 0.1}},
    "masked, muon, accumulated": MASKED | {"optimizer": "muon", "accumulate": 2},
    "longformer": MASKED | {"model": {"member": "longformer"}, "length": 40},
    "sentences": {"model": {"member": "etc"}, "objective": "mlm-cpc", "length": 40},
    "labels": LABELS,
    "labels, bf16": LABELS | {"precision": "bf16-mixed"},
}


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_finds_hidden_bytes_better_than_their_frequency_does(tmp_path: Path) -> None:
    draw = random.Random(1)
    alphabets = (("abcdefgh" * 10)[draw.randint(0, 7) :][: draw.randint(20, 60)] for _ in range(1000))
    (tmp_path / "text").write_text("".join(alphabets))
    corpus = open_corpus(str(tmp_path / "text"))
    model = {"member": "bert", "layers": 1}
    options = MASKED | {"model": model, "steps": 200, "batch_size": 16, "length": 24, "validation_tokens": 2000}
    result = train(corpus, tmp_path / "run", **options, validate_every=200, checkpoint_every=0)
    run = trainer(corpus, tmp_path / "run", **options)
    assert isinstance(run.data, MaskedTokens)
    measured = measure_masked(run.model.eval(), run.data.held_out, Bigrams(corpus.splits["train"]), 16)
    assert measured.bits < measured.unigram_bits - 0.04 and measured.unigram_bits == pytest.approx(3, abs=0.05)
    assert measured.bigram_bits < 1
    assert result.validation == pytest.approx({"bits_per_masked_byte": measured.bits, "accuracy": measured.accuracy})


def test_learns_classes(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path, **LABELS, steps=40, batch_size=16, validate_every=20)
    losses = curve(tmp_path)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3
    validated = [record for record in records(tmp_path) if "validation_bits_per_label" in record]
    assert len(validated) == 2 and validated[-1]["validation_accuracy"] > 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_ends_with_the_same_bits(corpus: Corpus, tmp_path: Path, variant: str) -> None:
    options = VARIANTS[variant] | {"keep": 3, "validate_every": 2}
    whole = train(corpus, tmp_path / "whole", **options)
    again = rewound(tmp_path / "whole", tmp_path / "again")
    resumed = trainer(corpus, again, **options)
    assert resumed.step == 4
    result = resumed.run()
    assert gap(tmp_path / "whole", again) == 0.0
    assert curve(again) == curve(tmp_path / "whole")
    assert result.validation == whole.validation and result.best_step == whole.best_step


@pytest.mark.parametrize("options", [MASKED, LABELS], ids=["masked", "labels"])
def test_accumulation_is_the_big_batch(corpus: Corpus, tmp_path: Path, options: dict[str, Any]) -> None:
    train(corpus, tmp_path / "one", **options)
    train(corpus, tmp_path / "four", accumulate=4, **options)
    assert curve(tmp_path / "four") == pytest.approx(curve(tmp_path / "one"), rel=1e-6)


def test_masks_differ_from_step_to_step_and_not_in_validation(corpus: Corpus, tmp_path: Path) -> None:
    run = trainer(corpus, tmp_path, **MASKED, batch_size=2)
    steps = [run.data.batch(step, 0, 1) for step in range(3)]
    assert len({batch.positions.numpy().tobytes() for batch in steps if batch.positions is not None}) == 3
    measure = [validate(run.engine, run.data, CPU) for _ in range(2)]
    assert measure[0] == measure[1]
    other = trainer(corpus, tmp_path, **MASKED, batch_size=16)
    assert validate(run.engine, other.data, CPU) == pytest.approx(measure[0], rel=1e-6)


def test_only_hidden_places_are_asked_for_and_padding_does_not_count() -> None:
    torch.manual_seed(0)
    model = build("bert", "tiny", 259)
    tokens, positions = torch.randint(0, 256, (2, 12)), torch.tensor([[1, 5, 7], [3, 0, 0]])
    labels = torch.tensor([[4, 9, 200], [8, IGNORED, IGNORED]])
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, 6:] = False
    loss, metrics, _ = MaskedLanguage()(model, MaskedBatch(tokens, valid, labels, positions), None, 0.0)
    logits = model(tokens, valid=valid)
    want = [
        functional.cross_entropy(logits[row, at], torch.tensor(label)).item()
        for row, at, label in [(0, 1, 4), (0, 5, 9), (0, 7, 200), (1, 3, 8)]
    ]
    assert loss.item() == pytest.approx(sum(want) / 4, rel=1e-5)
    assert float(metrics["nats"]) == pytest.approx(sum(want), rel=1e-5) and int(metrics["predicted"]) == 4
    alone, _, _ = MaskedLanguage()(
        model, MaskedBatch(tokens[1:, :6], None, labels[1:, :1], positions[1:, :1]), None, 0.0
    )
    assert alone.item() == pytest.approx(want[3], rel=1e-5)


def test_classes_of_tokens() -> None:
    torch.manual_seed(0)
    model = build("bert", "tiny", 259, {"head": TokenClassificationHead.Config(classes=4)})
    tokens, labels = torch.randint(0, 256, (2, 6)), torch.randint(0, 4, (2, 6))
    labels[0, 2] = IGNORED
    loss, metrics, _ = ObjectiveModule(model, Classification(), "fp32")(LabelledBatch(tokens, None, labels), None, 0.0)
    logits = model(tokens)
    kept = labels != IGNORED
    assert loss.item() == pytest.approx(functional.cross_entropy(logits[kept], labels[kept]).item(), rel=1e-6)
    assert int(metrics["predicted"]) == 11
    assert int(metrics["correct"]) == int((logits.argmax(-1) == labels)[kept].sum())


def test_measured_as_validated(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path, **LABELS, validate_every=8)
    run = trainer(corpus, tmp_path, **LABELS)
    assert isinstance(run.data, Labels) and run.data.examples == 120
    measured = measure_labels(run.model.eval(), run.data.held_out, 3)
    told = next(record for record in records(tmp_path) if "validation_accuracy" in record)
    assert measured.accuracy == pytest.approx(told["validation_accuracy"])
    assert measured.bits == pytest.approx(told["validation_bits_per_label"], rel=1e-5)
    labels = labelled().splits["test"].labels
    examples, predicted, correct = measured.counts
    assert examples == [(labels == each).sum() for each in range(3)]
    assert sum(predicted) == 120 and all(map(int.__le__, correct, predicted))
    assert measured.guessing == max(examples) / 120


def test_minutes_for_an_encoder(corpus: Corpus, tmp_path: Path) -> None:
    result = train(corpus, tmp_path, **LABELS, steps=None, minutes=0.05, checkpoint_every=None)
    assert result.total >= 1 and result.steps > result.total // 4 and result.seconds < 10
    assert result.tokens_per_second > 0


def test_a_validation_has_enough_examples(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_rows, "LEAST_EXAMPLES", 50)
    for tokens, examples in ((1, 50), (2000, 90), (10**6, 120)):
        settings = replace(SETTINGS, objective="classification", length=32, validation_tokens=tokens)
        made = rows(corpus, settings)
        assert isinstance(made, Labels) and made.examples == pytest.approx(examples, abs=15 if tokens == 2000 else 0)


def test_weights_are_float32_after_bf16(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path, **MASKED, precision="bf16-mixed")
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.float32}
