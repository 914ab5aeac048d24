"""``kinformer list``: the family or the tasks as a table of 80 columns, or as JSON, without importing PyTorch; the
kinds of parts."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Literal

import tyro

from kinformer.family.record import Member
from kinformer.family.table import members
from kinformer.lab.cli.options import CommonOptions
from kinformer.lab.cli.output import print_json, print_table
from kinformer.lab.tasks.table import tasks
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """List all members, or draw them as a tree; or list the tasks, or the kinds of parts."""

    what: Annotated[
        Literal["members", "tasks", "parts"], tyro.conf.Positional, tyro.conf.arg(metavar="members|tasks|parts")
    ] = "members"
    """What is listed."""
    by: Literal["axis", "cost", "state", "causal", "year"] | None = None
    """Print the family as a tree: by what members change (axis), by how their operations (cost) or state grow with the
    length, by whether they are causal (others read a full sequence at once), or by year."""


def run(options: Options) -> int:
    """Print the family and return the exit status."""
    if options.what != "members":
        if options.by is not None:
            raise KinformerError(f"--by {options.by}: groups members, but {options.what} are listed; leave it out.")
        _list_tasks(options.json) if options.what == "tasks" else _list_parts(options.json)
        return 0
    records = members(lambda sentence: print(f"kinformer: {sentence}", file=sys.stderr))
    if options.json:
        listed = [member.facts for member in records]
        groups = None if options.by is None else _groups(records, options.by)
        print_json(
            listed if groups is None else {name: [item.facts for item in group] for name, group in groups.items()}
        )
        return 0
    if options.by is not None:
        _print_tree(_groups(records, options.by))
        return 0
    rows = []
    for member in records:
        titles, axes = _wrapped(member.title, 24), _wrapped(", ".join(member.axes) or "-", 18)
        for number, (title, changed) in enumerate(zip_longest(titles, axes, fillvalue="")):
            first = (member.name, member.year, member.growth) if number == 0 else ("", "", "")
            rows.append((*first, title, changed))
    print_table(("member", "year", "state", "title", "changes"), rows)
    return 0


def _list_tasks(as_json: bool) -> None:
    """Print what a model can be trained for."""
    rows = [(task.name, task.title, task.metrics[0].name) for task in tasks()]
    if as_json:
        print_json([{"name": name, "title": title, "metric": metric} for name, title, metric in rows])
        return
    lines = []
    for name, title, metric in rows:
        first, *more = _wrapped(title, 40)
        lines += [(name, first, metric), *(("", line, "") for line in more)]
    print_table(("task", "title", "metric"), lines)


def _list_parts(as_json: bool) -> None:
    """Print the kinds of every slot of a config, as --set names them."""
    from kinformer.family.kinds import kinds

    parts = {slot: list(table) for slot, table in kinds().items()}
    if as_json:
        print_json(parts)
        return
    for slot, names in parts.items():
        print(textwrap.fill(f"{slot} ({len(names)}): {', '.join(names)}", 80, subsequent_indent="  "))


GROWTHS = {
    "none": "no state: reads whole texts",
    "constant": "constant",
    "window": "up to a window",
    "linear": "with every token",
    "store": "a datastore beside it",
}


COSTS = {
    "linear": "in proportion to the length",
    "between": "between the length and its square",
    "quadratic": "with the square of the length",
}


def _groups(records_: Sequence[Member], by: str) -> dict[str, list[Member]]:
    """Return the members by what they have in common, in the order of the table; those with several axes under each."""
    names: dict[str, Callable[[Member], Sequence[str]]] = {
        "axis": lambda member: member.axes or ("nothing",),
        "cost": lambda member: (COSTS[member.growth_of_cost],),
        "state": lambda member: (GROWTHS[member.growth],),
        "causal": lambda member: ("causal" if member.causal else "reads whole texts",),
        "year": lambda member: (str(member.year),),
    }
    groups: dict[str, list[Member]] = {}
    for member in records_:
        for name in names[by](member):
            groups.setdefault(name, []).append(member)
    return dict(sorted(groups.items())) if by == "year" else groups


def _print_tree(groups: Mapping[str, Sequence[Member]]) -> None:
    width = max(len(member.name) for group in groups.values() for member in group)
    for name, group in groups.items():
        print(f"{name} ({len(group)})")
        for index, member in enumerate(group):
            branch = "└─" if index == len(group) - 1 else "├─"
            title = _short(member.title, 68 - width)
            print(f"{branch} {member.name:<{width}}  {member.year}  {title}")


def _wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of this many columns, broken between words where these fit."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _short(text: str, width: int) -> str:
    """Return ``text`` in this many columns: without what stands in parentheses, or its last words, if it is longer."""
    return text if len(text) <= width else textwrap.shorten(text.split(" (")[0], width, placeholder="…")
