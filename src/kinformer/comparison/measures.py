"""What an entrant costs: one table of measures, for the columns of the report and for its sentences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kinformer.comparison.record import Comparison, EntrantRecord
from kinformer.runtime.words import plural
from kinformer.training.metric import size


class Measure(NamedTuple):
    """A column of the table of results: its ``title``, how an entrant's ``value`` is computed (None: not known) and
    shown as ``text``, and whether ``less`` is better (None: neither). ``best`` begins the sentence about the entrant
    that has the best value, in which ``unit`` follows the text; empty where there is none."""

    title: str
    value: Callable[[EntrantRecord], Any]
    text: Callable[[Any], str]
    less: bool | None = None
    best: str = ""
    unit: str = ""

    def cell(self, entrant: EntrantRecord) -> str:
        """Return the entrant's value as text, ``-`` where there is none."""
        value = self.value(entrant)
        return "-" if value is None else self.text(value)


def costs(comparison: Comparison) -> list[Measure]:
    """What members cost to train, to hold and to generate with: the columns of the table and the sentences above it."""
    length = common_length(comparison)
    return [
        Measure("train tokens/s", tokens_per_second, rate, False, "Fastest to train", " tokens/s"),
        Measure("training s", training_seconds, rate, True),
        Measure("peak memory", peak_bytes, size, True, "Least memory in training"),
        Measure(
            f"state at {plural(length, 'token')}",
            lambda entrant: state_at(entrant, length),
            size,
            True,
            f"Smallest state after {plural(length, 'token')}",
        ),
        _generation(1, "one text"),
        _generation(16, "16 texts"),
    ]


def rate(value: float) -> str:
    """Return a number as text without decimals."""
    return f"{value:,.0f}"


def _generation(batch: int, texts: str) -> Measure:
    """Tokens per second of so many texts at once."""
    best = f"Fastest to generate, {texts}"
    return Measure(f"generate {batch}/s", lambda entrant: generated(entrant, batch), rate, False, best, " tokens/s")


def tokens_per_second(entrant: EntrantRecord) -> float | None:
    """Return the tokens per second of training steps, which were timed in turns with the other entrants'."""
    if not entrant.training:
        return None
    return entrant.settings["length"] * entrant.settings["batch_size"] / entrant.training["seconds"]


def training_seconds(entrant: EntrantRecord) -> float | None:
    """Seconds of training, the mean of the seeds."""
    return sum(run.seconds for run in entrant.runs) / len(entrant.runs) if entrant.runs else None


def peak_bytes(entrant: EntrantRecord) -> int | None:
    """Return the peak bytes of a training process above those of an empty one."""
    return entrant.memory["training"] if entrant.memory else None


def common_length(comparison: Comparison) -> int:
    """The longest text after which the state of all is known; 0 where there is none."""
    lengths_by_entrant = [
        {int(length) for length in entrant.state_bytes} for entrant in comparison.entrants if entrant.state_bytes
    ]
    return max(set.intersection(*lengths_by_entrant), default=0) if lengths_by_entrant else 0


def state_at(entrant: EntrantRecord, length: int) -> int | None:
    """Bytes of the state of one row; None of a model without one."""
    return (entrant.state_bytes or {}).get(str(length)) or None


def generated(entrant: EntrantRecord, batch: int) -> float | None:
    """Tokens per second, all rows together."""
    points = (entrant.generation or {}).get("points", ())
    return next((batch / point["seconds"] for point in points if point["batch"] == batch), None)
