"""``kinformer list``: the family as a table or as JSON, without importing PyTorch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from kinformer.cli.options import CommonOptions
from kinformer.cli.output import print_json, print_table
from kinformer.family.record import Member
from kinformer.family.table import members


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Which form the list takes."""


def run(options: Options) -> int:
    """Print the family."""
    found = members(lambda sentence: print(f"kinformer: {sentence}", file=sys.stderr))
    if options.json:
        print_json([facts(member) for member in found])
        return 0
    rows = [
        (member.name, member.title, member.year, ", ".join(member.axes) or "-", member.growth, " ".join(member.recipes))
        for member in found
    ]
    print_table(("member", "title", "year", "changes", "state", "recipes"), rows)
    return 0


def facts(member: Member) -> dict[str, Any]:
    """A member's record as JSON-ready data."""
    names = ("name", "title", "paper", "year", "axes", "causal", "growth", "departures", "exact_limit")
    return {name: getattr(member, name) for name in names} | {"recipes": list(member.recipes)}
