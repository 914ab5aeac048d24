"""What a whole model can be asked for: protocols, which training, generation, evaluation and tasks go by.

A model is input, stack and head. What can be done with it is said by the protocol that its config names, never by the
name of its kind: a :class:`CausalModel` absorbs a sequence chunk by chunk, a :class:`WholeModel` reads it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.core.input import Input, InputConfig
from kinformer.core.stack import Stack, StackConfig


class Hidden(NamedTuple):
    """``hidden_states`` [batch, time, dim] after the last norm, the ``state`` after the chunk, and ``taps``: what the
    tapped uses of layers gave, [batch, time, dim] each."""

    hidden_states: Tensor
    state: Any
    taps: tuple[Tensor, ...] = ()


class CausalModel(Protocol):
    """A model of sequences that grow: ``outputs, state = model(values, state)`` for chunks of any length.

    ``state`` None begins new sequences; see ``kinformer.core.contract`` for the law that all chunks obey.
    """

    training: bool

    @property
    def input(self) -> Input: ...

    @property
    def max_length(self) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...

    def initial_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
    ) -> Any:
        """The state of ``batch`` new sequences; ``source`` [batch, length, width] for layers that look at one."""
        ...

    def hidden(
        self,
        values: Tensor,
        state: Any = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """What the layers make of ``values`` [batch, time, ...]."""
        ...

    def head_inputs(
        self, values: Tensor, state: Any = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Any, Any]:
        """What :meth:`logits` takes, a tensor or a ``NamedTuple`` of tensors [batch, time, ...], and the state."""
        ...

    def logits(self, inputs: Any) -> Tensor:
        """The head's outputs [batch, time, ...] of some :meth:`head_inputs`."""
        ...


class WholeModel(Protocol):
    """A model that reads its whole input at once and has no state: ``outputs = model(values, valid=)``."""

    training: bool

    @property
    def input(self) -> Input: ...

    @property
    def max_length(self) -> int | None: ...

    def hidden(self, values: Tensor, *, valid: Tensor | None = None) -> Any:
        """What the layers make of ``values`` [batch, time, ...]."""
        ...

    def logits(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        """The head's outputs, of positions [batch, time, ...] or of whole inputs [batch, ...]."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """``build()``: a whole model of the ``input``, the ``layers`` and the ``stack`` that applies them.

    ``protocol`` says what can be done with it: :class:`CausalModel` or :class:`WholeModel`.
    """

    slot = "model"
    protocol: ClassVar[type]

    input: InputConfig
    dim: int
    layers: tuple[Any, ...]
    stack: StackConfig

    def build(self) -> Any:
        raise NotImplementedError

    @property
    def uses(self) -> tuple[Config, ...]:
        """The config of the layer of every use, in order."""
        return tuple(self.layers[index] for index in self.stack.uses(len(self.layers)))


def units_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The parts of a model that are sharded or compiled one by one: its stack's; none of any other module."""
    stack = getattr(model, "stack", None)
    return stack.units if isinstance(stack, Stack) else ()


def at(inputs: Any, pick: Callable[[Tensor], Tensor]) -> Any:
    """Some of ``head_inputs``: ``pick`` of the tensor, or of every tensor of the ``NamedTuple``."""
    return pick(inputs) if isinstance(inputs, Tensor) else type(inputs)(*map(pick, inputs))
