"""What every setting of a part means, in one sentence each: the table ``settings.toml`` beside this file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from kinformer.core.config import Config, field_types, parts_in
from kinformer.runtime.fields import field_docs
from kinformer.runtime.parsing import parse_toml
from kinformer.runtime.plugins import KINFORMER

TABLE = Path(__file__).with_suffix(".toml")
ALL = "*"


@cache
def meanings() -> Mapping[str, Mapping[str, str]]:
    """Return the table: name of a group of parts -> setting -> meaning."""
    return parse_toml(TABLE.read_text(encoding="utf-8"))


def groups(config: type[Config]) -> Iterator[str]:
    """Yield the names of the groups of the table that a config class is in, the most special one first."""
    if not config.kind:
        yield config.__qualname__
        return
    yield from (f"{config.slot}.{config.kind}", f"{ALL}.{config.kind}", config.slot, ALL)


def group_of(config: type[Config], name: str) -> str | None:
    """Return the group whose meaning counts for the setting ``name`` of a config class, None where none has it."""
    return next((group for group in groups(config) if name in meanings().get(group, {})), None)


def meaning(config: type[Config], name: str) -> str:
    """Return what the setting ``name`` of a config class means: its unit, and what special values do.

    Of a part of another package it is the text under the field in its source; "" where there is none.
    """
    if config.__module__.partition(".")[0] != KINFORMER:
        return field_docs(config).get(name, "")
    group = group_of(config, name)
    return "" if group is None else meanings()[group][name]


def meanings_in(config: object) -> dict[str, dict[str, str]]:
    """Return the meanings of all settings of a config and of all configs inside it: part ("slot.kind") -> setting ->
    meaning; those without a kind by their class."""
    return {
        next(groups(part)): {name: meaning(part, name) for name in field_types(part)}
        for part in dict.fromkeys(map(type, parts_in(config)))
    }
