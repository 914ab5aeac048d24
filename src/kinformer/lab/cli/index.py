"""``kinformer index DIR --data PATH --datastore FOLDER``: a datastore of a trained run, for kNN-LM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from kinformer.lab.cli.options import CommonOptions, RunFolder, options_as
from kinformer.lab.cli.output import print_json
from kinformer.lab.runs.options import IndexOptions
from kinformer.lab.training.logging import size
from kinformer.runtime.errors import plural


@dataclass(frozen=True, kw_only=True)
class Options(IndexOptions, CommonOptions):
    """Write what the run makes of every context of a text, and the token that came next, into a datastore.

    A build that was stopped goes on when the same command is given again.
    """

    folder: RunFolder
    """The run folder."""
    datastore: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """The datastore: a new folder, or with --append one that this run made."""


def run(options: Options) -> int:
    """Build the datastore, or go on building it, and print a report."""
    from kinformer.lab.runs.index import index

    done = index(options.folder, options_as(IndexOptions, options), quiet=options.json or options.quiet)
    store, new = done.store, done.new
    if options.json:
        print_json(done.facts)
        return 0
    speed = f" in {done.seconds:.0f} s, {new / done.seconds:,.0f} a second" if new else ""
    print(f"{store.folder}: {plural(new, 'new entry')}{speed}; {store.entries:,} in all, {size(done.bytes)}")
    if done.lists is not None:
        print(
            f"sorted into {plural(done.lists, 'list')}, in which train, evaluate and generate search unless told "
            "otherwise"
        )
    return 0
