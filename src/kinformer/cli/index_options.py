"""The options of ``kinformer index``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from kinformer.cli.options import Computing, Context, Count, Number, RunFolder, Text


@dataclass(frozen=True, kw_only=True)
class Options(Computing):
    """Write what the run makes of every context of a text, and the token that came next, into a datastore.

    A build that was stopped goes on when the same command is given again.
    """

    folder: RunFolder
    """The run folder."""
    datastore: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """The datastore: a new folder, or with --append one that this run made."""
    data: Text = None
    """The text: a path, - for standard input, or stdlib; the run's own if not given."""
    split: str = "train"
    """Which part of the data: train, validation, test, or all of it."""
    holdout: Number = None
    """Hold out the last share of the data, instead of the run's."""
    append: bool = False
    """Add the text to what the datastore holds."""
    max_bytes: Count = None
    """Take the first N bytes only."""
    context: Context = None
    """Read in windows of N tokens, or with the state carried. If not given, as the run was trained."""
    overlap: float = 0.0
    """The share of each window that is context only: its entries are those of the window before."""
    chunk: int = 4096
    """Tokens computed at a time."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the keys on the disk."""
    approximate: bool = False
    """Also sort the entries into lists, for approximate search with --probes (needs faiss)."""
    lists: Count = None
    """With --approximate: into how many lists (the root of the number of entries if not given)."""
    lengths: Annotated[None, tyro.conf.Suppress] = None
