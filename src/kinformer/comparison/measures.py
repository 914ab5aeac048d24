"""The costs of an entrant as one table of measures, for the columns of the report and for its sentences; and how its
model differs from the yardstick's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from kinformer.comparison.record import Comparison, EntrantRecord
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.words import plural
from kinformer.training.metric import size

Slots: TypeAlias = dict[str, dict[str, JsonObject]]
"""The parts of a model's config: slot -> kind -> options."""
RESOLUTION = 1 << 20
"""Bytes below which the memory of a process says nothing: its allocator holds that much without asking the system."""


class Measure(NamedTuple):
    """A column of the table of results: its ``title``, how an entrant's ``value`` is computed (None: not known) and
    shown as ``text``, and whether ``less`` is better (None: neither). ``best`` begins the sentence about the entrant
    that has the best value, in which ``unit`` follows the text; empty where there is none."""

    title: str
    value: Callable[[EntrantRecord], float | None]
    text: Callable[[float], str]
    less: bool | None = None
    best: str = ""
    unit: str = ""

    def cell(self, entrant: EntrantRecord) -> str:
        """Return the entrant's value as text, ``-`` where there is none."""
        value = self.value(entrant)
        return "-" if value is None else self.text(value)


def costs(comparison: Comparison) -> list[Measure]:
    """Return the costs of training, of the state and of generating: columns of the table and sentences above it."""
    length = common_length(comparison)
    return [
        Measure("train tokens/s", tokens_per_second, rate, False, "Fastest to train", " tokens/s"),
        Measure("training s", training_seconds, rate, True),
        Measure("peak memory", peak_bytes, _memory, True, "Least memory in training"),
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
    """Return the column of the tokens per second of ``batch`` texts at once."""
    best = f"Fastest to generate, {texts}"
    return Measure(f"generate {batch}/s", lambda entrant: generated(entrant, batch), rate, False, best, " tokens/s")


def tokens_per_second(entrant: EntrantRecord) -> float | None:
    """Return the tokens per second of training steps, which were timed in turns with the other entrants'."""
    if not entrant.training:
        return None
    return entrant.settings["length"] * entrant.settings["batch_size"] / entrant.training["seconds"]


def training_seconds(entrant: EntrantRecord) -> float | None:
    """Return the mean seconds of training over the seeds."""
    return sum(run.seconds for run in entrant.runs) / len(entrant.runs) if entrant.runs else None


def peak_bytes(entrant: EntrantRecord) -> int | None:
    """Return the peak bytes of a training process above those of an empty one, 0 where they cannot be resolved."""
    if not entrant.memory:
        return None
    count = int(entrant.memory["training"])
    return count if count >= resolution(entrant) else 0


def resolution(entrant: EntrantRecord) -> int:
    """Return the least bytes of memory that its machine tells from none: a GPU counts every tensor."""
    return RESOLUTION if entrant.machine.get("device", "cpu") == "cpu" else 1


def _memory(count: float) -> str:
    return size(count) if count >= RESOLUTION else f"below {size(RESOLUTION)}"


def common_length(comparison: Comparison) -> int:
    """Return the longest text after which the state of all entrants is known; 0 if there is none."""
    lengths_by_entrant = [
        {int(length) for length in entrant.state_bytes} for entrant in comparison.entrants if entrant.state_bytes
    ]
    return max(set.intersection(*lengths_by_entrant), default=0) if lengths_by_entrant else 0


def state_at(entrant: EntrantRecord, length: int) -> int | None:
    """Return the bytes of the state of one row after ``length`` tokens; None for a model without one."""
    return (entrant.state_bytes or {}).get(str(length)) or None


def generated(entrant: EntrantRecord, batch: int) -> float | None:
    """Return the tokens per second of generating ``batch`` rows, all of them together."""
    points = entrant.generation.get("points", ()) if entrant.generation else ()
    return next((batch / point["seconds"] for point in points if point["batch"] == batch), None)


WIDTHS = {"kind", "dim", "num_heads", "head_dim", "hidden_dim", "vocab_size"}
"""Options that the parameter budget or the data decide."""
INNER = {"inner"}
SIZES = ("window", "stride", "segment", "memory")
"""Options that are part of what a pattern or a memory is."""


def departures(comparison: Comparison) -> list[str]:
    """Return a sentence for every entrant but the first, the yardstick: the parts of its model that differ, by their
    configs."""
    models = [(item.name, item.facts["config"]) for item in comparison.entrants if item.facts]
    if not models:
        return []
    base, theirs = models[0][0], slots(models[0][1])
    pairs = ((name, list(differing(slots(config), theirs).values())) for name, config in models[1:])
    return [f"{name} differs from {base} in {', '.join(texts) or 'nothing but sizes'}." for name, texts in pairs]


def slots(config: JsonObject) -> Slots:
    """Return the parts of a model's config, of all layers: slot -> kind -> options."""
    parts: Slots = {}
    for slot, node in _nodes(config, "model"):
        options = {name: value for name, value in node.items() if name not in WIDTHS and not _nested(value)}
        parts.setdefault(slot, {}).setdefault(node.get("kind", ""), options)
    return parts


def differing(ours: Slots, theirs: Slots) -> dict[str, str]:
    """Return how a model's parts differ from those of another, by slot, in words; no position is a part, too."""
    texts: dict[str, str] = {}
    for slot, kinds in ours.items():
        others, name = theirs.get(slot, {}), slot.replace("_", " ")
        kinds, others = ({kind: one[kind] for kind in one if kind != "none"} for one in (kinds, others))
        if kinds.keys() != others.keys():
            instead = f" instead of {_kinds(others)}" if others else ""
            texts[slot] = f"{name} {_kinds(kinds)}{instead}" if kinds else f"no {name} instead of {_kinds(others)}"
            continue
        changes = [
            f"{name} {option.replace('_', ' ')} {value} instead of {others[kind].get(option)}"
            for kind, options in kinds.items()
            for option, value in options.items()
            if value != others[kind].get(option)
        ]
        if changes:
            texts[slot] = ", ".join(changes)
    return texts


def _nodes(node: object, slot: str) -> Iterator[tuple[str, JsonObject]]:
    for item in node if isinstance(node, list) else [node]:
        if isinstance(item, dict) and slot not in INNER:
            yield slot, item
            for name, value in item.items():
                if _nested(value):
                    yield from _nodes(value, name)


def _nested(value: object) -> bool:
    return isinstance(value, dict | list)


def _kinds(kinds: Mapping[str, Mapping[str, object]]) -> str:
    """Return kinds in words, with the sizes that they consist of: ``local (window 64)``."""
    words = []
    for kind, options in kinds.items():
        sizes = ", ".join(f"{name} {options[name]}" for name in SIZES if name in options)
        words.append(f"{kind.replace('_', ' ')} ({sizes})" if sizes else kind.replace("_", " "))
    return " and ".join(words) or "none"
