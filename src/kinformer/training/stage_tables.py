"""What the option `stages` may hold: a list of tables, checked before a run is planned. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kinformer.runtime.errors import KinformerError, nearest, require, require_above
from kinformer.runtime.fields import require_kind
from kinformer.runtime.parsing import JsonObject

_TYPES: Mapping[str, tuple[type, ...]] = {
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


def checked_stages(stages: object) -> tuple[JsonObject, ...] | None:
    """Return ``stages`` as tables of known names and types; None for None.

    Errors: ``KinformerError`` for anything else, and for stages that lack a setting, or have one that belongs to
    the run.
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
