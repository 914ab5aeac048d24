"""The task of recall: its rows, its objective, and how many values a model recalls.

A training row is pairs of a key and its value, then slots that begin with a key or hold random tokens:

    tokens   7 201  3 180   94 12    7  33   51 8    3  77
    labels   -  -   -  -     -  -   201  -    -  -  180  -      "-" is IGNORED: only the values of queried keys count
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, log
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.model import device_of
from kinformer.core.stack import ModelConfig
from kinformer.core.state import nbytes
from kinformer.lab.data.labelled import TextSource
from kinformer.lab.data.mqar import SPLITS, Recall, RecallRows
from kinformer.lab.tasks.answers import Answers, AnswersLoss, MadeRows, ScoredBatch, answered_batches, answers_to
from kinformer.lab.tasks.evaluation import (
    Evaluation,
    EvaluationSettings,
    LoadedRun,
    Predicted,
    PredictionSettings,
    TextTable,
    Write,
    evaluated,
    track,
)
from kinformer.lab.tasks.next_token import Generated, Sample
from kinformer.lab.tasks.options import RecallEvaluationOptions
from kinformer.lab.tasks.task import GenerationSettings, NoOptions, TrainingPlan
from kinformer.lab.tasks.texts import check_ids
from kinformer.lab.training.data_module import DataModule
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL, SHARE, Metric
from kinformer.runtime.errors import KinformerError, choose, plural, require_finite

# Rows of keys and values for a causal model, and the objective of recalling values.


def accuracy_of(pairs: int) -> Metric:
    """Return the metric of the share of right queries, of rows with this many pairs."""
    return Metric(f"accuracy_of_{pairs}_pairs", SHARE, lower_is_better=False)


class RecallData(MadeRows):
    """Rows of training's length, and their accuracy by the number of pairs."""

    data: Recall

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__(plan)
        by_pairs = (f"{name}_{number}" for number in self.data.pairs for name in ("correct", "asked"))
        self.sums = ("nats", "correct", *by_pairs)
        self.metrics = (ACCURACY, BITS_PER_LABEL, *map(accuracy_of, self.data.pairs))

    @property
    def width(self) -> int:
        return self.settings.length

    def made(self, split: str, part: int, seed: int) -> tuple[np.ndarray, ...]:
        return self.data.rows(split, part, self.settings.batch_size, self.settings.length, seed)

    def guessed(self, labels: Tensor, sizes: Tensor) -> dict[str, float]:
        return {"guessing": float((1 / sizes).mean())}

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        metrics = {ACCURACY.name: means["correct"], BITS_PER_LABEL.name: means["nats"] / log(2)}
        for number in self.data.pairs:
            scored = means[f"asked_{number}"]
            metrics[accuracy_of(number).name] = means[f"correct_{number}"] / scored if scored else float("nan")
        return metrics


