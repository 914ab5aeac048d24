"""A comparison from members, or from the files of others, to its report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

from kinformer.comparison.compare import compare
from kinformer.comparison.files import Written, write
from kinformer.comparison.options import CompareOptions, default_budget
from kinformer.comparison.record import merged, read
from kinformer.runtime.files import reading

MERGED = "merged"
"""The folder of a merged report where no other is named."""


def report(members: Sequence[str], options: CompareOptions, merge: Sequence[str], command: str) -> Written:
    """The comparison of ``members``, or of the files ``merge`` (and those in ``members`` beside them), with its report
    written into the folder ``options.out``.

    ``command``: what was called, for the report.
    """
    out, files = Path(options.out), list[Path]()
    if merge:
        files = [Path(path) for path in (*merge, *members)]
        comparison = merged([(path, read(path)) for path in files])
        out = Path(MERGED) if options.out == CompareOptions.out else out
    else:
        values = {option.name: getattr(options, option.name) for option in fields(CompareOptions)}
        comparison = compare(members, replace(options, **default_budget(members, values)), command)
    with reading(" ".join(map(str, files))) if merge else nullcontext():
        return write(comparison, out)
