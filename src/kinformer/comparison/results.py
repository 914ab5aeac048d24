"""What is measured of the entrants of a comparison, as JSON holds it in the cache and in the record."""

from __future__ import annotations

from typing import TypedDict

from kinformer.family.record import MemberSheet
from kinformer.figures.text_picture import TextPicture
from kinformer.runtime.parsing import JsonObject


class FactSheet(TypedDict, total=False):
    """An entrant's fact sheet: ``config`` is its model's, ``state_bytes`` those of one row by tokens absorbed, and
    ``needs`` the options of training that are part of its method; empty where it could not be made."""

    members: list[MemberSheet]
    config: JsonObject
    formulas: list[str]
    max_length: int | None
    state_bytes: dict[str, int]
    patterns: list[TextPicture]
    needs: list[str]


class StepTime(TypedDict):
    """The ``seconds`` of a training step, those of the ``anchor`` (an entrant) in the same rounds, and the ``date``."""

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
    """The speeds of several works, those of the ``anchor`` (an entrant) in the same rounds, and the ``date``."""

    points: list[SpeedPoint]
    anchor: str
    anchor_value: list[SpeedPoint] | None
    date: str


class LengthBytes(TypedDict):
    """The peak ``bytes`` of a training step of one row of ``length`` tokens, above the model itself."""

    length: int
    bytes: int


class Memory(TypedDict):
    """The peak bytes of a ``training`` process above those of an empty one, and of a step by length."""

    training: int
    lengths: list[LengthBytes]


class Badge(TypedDict):
    """Whether a ``law`` of the battery ``holds`` (None: not judged), with the reason if not. ``left_out``: changes that
    the judged model could not have."""

    name: str
    law: str
    holds: bool | None
    why: str
    left_out: list[str]


class MachineFacts(TypedDict, total=False):
    """The facts of the machine on which something was measured, and the ``versions`` of packages there."""

    processor: str
    architecture: str
    cores: int | None
    threads: int
    system: str
    device: str
    load: float
    python: str
    versions: dict[str, str | None]


class PositionBits(TypedDict):
    """The bits per byte of the ``tokens`` that have ``first`` to ``last`` tokens before them in their window."""

    first: int
    last: int
    tokens: int
    bits_per_byte: float


class ContextValue(TypedDict):
    """The deciding metric at a length of ``context`` in tokens, and by position within it."""

    context: int
    value: float
    positions: list[PositionBits]


class Budget(TypedDict, total=False):
    """The budget of all entrants. ``steps`` and ``sweep_steps`` are the different numbers there are, in order."""

    parameters: int
    steps: list[int]
    minutes: float | None
    total_minutes: float | None
    tokens_step: int
    seeds: int
    sweep_steps: list[int]


class RunResult(TypedDict, total=False):
    """A training run: its ``folder``, best ``validation``, ``log`` and the ``command`` that repeats it; of one that
    ``diverged`` only the reason."""

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


class SeedResult(RunResult):
    """A training run with its ``seed`` and what was ``measured`` on the test split."""

    seed: int
    measured: Measurement


class TrialResult(TypedDict):
    """A learning rate of the sweep and the deciding metric after it, None where training diverged."""

    lr: float
    value: float | None


class Results(TypedDict, total=False):
    """All results of one contestant, by stage; what was not measured, or failed, is missing or None."""

    facts: FactSheet
    max_length: int | None
    flops_step: float | None
    training: StepTime | None
    generation: Speeds | None
    lengths: Speeds | None
    memory: Memory
    badges: list[Badge]
    sweep: list[TrialResult]
    lr: float
    moved: str | None
    runs: list[SeedResult]
