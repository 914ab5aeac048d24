"""A config with the meaning behind each of its settings, wrapped to the width of the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import fields

from kinformer.cli.output import runs
from kinformer.core.config import Config, field_types, tags, to_dict
from kinformer.family.settings import meaning

MOST_LEFT, NARROW = 38, 64
"""Columns of settings, beyond which a meaning begins on the line below; in narrower terminals all do."""


def explained(config: Config, width: int, brief: bool = False) -> Iterator[str]:
    """Yield the lines of ``config`` with meanings, at most ``width`` columns wide where words allow; with ``brief``
    without the settings that are at their defaults."""
    rows = list(_rows(config, "  ", brief))
    column = min(MOST_LEFT, max((len(left) for left, _ in rows), default=0)) + 2
    for left, text in rows:
        behind = len(left) + 2 <= column and width >= NARROW
        indent = " " * (column if behind else len(left) - len(left.lstrip()) + 4)
        lines = textwrap.wrap(text, max(width, len(indent) + 20), initial_indent=indent, subsequent_indent=indent)
        if behind and lines:
            yield left.ljust(column) + lines.pop(0)[column:]
        else:
            yield left
        yield from lines


def _rows(config: Config, indent: str, brief: bool) -> Iterator[tuple[str, str]]:
    """Each setting, indented, and its meaning; equal neighbours in a list are listed once."""
    if (package := tags(config).get("package")) is not None:
        yield f"{indent}package = {package}", ""
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]
    for name in field_types(type(config)):
        value, text = getattr(config, name), meaning(type(config), name)
        if brief and value == defaults[name]:
            continue
        if isinstance(value, Config):
            yield f"{indent}{name}: {value.kind}".rstrip(), text
            yield from _rows(value, f"{indent}  ", brief)
        elif isinstance(value, tuple) and value and isinstance(value[0], Config):
            for first, last, item in runs(value):
                numbers = str(first) if first == last else f"{first} to {last}"
                yield f"{indent}{name} {numbers}: {item.kind}".rstrip(), text
                yield from _rows(item, f"{indent}  ", brief)
        else:
            yield f"{indent}{name} = {to_dict(value)}", text
