"""Runs as tasks see them, how they are evaluated, and what an evaluation reports: metrics, facts for JSON, text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import Checked, KinformerError, require, require_seed
from kinformer.runtime.progress import progressing

if TYPE_CHECKING:
    import numpy as np

    from kinformer.core.stack import ModelConfig
    from kinformer.lab.data import Tokenizer
    from kinformer.lab.data.labelled import TextItem

# The results of predicting and embedding for every item: a row of values and a line for people, or a vector.

FileSource: TypeAlias = str | Path | Sequence[str | Path]
"""Where pictures or sounds come from: a file, a folder, data by name, or a list of paths."""
Write: TypeAlias = Callable[[str], None] | None
"""A function that gets the pieces of a generated text as they come, or None."""


@dataclass(frozen=True, kw_only=True)
class ItemSettings(Checked):
    """How items are read and computed, one after the other."""

    text_field: str | None = None
    """The column or field with the text, where it is not called text or sentence."""
    format: Literal["lines", "tsv", "csv", "jsonl"] | None = None
    """How the rows of the input are written. If not given, by the file's ending, and lines on standard input."""
    batch_size: int = 32
    """Items computed at a time; bounds the memory, does not change the result."""
    first: int | None = None
    """Take the first N items only."""
    quiet: bool = False
    """Print only the result, without progress or notes."""
    skip_bad: bool = False
    """Report an unreadable file of a folder or list and continue with the next; without it such a file is an error."""
    seed: int = 0
    """Decides all random numbers, such as the hashes of a member with hashing."""

    LEAST = {"batch_size": 1, "first": 1}

    def __post_init__(self) -> None:
        require_seed(self.seed)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PredictionSettings(ItemSettings):
    """How runs of any task predict."""

    top_k: int = 1
    """Give the N most probable classes of an item, or candidates of a mask, each with its probability."""
    label_field: str | None = None
    """The column or field with a label to show beside the prediction, where it is not called label."""

    LEAST = {"top_k": 1}


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(ItemSettings):
    """How runs of any task make vectors."""

    label_field: str | None = None
    """The column or field with a label to write beside the vector, where it is not called label."""

    pooling: Literal["mean", "first", "last"] = "mean"
    """How an item becomes a vector: the mean over its positions, or the vector of the first or the last position."""


class Embedded(NamedTuple):
    """A vector, float32 [dim], of the item ``name``: a text, or the path of a file. ``kind``: the kind of
    item, ``text``, ``image`` or ``audio``. ``label``: the item's label where its table has labels."""

    kind: str
    name: str
    vector: np.ndarray
    label: str | None = None

    @property
    def row(self) -> dict[str, object]:
        """The item as data that JSON can hold."""
        label = {} if self.label is None else {"label": self.label}
        return {self.kind: self.name, **label, "vector": self.vector.tolist()}


class Predicted(NamedTuple):
    """A prediction: its ``row`` for tables and JSON, and one ``line`` for people."""

    row: Mapping[str, object]
    line: str

    @classmethod
    def of(cls, item: TextItem, line: str, **answer: object) -> Predicted:
        """Return the ``answer`` to a text, after the text and its label in the row."""
        label = {} if item.label is None else {"label": item.label}
        return cls({"text": item.text} | label | answer, line)


R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Checked):
    """How runs of any task are measured."""

    data: str | None = None
    """Data to measure on: a path, - for standard input, or stdlib; the run's own if not given."""
    split: str = "test"
    """Which part of the data: train, validation or test."""
    first: int | None = None
    """Measure on the first N only: bytes of a text, else images, pairs, or with `harness` items of every task."""
    chunk: int = 2048
    """Tokens computed at a time; bounds the memory, does not change the result."""
    seed: int = 0
    """The seed of all random numbers."""

    LEAST = {"first": 1, "chunk": 1}

    def __post_init__(self) -> None:
        require_seed(self.seed)
        super().__post_init__()


