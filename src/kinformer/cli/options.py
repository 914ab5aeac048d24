"""The options that commands share, and the groups of options that tasks add to a command. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from kinformer.cli.parsing import overrides
from kinformer.core.errors import require
from kinformer.tasks.table import tasks

Member = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER")]
RunFolder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
RunFolders = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Changes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH=VALUE")]
Hidden = Annotated[Mapping[str, Any], tyro.conf.Suppress]

__all__ = ["Changes", "CommonOptions", "Hidden", "Member", "RunFolder", "RunFolders", "asked", "require"]


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every command takes."""

    json: bool = False
    """Print one JSON object instead of text."""
    seed: int = 0
    """Decides everything random."""


O = TypeVar("O")


def with_task_options(options: type[O], kind: Literal["Options", "MeasuringOptions"]) -> type[O]:
    """``options`` with a group for the own options of every task that has some, under the name of the first that has
    them. An option whose name is taken already keeps its task's name before it: ``--task.option``."""
    groups: list[tuple[str, Any, Any]] = []
    taken, seen = {each.name for each in fields(options)}, set[type]()  # type: ignore[arg-type]
    for task in tasks():
        own = getattr(task, kind)
        names = {each.name for each in fields(own)}
        if names and own not in seen:
            group: Any = with_placeholders(own)
            shown = group if names & taken else Annotated[group, tyro.conf.OmitArgPrefixes]
            groups.append((_attribute(task.name), shown, field(default_factory=group)))
        taken |= names
        seen.add(own)
    return make_dataclass(options.__name__, groups, bases=(options,), frozen=True, kw_only=True)


PLACEHOLDERS = {int | None: "N", float | None: "X", str | None: "TEXT"}


def with_placeholders(options: type[O]) -> type[O]:
    """``options`` whose help names what may be given for an option that has no default: N, X or TEXT."""
    hints = get_type_hints(options, include_extras=True)
    named = [
        (each.name, Annotated[hints[each.name], tyro.conf.arg(metavar=PLACEHOLDERS[hints[each.name]])], each)
        for each in fields(options)  # type: ignore[arg-type]
        if hints[each.name] in PLACEHOLDERS
    ]
    changed = [(name, hint, field(default=each.default)) for name, hint, each in named]
    about = {"__doc__": options.__doc__, "__module__": options.__module__}
    return make_dataclass(options.__name__, changed, bases=(options,), frozen=True, kw_only=True, namespace=about)


def asked(request: type[O], options: Any) -> O:
    """What a function is asked for by ``options``: the changes as a table, and the tasks' own options that were
    given."""
    values = {each.name: getattr(options, each.name) for each in fields(request)}  # type: ignore[arg-type]
    if "set" in values:
        values["set"] = overrides(options.set)
    if "own" in values:
        values["own"] = _given(options)
    return request(**values)


def _given(options: Any) -> dict[str, Any]:
    """Of the options in groups those that differ from their defaults."""
    given: dict[str, Any] = {}
    for task in tasks():
        own = getattr(options, _attribute(task.name), None)
        if own is not None:
            given |= {each.name: value for each in fields(own) if (value := getattr(own, each.name)) != each.default}
    return given


def _attribute(name: str) -> str:
    return name.replace("-", "_")
