"""How many problems a model solves by their length, in training's range and beyond, and what it answers to one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import isfinite, log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.model import device_of
from kinformer.data.algorithms import END, SPLITS, SYMBOLS, AlgorithmData, AlgorithmRows, carried
from kinformer.evaluation.adaptive_computation import PONDER_STEPS
from kinformer.evaluation.depths import Depths, noting_depths
from kinformer.evaluation.early_exit import LAYERS_PER_TOKEN
from kinformer.runtime.errors import KinformerError, choose, require_finite
from kinformer.runtime.progress import note
from kinformer.runtime.tables import WriteRow
from kinformer.runtime.words import plural
from kinformer.tasks.algorithm.rows import solved
from kinformer.tasks.evaluation import Evaluation, EvaluationSettings, TextTable, by_group, evaluated, total
from kinformer.tasks.next_token.generate import MOST_NEW, Generated, Sample
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.answer_rows import Answers, ScoredBatch, answers, drawn_batches
from kinformer.training.batch import map_fields
from kinformer.training.metric import ACCURACY, BITS_PER_LABEL, SEQUENCE_ACCURACY, SHARE, Metric

if TYPE_CHECKING:
    from kinformer.tasks.algorithm import AlgorithmEvaluationOptions


def sequence_accuracy_at(digits: int) -> Metric:
    """The share of problems of so many digits that are solved."""
    return Metric(f"sequence_accuracy_at_{digits}", SHARE, lower_is_better=False)


def evaluate(
    subject: LoadedRun, evaluation_settings: EvaluationSettings, options: AlgorithmEvaluationOptions, quiet: bool
) -> Evaluation:
    """A run on new problems of each number of digits; the figures of all are over those in training's range, or over
    all where none is. Every problem is written to the table that the options name."""
    begun = time.perf_counter()
    data: AlgorithmData = subject.run.options.data
    split = choose(evaluation_settings.split, SPLITS, "`split`")
    lengths, rows = _lengths(subject.model, data, options.digits_to_measure), options.problems
    with options.writing_predictions() as write:
        groups = by_group(
            lengths,
            lambda digits: _measured(subject.model, data, split, digits, rows, evaluation_settings, write),
            quiet,
        )
    main = [group for group in groups if group["trained"]] or groups
    tokens, correct, done, problems, nats = total(main, "tokens", "correct", "solved", "problems", "nats")
    metrics = {ACCURACY: correct / tokens, SEQUENCE_ACCURACY: done / problems, BITS_PER_LABEL: nats / log(2) / tokens}
    metrics |= {sequence_accuracy_at(group["digits"]): group["sequence_accuracy"] for group in groups}
    depth = next((metric for metric in (PONDER_STEPS, LAYERS_PER_TOKEN) if metric.name in groups[0]), None)
    if depth is not None:
        metrics[depth] = total(main, depth.name)[0] / len(main)
    baselines = {"most_frequent_token": max(group["guessing"] for group in main)}
    ponder = "" if depth is None else f", {depth.text(metrics[depth])}"
    text = (
        f"{subject.title} on {data.algorithm} of {data.least} to {plural(data.most, 'digit')}, {split} split",
        f"{metrics[SEQUENCE_ACCURACY]:.1%} of {plural(problems, 'problem')} solved, {metrics[ACCURACY]:.1%} of their "
        f"tokens right, {metrics[BITS_PER_LABEL]:.4f} bits per token{ponder}\n",
        _by_digits(groups, depth),
        *(() if depth is None else _by_difficulty(groups, depth)),
    )
    facts = {"algorithm": data.algorithm, "by_digits": groups} | baselines
    identity = data.identity | {"split": split}
    return evaluated(subject, metrics, identity, text, facts=facts, baselines=baselines, task="algorithm", since=begun)


def _by_digits(groups: list[dict[str, object]], depth: Metric | None) -> TextTable:
    """A row for every number of digits; ``depth``: with the steps or layers per token."""
    names = ("digits", "trained", "problems", "solved", "tokens right", "most frequent token")
    steps = [] if depth is None else [depth]
    lines = [
        [
            group["digits"], "yes" if group["trained"] else "no", group["problems"],
            f"{group['sequence_accuracy']:.1%}", f"{group['accuracy']:.1%}", f"{group['guessing']:.1%}",
            *(f"{group[step.name]:.2f}" for step in steps),
        ]
        for group in groups
    ]  # fmt: skip
    return TextTable((*names, *(step.unit for step in steps)), lines, [0, *range(2, len(names) + len(steps))])


def _by_difficulty(lengths_tested: list[dict[str, Any]], depth: Metric) -> Iterator[str | TextTable]:
    """Tables of answers' tokens by their difficulty, of the longest problems in training's range."""
    longest = ([item for item in lengths_tested if item["trained"]] or lengths_tested)[-1]
    for name, what in ((PLACE, "place in the answer, from 0"), (CARRY, "places that the carry has come")):
        if f"by_{name}" not in longest:
            continue
        lines = [
            [row[name], row["tokens"], f"{row['accuracy']:.1%}", f"{row[depth.name]:.2f}"]
            for row in longest[f"by_{name}"]
        ]
        yield f"\nAnswers of {plural(longest['digits'], 'digit')}:"
        yield TextTable((what, "tokens", "right", depth.unit), lines, range(4))


def _lengths(model: Any, data: AlgorithmData, at_digits: Sequence[int] | None) -> list[int]:
    """The numbers of digits to measure at: those asked for, or to twice and four times training's, within the model's
    positions."""
    limit = model.max_length
    if at_digits is not None:
        for digits in at_digits:
            if limit is not None and data.width(digits) > limit:
                raise KinformerError(
                    f"`at_digits` {digits}: takes rows of {plural(data.width(digits), 'token')}, but this model's "
                    f"positions end at {limit}; give fewer digits."
                )
        return list(at_digits)
    wanted = sorted({data.least, (data.least + data.most) // 2, data.most, 2 * data.most, 4 * data.most})
    fitting = [digits for digits in wanted if limit is None or data.width(digits) <= limit]
    if fitting != wanted:
        left = ", ".join(str(digits) for digits in wanted if digits not in fitting)
        note(f"note: not measured at {left} digits, beyond the model's positions.")
    return fitting


def _measured(
    model: nn.Module,
    data: AlgorithmData,
    split: str,
    digits: int,
    rows: int,
    evaluation_settings: EvaluationSettings,
    write: WriteRow | None,
) -> dict[str, Any]:
    """Measure problems of so many digits: the answers' tokens and how many are right, problems and how many are
    solved."""
    tokens, right, nats, done = 0, 0, 0.0, 0
    counts = torch.zeros(len(SYMBOLS), dtype=torch.int64)

    def draw(part: int, count: int) -> AlgorithmRows:
        return data.rows(split, part, count, evaluation_settings.seed, digits)

    with torch.inference_mode(), noting_depths(model) as depths:
        deep = None if depths is None else ByDifficulty(data.algorithm, digits, depths)
        for batch in drawn_batches(draw, rows, data.width(digits), evaluation_settings.chunk):
            answered = answers(model, map_fields(batch, lambda field: field.to(device_of(model))))
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
        "digits": digits, "trained": data.least <= digits <= data.most, "problems": rows, "solved": done,
        "sequence_accuracy": done / rows, "tokens": tokens, "correct": right, "accuracy": right / tokens,
        "guessing": int(counts.max()) / tokens, "nats": nats,
    } | ({} if deep is None else {deep.depths.metric.name: deep.mean} | deep.facts)  # fmt: skip


def _problems(batch: ScoredBatch, answered: Answers) -> Iterator[dict[str, str | bool]]:
    """Every problem of a batch: its text, the right answer, and the answer each of whose tokens is the most probable
    one behind the right ones before it; a problem is solved where both are equal."""
    guesses = answered.logits.argmax(-1)
    for row, tokens in enumerate(batch.tokens):
        begin = int(batch.scored[row].nonzero()[0])
        here = (answered.rows == row).cpu()
        right, guess = (_symbols(tokens_of.cpu()[here]) for tokens_of in (answered.labels, guesses))
        yield {"text": _symbols(tokens[: begin + 1]), "label": right, "answer": guess, "solved": right == guess}


def _symbols(tokens: Tensor) -> str:
    """Tokens as text, without the end; ids beyond the symbols, which an untrained model may take, as ?."""
    text = "".join(SYMBOLS[token] if token < len(SYMBOLS) else "?" for token in tokens.tolist())
    return text.removesuffix(SYMBOLS[END])


def answer(subject: LoadedRun, prompt: str | bytes, options: Any, write: Callable[[str], None] | None) -> Generated:
    """The answer to the problem ``prompt``, such as 407=, token by token, each the most probable, to the end."""
    text = problem_in(prompt)
    begun, most = time.perf_counter(), subject.model.max_length
    new: list[int] = []
    with torch.inference_mode():
        tokens = torch.tensor([[SYMBOLS.index(symbol) for symbol in text]], device=device_of(subject.model))
        logits, state = subject.model(tokens)
        first, room = time.perf_counter(), MOST_NEW if most is None else min(MOST_NEW, most - len(text))
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
        state_bytes=states.nbytes(state),
        prompt_seconds=first - begun,
        new_tokens=len(new),
        seconds=time.perf_counter() - begun,
    )


def problem_in(prompt: str | bytes) -> str:
    """The problem that a prompt holds. Errors: ``KinformerError`` where it is none."""
    text = (prompt.decode("utf-8", "replace") if isinstance(prompt, bytes) else prompt).strip()
    if not text or text[-1] != "=" or not set(text) <= set(SYMBOLS):
        raise KinformerError(
            f"the prompt {text!r} is no problem: it must hold digits, + and at last =, as in 407= or 407+950=."
        )
    return text


PLACE, CARRY = "place", "carry"


class ByDifficulty:
    """Answers' tokens of problems of one ``algorithm`` and so many ``digits``, counted by their difficulty; ``depths``
    are of the call that read the batch that is noted.

    A model that lets tokens halt or leave early thinks longer about some tokens than about others. Difficulty is their
    place in the answer, and in an addition how far the carry that arrives there has come.
    """

    def __init__(self, algorithm: str, digits: int, depths: Depths) -> None:
        self.digits, self.depths = digits, depths
        names = (PLACE, CARRY) if algorithm == "addition" else (PLACE,)
        self.counts = {name: torch.zeros(3, digits + 2, dtype=torch.float64) for name in names}
        self.all = torch.zeros(2, dtype=torch.float64)

    def note(self, batch: ScoredBatch, right: Tensor) -> None:
        """``right`` [tokens] bool: which of the batch's answers' tokens are, in order."""
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
    def mean(self) -> float:
        """Return the mean depth of all tokens noted, those of problems included."""
        return float(self.all[1] / self.all[0])

    @property
    def facts(self) -> dict[str, list[dict[str, Any]]]:
        """The counts as data that JSON can hold: by each difficulty, a row for every group that has tokens."""
        return {f"by_{name}": rows_of(name, counts, self.depths.metric.name) for name, counts in self.counts.items()}


def rows_of(name: str, counts: Tensor, depth: str) -> list[dict[str, Any]]:
    """Return a row for every group of ``counts`` [3, groups] (tokens, right ones, sums of depths) that has tokens:
    their number, their accuracy and their mean ``depth``."""
    return [
        {name: number, "tokens": int(tokens), "accuracy": right / tokens, depth: total / tokens}
        for number, (tokens, right, total) in enumerate(counts.T.tolist())
        if tokens
    ]
