"""Training in stages: rows, batch, learning rate and settings of the model without weights, changed in the course of a
run (Beltagy et al. 2020, Longformer, section 4.2; Press et al. 2021, Shortformer). Free of PyTorch.

Every stage begins its rows anew, in an order of its own, and carries no state over from the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kinformer.runtime.errors import KinformerError, nearest, require, require_above
from kinformer.runtime.fields import require_kind
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from kinformer.training.settings import Settings

_TYPES: Mapping[str, tuple[Any, ...]] = {
    "steps": (int,),
    "length": (int,),
    "batch_size": (int,),
    "accumulate": (int,),
    "lr": (float,),
    "warmup": (float,),
    "set": (Mapping,),
}
_OF_THE_RUN = ("steps", "length", "batch_size", "accumulate", "set")
"""What the last stage has of the run."""
_EXAMPLE = '`set` training.stages=\'[{"steps": 900, "length": 128}, {}]\''


@dataclass(frozen=True)
class Stage:
    """Stage ``number`` (from 0) of ``count``: the updates from step ``begin`` up to ``end``, None in the last one.

    settings: those of the run, with the stage's own.
    changes: overrides of the model's config.
    rates: the steps from which and up to which the schedule of the learning rate runs; None is the run's end.
    since: the first step from which on the model has these changes, so that metrics can be compared.
    """

    number: int
    count: int
    begin: int
    end: int | None
    settings: Settings
    changes: Mapping[str, Any]
    rates: tuple[int, int | None]
    since: int

    def __str__(self) -> str:
        sizes = f"length {self.settings.length}, batch_size {self.settings.batch_size}, lr {self.settings.lr:g}"
        changes = "".join(f", {path}={value}" for path, value in self.changes.items())
        end = "" if self.end is None else f" to {self.end}"
        return f"stage {self.number + 1} of {self.count}, from step {self.begin + 1}{end}: {sizes}{changes}"

    @property
    def record(self) -> dict[str, float]:
        """Return what the log notes of the stage's begin."""
        sizes = {f"stage_{name}": getattr(self.settings, name) for name in ("length", "batch_size", "lr")}
        return {"stage": self.number + 1, **sizes}


def checked_stages(stages: Any) -> tuple[dict[str, Any], ...] | None:
    """Return ``stages`` as tables of known names and types; None for None.

    Errors: ``KinformerError`` for anything else, and for stages that say too little or what only the run can say.
    """
    if stages is None:
        return None
    if isinstance(stages, str | Mapping) or not isinstance(stages, Sequence):
        raise KinformerError(f"`stages` is {stages!r} but must be a list of tables, as in {_EXAMPLE}.")
    for number, stage in enumerate(stages, start=1):
        place = f"stage {number}"
        if not isinstance(stage, Mapping):
            raise KinformerError(f"`stages`: {place} is {stage!r} but must be a table, as in {_EXAMPLE}.")
        for name, value in stage.items():
            if name not in _TYPES:
                raise KinformerError(f"`stages`: {place} has no setting {name!r}; {nearest(str(name), _TYPES)}")
            require_kind(f"{name} of {place}", value, *_TYPES[name])
            if name == "lr":
                require_above(f"lr of {place}", value, 0)
            elif name != "set":
                require(f"{name} of {place}", value, 0 if name == "warmup" else 1)
        if "warmup" in stage and "lr" not in stage:
            raise KinformerError(f"`stages`: {place} has a warmup but no lr, with which a new rise begins; add it.")
        last = number == len(stages)
        if not last and "steps" not in stage:
            raise KinformerError(f"`stages`: {place} does not say its steps; add them, as in {_EXAMPLE}.")
        if taken := [name for name in _OF_THE_RUN if last and name in stage]:
            raise KinformerError(
                f"`stages`: {place} is the last, which has the run's own {taken[0]}; leave it out there and give it "
                "to the run."
            )
    return tuple(dict(stage) for stage in stages)


def stages_of(settings: Settings) -> list[Stage]:
    """Return the stages of a run with ``settings``; a run without any is one stage.

    Errors: ``KinformerError`` where the run ends before its last stage begins.
    """
    entries: Sequence[Mapping[str, Any]] = settings.stages or ({},)
    begins = [sum(entry["steps"] for entry in entries[:number]) for number in range(len(entries))]
    if settings.steps is not None and len(entries) > 1 and begins[-1] >= settings.steps:
        raise KinformerError(
            f"`stages`: those before the last take {plural(begins[-1], 'step')}, but the run has {settings.steps}; "
            "give more `steps`, or shorter stages (`stages` [] for none)."
        )
    rises = [number for number, entry in enumerate(entries) if number == 0 or "lr" in entry]
    since = 0
    stages: list[Stage] = []
    for number, entry in enumerate(entries):
        changes: Mapping[str, Any] = entry.get("set", {})
        if number and changes != stages[-1].changes:
            since = begins[number]
        rise = max(item for item in rises if item <= number)
        fall = next((item for item in rises if item > number), None)
        sizes = {name: value for name, value in entry.items() if name in ("length", "batch_size", "accumulate")}
        rates = {name: value for name, value in entries[rise].items() if name in ("lr", "warmup")}
        stages.append(
            Stage(
                number=number,
                count=len(entries),
                begin=begins[number],
                end=begins[number + 1] if number + 1 < len(entries) else None,
                settings=replace(settings, **sizes, **rates),
                changes=changes,
                rates=(begins[rise], None if fall is None else begins[fall]),
                since=since,
            )
        )
    return stages


def stage_at(settings: Settings, step: int) -> Stage:
    """Return the stage that makes the update after step ``step``."""
    return [stage for stage in stages_of(settings) if stage.begin <= step][-1]
