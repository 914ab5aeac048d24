"""Ctrl-C and the scheduler's SIGTERM end a run in good order: after the step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 1.0


class Interrupt:
    """While entered, the first signal is only noted in ``signal``; a second one leaves at once.

    A launcher passes on the signal that a terminal has already given to all processes: with ``echoed`` a second one
    within a second counts as the same.
    """

    def __init__(self, echoed: bool = False) -> None:
        self.signal = 0
        self._echo = ECHO_SECONDS if echoed else 0.0
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._at = number, time.monotonic()
        elif time.monotonic() - self._at >= self._echo:
            os._exit(128 + number)
