"""How a session makes its steps: in Python, and in long generation by a recording of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kinformer.core.state import ReservedState
from kinformer.generation.recorded import RecordedStep, UnrecordableError, logits_after, record
from kinformer.generation.recorded_exits import RecordedExits, leaves_early, record_exits
from kinformer.runtime.host import trusted_arguments
from kinformer.runtime.matmul import FEW, few_rows

LONG = 512
"""Expected tokens for which a recording is worth its time, that of some fifty to a hundred steps."""
EARLY, LATE = 16, 256
"""Steps before one is tried, where so many tokens are expected and where they are not."""


class Steps:
    """Steps of ``model``; ``room`` tokens are expected, and with ``recorded`` they are recorded where that can be."""

    def __init__(self, model: Any, room: int, recorded: bool) -> None:
        self.model, self.recorded = model, recorded
        self.made, self.record_at = 0, EARLY if room >= LONG else LATE
        self.running: RecordedStep | RecordedExits | None = None
        self._looks_back: bool | None = None
        self._recording: RecordedStep | RecordedExits | None = None

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Logits [batch, vocab] behind ``tokens`` [batch, 1], which the model drew, and the state there.

        While a recording runs it keeps the state; what is returned stands for it until it is asked for by
        :meth:`settled`.
        """
        self.made += 1
        if self.running is not None and not self.running.has_room:
            state = self.settled(state)
        if self._looks_back is None:
            self._looks_back = _has_slots(state)
        with trusted_arguments(), few_rows(tokens.device, tokens.shape[0] < FEW or self._looks_back):
            if self.running is None:
                self.running = self._recorded(tokens, state)
            if self.running is None:
                return logits_after(self.model, tokens, state)
            return self.running.step(tokens), state

    def settled(self, state: Any) -> Any:
        """The state behind all steps; ``state`` is what the last one returned."""
        if self.running is not None:
            state, self.running = self.running.release(), None
        return state

    def _recorded(self, tokens: Tensor, state: Any) -> RecordedStep | RecordedExits | None:
        """The step from ``state`` on, recorded before or now; None where that is not worth it or cannot be."""
        if self._recording is not None and (again := self._recording.with_state(state)) is not None:
            return again
        if self.recorded and self.made > self.record_at:
            try:
                self._recording = (record_exits if leaves_early(self.model) else record)(self.model, tokens, state)
                return self._recording
            except UnrecordableError as refused:
                self.record_at = self.made + (refused.steps or 7 * self.made) - 1
        return None


def _has_slots(state: Any) -> bool:
    """Whether each row attends to slots of its own."""
    if isinstance(state, Tensor):
        return False
    return isinstance(state, ReservedState) or bool(getattr(state, "slots", ())) or any(map(_has_slots, state))
