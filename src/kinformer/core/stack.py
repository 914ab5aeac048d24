"""The stack of a model applies the layers: in which order, with which states, and with which activations stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinformer.core.config import Config
from kinformer.core.contract import Chunk, FirstValues, PartialOutput, StateOptions, shares_values
from kinformer.core.parts import Input, InputConfig, PositionConfig
from kinformer.core.state import map_tensors
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.core.encoder import SequenceContext
    from kinformer.core.state import State

M = TypeVar("M", bound=nn.Module)

# Stochastic depth (Huang et al. 2016): a training step drops a sublayer for some sequences, drawn anew in every step.
#
#     x + b F(x) / (1 - p),   b ~ Bernoulli(1 - p) for each sequence;     p_l = p l / (L - 1),   l = 0 .. L - 1
#
# The expectation of the second term is F(x), the term outside of training. The probability rises linearly with depth
# from 0 in the first layer to p in the last, as in the code of DeiT and Swin (Huang et al. count from the input,
# p l / L). Every sublayer of a layer draws for itself.


class Droppable(nn.Module):
    """The base of residual sums that can drop their sublayer.

    ``drop_rate`` is the probability per sequence, which the stack sets. ``undroppable`` is the reason why the sublayer
    cannot be dropped, None where it can.
    """

    drop_rate: float = 0.0
    undroppable: str | None = None

    def dropped(self, y: Tensor) -> Tensor:
        """Return the sublayer's output ``y`` [batch, time, dim], zero for the sequences that drop it."""
        if not (self.training and self.drop_rate):
            return y
        assert y.dim() == 3, "the sublayer was computed for some tokens only"
        remain = torch.rand(len(y), 1, 1, device=y.device) >= self.drop_rate
        # A quotient, since 1 / (1 - p) as a factor would be rounded to the dtype of y.
        return torch.where(remain, y / (1 - self.drop_rate), y.new_zeros(()))


def drop_rates(peak: float, layers: int) -> tuple[float, ...]:
    """Return the probability of each of ``layers`` layers, rising to ``peak`` in the last."""
    return tuple(peak if layers == 1 else peak * layer / (layers - 1) for layer in range(layers))


def drop_sublayers(layers: nn.ModuleList, peak: float) -> None:
    """Set the drop rates of the sublayers of ``layers``, which rise with depth up to ``peak``."""
    for layer, rate in zip(layers, drop_rates(peak, len(layers)), strict=True):
        droppable = [module for module in layer.modules() if isinstance(module, Droppable)]
        if not droppable:
            raise KinformerError(
                f"stack.stochastic_depth is {peak:g}, but {type(layer).__name__} does not have a residual sum, so "
                "its sublayers cannot be dropped; use the layer 'decoder' or 'encoder', or stack.stochastic_depth = 0."
            )
        for sublayer in droppable:
            if sublayer.undroppable is not None:
                raise KinformerError(
                    f"stack.stochastic_depth is {peak:g}, but {sublayer.undroppable}; use another residual (pre), or "
                    "stack.stochastic_depth = 0."
                )
            sublayer.drop_rate = rate


Use = Callable[[nn.Module, Tensor, int], Tensor]
"""(layer, x [batch, time, dim], number of the use) -> the layer's output. It passes the state of a decoder's layer."""
BeforeUse = Callable[[Tensor, int], Tensor]
"""(x [batch, time, dim], number of the use) -> the layer's input. It adds a position that enters every layer."""


class Branch(NamedTuple):
    """A sublayer without its residual sum, for a stack that adds it; ``branches()`` of a layer returns its sublayers.

    ``added, state = run(x, context, state)`` with x [batch, time, dim] and ``context`` a decoder's ``Chunk``, whose x
    is ignored, or an encoder's ``SequenceContext``. ``state`` is the mixer's, ignored where ``mixes`` is False.
    """

    run: Callable[[Tensor, Any, State], tuple[Tensor, State]]
    mixes: bool


class StackConfig(Config):
    """The config; ``build(layers)`` returns the stack of the built ``layers``.

    With ``checkpoint`` a training step stores the input of each use and computes the use a second time in the backward
    pass, with the same random masks: less memory, about a third more work, equal gradients (Chen et al. 2016).
    ``stochastic_depth`` is the probability with which a training step drops a sublayer of the last layer for a
    sequence; in earlier layers it is linearly less (``core.stack``).
    """

    slot = "stack"
    checkpoint: bool = False
    stochastic_depth: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stochastic_depth < 1:
            raise KinformerError(
                f"stack.stochastic_depth must be a probability from 0 to below 1, but is {self.stochastic_depth:g}."
            )

    def uses(self, layers: int) -> tuple[int, ...]:
        """Return the number of the layer of each use, in order; a layer may be used more than once."""
        return tuple(range(layers))

    def width(self, dim: int) -> int:
        """Return the width of the stack's outputs in a model of width ``dim``."""
        return dim

    def widths(self, dim: int, layers: int) -> tuple[int, ...]:
        """Return the width of each of ``layers`` layers, in a model of width ``dim``."""
        return (dim,) * layers

    def select(self, layers: Sequence[int]) -> StackConfig:
        """Return the config of a stack that applies each of the ``layers``, ascending numbers, once."""
        return StackConfig(checkpoint=self.checkpoint, stochastic_depth=self.stochastic_depth)

    @property
    def recomputes(self) -> bool:
        """Return whether a training step computes layers a second time instead of storing their activations."""
        return self.checkpoint

    def check(self, position: nn.Module) -> None:
        """Raise for a model's ``position`` (``core.parts``) that cannot enter this stack."""

    def model_class(self, plain: type[M]) -> type[M]:
        """Return the class of a decoder with this stack; ``plain`` is its class with other stacks."""
        return plain

    def build(self, layers: Sequence[nn.Module]) -> Stack:
        return Stack(self, layers)

    def build_model(self, layers: Sequence[nn.Module], dim: int) -> Stack:
        """Build the stack of a model of width ``dim``; override this for a stack with weights."""
        return self.build(layers)


