"""Rotary positions as configs of the library transformers name them: ``rope_parameters`` today, ``rope_theta`` and
``rope_scaling`` in older files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from kinformer.interop.layouts import ConfigData, ConfigView
from kinformer.interop.settings import Settings, integer, positive, switch
from kinformer.runtime.errors import KinformerError

SCALINGS: dict[str, dict[str, str]] = {
    "linear": {},
    "yarn": {
        "original_length": "original_max_position_embeddings",
        **{name: name for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")},
    },
    "llama3": {
        "original_length": "original_max_position_embeddings",
        **{name: name for name in ("low_freq_factor", "high_freq_factor")},
    },
}
"""The type of scaled rotary positions to what its settings are called here and in ``rope_parameters``."""
READERS: dict[str, Callable[[Mapping[str, object], Path, str], float]] = {
    "original_length": integer,
    "truncate": switch,
}
"""The settings that are no numbers above 0."""


def rope(
    full: Mapping[str, object], place: Path | str, kind: str | None = None, base: float = 10000.0, partial: bool = False
) -> ConfigData:
    """Return the config, as data, of the rotary positions of the config ``full``, which stands at ``place``.

    ``kind``: the kind of layer, where they differ between kinds; ``base``: where a file has none; ``partial``: whether
    the model heeds ``partial_rotary_factor``, which most do not.
    """
    place = Path(place)
    table = parameters(full, place, kind)
    outside = {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
    settings = {"rope_theta": base, **outside, **table, "max_position_embeddings": full.get("max_position_embeddings")}
    if kind is None and "original_max_position_embeddings" in full:
        settings["original_max_position_embeddings"] = full["original_max_position_embeddings"]
    position: ConfigData = {"kind": "rope", "base": positive(settings, place, "rope_theta")}
    if partial and settings.get("partial_rotary_factor", 1.0) != 1:
        position["fraction"] = positive(settings, place, "partial_rotary_factor")
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling in ("default", None):
        return position
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise KinformerError(
            f"{place}: rotary positions are of the type {scaling!r}, whose frequencies the position 'rope' does not "
            f"have"
            f"{', as they follow the length of the text' if scaling in ('dynamic', 'longrope') else ''}; what it has: "
            f"default, {', '.join(SCALINGS)}."
        )
    return position | _scaled(settings, place, scaling)


def parameters_of(position: ConfigView) -> Settings:
    """Return the ``rope_parameters`` of the config ``position``, as data: the inverse of :func:`rope`; with no base for
    no positions.

    Errors: ``KeyError`` for positions that are not rotary, or scaled in a way that transformers does not know.
    """
    if position["kind"] == "none":
        return {"rope_type": "default", "rope_theta": None}
    scaling = position["scaling"]
    parameters = {"rope_type": "default" if scaling == "none" else scaling, "rope_theta": position["base"]}
    if scaling == "none":
        return parameters
    named = {theirs: position[ours] for ours, theirs in SCALINGS[scaling].items()}
    return (
        parameters
        | {"factor": position["factor"]}
        | {name: value for name, value in named.items() if value is not None}
    )


def _scaled(settings: Mapping[str, object], place: Path, scaling: str) -> ConfigData:
    """Return the settings of positions that are scaled; none where a factor of 1 leaves them as they are."""
    scaled = {
        ours: READERS.get(ours, positive)(settings, place, theirs)
        for ours, theirs in SCALINGS[scaling].items()
        if settings.get(theirs) is not None
    }
    if "original_length" in SCALINGS[scaling] and "original_length" not in scaled:
        scaled["original_length"] = integer(settings, place, "max_position_embeddings")
    if settings.get("factor") is None and "original_length" in scaled:
        factor = integer(settings, place, "max_position_embeddings") / scaled["original_length"]
    else:
        factor = positive(settings, place, "factor")
    if scaling == "yarn" and "attention_factor" not in scaled:
        scaled |= _attention_factor(settings, place, factor)
    if factor == 1 and scaled.get("attention_factor", 1.0) == 1:
        return {}
    return {"scaling": scaling, "factor": factor} | scaled


def _attention_factor(settings: Mapping[str, object], place: Path, factor: float) -> dict[str, float]:
    """Return what multiplies cosines and sines with YaRN where DeepSeek's ``mscale`` and ``mscale_all_dim`` say it."""
    names = ("mscale", "mscale_all_dim")
    if not all(settings.get(name) for name in names) or factor <= 1:
        return {}
    above, below = (magnitude(settings, place, name, factor) for name in names)
    return {"attention_factor": above / below}


def magnitude(settings: Mapping[str, object], place: Path, name: str, factor: float) -> float:
    """Return YaRN's magnitude, 0.1 m ln(factor) + 1, for m the setting ``name``; 1 where nothing is stretched."""
    return 0.1 * positive(settings, place, name) * math.log(factor) + 1 if factor > 1 else 1.0


def parameters(full: Mapping[str, object], place: Path, kind: str | None = None) -> Mapping[str, object]:
    """Return the table of rotary settings, empty where there is none.

    ``rope_scaling`` replaces ``rope_parameters``, as in transformers; where each ``kind`` of layer has its own table,
    ``rope_scaling`` adds to it.
    """
    tables: list[Mapping[str, object]] = []
    for name in ("rope_parameters", "rope_scaling"):
        table = full.get(name) or {}
        if not isinstance(table, Mapping):
            raise KinformerError(f"{place}: {name} is not a table of settings; restore the file from a copy.")
        tables.append(table)
    parameters, scaling = tables
    if kind is None:
        return scaling or parameters
    of_kind = parameters.get(kind)
    return {**(of_kind if isinstance(of_kind, Mapping) else {}), **scaling}
