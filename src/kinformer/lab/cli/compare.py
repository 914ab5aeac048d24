"""``kinformer compare MEMBER...``: members trained under one budget, measured in turns, and one report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from kinformer.lab.cli.options import Changes, CommonOptions, Hidden, options_as
from kinformer.lab.cli.output import print_blocks, print_json
from kinformer.lab.comparison.options import CompareOptions

TASK_OPTIONS = "Options"
Entrants = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER")]


@dataclass(frozen=True, kw_only=True)
class Options(CompareOptions, CommonOptions):
    """Compare members: one parameter budget, the same data and order, a learning rate that suits each, and a page that
    says which is better, at which cost, and what is not significant."""

    members: Entrants = ()
    """Members, hybrids as linear-transformer:3,gpt:1, or wide=gpt for another name; without any, a comparison of
    five on the standard library's sources, in at most 45 minutes."""
    set: Changes = ()  # type: ignore[assignment]
    """A change to all members, or NAME:PATH=VALUE to one, as in wide:layers=8; may be given again."""
    merge: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE.json")] = ()
    """Train nothing: merge this comparison with those that follow it, all of one task and data, as in
    --merge A.json B.json, and report on all of them."""
    task_options: Hidden = field(default_factory=dict)


def run(options: Options) -> int:
    """Compare, write the report, and print it; returns 1 where a member is out."""
    from kinformer.lab.comparison.compare import report
    from kinformer.lab.comparison.record import as_json

    written = report(options.members, options_as(CompareOptions, options), options.merge, _command())
    if options.json:
        print_json(as_json(written.comparison))
    else:
        print_blocks(written.text)
    return int(any(entrant.error for entrant in written.comparison.entrants))


def _command() -> str:
    """Return the command line as the user typed it, quoted for a shell."""
    return shlex.join(["kinformer", *sys.argv[1:]])
