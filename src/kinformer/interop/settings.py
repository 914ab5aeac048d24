"""Settings of a ``config.json``, each checked: a wrong one is one sentence that names the file and the setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from reprlib import repr as excerpt
from typing import TypeAlias

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

Settings: TypeAlias = JsonObject
"""The settings of a ``config.json``, with the defaults of those that it leaves out."""

EVERYWHERE: Mapping[str, object] = {"per_layer_config": None}
CAUSAL: Mapping[str, object] = {
    "is_causal": True,
    "layer_types": None,
    "sliding_window": None,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
}
"""Settings that transformers reads in every architecture, and in every one that generates, with the only values that
can be imported where an architecture here does not read them itself."""
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""What the setting ``layer_types`` calls the kinds of layers."""


def complete(
    config: Mapping[str, object],
    place: Path,
    defaults: Mapping[str, object],
    required: Mapping[str, object] | None = None,
    names: Mapping[str, str] | None = None,
    causal: bool = True,
) -> Settings:
    """Return the settings of the ``config.json`` at ``place``, with ``defaults`` for settings that it leaves out.

    Every setting that transformers reads must be a default here, which the caller reads, or have its only value in
    ``required``. ``names``: further names of settings, which transformers prefers. ``causal``: whether the model
    generates.
    """
    full = {**defaults, **config}
    full |= {ours: config[theirs] for theirs, ours in (names or {}).items() if config.get(theirs) is not None}
    shared = {**EVERYWHERE, **(CAUSAL if causal else {})}
    require(full, place, {name: value for name, value in shared.items() if name not in defaults} | dict(required or {}))
    return full


def integer(config: Mapping[str, object], place: Path, name: str, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    """Return a whole number between ``minimum`` and ``maximum``."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise KinformerError(
            f"{place}: {name} is {excerpt(value)}, but must be a whole number from {minimum} to {maximum}."
        )
    return value


def number(config: Mapping[str, object], place: Path, name: str) -> float:
    """Return a number of 0 or more and below 1."""
    value = config.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but must be a number of 0 or more and below 1.")
    return float(value)


def choice(config: Mapping[str, object], place: Path, name: str, names: Iterable[str]) -> str:
    """Return the setting ``name``, which must be one of ``names``."""
    value, names = config.get(name), list(names)
    if value not in names:
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but only {', '.join(names)} can be imported.")
    return str(value)


def require(config: Mapping[str, object], place: Path, values: Mapping[str, object]) -> None:
    """Raise an error if a setting differs from its value in ``values``.

    A setting that ``config`` leaves out has this value, and null equals false.
    """
    for name, value in values.items():
        setting = config.get(name, value)
        if setting != value and (setting is not None or value):
            raise KinformerError(f"{place}: {name} is {excerpt(config[name])}, but only {value!r} can be imported.")


def positive(config: Mapping[str, object], place: Path, name: str) -> float:
    """Return a number above 0 that is finite."""
    value = config.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but must be a number above 0.")
    return float(value)


def switch(config: Mapping[str, object], place: Path, name: str) -> bool:
    """Return a setting that is true or false."""
    value = config.get(name)
    if not isinstance(value, bool):
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but must be true or false.")
    return value
