"""``kinformer list``: the family as a table of 80 columns, or all of it as JSON, without importing PyTorch."""

from __future__ import annotations

import sys
import textwrap
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
        (member.name, member.year, member.growth, _short(member.title, 24), _short(", ".join(member.axes) or "-", 18))
        for member in found
    ]
    print_table(("member", "year", "state", "title", "changes"), rows)
    return 0


def _short(text: str, width: int) -> str:
    """``text`` in so many columns: without what stands in parentheses, or its last words, where it is longer."""
    return text if len(text) <= width else textwrap.shorten(text.split(" (")[0], width, placeholder="…")


def facts(member: Member) -> dict[str, Any]:
    """A member's record as JSON-ready data."""
    names = ("name", "title", "paper", "year", "axes", "causal", "growth", "departures", "exact_limit")
    return {name: getattr(member, name) for name in names} | {"recipes": list(member.recipes)}
