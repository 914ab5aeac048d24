"""A step of a model with early exits, recorded in segments from exit to exit.

Behind each piece the host reads whether the token goes on. Every piece is recorded in two ways: the token runs through
it, or it left before and the piece's layers only absorb it (``stacks.exits``). One sequence at a time, for the tokens
of several leave by unlike exits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel
from kinformer.core.model_config import ModelConfig
from kinformer.core.stack import Stack
from kinformer.core.state import State
from kinformer.generation.recordable import UnrecordableError
from kinformer.generation.recorded import RecordedStep, Recording, Way, record_ways

RUNS, HAS_LEFT = 0, 1


class ExitsStack(Protocol):
    """A stack with early exits (``stacks.exits``)."""

    layers: nn.ModuleList
    order: tuple[int, ...]
    exits: tuple[int, ...]
    rule: nn.Module
    left: nn.Module

    def asks(self, number: int) -> bool: ...

    def leads(self, number: int) -> range: ...


class SegmentedModel(CausalModel, Protocol):
    """A causal model that can be stepped from exit to exit."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def stack(self) -> ExitsStack: ...

    def until_exit(self, number: int, values: Tensor, state: State) -> tuple[tuple[Tensor, ...], State]: ...

    def past_exit(self, number: int, hidden: Tensor, state: State) -> tuple[tuple[()], State]: ...

    def named_children(self) -> Iterator[tuple[str, nn.Module]]: ...


def leaves_early(model: CausalModel) -> TypeGuard[SegmentedModel]:
    """Return whether tokens of ``model`` may leave by an exit before the last,
    and it can be stepped from exit to exit."""
    stack = getattr(model, "stack", None)
    return isinstance(stack, Stack) and stack.leaves_early and hasattr(model, "until_exit")


class ExitsRecording:
    """A :class:`Recording` per segment; ``pieces`` step the states of the layers before each exit."""

    def __init__(self, stack: ExitsStack, pieces: Sequence[Recording]) -> None:
        self._stack, self.pieces = stack, pieces

    def holds(self) -> bool:
        """Return whether the model is unchanged since the recording."""
        return all(piece.holds() for piece in self.pieces)

    def begin(self, state: State) -> RecordedExits | None:
        """Return steps from ``state`` on; None where that has other sizes, for which it was not checked."""
        steps = [piece.begin(part) for piece, part in zip(self.pieces, _split(self._stack, state), strict=True)]
        return None if None in steps else RecordedExits(self._stack, [step for step in steps if step is not None])


class RecordedExits:
    """An :class:`ExitsRecording` at work, and the state that it steps."""

    def __init__(self, stack: ExitsStack, pieces: Sequence[RecordedStep]) -> None:
        self._stack, self._pieces = stack, pieces
        self._asks = [stack.asks(number) for number in range(len(pieces))]

    @property
    def goes_on(self) -> bool:
        """Return whether the buffers hold another token and the model is unchanged."""
        return all(piece.goes_on for piece in self._pieces)

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [1, vocab] after ``tokens`` [1, 1], which the state absorbs."""
        leaves, hidden, logits = len(self._pieces) - 1, tokens, tokens
        for number, (piece, asks) in enumerate(zip(self._pieces, self._asks, strict=True)):
            if number > leaves:
                piece.go(hidden, HAS_LEFT)
                continue
            hidden, logits, by = piece.go(hidden, RUNS)
            leaves = int(by) if asks else leaves
        if self._stack.left._forward_hooks:
            self._stack.left(torch.full_like(tokens, leaves), None)
        return logits[:, 0]

    def release(self) -> State:
        """Return the state, for steps in Python; this object must not be used any more."""
        states = [piece.release() for piece in self._pieces]
        return states[-1]._replace(layers=tuple(layer for state in states for layer in state.layers))


def record_exits(model: SegmentedModel, tokens: Tensor, state: State) -> ExitsRecording:
    """Return the recorded step of ``model``, whose tokens may leave early; otherwise like ``recorded.record``."""
    stack = model.stack
    if len(tokens) > 1:
        raise UnrecordableError("tokens of unlike rows leave by unlike exits")
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    hidden = torch.randn(1, 1, model.config.dim, generator=torch.Generator().manual_seed(0)).to(weight)
    pieces = []
    for number, piece_state in enumerate(_split(stack, state)):
        used = [stack.layers[stack.order[use]] for use in stack.leads(number)]
        parts = [*used, *(part for name, part in model.named_children() if name != "stack"), stack.rule]
        ways: list[Way] = [partial(model.until_exit, number), partial(model.past_exit, number)]
        pieces.append(record_ways(ways if number else ways[:1], parts, hidden if number else tokens, piece_state))
    return ExitsRecording(stack, pieces)


def _split(stack: ExitsStack, state: State) -> Iterator[State]:
    """Yield the states of the layers before each exit."""
    for number in range(len(stack.exits)):
        yield state._replace(layers=tuple(state.layers[use] for use in stack.leads(number)))
