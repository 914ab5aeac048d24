"""The record of a comparison, plain data that is checked on reading, and the cache of its results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar

from kinformer.core.config import Config, from_dict, to_dict
from kinformer.family.record import MemberSheet
from kinformer.lab.training.logging import Metric
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import json_digest, read_json, require_signature, signed, write_json
from kinformer.runtime.parsing import JsonObject

# A cache of results under keys of their inputs, so that no result is computed twice.

T = TypeVar("T")


def key_of(content: object) -> str:
    """Return a digest of JSON-ready ``content``."""
    return json_digest(content)[:16]


def file_name(text: str) -> str:
    """Return ``text`` with only characters that a file name may hold."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")


class Cache:
    """A folder of JSON values, each under its kind and key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, kind: str, key: str) -> Path:
        """Return the path of the file that holds a value."""
        return self.folder / f"{kind}-{key}.json"

    def get(self, kind: str, key: str) -> Any | None:
        """Return the stored value; None without a stored value.

        Errors: ``KinformerError`` for a damaged file.
        """
        path = self.path(kind, key)
        if not path.is_file():
            return None
        data = read_json(path)
        require_signature(data, path, required=True)
        return data["value"]

    def put(self, kind: str, key: str, value: object) -> None:
        """Store a value with a checksum under its kind and key."""
        write_json(self.path(kind, key), signed({"value": value}))

    def once(self, kind: str, key: str, make: Callable[[], T]) -> T:
        """Return the stored value; without a stored value call ``make``, and store and return its result."""
        value: T | None = self.get(kind, key)
        if value is None:
            value = make()
            self.put(kind, key, value)
        return value


# The measurements of entrants, in the form of the cache and the record.


class FactSheet(TypedDict, total=False):
    """An entrant's fact sheet, which is empty if it could not be made: ``config`` of the model, ``state_bytes`` of one
    row by absorbed tokens, ``needs``: the options of training that belong to the member's method."""

    members: list[MemberSheet]
    config: JsonObject
    max_length: int | None
    state_bytes: dict[str, int]
    needs: list[str]


class StepTime(TypedDict):
    """The ``seconds`` of a training step, and of the ``anchor`` (an entrant) in the same rounds, and the ``date``."""

    seconds: float
    anchor: str
    anchor_value: float | None
    date: str


class SpeedPoint(TypedDict):
    """The ``seconds`` of a ``kind`` of work on ``batch`` rows of ``length`` tokens; of decoding, of one token."""

    kind: str
    batch: int
    length: int
    seconds: float


class Speeds(TypedDict):
    """The speeds of several works, the speeds of the ``anchor`` (an entrant) in the same rounds, and the ``date``."""

    points: list[SpeedPoint]
    anchor: str
    anchor_value: list[SpeedPoint] | None
    date: str


class LengthBytes(TypedDict):
    """The peak ``bytes`` of a training step of one row of ``length`` tokens, above the model itself."""

    length: int
    bytes: int


class Memory(TypedDict):
    """The peak bytes of a ``training`` process above an empty process, and of a step by length."""

    training: int
    lengths: list[LengthBytes]


class MachineFacts(TypedDict, total=False):
    """The facts of the machine of a measurement, the ``versions`` of its packages, and the share of the time of
    training in which the comparison was ``computing``, less than 1 on a busy machine."""

    processor: str
    architecture: str
    cores: int | None
    threads: int
    system: str
    device: str
    load: float
    computing: float | None
    python: str
    versions: dict[str, str | None]


class PositionBits(TypedDict):
    """The bits per byte of the ``tokens`` with ``first`` to ``last`` tokens before them in their window."""

    first: int
    last: int
    tokens: int
    bits_per_byte: float


class ContextValue(TypedDict):
    """The deciding metric on the ``test`` split at a length of ``context`` in tokens, and by position within it."""

    context: int
    test: float
    positions: list[PositionBits]


