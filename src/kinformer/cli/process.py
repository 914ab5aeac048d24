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
def started() -> Iterator[None]:
    """A process of the command line, which looks for no garbage before :func:`settle`: imports make none."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle(with_models: bool) -> None:
    """Load the parts of models, if the command needs them, and let Python look for garbage from here on, but never in
    what is loaded: that would take two fifths of a short command's time (``benchmarks/first_seconds.py``)."""
    if with_models:
        from kinformer.family.kinds import kinds

        kinds()
    gc.freeze()
    gc.enable()


def set_up(computes: bool, is_command: bool) -> AbstractContextManager[None]:
    """The process in which a command computes: set up for it where it is the command's, else left as it was."""
    if not computes:
        return nullcontext()
    from kinformer.runtime.process import begin_process, preserved

    if is_command:
        begin_process()
    return preserved()


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
