"""The three protocols of models, by which training, generation, evaluation and tasks use them.

A model is input, stack and head. Callers ask for the protocol that its config names, never for the name of its kind: a
:class:`CausalModel` absorbs a sequence chunk by chunk, a :class:`WholeModel` encodes it at once, a :class:`SourceModel`
encodes a source at once and then absorbs its continuation. Free of PyTorch until a function is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar, Unpack

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from kinformer.core.contract import StateOptions
    from kinformer.core.parts import Input
    from kinformer.core.stack import ModelConfig, Stack
    from kinformer.core.state import State

M = TypeVar("M")


class Hidden(NamedTuple):
    """The hidden states [batch, time, dim] after the last norm, the ``state`` after the chunk, and ``taps``, the
    outputs of the tapped uses of layers, [batch, time, dim] each."""

    hidden_states: Tensor
    state: State
    taps: tuple[Tensor, ...] = ()


class Encoded(NamedTuple):
    """The hidden states of an encoder: of the ``long_input`` [batch, time, dim] in the caller's order, of the
    ``global_input`` [batch, n, dim], and of the long input after the ``tapped`` layers. ``sentences`` [batch, n] bool
    are the tokens of the global input that stand for a sentence of their row."""

    long_input: Tensor
    global_input: Tensor | None
    sentences: Tensor | None
    tapped: tuple[Tensor, ...]


class Model(Protocol):
    """The protocol of all models: modules with an input. ``max_length``: of a sequence, None for any length."""

    training: bool

    @property
    def input(self) -> Input: ...
    @property
    def max_length(self) -> int | None: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def get_parameter(self, target: str) -> nn.Parameter: ...
    def requires_grad_(self, requires_grad: bool = True) -> Self: ...
    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...
    def buffers(self, recurse: bool = True) -> Iterator[Tensor]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def to(self, device: torch.device, /) -> Self: ...


class StackedModel(Model, Protocol):
    """A model of this library: the input, the stack and the head of its ``config``."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def stack(self) -> Stack: ...
    @property
    def head(self) -> nn.Module: ...


class CausalModel(Model, Protocol):
    """A model of sequences that grow: ``logits, state = model(values, state)`` for chunks of any length.

    The model's input reads the values: [batch, time], or [batch, time, ...] if a position has several numbers.
    ``state`` None begins new sequences; ``kinformer.core.contract`` has the law that all chunks obey.
    """

    @property
    def vocab_size(self) -> int:
        """Return the number of ids of a model of tokens."""

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> State:
        """Return the state of ``batch`` new sequences; some layers attend to ``source`` [batch, length, width]."""

    def __call__(
        self, values: Tensor, state: State = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return logits [batch, time, ...], zero where not ``valid``, and the state after the chunk."""

    def hidden(
        self,
        values: Tensor,
        state: State = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Return the hidden states of ``values`` and the state after them."""

    def head_inputs(
        self, values: Tensor, state: State = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Any, State]:
        """Return the inputs of :meth:`logits` at every position, a tensor or a NamedTuple of tensors [batch, time,
        ...], and the state. The inputs are the hidden states, unless the head needs more."""

    def logits(self, inputs: Any) -> Tensor:
        """Return logits [batch, time, ...] of head inputs [batch, time, ...]."""


class StackedCausalModel(CausalModel, StackedModel, Protocol):
    """A causal model of this library, with config, stack and head."""


class WholeModel(Model, Protocol):
    """A model without state that encodes whole inputs [batch, time] or [batch, time, ...] at once: an encoder."""

    def __call__(self, values: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Return the logits of every position or of every row."""

    def hidden(self, values: Tensor, *, valid: Tensor | None = None) -> Encoded:
        """Return the hidden states of every position."""

    def logits(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the head's logits of hidden states [..., dim]."""


class StackedWholeModel(WholeModel, StackedModel, Protocol):
    """An encoder of this library, with config, stack and head."""


class SourceModel(CausalModel, Protocol):
    """A causal model of sequences over a source: ``state = model.begin(source, valid)``, then as any causal model.

    The state holds all that the model reads of the source. Every sequence needs one, so the state None is an error.
    """

    @property
    def source_input(self) -> Input: ...

    @property
    def max_source_length(self) -> int | None:
        """Return the greatest length of a source, None for any length."""

    def begin(self, source: Tensor, valid: Tensor | None = None) -> State:
        """Return the state of new sequences over the rows of ``source`` [batch, length] or [batch, length, ...]."""


PROTOCOLS: dict[type, str] = {CausalModel: "causal", WholeModel: "an encoder", SourceModel: "an encoder-decoder"}
"""The names of the protocols in messages."""


def modules_of(model: nn.Module, kind: type[M]) -> list[M]:
    """Return the modules of ``model`` of the type ``kind``, in order."""
    return [module for module in model.modules() if isinstance(module, kind)]


def device_of(model: Model | nn.Module) -> torch.device:
    """Return the device of the model's weights."""
    return next(model.parameters()).device
