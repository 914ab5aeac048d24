"""The meanings of the settings of all parts, one sentence each, from the table ``settings.toml`` beside this file."""

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
    """Yield the names of the groups of the table that a config class belongs to, the most special group first."""
    if not config.kind:
        yield config.__qualname__
        return
    yield from (f"{config.slot}.{config.kind}", f"{ALL}.{config.kind}", config.slot, ALL)


def group_of(config: type[Config], name: str) -> str | None:
    """Return the first group with a meaning of the setting ``name`` of a config class, or None."""
    return next((group for group in groups(config) if name in meanings().get(group, {})), None)


def meaning(config: type[Config], name: str) -> str:
    """Return the meaning of the setting ``name`` of a config class: its unit, and the effect of special values.

    For a part of another package, return the text under the field in its source, or "".
    """
    if config.__module__.partition(".")[0] != KINFORMER:
        return field_docs(config).get(name, "")
    group = group_of(config, name)
    return "" if group is None else meanings()[group][name]


def meanings_in(config: object) -> dict[str, dict[str, str]]:
    """Return the meanings of all settings of a config and of all configs inside it: part -> setting -> meaning. A part
    is named "slot.kind", or by its class if it does not have a kind."""
    return {
        next(groups(part)): {name: meaning(part, name) for name in field_types(part)}
        for part in dict.fromkeys(map(type, parts_in(config)))
    }
