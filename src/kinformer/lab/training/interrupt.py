"""Ctrl-C, a scheduler's SIGTERM and a terminal's SIGHUP end a run in good order: after the step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 1.0


class Interrupt:
    """A context manager that handles signals. It notes the first signal in ``signal`` and reports it unless ``quiet``;
    a second signal ends the process at once.

    A terminal that closes sends SIGHUP twice, so a second SIGHUP changes nothing. Under nohup SIGHUP stays ignored.
    A launcher repeats the signal that the terminal has already sent to all processes. With ``echoed`` a second signal
    within ``ECHO_SECONDS`` therefore counts as the first.
    """

    def __init__(self, echoed: bool = False, quiet: bool = True) -> None:
        self.signal, self.quiet = 0, quiet
        self._echo = ECHO_SECONDS if echoed else 0.0
        self._at = 0.0
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heeded()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._at = number, time.monotonic()
            self._say(f"kinformer: {signal.Signals(number).name}: finishing this step, then saving.\n")
        elif number != signal.SIGHUP and time.monotonic() - self._at >= self._echo:
            os._exit(128 + number)

    def _say(self, text: str) -> None:
        """Write straight to standard error: Python's own stream may be in the middle of a write."""
        if not self.quiet:
            with suppress(OSError):
                os.write(2, text.encode())


def heeded() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process: without SIGHUP where the process ignores it, as under nohup."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (nohup and number == signal.SIGHUP))
