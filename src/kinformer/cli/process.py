"""The process of a command: its standard streams, its garbage collection, and its settings for computing."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from kinformer.runtime.progress import tolerant


@contextmanager
def started(is_command: bool) -> Iterator[None]:
    """Turn garbage collection off in a command's own process until :func:`set_up`, since imports make no garbage."""
    if not is_command:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def set_up(computes: bool, is_command: bool, fast_products: bool = True) -> AbstractContextManager[None]:
    """Set up the process for a command that computes, if it is the command's own; else restore its settings at the end.

    ``fast_products``: whether large products may take oneDNN's path.

    From here on garbage is collected, but never searched for in what is loaded by now: that would take two fifths of a
    short command's time (``benchmarks/first_seconds.py``). So commands that compute load the parts of models before.
    """
    if computes:
        from kinformer.runtime.process import begin_process, preserved

        if is_command:
            from kinformer.family.kinds import kinds

            begin_process(fast_products)
            kinds()
    if is_command:
        gc.freeze()
        gc.enable()
    return preserved() if computes else nullcontext()


def open_standard_streams() -> None:
    """Open closed standard streams on the null device; else the next file that is opened would take their place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (stream or tolerant(stream) for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        _tolerate(stream)


def _tolerate(stream: TextIO) -> None:
    """Replace characters that the terminal cannot show by question marks instead of crashing."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
