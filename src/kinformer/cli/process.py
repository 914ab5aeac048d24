"""The process that a command runs in: its standard streams, its search for garbage, and its settings for computing."""

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
    """The command line: a process of its own looks for no garbage before :func:`set_up`, since imports make none."""
    if not is_command:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def set_up(computes: bool, is_command: bool) -> AbstractContextManager[None]:
    """The process in which a command computes: set up for it where it is the command's, else left as it was.

    From here on a command's process looks for garbage, but never in what is loaded by now: that would take two fifths
    of a short command's time (``benchmarks/first_seconds.py``). So what computes loads the parts of models before.
    """
    if computes:
        from kinformer.runtime.process import begin_process, preserved

        if is_command:
            from kinformer.family.kinds import kinds

            begin_process()
            kinds()
    if is_command:
        gc.freeze()
        gc.enable()
    return preserved() if computes else nullcontext()


def open_standard_streams() -> None:
    """Standard streams that were closed lead nowhere; else the next file that is opened would take their place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (stream or tolerant(stream) for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        _tolerate(stream)


def _tolerate(stream: TextIO) -> None:
    """Characters that the terminal cannot show become question marks instead of a crash."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