class Stack(nn.Module):
    """The base of stacks: it owns the layers, applies them in the order of ``config.uses`` and has one state per use.

    A subclass overrides :meth:`absorb` for decoders and :meth:`read` for encoders, or :meth:`through` for both.
    ``units`` are the modules that an engine shards or compiles one by one. Parts that the layers share belong to the
    stack (see :func:`share`). ``shardable`` is whether an engine may cut the weights of units (FSDP), ``opens_values``
    whether layers may read the values of the first layer, ``adaptive`` whether the number of uses depends on the token.
    """

    shardable: bool = True
    opens_values: bool = False
    adaptive: bool = False

    def __init__(self, config: StackConfig, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.shared = share(self.layers)
        self._values = shares_values(self.layers, config.kind, self.opens_values)
        self.order = config.uses(len(self.layers))
        if config.stochastic_depth:
            drop_sublayers(self.layers, config.stochastic_depth)

    @property
    def units(self) -> tuple[nn.Module, ...]:
        return tuple(self.layers)

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        """Return one state per use; ``core.contract.initial_states`` describes the ``options``."""
        return tuple(self.layers[index].initial_state(batch, **options) for index in self.order)  # type: ignore[operator]

    def through(
        self, x: Tensor, use: Use, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs [batch, time, dim] of all layers for x [batch, time, dim], and those of the uses ``taps``.

        Override this for another wiring of the layers of decoders and encoders. It must call ``use(layer, before(x,
        number), number)`` exactly once for every use, in the order of ``config.uses``, and must not mix tokens.
        """
        tapped = []
        for number, index in enumerate(self.order):
            x = use(self.layers[index], before(x, number), number)
            if number in taps:
                tapped.append(x)
        return x, tuple(tapped)

    def absorb(
        self, chunk: Chunk, state: tuple[State, ...], before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]]:
        """Return outputs [batch, time, dim] of a decoder's layers, the states after, and the outputs of ``taps``."""
        after: list[State] = []
        if self._values:
            chunk = chunk._replace(values=FirstValues())

        def use(layer: nn.Module, x: Tensor, number: int) -> Tensor:
            y, new_state = self._run_layer(layer, chunk._replace(x=x), state[number])
            after.append(new_state)
            return y

        x, tapped = self.through(chunk.x, use, before, taps)
        return x, tuple(after), tapped

    def read(
        self, x: Tensor, context: SequenceContext, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return outputs [batch, time, dim] of an encoder's layers, and the outputs of the uses in ``taps``."""
        if self._values:
            context = context._replace(values=FirstValues())
        return self.through(x, lambda layer, x, _: self._read(layer, x, context), before, taps)

    def _read(self, layer: nn.Module, x: Tensor, context: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        """Apply an encoder's ``layer`` to x; outputs are needed for ``output_mask`` [batch, time] bool (None: all)."""
        inputs = (
            (x, context, output_mask) if output_mask is not None and isinstance(layer, PartialOutput) else (x, context)
        )
        return checkpoint(layer, *inputs, use_reentrant=False) if self._recomputes else layer(*inputs)

    def _run_layer(self, layer: nn.Module, *inputs: object) -> tuple[Tensor, State]:
        """Apply a decoder's ``layer`` to a chunk, a state and further ``inputs``."""
        return checkpoint(_run_owning, layer, *inputs, use_reentrant=False) if self._recomputes else layer(*inputs)

    def _run_use(self, number: int, chunk: Chunk, state: State, output_mask: Tensor | None) -> tuple[Tensor, State]:
        """Apply the layer of use ``number``; outputs are needed for ``output_mask`` [batch, time] bool (None: all).

        A :class:`PartialOutput` computes these outputs only; its state absorbs all tokens.
        """
        layer = self.layers[self.order[number]]
        if output_mask is not None and isinstance(layer, PartialOutput):
            return self._run_layer(layer, chunk, state, output_mask)
        return self._run_layer(layer, chunk, state)

    @property
    def _recomputes(self) -> bool:
        return self.config.checkpoint and self.training and torch.is_grad_enabled()


def _run_owning(layer: nn.Module, *inputs: object) -> tuple[Tensor, State]:
    """Return a layer's result with copies of the state's tensors: a view would keep its whole base in memory."""
    x, state = layer(*inputs)
    return x, map_tensors(torch.Tensor.clone, state)


def units_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the units of a model's stack, which an engine shards or compiles one by one; empty without a stack."""
    stack = getattr(model, "stack", None)
    return stack.units if isinstance(stack, Stack) else ()


class HasModules(Protocol):
    """A module, or an object that follows a protocol of models."""

    def modules(self) -> Iterator[nn.Module]: ...


def sparse_tables(model: HasModules) -> frozenset[Tensor]:
    """Return the tables of ``model`` whose gradients are sparse."""
    lookups = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return frozenset(lookup.weight for lookup in lookups if lookup.sparse)


def share(layers: nn.ModuleList) -> nn.ModuleList:
    """Merge the ``shared`` parts in ``layers`` with equal configs and shapes, and return the merged parts.

    A shared part of a mixer has the attributes ``shared`` and ``config``; one table of biases for all layers is an
    example. The layers still call the part, but it is not a submodule of them any more: the module that stores the
    returned list saves, counts, moves and shards it once.
    """
    shared: dict[object, nn.Module] = {}
    for owner in list(layers.modules()):
        for name, part in list(owner.named_children()):
            if getattr(part, "shared", False):
                key = (type(part), part.config, *(parameter.shape for parameter in part.parameters()))
                delattr(owner, name)
                object.__setattr__(owner, name, shared.setdefault(key, part))
    return nn.ModuleList(shared.values())


# The configs of whole models, and of their embeddings and heads.


class EmbeddingConfig(Config):
    """The config; ``build(vocab_size, dim)`` returns a module (tokens, positions) -> vectors [batch, time, dim].

    Tokens and positions are [batch, time] int64. A tied head reads the module's ``weight`` [vocab_size, ...].
    ``bounded_by_training`` has the meaning that it has for positions (``core.parts``). ``by_vocabulary``: whether the
    module only looks up rows of ``weight``, so that ``weight`` may be cut by rows.
    """

    slot = "embedding"
    bounded_by_training: ClassVar[bool] = False
    by_vocabulary: ClassVar[bool] = False

    def build(self, vocab_size: int, dim: int) -> nn.Embedding:
        return self.builds(self, vocab_size, dim)


class ModelConfig(Config):
    """The config; ``build()`` returns a whole model: ``input``, ``position``, the ``layers`` and the ``stack`` that
    applies them, and ``head``.

    ``protocol`` is the protocol of the model: ``core.model.CausalModel``, ``WholeModel`` or ``SourceModel``.
    """

    slot = "model"
    protocol: ClassVar[type]

    input: InputConfig
    dim: int
    layers: tuple[Any, ...]
    stack: StackConfig
    position: PositionConfig
    head: HeadConfig

    def build(self) -> Any:
        return self.builds(self)

    @property
    def uses(self) -> tuple[Config, ...]:
        """Return the config of the layer of every use, in order."""
        return tuple(self.layers[index] for index in self.stack.uses(len(self.layers)))

    @property
    def width(self) -> int:
        """Return the width of the hidden states that the head receives."""
        return self.stack.width(self.dim)


class HeadConfig(Config):
    """The config; ``build(dim, input)`` returns a module (hidden_states [batch, time, dim], input, valid or None) ->
    logits.

    ``input`` is the model's ``core.parts.Input``; a tied head reads its table. The module returns logits of every
    position, [batch, time, ...], or, with ``per_position`` False, of whole inputs, [batch, ...], as encoders have.
    """

    slot = "head"
    per_position: ClassVar[bool] = True

    def check(self, dim: int, input: Input) -> None:
        """Raise for a model of width ``dim`` whose ``input`` has a table that this head, if tied, cannot use."""

    def build(self, dim: int, input: Input) -> nn.Module:
        return self.builds(self, dim)


def check_table(head: HeadConfig, dim: int, input: Input) -> None:
    """Raise for an ``input`` whose table is not a matrix [vocab_size, dim], which the tied ``head`` needs."""
    expected, table = [vocab_size_of(input, head), dim], input.table
    shape = list(table.shape) if isinstance(table, Tensor) else None
    if shape != expected:
        has = f"is {shape}" if shape else "is none" if table is None else "is in clusters"
        untied = "give the head a separate matrix (tied = false), or" if hasattr(head, "tied") else "give"
        raise KinformerError(
            f"the head {head.kind!r} is tied to the input's table, which must be [vocab_size, width] = {expected} but "
            f"{has}; {untied} the input another embedding."
        )


def vocab_size_of(input: Input, head: HeadConfig) -> int:
    """Return the number of token ids of ``input`` for a ``head`` that predicts ids; raise for an input without ids."""
    if input.vocab_size is None:
        raise KinformerError(
            f"the head {head.kind!r} predicts token ids, which the input of this model does not know; use the input "
            "tokens, or another head."
        )
    return input.vocab_size
