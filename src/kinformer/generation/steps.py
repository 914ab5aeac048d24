"""The steps of a session: in Python, and in long generation by a recording of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kinformer.core.model import CausalModel, Model
from kinformer.core.state import ReservedState, State
from kinformer.generation.recordable import UnrecordableError
from kinformer.generation.recorded import logits_after, record
from kinformer.generation.recorded_exits import leaves_early, record_exits
from kinformer.generation.recordings import RunningSteps, StepRecording, recordings_of
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import trusted_arguments
from kinformer.runtime.matmul import FEW, few_rows

LONG = 48
"""Expected tokens for which a recording is worth its time, that of some seven steps, which some twenty make up for."""
EARLY, LATE = 1, 24
"""Steps before one is tried, where that many tokens are expected and where they are not."""
_LOOKS_EVERY = 16


class Steps:
    """The steps of ``model``, of which ``room`` are expected; with ``recorded`` they are recorded where possible."""

    def __init__(self, model: CausalModel, room: int, recorded: bool) -> None:
        self.model, self.recorded = model, recorded
        self._dtype = _dtype(model)
        self.made, self.record_at = 0, EARLY if room >= LONG else LATE
        self.running: RunningSteps | None = None
        self._looks_back: bool | None = None
        self._recording: StepRecording | None = None

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Return logits [batch, vocab] behind ``tokens`` [batch, 1], which the model drew, and the state there.

        While a recording runs it holds the state; the state returned stands for it until :meth:`settled` resolves it.
        """
        self.made += 1
        if self._looks_back is None:
            self._looks_back = _has_slots(state)
        with few_rows(tokens.device, tokens.shape[0] < FEW or self._looks_back):
            if self.running is not None and self.running.goes_on:
                return self.running.step(tokens), state
            self.require_dtype()
            state = self.settled(state)
            with trusted_arguments():
                self.running = self._recorded(tokens, state)
                if self.running is None:
                    return logits_after(self.model, tokens, state)
            return self.running.step(tokens), state

    def require_dtype(self) -> None:
        """Raise where the weights no longer have the dtype of when the session began, which its state has."""
        if (now := _dtype(self.model)) != self._dtype:
            raise KinformerError(
                f"the model's weights are {now}, but this session began with {self._dtype}, which its state has; begin "
                "a new session after you convert a model."
            )

    def settled(self, state: State) -> State:
        """Return the state behind all steps; ``state`` is the one that the last step returned."""
        if self.running is not None:
            state, self.running = self.running.release(), None
        return state

    def abandon(self) -> None:
        """Leave the state of a recording that runs, for an earlier one."""
        self.running = None

    def _recorded(self, tokens: Tensor, state: State) -> RunningSteps | None:
        """Return the step from ``state`` on, recorded before or now; None where that is not worth it or cannot be."""
        if not self.recorded:
            return None
        for recording in self._earlier():
            if (running := recording.begin(state)) is not None:
                self._recording = recording
                return running
        if self.made > self.record_at:
            try:
                model = self.model
                self._recording = (
                    record_exits(model, tokens, state) if leaves_early(model) else record(model, tokens, state)
                )
                recordings_of(model).keep(self._recording)
                return self._recording.begin(state)
            except UnrecordableError as refused:
                self.record_at = self.made + (refused.steps or 7 * self.made) - 1
        return None

    def _earlier(self) -> Sequence[StepRecording]:
        """Return recordings that may serve: this session's last one, and now and then those of others of the model."""
        if self._recording is not None and not self._recording.holds():
            self._recording, self.record_at = None, self.made + _LOOKS_EVERY
        if self._recording is not None:
            return (self._recording,)
        looks = self.made <= 2 or self.made % _LOOKS_EVERY == 1 or self.made > self.record_at
        return recordings_of(self.model) if looks else ()


def _dtype(model: Model) -> torch.dtype | None:
    """Return the dtype of the first weight that is not an integer."""
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)


def _has_slots(state: State) -> bool:
    """Return whether each row attends to slots of its own."""
    if isinstance(state, Tensor):
        return False
    return isinstance(state, ReservedState) or bool(getattr(state, "slots", ())) or any(map(_has_slots, state))
