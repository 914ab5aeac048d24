"""Progress of long work: a bar on a terminal, and notes that the command line prints."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Any, TextIO

from kinformer.runtime.errors import spelled

ProgressCallback = Callable[[int, int], None]
"""Called with the amount done and the total."""

LOGGER = logging.getLogger("kinformer")


def note(text: str) -> None:
    """Report a message: the command line prints it, and Python's logging has it at level INFO."""
    LOGGER.info(spelled(text))


def note_once(text: str) -> None:
    """Report ``text`` like :func:`note`, but only once, for example where data is opened twice."""
    if text not in _SHOWN:
        _SHOWN.add(text)
        note(text)


_SHOWN: set[str] = set()


class Tolerant:
    """A stream of text whose reader may have left: after the first failed write, all text is dropped.

    A closed terminal, or ``2>&1 | head -1``, therefore does not end training.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, unless the reader is gone."""
        try:
            return self.stream.write(text)
        except (OSError, ValueError):
            abandon(self.stream)
            return len(text)

    def flush(self) -> None:
        """Flush the stream, unless the reader is gone."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            abandon(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Nowhere(StringIO):
    def write(self, text: str) -> int:
        return len(text)


def tolerant(stream: TextIO | None) -> Any:
    """Return a :class:`Tolerant` stream over ``stream``; for None, Python's value of a closed stream, over nothing."""
    if isinstance(stream, Tolerant):
        return stream
    return Tolerant(stream or _Nowhere())


def abandon(stream: TextIO) -> None:
    """Drop the buffered text and all later text."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextmanager
def progressing(quiet: bool, label: str = "measuring") -> Iterator[ProgressCallback | None]:
    """Show a bar on standard error, if it is a terminal."""
    stream = tolerant(sys.stderr)
    if quiet or not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)
