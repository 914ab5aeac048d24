"""Training in stages: rows, batch, learning rate and settings of the model without weights, changed in the course of a
run (Beltagy et al. 2020, Longformer, section 4.2; Press et al. 2021, Shortformer). Free of PyTorch.

Every stage reads its rows from the start, in its own order, and does not carry a state over from the stage before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.parsing import JsonObject


@dataclass(frozen=True)
class Stage:
    """Stage ``number`` (from 0) of ``count``: the updates from step ``begin`` up to ``end``, None in the last one.

    settings: the settings of the run, with the changes of the stage.
    changes: overrides of the model's config.
    rates: the first step and the end of the schedule of the learning rate; None is the run's end.
    since: the first step with these changes of the model. Metrics from this step on are comparable.
    """

    number: int
    count: int
    begin: int
    end: int | None
    settings: Settings
    changes: Mapping[str, object]
    rates: tuple[int, int | None]
    since: int

    def __str__(self) -> str:
        sizes = f"length {self.settings.length}, batch_size {self.settings.batch_size}, lr {self.settings.lr:g}"
        changes = "".join(f", {path}={value}" for path, value in self.changes.items())
        end = "" if self.end is None else f" to {self.end}"
        return f"stage {self.number + 1} of {self.count}, from step {self.begin + 1}{end}: {sizes}{changes}"

    @property
    def record(self) -> dict[str, float]:
        """Return the log's record of the beginning of the stage."""
        sizes = {f"stage_{name}": getattr(self.settings, name) for name in ("length", "batch_size", "lr")}
        return {"stage": self.number + 1, **sizes}


def stages_of(settings: Settings) -> list[Stage]:
    """Return the stages of a run with ``settings``; a run without any is one stage.

    Errors: ``KinformerError`` where the run ends before its last stage begins.
    """
    entries: Sequence[JsonObject] = settings.stages or ({},)
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
        changes: Mapping[str, object] = entry.get("set", {})
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
