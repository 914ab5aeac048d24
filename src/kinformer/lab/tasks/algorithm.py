"""The task of algorithms: its rows, its objective, and how many problems a model solves by their length.

A training row is a problem with its answer. A label is the token that follows; "-" stands for IGNORED:

    tokens   4 0 7 = 7 0 4 . .      reverse: 407=704. in a row with room for longer problems
    labels   - - - 7 0 4 . - -      the answer and its end "." are predicted
    valid    1 1 1 1 1 1 1 0 0
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, log
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.model import Model, device_of
from kinformer.core.state import nbytes
from kinformer.lab.data.algorithms import END, SPLITS, SYMBOLS, AlgorithmData, AlgorithmRows, carried
from kinformer.lab.data.labelled import TextSource
from kinformer.lab.evaluation.depths import Depths, noting_depths
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
from kinformer.lab.tasks.next_token import MOST_NEW, Generated, Sample
from kinformer.lab.tasks.options import AlgorithmEvaluationOptions
from kinformer.lab.tasks.task import GenerationSettings, NoOptions, TrainingPlan
from kinformer.lab.tasks.texts import check_ids
from kinformer.lab.training.logging import ACCURACY, BITS_PER_LABEL, SEQUENCE_ACCURACY, SHARE, Metric
from kinformer.runtime.errors import KinformerError, choose, plural, require_finite
from kinformer.runtime.progress import note

# Rows of an algorithm for a causal model, and the objective of its answers.


class AlgorithmModule(MadeRows):
    """Rows as long as the longest problem with its answer."""

    data: AlgorithmData
    sums = ("nats", "correct", "solved", "problems")
    metrics = (ACCURACY, SEQUENCE_ACCURACY, BITS_PER_LABEL)

    @property
    def width(self) -> int:
        return self.data.width()

    def made(self, split: str, part: int, seed: int) -> tuple[np.ndarray, ...]:
        return self.data.rows(split, part, self.settings.batch_size, seed)

    def guessed(self, labels: Tensor, sizes: Tensor) -> dict[str, float]:
        return {"most_frequent_token": float(labels.bincount().max() / len(labels))}

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {
            ACCURACY.name: means["correct"],
            SEQUENCE_ACCURACY.name: means["solved"] / means["problems"],
            BITS_PER_LABEL.name: means["nats"] / log(2),
        }


def vocab_size(data: AlgorithmData) -> int:
    """Return how many symbols there are."""
    return len(SYMBOLS)


def check(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model without the symbols of problems, and rows shorter than the longest problem."""
    check_ids(plan, model, len(SYMBOLS))
    plan.data.check(plan.settings.length)


class AlgorithmLoss(AnswersLoss):
    """The mean cross-entropy of all tokens of the answers; its metrics also count the solved problems."""

    def counted(self, batch: ScoredBatch, rows: Tensor, right: Tensor) -> dict[str, Tensor]:
        problems = len(batch.tokens)
        return {"solved": solved(right, rows, problems).sum(), "problems": torch.full_like(right.sum(), problems)}


