"""Progress of long work: a bar on a terminal, and notes that the command line prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""

LOGGER = logging.getLogger("kinformer")


def note(text: str) -> None:
    """Tell the user something that is no error: the command line prints it, Python's logging has it at level INFO."""
    LOGGER.info(text)


@contextmanager
def progressing(quiet: bool, label: str = "measuring") -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)
