"""The options of ``kinformer evaluate``."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.cli.options import Changes, Computing, Context, Count, Number, RunFolders, Text
from kinformer.cli.store import MeasuredStoreOptions


@dataclass(frozen=True, kw_only=True)
class Options(MeasuredStoreOptions, Computing):
    """Measure runs: their files in order, every token scored once, in bits per byte of text."""

    folders: RunFolders
    """The run folder; several are measured one after the other and shown side by side."""
    set: Changes = ()
    """A change that leaves the weights as they are, as in --set layers.*.mixer.position.scaling=yarn."""
    data: Text = None
    """Data to measure on: a path, - for standard input, or stdlib; the run's own if not given."""
    split: str = "test"
    """Which part of the data: train, validation or test."""
    context: Context = None
    """Measure in windows of N tokens, or with the state carried from end to end. If not given, as it was trained:
    carried after training with --segments, else in windows of the training length."""
    overlap: float = 0.0
    """The share of each window that repeats the one before and is not scored again."""
    lengths: Text = None
    """Also measure in windows of each of these lengths and by position within them, as in 128,512,2048, or 1x,4x,16x
    for multiples of the training length. A length beyond a model's positions is left out."""
    plot: Text = None
    """Draw what --lengths, --recl or --datastore measured, as PNG or SVG by the ending of this name."""
    recl: bool = False
    """Measure the relative effective context length of a group of runs instead; --lengths are the contexts tried."""
    hardest: float = 0.1
    """With --recl: the share of tokens that count, those that the shorter context explains least."""
    positions: int = 512
    """With --recl: how many tokens are predicted, evenly spread, each anew at every context."""
    holdout: Number = None
    """Take the last share of the data for validation and test, instead of the run's."""
    max_bytes: Count = None
    """Measure on the first N bytes only."""
    chunk: int = 2048
    """Tokens computed at a time; bounds the memory, does not change the result."""
    baseline: bool = False
    """Also count 5-grams of the training split and measure their prediction."""
