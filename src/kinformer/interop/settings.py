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

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""What the setting ``layer_types`` calls the kinds of layers."""


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
    """Refuse a setting that has another value; one that is left out has this one."""
    for name, value in values.items():
        if config.get(name, value) != value:
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
