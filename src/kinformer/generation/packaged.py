"""The step of a model from a package of machine code, in place of one that a session records.

A session finds it among the recordings of its model (``generation.recordings``), so prompts, sampling and stops are
those of any session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.leaves import Leaf, unflattened
from kinformer.core.state import State
from kinformer.generation.recordings import Unchanged, recordings_of

Step = Callable[..., list[Tensor]]


class PackagedStep:
    """The ``step`` (token [1, 1], leaves) -> [logits, leaves] of a model whose states have these ``leaves``."""

    def __init__(self, step: Step, leaves: Sequence[Leaf], model: nn.Module) -> None:
        self.run, self.leaves = step, leaves
        self.holds = Unchanged([model]).holds

    def begin(self, state: State) -> PackagedSteps | None:
        """Return steps from ``state`` on; None where that is of more sequences, or not on a CPU."""
        value = states.value(state)
        tensors = list(states.tensors(value))
        if len(tensors) != len(self.leaves) or any(x.device.type != "cpu" or x.shape[0] != 1 for x in tensors):
            return None
        filled = [leaf.filled(tensor) for leaf, tensor in zip(self.leaves, tensors, strict=True)]
        if not all(leaf.accepts(tensor) for leaf, tensor in zip(self.leaves, filled, strict=True)):
            return None
        return PackagedSteps(self, value, filled)


class PackagedSteps:
    """A :class:`PackagedStep` at work, and the leaves of the state that it steps."""

    def __init__(self, packaged: PackagedStep, like: object, leaves: list[Tensor]) -> None:
        self._packaged, self._like, self._leaves = packaged, like, leaves

    @property
    def goes_on(self) -> bool:
        """Return whether the model is unchanged."""
        return self._packaged.holds()

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [1, vocab] after ``tokens`` [1, 1], which the state absorbs."""
        logits, *leaves = self._packaged.run(tokens.contiguous(), *self._leaves)
        self._leaves = [leaf.contiguous() for leaf in leaves]  # a package takes strides as they were and checks none
        return logits[:, -1]

    def release(self) -> State:
        """Return the state, for steps in Python."""
        return unflattened(self._like, self._leaves)


def use_package(model: nn.Module, step: Step, leaves: Sequence[Leaf]) -> None:
    """Let sessions of ``model`` step by ``step``."""
    with torch.inference_mode():
        recordings_of(model).keep(PackagedStep(step, leaves, model))
