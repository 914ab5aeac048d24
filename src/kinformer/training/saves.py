"""The saves of a run, in order: at once, or in a thread beside training, one step's saves at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

Work = Callable[[], object]


class Saves:
    """A queue of saves; with ``in_thread`` a thread writes them while training goes on, so that what is added must hold
    copies. After an error nothing that was added later is written; :meth:`wait` raises it.

    ``seconds``: how long the last one took to write.
    """

    def __init__(self, in_thread: bool) -> None:
        self.in_thread, self.seconds = in_thread, 0.0
        self._step: int | None = None
        self._last: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "kinformer-saves") if in_thread else None

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all; an error that ends the run already is raised before one of theirs."""
        with suppress(*[] if kind is None else [Exception]):
            self.wait()

    @property
    def failed(self) -> bool:
        """Return whether one could not be written, as far as that is clear by now."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def begin(self, step: int) -> None:
        """Wait until the saves of other steps than ``step`` are written."""
        if step != self._step:
            self.wait()
        self._step = step

    def add(self, work: Work) -> None:
        """Do ``work`` after all that was added before."""
        if self._thread is None:
            self._timed(work, None)
        else:
            self._last = self._thread.submit(self._timed, work, self._last)

    def wait(self) -> None:
        """Wait until all is written; raise the first error."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _timed(self, work: Work, before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        started_at = time.monotonic()
        work()
        self.seconds = time.monotonic() - started_at
