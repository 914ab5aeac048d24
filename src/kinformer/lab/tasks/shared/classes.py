"""Classes that a run predicts: their names, their numbers in other data, and how often each was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

import numpy as np

from kinformer.lab.tasks.evaluation import TextTable
from kinformer.lab.tasks.runs import TrainedRun
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor


def classes_of(run: TrainedRun) -> list[str]:
    """The names of the classes that a run predicts."""
    classes = (run.data.get("identity") or {}).get("classes")
    if not isinstance(classes, list):
        raise KinformerError(f"{run.folder}: does not say which classes it predicts; measure the run that was trained.")
    return classes


def numbers_of(run: TrainedRun, name: str, classes: Sequence[str]) -> np.ndarray:
    """The numbers that ``run`` gave to the ``classes`` of the data called ``name``, in their order."""
    learnt = classes_of(run)
    if strange := [item for item in classes if item not in learnt]:
        raise KinformerError(
            f"{name}: has the class {strange[0]!r}, which {run.folder} was not trained to predict; it predicts "
            f"{', '.join(learnt)}."
        )
    return np.array([learnt.index(item) for item in classes], np.int64)


class ClassCounts(Protocol):
    """The counts of each class: how many ``examples`` it has, how often it was ``predicted``, and how often rightly."""

    @property
    def examples(self) -> tuple[int, ...]: ...
    @property
    def predicted(self) -> tuple[int, ...]: ...
    @property
    def correct(self) -> tuple[int, ...]: ...


def by_class(classes: Sequence[str], measured: ClassCounts, things: str) -> tuple[list[dict[str, object]], TextTable]:
    """Return, as JSON and as a table, how many ``things`` of every class there are, how often it was predicted and how
    often rightly."""
    columns = (measured.examples, measured.predicted, measured.correct)
    counts = [
        {"class": name, things: count, "predicted": predicted, "correct": correct}
        for name, count, predicted, correct in zip(classes, *columns, strict=True)
    ]
    rows = [list(count.values()) for count in counts]
    return counts, TextTable(("class", things, "predicted", "correct"), rows, range(1, 4))


class ClassPredictions:
    """The predicted class of every item of a part of data, and its probability, in the order of the data."""

    def __init__(self, count: int) -> None:
        self.classes, self.shares = np.zeros(count, np.int64), np.zeros(count)

    def note(self, indices: np.ndarray, logits: Tensor) -> None:
        """Note the predictions of the items ``indices`` [n] by their ``logits`` [n, classes]."""
        shares, classes = logits.softmax(-1).max(-1)
        self.classes[indices], self.shares[indices] = classes.numpy(), shares.double().numpy()

    def rows(self, labels: np.ndarray, names: Sequence[str]) -> Iterator[dict[str, object]]:
        """Yield what is predicted of every item, as a row of a table, beside its label."""
        labels = labels[: len(self.classes)]  # of the items that were measured, the first ones
        for label, predicted, share in zip(labels, self.classes.tolist(), self.shares.tolist(), strict=True):
            yield {"label": names[int(label)], "class": names[predicted], "probability": share}


ClassProbability = TypedDict("ClassProbability", {"class": str, "probability": float})
"""A class with its probability, as JSON holds it."""


def most_probable(probabilities: Tensor, names: Sequence[str], top_k: int) -> list[ClassProbability]:
    """The ``top_k`` most probable classes of ``probabilities`` [classes], the most probable first."""
    best = probabilities.topk(min(top_k, len(names)))
    return [
        {"class": names[index], "probability": share}
        for share, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def spell_classes(classes: Sequence[ClassProbability]) -> str:
    """Return classes with their probabilities, for people."""
    return ", ".join(f"{item['class']} {item['probability']:.1%}" for item in classes)