def solved(right: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return which of ``count`` rows, [count] bool, have the whole answer right: greedy decoding solves them."""
    return torch.ones(count, dtype=torch.bool, device=right.device).index_put((rows[~right],), right.new_zeros(()))


# Counts of the tokens of answers by how difficult they are.

PLACE, CARRY = "place", "carry"


class ByDifficulty:
    """Counts of the answers' tokens by difficulty, for problems of one ``algorithm`` with this many ``digits``;
    ``depths`` come from the model's call on the noted batch.
    A model that lets tokens halt or leave early thinks longer about some tokens than about others. Difficulty is their
    place in the answer, and in an addition how far the carry that arrives there has come."""

    def __init__(self, algorithm: str, digits: int, depths: Depths) -> None:
        self.digits, self.depths = digits, depths
        names = (PLACE, CARRY) if algorithm == "addition" else (PLACE,)
        self.counts = {name: torch.zeros(3, digits + 2, dtype=torch.float64) for name in names}
        self.all = torch.zeros(2, dtype=torch.float64)

    def note(self, batch: ScoredBatch, right: Tensor) -> None:
        """Count the answers' tokens of a batch, in order; ``right`` [tokens] bool says which are."""
        scored, depth = batch.scored.cpu(), self.depths.last.cpu().double()
        place = (scored.cumsum(1) - 1)[scored]
        self.all += torch.stack([(depth > 0).sum(), depth.sum()])
        groups = {PLACE: place}
        if CARRY in self.counts:
            rows = scored.nonzero()[:, 0]
            groups[CARRY] = torch.from_numpy(carried(batch.tokens.cpu().numpy(), self.digits))[rows, place]
        for name, group in groups.items():
            for row, weights in enumerate((torch.ones_like(depth[scored]), right.cpu().double(), depth[scored])):
                self.counts[name][row] += group.bincount(weights, minlength=self.digits + 2)

    @property
    def facts(self) -> dict[str, object]:
        """Return the mean depth of all noted tokens, the tokens of problems included, and ``by_place`` and
        ``by_carry``: the number, accuracy and mean depth of every group of tokens."""
        depth = self.depths.metric.name
        groups = {
            f"by_{name}": [
                {name: number, "tokens": int(tokens), "accuracy": right / tokens, depth: total / tokens}
                for number, (tokens, right, total) in enumerate(counts.T.tolist())
                if tokens
            ]
            for name, counts in self.counts.items()
        }
        return {depth: float(self.all[1] / self.all[0]), **groups}


# How many problems a model solves by their length, in training's range and beyond, and its answer to one.


Measured = dict[str, Any]
"""The results on problems of this many ``digits``, for JSON: how many ``problems`` were ``solved``, how many ``tokens``
of their answers are ``correct``, the share of the most frequent one (``guessing``), and the sum of ``nats``.
``trained``: whether training's range holds them. Where tokens halt or leave early, the mean depth by the name of its
metric, and the groups of :class:`ByDifficulty`."""


def evaluate(
    subject: LoadedRun, settings: EvaluationSettings, options: AlgorithmEvaluationOptions, quiet: bool
) -> Evaluation:
    """Evaluate a run on new problems of each number of digits; the metrics are over the problems in training's range,
    or over all problems if none is in it. Every problem is written to the table that the options name."""
    started_at, model = time.perf_counter(), subject.model
    data: AlgorithmData = subject.run.options.data
    split = choose(settings.split, SPLITS, "`split`")

    def measure(digits: int) -> Measured:
        tokens, right, nats, done = 0, 0, 0.0, 0
        counts = torch.zeros(len(SYMBOLS), dtype=torch.int64)

        def draw(part: int, count: int) -> AlgorithmRows:
            return data.rows(split, part, count, settings.seed, digits)

        deep = None if depths is None else ByDifficulty(data.algorithm, digits, depths)
        for batch, answered in answered_batches(model, draw, options.problems, data.width(digits), settings.chunk):
            tokens, right = tokens + len(answered.labels), right + int(answered.right.sum())
            done += int(solved(answered.right, answered.rows, len(batch.tokens)).sum())
            nats += float(answered.nats)
            counts += answered.labels.cpu().bincount(minlength=len(SYMBOLS))
            if write is not None:
                for row in _problems(batch, answered):
                    write({"digits": digits, **row})
            if deep is not None:
                deep.note(batch, answered.right)
        require_finite(isfinite(nats))
        return {
            "digits": digits, "trained": data.least <= digits <= data.most, "problems": options.problems,
            "solved": done, "sequence_accuracy": done / options.problems, "tokens": tokens, "correct": right,
            "accuracy": right / tokens, "guessing": int(counts.max()) / tokens, "nats": nats,
            **({} if deep is None else deep.facts),
        }  # fmt: skip

    lengths = _lengths(model, data, options.digits_to_measure)
    with options.writing_predictions() as write, torch.inference_mode(), noting_depths(model) as depths:
        groups = [measure(digits) for digits in track(lengths, len(lengths), quiet)]
    depth = None if depths is None else depths.metric
    main = [group for group in groups if group["trained"]] or groups
    names = ("tokens", "problems", "correct", "solved", "nats")
    total = {name: sum(group[name] for group in main) for name in names}
    metrics = {
        ACCURACY: total["correct"] / total["tokens"],
        SEQUENCE_ACCURACY: total["solved"] / total["problems"],
        BITS_PER_LABEL: total["nats"] / log(2) / total["tokens"],
    }
    for group in groups:
        name = f"sequence_accuracy_at_{group['digits']}"
        metrics[Metric(name, SHARE, lower_is_better=False)] = group["sequence_accuracy"]
    if depth is not None:
        metrics[depth] = sum(group[depth.name] for group in main) / len(main)
    baselines = {"most_frequent_token": max(group["guessing"] for group in main)}
    ponder = "" if depth is None else f", {depth.text(metrics[depth])}"
    text = (
        f"{subject.title} on {data.algorithm} of {data.least} to {plural(data.most, 'digit')}, {split} split",
        f"{metrics[SEQUENCE_ACCURACY]:.1%} of {plural(total['problems'], 'problem')} solved, {metrics[ACCURACY]:.1%} "
        f"of their tokens right, {metrics[BITS_PER_LABEL]:.4f} bits per token{ponder}\n",
        _by_digits(groups, depth),
        *(() if depth is None else _by_difficulty(main[-1], depth)),
    )
    facts = {"algorithm": data.algorithm, "by_digits": groups} | baselines
    more: dict[str, Any] = {"facts": facts, "baselines": baselines, "task": "algorithm", "since": started_at}
    return evaluated(subject, metrics, data.identity | {"split": split}, text, **more)


def _by_digits(groups: Sequence[Measured], depth: Metric | None) -> TextTable:
    """Return a row for every number of digits; with ``depth``, the steps or layers per token."""
    headers = ["digits", "trained", "problems", "solved", "tokens right", "most frequent token"]
    lines = []
    for group in groups:
        shares = (f"{group[name]:.1%}" for name in ("sequence_accuracy", "accuracy", "guessing"))
        lines.append([group["digits"], "yes" if group["trained"] else "no", group["problems"], *shares])
        lines[-1] += [] if depth is None else [f"{group[depth.name]:.2f}"]
    headers += [] if depth is None else [depth.unit]
    return TextTable(headers, lines, [0, *range(2, len(headers))])


def _by_difficulty(group: Measured, depth: Metric) -> Iterator[str | TextTable]:
    """Yield tables of the answers' tokens of a ``group`` of problems by their difficulty."""
    for name, what in ((PLACE, "place in the answer, from 0"), (CARRY, "places that the carry has come")):
        if rows := group.get(f"by_{name}"):
            yield f"\nAnswers of {plural(group['digits'], 'digit')}:"
            lines = [[row[name], row["tokens"], f"{row['accuracy']:.1%}", f"{row[depth.name]:.2f}"] for row in rows]
            yield TextTable((what, "tokens", "right", depth.unit), lines, range(4))


def _lengths(model: Model, data: AlgorithmData, at_digits: Sequence[int] | None) -> list[int]:
    """Return the numbers of digits to measure at: ``at_digits``, or up to four times training's within the model's
    positions."""
    usual = {data.least, (data.least + data.most) // 2, data.most, 2 * data.most, 4 * data.most}
    lengths, limit = list(at_digits or sorted(usual)), model.max_length
    beyond = [digits for digits in lengths if limit is not None and data.width(digits) > limit]
    if beyond and at_digits is not None:
        raise KinformerError(
            f"`at_digits` {beyond[0]}: takes rows of {plural(data.width(beyond[0]), 'token')}, but this model's "
            f"positions end at {limit}; give fewer digits."
        )
    if beyond:
        note(f"note: not measured at {', '.join(map(str, beyond))} digits, beyond the model's positions.")
    return [digits for digits in lengths if digits not in beyond]


def _problems(batch: ScoredBatch, answered: Answers) -> Iterator[dict[str, str | bool]]:
    """Yield every problem of a batch: its text, the right answer, and the answer each of whose tokens is the most
    probable one behind the right ones before it; a problem is solved where both are equal."""
    guesses = answered.logits.argmax(-1)
    for row, tokens in enumerate(batch.tokens):
        begin = int(batch.scored[row].nonzero()[0])
        here = (answered.rows == row).cpu()
        right, guess = (_symbols(tokens_of.cpu()[here]) for tokens_of in (answered.labels, guesses))
        yield {"text": _symbols(tokens[: begin + 1]), "label": right, "answer": guess, "solved": right == guess}


def _symbols(tokens: Tensor) -> str:
    """Return tokens as text, without the end; ids beyond the symbols, which an untrained model may draw, become ?."""
    text = "".join(SYMBOLS[token] if token < len(SYMBOLS) else "?" for token in tokens.tolist())
    return text.removesuffix(SYMBOLS[END])


def predict(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, options: NoOptions
) -> Iterator[Predicted]:
    """Yield the answers to the problems of ``source``."""
    return answers_to(source, settings, problem_in, subject, generate)


def generate(subject: LoadedRun, prompt: str | bytes, options: GenerationSettings, write: Write = None) -> Generated:
    """Return the answer to the problem ``prompt``, such as 407=, token by token, each the most probable, to the end."""
    text = problem_in(prompt)
    started_at, limit = time.perf_counter(), subject.model.max_length
    new: list[int] = []
    with torch.inference_mode():
        tokens = torch.tensor([[SYMBOLS.index(symbol) for symbol in text]], device=device_of(subject.model))
        logits, state = subject.model(tokens)
        first, room = time.perf_counter(), MOST_NEW if limit is None else min(MOST_NEW, limit - len(text))
        while (token := int(logits[0, -1, : len(SYMBOLS)].argmax())) != END and len(new) < room:
            new.append(token)
            if write is not None:
                write(SYMBOLS[token])
            logits, state = subject.model(tokens.new_tensor([[token]]), state)
    if write is not None:
        write("\n")
    return Generated(
        [Sample(new, "".join(SYMBOLS[token] for token in new), stopped=token == END)],
        len(text),
        seed=options.seed,
        state_bytes=nbytes(state),
        prompt_seconds=first - started_at,
        new_tokens=len(new),
        seconds=time.perf_counter() - started_at,
    )


def problem_in(prompt: str | bytes) -> str:
    """Return the problem in a prompt."""
    text = (prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else prompt).strip()
    if not text.endswith("=") or not set(text) <= set(SYMBOLS):
        raise KinformerError(
            f"the prompt {text!r} is not a problem: it must hold digits, + and at last =, as in 407= or 407+950=."
        )
    return text