MAX_SAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(Checked):
    """How runs of any task generate."""

    max_new_tokens: int | None = None
    """Tokens to draw: 256 if not given, or as many as the model's positions allow."""
    temperature: float = 1.0
    """1 draws as the model predicts, 0 always takes the most probable token (0.8 for text, 1 for images)."""
    top_k: int | None = None
    """Draw from the N most probable tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens whose probability together is X or more."""
    min_p: float | None = None
    """Draw from tokens at least X times as probable as the most probable token."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens that were there before by X, where they are positive; multiply the others."""
    stop: tuple[str, ...] = ()
    """End before this text appears; may be given again. A text also ends with the model's `input.eos_token`."""
    samples: int = 1
    """Continue the prompt N times, written one after the other when all are done; or draw N images."""
    chunk: int = 1024
    """Tokens of the prompt that the model sees at a time."""
    draft_length: int = 4
    """With `draft`: how many tokens are guessed at most."""
    seed: int = 0
    """The seed of the draws; another one every time if not given."""
    quiet: bool = False
    """Print only the result, without progress or notes."""
    task_options: Any = field(default_factory=dict)
    """The task's own options, by name; a task gets them as its dataclass."""

    LEAST = {"max_new_tokens": 1, "top_k": 1, "chunk": 1, "draft_length": 1, "temperature": 0, "seed": 0}
    SHARES = {"top_p": "(0, 1]", "min_p": "(0, 1]"}

    def __post_init__(self) -> None:
        require("samples", self.samples, 1, MAX_SAMPLES)
        if not 0 < self.repetition_penalty < float("inf"):
            raise KinformerError(
                f"`repetition_penalty` is {self.repetition_penalty:g} but must be above 0; 1 penalises nothing."
            )
        super().__post_init__()


class TextTable(NamedTuple):
    """A table for printing; the columns in ``numeric`` are aligned to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    numeric: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a run is. ``metrics``: the values of ``units``, which name them and say whether less is better;
    ``baselines``: the deciding metric of simple rules, or the metric ``judged``, which comes with the run's value;
    ``data``: the identity of what was measured on; ``facts``: all of it and more, as values for JSON; ``text``: the
    same for people."""

    run: str
    member: str
    metrics: Mapping[str, float]
    units: tuple[Metric, ...]
    data: Mapping[str, object]
    baselines: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict, repr=False)
    text: tuple[str | TextTable, ...] = field(default=(), repr=False)
    judged: tuple[Metric, float] | None = field(default=None, repr=False)

    @property
    def deciding(self) -> tuple[Metric | None, float]:
        """Return the metric that the baselines have, and the run's value; None and NaN without a unit."""
        first = next(((unit, self.metrics[unit.name]) for unit in self.units), (None, float("nan")))
        return self.judged or first

    @property
    def figures(self) -> Mapping[str, float]:
        """An alias of ``metrics``: the values by name."""
        return self.metrics


@dataclass(frozen=True)
class EvaluationReport:
    """Several evaluations, and a report on all: ``together`` as text, ``facts`` for JSON."""

    evaluations: Sequence[Evaluation]
    together: Sequence[str | TextTable] = ()
    facts_of_task: Mapping[str, object] | None = None

    @property
    def facts(self) -> Mapping[str, object]:
        """The report as data that JSON can hold: one run's facts, or the facts of all under ``runs``."""
        if self.facts_of_task is not None:
            return self.facts_of_task
        facts = [evaluation.facts for evaluation in self.evaluations]
        return facts[0] if len(facts) == 1 else {"runs": facts}

    @property
    def text(self) -> list[str | TextTable]:
        """The report as lines and tables to print: each evaluation's, then text on all."""
        return [*(block for evaluation in self.evaluations for block in evaluation.text), *self.together]


def evaluated(
    subject: LoadedRun,
    metrics: Mapping[Metric, float],
    data: Mapping[str, object],
    text: Iterable[str | TextTable],
    *,
    facts: Mapping[str, object],
    baselines: Mapping[str, float] | None = None,
    task: str | None = None,
    since: float | None = None,
) -> Evaluation:
    """Return the evaluation of ``subject``: one value of every metric, the deciding one first.
    ``data`` is the identity of what was evaluated on, ``text`` what people read. The facts are the run, its changes,
    the data and the metrics, followed by ``facts`` and, where ``since`` is a time of ``time.perf_counter``, the seconds
    since then."""
    run, values = subject.run, {metric.name: value for metric, value in metrics.items()}
    head = {"run": str(run.folder), "member": run.member} | ({} if task is None else {"task": task})
    all_facts = head | {"set": list(subject.changes), "data": data} | values | dict(facts)
    if since is not None:
        all_facts["seconds"] = time.perf_counter() - since
    return Evaluation(
        run=str(run.folder),
        member=run.member,
        metrics=values,
        units=tuple(metrics),
        baselines=baselines or {},
        data=data,
        facts=all_facts,
        text=tuple(text),
    )