class Budget(TypedDict, total=False):
    """The budget of all entrants, and the ``use`` of the members; ``steps`` lists the different numbers of steps."""

    parameters: int
    steps: list[int]
    minutes: float | None
    total_minutes: float | None
    tokens_step: int
    seeds: int
    use: str | None
    sweep_steps: list[int]


class RunResult(TypedDict, total=False):
    """A training run: its best ``validation``, ``log`` and the ``command`` that repeats it, or why it ``diverged``."""

    folder: str
    validation: dict[str, float | None]
    steps: int
    seconds: float
    log: list[JsonObject]
    command: str
    diverged: str


class Measurement(TypedDict):
    """The metrics of a run on the test split, with their ``units`` as [name, unit, lower is better]."""

    figures: dict[str, float]
    units: list[list[object]]
    baselines: dict[str, float]
    data: JsonObject
    contexts: list[ContextValue]


SCHEMA = 2


class Trial(Config):
    """A learning rate of the sweep and the deciding metric of its ``validation``, None where training diverged."""

    lr: float
    validation: float | None


class Point(Config):
    """A point of a run's curve: a ``validation`` after ``step`` steps, ``seconds`` and ``flops``, None if unknown."""

    step: int
    validation: float
    seconds: float | None
    flops: float | None


class SeedRun(Config):
    """One run: the deciding metric on the ``test`` split, all ``test_metrics``, its ``curve`` of validations, the test
    metric at lengths of context, and the command that repeats it."""

    seed: int
    test: float
    test_metrics: dict[str, float]
    steps: int
    seconds: float
    curve: tuple[Point, ...]
    contexts: Sequence[ContextValue] = ()
    command: str


class EntrantRecord(Config):
    """The results of one entrant by stage; a missing measurement is None. ``moved``: a sentence about an optimum at an
    end of the sweep. ``error``: the reason why the entrant is out."""

    name: str
    spec: str
    set: dict[str, object]
    facts: FactSheet = field(default_factory=FactSheet)
    parameters: int = 0
    flops_step: float | None = None
    error: str | None = None
    sweep: tuple[Trial, ...] = ()
    lr: float | None = None
    moved: str | None = None
    runs: tuple[SeedRun, ...] = ()
    state_bytes: dict[str, int] = field(default_factory=dict)
    training: StepTime | None = None
    generation: Speeds | None = None
    lengths: Speeds | None = None
    memory: Memory | None = None
    machine: MachineFacts = field(default_factory=MachineFacts)
    settings: JsonObject = field(default_factory=dict)

    @property
    def values(self) -> tuple[float, ...]:
        """The deciding metric on the test split for every seed."""
        return tuple(run.test for run in self.runs)


class Comparison(Config):
    """A comparison of entrants on one task and data; ``budget`` and ``settings`` repeat the command."""

    kinformer: str
    created: str
    command: str
    task: str
    figure: str
    unit: str
    lower_is_better: bool
    data: JsonObject
    baselines: dict[str, float]
    budget: Budget
    settings: JsonObject
    seconds: dict[str, float]
    entrants: tuple[EntrantRecord, ...]

    place: ClassVar[str] = "a comparison"

    @property
    def deciding(self) -> Metric:
        """The metric by which entrants are ranked."""
        return Metric(self.figure, self.unit, self.lower_is_better)

    @property
    def finished(self) -> list[EntrantRecord]:
        """The entrants that were measured, the best first."""
        done = [entrant for entrant in self.entrants if entrant.runs]
        return sorted(done, key=lambda item: mean_of(item) * (1 if self.lower_is_better else -1))


def mean_of(entrant: EntrantRecord) -> float:
    """Return the mean of the deciding metric on the test split over the seeds."""
    return sum(entrant.values) / len(entrant.values)


