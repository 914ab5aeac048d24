"""Steps per token in a model whose stack lets tokens halt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from kinformer.core.stack import HaltingState, Stack
from kinformer.training.metric import Metric

PONDER_STEPS = Metric("ponder_steps", "steps per token")


class PonderRecorder:
    """The steps that the tokens of a model have taken so far; ``halts``: whether they can take fewer than all."""

    def __init__(self, model: nn.Module) -> None:
        stacks = (module for module in model.modules() if isinstance(module, Stack))
        self.deciding = [stack.halting for stack in stacks if stack.halting is not None]
        self.tokens, self.steps = 0, 0

    @property
    def halts(self) -> bool:
        return bool(self.deciding)

    @property
    def mean(self) -> float | None:
        """Return the steps per token, None where there were no tokens or nothing halts."""
        return self.steps / self.tokens if self.tokens else None

    def note(self, progress: HaltingState) -> None:
        """Count the tokens that take the step in ``progress``."""
        running = int(progress.running.sum())
        self.steps += running
        self.tokens += running if progress.number == 0 else 0


@contextmanager
def noting_steps(model: nn.Module) -> Iterator[PonderRecorder]:
    """Count the steps of all valid tokens of ``model`` within the context."""
    recorder = PonderRecorder(model)

    def hook(_: nn.Module, inputs: tuple[HaltingState, *tuple[object, ...]]) -> None:
        recorder.note(inputs[0])

    handles = [counter.register_forward_pre_hook(hook) for counter in recorder.deciding]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