def track(
    items: Iterable[T],
    total: int | None,
    quiet: bool,
    label: str = "measuring",
    size: Callable[[T], int] = lambda item: 1,
) -> Iterator[T]:
    """Yield ``items``, each of a ``size``; a bar shows how much of ``total``, if known, is done unless ``quiet``.

    The bar lives as long as the generator, so let a ``for`` own it, in the function that computes with the items: then
    an error there ends the bar before its message is printed.
    """
    done = 0
    with progressing(quiet or total is None, label) as progress:
        for item in items:
            yield item
            done += size(item)
            if progress is not None and total is not None:
                progress(done, total)


def parts_of(count: int, size: int, quiet: bool = True, label: str = "measuring") -> Iterator[slice]:
    """Yield the places of ``count`` items in order, ``size`` at a time, with a bar unless ``quiet``."""
    parts = (slice(first, min(first + size, count)) for first in range(0, count, size))
    return track(parts, count, quiet, label, lambda part: part.stop - part.start)


# Runs as tasks see them: the folder of a trained model, and the loaded model with its companions.


class TrainedRun(Protocol):
    """A run folder, as far as tasks read it."""

    @property
    def folder(self) -> Path: ...
    @property
    def member(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def data(self) -> Mapping[str, Any]: ...
    @property
    def options(self) -> Any: ...
    @property
    def training(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


class LoadedRun(NamedTuple):
    """A run to measure or to generate with.
    ``model``: of the protocol that the task names, in eval mode; ``changes``: the changes of its config, as
    ``path=value``; ``lookup``: the datastore of its head, as values for JSON; ``draft``: the draft that guesses its
    next tokens (see ``generation.generate``); ``language_model``: the language model that guides its search."""

    run: TrainedRun
    model: Any
    changes: tuple[str, ...] = ()
    lookup: Mapping[str, Any] | None = None
    draft: object = None
    language_model: LoadedRun | None = None

    @property
    def title(self) -> str:
        """Return the folder, and in brackets the member and the changes."""
        return f"{self.run.folder} ({', '.join((self.run.member, *self.changes))})"


# The parts of configs and models that only some have, the output of tasks that generate, and items in batches.


def input_of(config: ModelConfig) -> Any:
    """Return the input of ``config``, whose class the task knows."""
    return config.input


def part_of(owner: object, name: str) -> Any:
    """Return the part ``name`` of a config or model, which only some have, such as the policy of a head."""
    return getattr(owner, name)


@dataclass(frozen=True)
class Made:
    """The output of tasks that generate something other than continued text: ``facts`` for JSON, ``text`` for people,
    and of drawn images their ``pixels`` uint8 [images, height, width, channels]."""

    facts: Mapping[str, object]
    text: str
    interrupted: bool = False
    pixels: np.ndarray | None = None


# Items in batches: the arrived items of a stream, and items of similar length.

POOL = 16
"""Batches whose items are sorted by length together."""
_END = object()


def arriving(items: Iterator[T], limit: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most ``limit``: the items already there, and one to wait for at most."""
    queue: Queue[Any] = Queue(maxsize=4 * limit)

    def read() -> None:
        try:
            for item in items:
                queue.put((item, None))
            queue.put((_END, None))
        except BaseException as error:
            queue.put((_END, error))

    Thread(target=read, daemon=True).start()
    error: BaseException | None = None
    at_end = False
    while not at_end:
        batch: list[T] = []
        item, error = queue.get()
        while item is not _END:
            batch.append(item)
            if len(batch) == limit:
                break
            try:
                item, error = queue.get(timeout=0.01)
            except Empty:
                break
        at_end = item is _END
        if batch:
            yield batch
    if error is not None:
        raise error


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``; the last list has the rest."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def in_batches(
    items: Iterator[T],
    batch_size: int,
    size: Callable[[T], int],
    compute: Callable[[Sequence[T]], Sequence[R]],
    total: int | None = None,
    quiet: bool = True,
) -> Iterator[R]:
    """Yield the results of ``compute`` for the items, in their order; a batch holds items of like ``size``, and few are
    in memory at a time. A bar shows how many of ``total`` are done, unless ``quiet``."""
    done = 0
    with progressing(quiet or total is None, "predicting") as progress:
        for pool in arriving(items, batch_size * POOL):
            results: dict[int, R] = {}
            for chosen in batched(sorted(range(len(pool)), key=lambda index: size(pool[index])), batch_size):
                results |= zip(chosen, compute([pool[index] for index in chosen]), strict=True)
                done += len(chosen)
                if progress is not None and total is not None:
                    progress(done, total)
            yield from (results[index] for index in range(len(pool)))
