"""Plain values of configs, which text may spell as on a command line."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import parse_count, parse_json


def plain(value: Any) -> Any:
    """Return the JSON value that a string spells, or the string if it spells none."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def parse_plain(kind: Any, value: Any, place: str) -> Any:
    """Return ``value`` as the plain type ``kind``; another is an error that names the ``place``."""
    if kind is str and isinstance(value, str):
        return value
    if kind is int and isinstance(value, str):
        with suppress(ValueError):
            return parse_count(value)
    read = plain(value)
    if kind is float and isinstance(read, int) and not isinstance(read, bool):
        return float(read)
    if kind is Any or not isinstance(kind, type):  # a type that only the owner of the config can check
        return read
    if isinstance(read, kind) and isinstance(read, bool) == (kind is bool):
        return read
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise KinformerError(f"{place}: {value!r} is not {names.get(kind, kind)}.")
