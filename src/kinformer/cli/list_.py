"""``kinformer list``: the family as a table of 80 columns, or all of it as JSON, without importing PyTorch."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kinformer.cli.options import CommonOptions
from kinformer.cli.output import print_json, print_table
from kinformer.family.record import Member
from kinformer.family.table import members


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """List all members, or draw them as a tree."""

    by: Literal["axis", "cost", "state", "causal", "year"] | None = None
    """Print the family as a tree: by what members change (axis), by how their operations (cost) or state grow with the
    length, by whether they are causal (others read a full sequence at once), or by year."""


def run(options: Options) -> int:
    """Print the family and return the exit status."""
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
    rows = [
        (member.name, member.year, member.growth, _short(member.title, 24), _short(", ".join(member.axes) or "-", 18))
        for member in records
    ]
    print_table(("member", "year", "state", "title", "changes"), rows)
    return 0


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
    """The members under what they have in common, in the order of the table; under every axis that they change."""
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


def _short(text: str, width: int) -> str:
    """``text`` in so many columns: without what stands in parentheses, or its last words, where it is longer."""
    return text if len(text) <= width else textwrap.shorten(text.split(" (")[0], width, placeholder="…")