def row_lengths(data: Recall, config: ModelConfig) -> list[int]:
    """Return the tokens that the most pairs and as many queries take."""
    return [4 * max(data.pairs)]


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the symbols of the data, and rows too short for the pairs."""
    check_ids(plan, model, plan.data.symbols)
    plan.data.check(plan.settings.length)


class RecallLoss(AnswersLoss):
    """The mean cross-entropy of the queried values; its metrics count the right ones for each of ``pairs``."""

    def __init__(self, pairs: Sequence[int]) -> None:
        self.pairs = tuple(pairs)

    @classmethod
    def of(cls, model: nn.Module, data: DataModule | None) -> RecallLoss:
        """Make the objective, whose metrics count the numbers of pairs of the rows ``data``."""
        return cls(data.data.pairs if isinstance(data, RecallData) else ())

    def counted(self, batch: ScoredBatch, rows: Tensor, right: Tensor) -> dict[str, Tensor]:
        counts: dict[str, Tensor] = {}
        pairs = batch.sizes[rows]
        for number in self.pairs:
            scored = pairs == number
            counts |= {f"correct_{number}": (right & scored).sum(), f"asked_{number}": scored.sum()}
        return counts


# How many values a model recalls by the number of pairs, and which value it recalls for a key.


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: RecallEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on new rows of each number of pairs, of the length of training or as long as the pairs need; every
    query is written to the table that the options name."""
    run, model, started_at = subject.run, subject.model, time.perf_counter()
    data: Recall = run.options.data
    split = choose(settings.split, SPLITS, "`split`")
    all_pairs, rows = options.pairs_to_measure or data.pairs, options.rows

    def measure(pairs: int) -> dict[str, Any]:
        length = max(run.training["length"], 4 * pairs)
        data.check(length, (pairs,))
        if model.max_length is not None and length > model.max_length:
            raise KinformerError(
                f"`at_pairs` {pairs}: takes rows of {plural(length, 'token')}, but this model's positions end at "
                f"{model.max_length}; give fewer pairs."
            )
        queries, right, nats, done = 0, 0, 0.0, 0

        def draw(part: int, count: int) -> RecallRows:
            return data.rows(split, part, count, length, settings.seed, (pairs,))

        for batch, answered in answered_batches(model, draw, rows, length, settings.chunk):
            queries += len(answered.labels)
            right += int(answered.right.sum())
            nats += float(answered.nats)
            if write is not None:
                for row in _queries(batch, answered, done):
                    write({"pairs": pairs, **row})
            done += len(batch.tokens)
        require_finite(isfinite(nats))
        return {
            "pairs": pairs, "length": length, "queries": queries, "correct": right, "accuracy": right / queries,
            "nats": nats,
        }  # fmt: skip

    with options.writing_predictions() as write, torch.inference_mode():
        groups = [measure(pairs) for pairs in track(all_pairs, len(all_pairs), quiet)]
    queries, correct = sum(group["queries"] for group in groups), sum(group["correct"] for group in groups)
    guessing, nats = rows * len(all_pairs) / queries, sum(group["nats"] for group in groups)
    metrics = {ACCURACY: correct / queries, BITS_PER_LABEL: nats / log(2) / queries}
    metrics |= {accuracy_of(group["pairs"]): group["accuracy"] for group in groups}
    lines = [
        [group["pairs"], group["length"], group["queries"], f"{group['accuracy']:.1%}", f"{1 / group['pairs']:.1%}"]
        for group in groups
    ]
    text = (
        f"{subject.title} on {data.name} {data.fingerprint}, {split} split",
        f"{ACCURACY.text(metrics[ACCURACY])}, {metrics[BITS_PER_LABEL]:.4f} bits per value: "
        f"{plural(queries, 'query')}, {guessing:.1%} by guessing a value of the row\n",
        TextTable(("pairs", "length", "queries", "accuracy", "guessing"), lines, range(5)),
    )
    baselines, facts = {"guessing": guessing}, {"guessing": guessing, "by_pairs": groups}
    more: dict[str, Any] = {"facts": facts, "baselines": baselines, "task": "recall", "since": started_at}
    return evaluated(subject, metrics, data.identity | {"split": split}, text, **more)


def _queries(batch: ScoredBatch, answered: Answers, before: int) -> Iterator[dict[str, int | float]]:
    """Yield every query of a batch, with rows numbered after ``before``: its key, its value, and the predicted one."""
    shares, values = answered.logits.softmax(-1).max(-1)
    keys = batch.tokens[batch.scored]
    columns = (answered.rows, keys, answered.labels, values, shares)
    for row, key, label, value, share in zip(*(column.tolist() for column in columns), strict=True):
        yield {"row": before + row + 1, "key": key, "label": label, "value": value, "probability": share}


def predict(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, options: NoOptions
) -> Iterator[Predicted]:
    """Yield the values of the last keys of the lines of ``source``."""
    return answers_to(source, settings, lambda text: symbols_of(text, subject.model.vocab_size), subject, generate)


def generate(subject: LoadedRun, prompt: str | bytes, options: GenerationSettings, write: Write = None) -> Generated:
    """Return the most probable value after ``prompt``: numbers of symbols, keys with values and at last a key."""
    words = symbols_of(prompt, subject.model.vocab_size)
    started_at = time.perf_counter()
    with torch.inference_mode():
        tokens = torch.tensor([words], device=device_of(subject.model))
        logits, state = subject.model(tokens)
    value = int(logits[0, -1].argmax())
    if write is not None:
        write(f" {value}\n")
    return Generated(
        [Sample([value], str(value))],
        len(words),
        seed=options.seed,
        state_bytes=nbytes(state),
        prompt_seconds=time.perf_counter() - started_at,
        new_tokens=1,
        seconds=time.perf_counter() - started_at,
    )


def symbols_of(prompt: str | bytes, symbols: int) -> list[int]:
    """Return the numbers of a prompt, each below ``symbols``."""
    words = (prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else prompt).split()
    for word in words:
        if not (word.isdecimal() and int(word) < symbols):
            raise KinformerError(
                f"the prompt holds {word!r}, but must be numbers of symbols below {symbols}, keys with values and at "
                "last a key, as in 3 180 7 201 3."
            )
    if not words:
        raise KinformerError("the prompt is empty; write keys with values and at last a key, as in 3 180 7 201 3.")
    return [int(word) for word in words]
