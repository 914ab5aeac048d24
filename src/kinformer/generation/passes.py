"""Passes of a model over the few tokens that a session checks, recorded as steps are (``generation.recorded``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kinformer.core.state import State
from kinformer.generation.recordable import UnrecordableError
from kinformer.generation.recorded import RecordedStep, Recording, record_ways
from kinformer.generation.recordings import recordings_of
from kinformer.generation.steps import EARLY, LATE, LONG
from kinformer.runtime.host import trusted_arguments
from kinformer.runtime.matmul import FEW, few_rows


class Passes:
    """Passes of ``model``; those over ``time`` tokens are recorded where that can be, if so many tokens (``room``) are
    expected that it is worth it."""

    def __init__(self, model: Any, time: int, room: int, recorded: bool) -> None:
        self.model, self.time, self.recorded = model, time, recorded
        self._made, self._record_at = 0, EARLY if room >= LONG else LATE

    def go(self, tokens: Tensor, valid: Tensor | None, state: State) -> tuple[Tensor, Tensor, Any]:
        """Return the logits [batch, time, vocab] and the hidden states [batch, time, width] of ``tokens`` [batch,
        time], of which those ``valid`` count (None: all), and the state behind them."""
        with few_rows(tokens.device, tokens.numel() < FEW), trusted_arguments():
            if self.recorded and valid is None and tokens.shape[1] == self.time:
                self._made += 1
                running = self._recorded(tokens, state)
                if running is not None:
                    logits, hidden = running.go(tokens, 0)
                    return logits, hidden, running.release()
            (logits, hidden), state = self._pass(tokens, state, valid)
            return logits, hidden, state

    def _pass(self, tokens: Tensor, state: State, valid: Tensor | None = None) -> tuple[tuple[Tensor, ...], Any]:
        inputs, state = self.model.head_inputs(tokens, state, valid=valid)
        return (self.model.logits(inputs), getattr(inputs, "hidden_states", inputs)), state

    def _recorded(self, tokens: Tensor, state: State) -> RecordedStep | None:
        """Return the pass from ``state`` on, recorded before or now; None where that is not worth it or cannot be."""
        for recording in recordings_of(self.model):
            if isinstance(recording, Recording) and (running := recording.begin(state, self.time)) is not None:
                return running
        if self._made > self._record_at:
            try:
                recording = record_ways([self._pass], [self.model], tokens, state)
                recordings_of(self.model).keep(recording)
                return recording.begin(state, self.time)
            except UnrecordableError as refused:
                self._record_at = self._made + (refused.steps or 7 * self._made) - 1
        return None