def save(comparison: Comparison, path: Path) -> None:
    """Write the comparison to ``path`` as JSON."""
    write_json(path, as_json(comparison))


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as JSON-ready data, with the number of the schema."""
    return {"schema": SCHEMA} | to_dict(comparison)


def read(path: Path) -> Comparison:
    """Return the comparison in a file.

    Errors: ``KinformerError`` for a file without a comparison, or with another schema.
    """
    data = read_json(path)
    if not isinstance(data, dict) or "entrants" not in data:
        raise KinformerError(f"{path}: is not a comparison; give the comparison.json that kinformer compare wrote.")
    if (schema := data.pop("schema", None)) == 1:
        data = _renamed(data)
    elif schema != SCHEMA:
        raise KinformerError(f"{path}: has schema {schema!r}, but this version reads {SCHEMA}; use a matching version.")
    result = from_dict(Comparison, data, {}, str(path))
    for entrant in result.entrants:
        if (entrant.lr is None or not entrant.facts) and entrant.runs:
            raise KinformerError(f"{path}: {entrant.name} has runs but no learning rate or facts; restore it.")
    return result


NAMES: Mapping[str, Mapping[str, str | None]] = {
    "curve": {"value": "validation"}, "sweep": {"value": "validation"}, "contexts": {"value": "test"},
    "runs": {"value": "test", "figures": "test_metrics"}, "entrants": {"badges": None},
}  # fmt: skip
"""The names of schema 1 in lists, and their names today; None for a name without a successor."""


def _renamed(data: Any, place: str = "") -> Any:
    """Return a comparison of schema 1, or a part of it in the list ``place``, with the names of today."""
    if isinstance(data, list):
        return [_renamed(item, place) for item in data]
    if not isinstance(data, dict) or place == "facts":
        return data
    names = NAMES.get(place, {})
    pairs = ((names.get(name, name), _renamed(value, name)) for name, value in data.items())
    return {name: value for name, value in pairs if name is not None}


IN_ALL_SEEDS = ("spec", "set", "settings", "lr", "parameters")
"""The fields that two trainings of one entrant with different seeds share."""


def merged(comparisons: list[tuple[Path, Comparison]]) -> Comparison:
    """Return one comparison with the entrants of several comparisons on one task and the same data. The second of two
    entrants of one name gets the name of its file; runs of the same entrant with different seeds are joined.

    Errors: ``KinformerError`` for another task, other data or another deciding metric.
    """
    (first_path, first), *others = comparisons
    entrants: dict[str, EntrantRecord] = {item.name: item for item in first.entrants}
    for path, other in others:
        for what in ("task", "figure"):
            if getattr(other, what) != getattr(first, what):
                raise KinformerError(
                    f"{path}: its {what} is {getattr(other, what)}, but {first_path} has {getattr(first, what)}; merge "
                    "comparisons of one task."
                )
        if _fingerprint(other) != _fingerprint(first):
            raise KinformerError(f"{path}: is of other data than {first_path}; merge comparisons of the same data.")
        for entrant in other.entrants:
            previous = entrants.get(entrant.name)
            if previous is None:
                entrants[entrant.name] = entrant
            elif all(getattr(previous, name) == getattr(entrant, name) for name in IN_ALL_SEEDS):
                seeds = {run.seed for run in previous.runs}
                more = tuple(run for run in entrant.runs if run.seed not in seeds)
                entrants[entrant.name] = previous.replace(runs=previous.runs + more)
            else:
                base = f"{entrant.name} ({path.stem})"
                names = chain([base], (f"{base} {number}" for number in count(2)))
                name = next(name for name in names if name not in entrants)
                entrants[name] = entrant.replace(name=name)
    seconds = {"in all": sum(sum(comparison.seconds.values()) for _, comparison in comparisons)}
    return first.replace(entrants=tuple(entrants.values()), seconds=seconds)


def _fingerprint(comparison: Comparison) -> list[object]:
    data = comparison.data if isinstance(comparison.data, dict) else {}
    return [data.get("fingerprint"), data.get("split"), data.get("max_bytes")]
