"""The stack of a model: which layer is applied when, what is stored between, and the states of its uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinformer.core.config import Config
from kinformer.core.contract import Chunk, FirstValues, PartialOutput, shares_values
from kinformer.core.parts import Input, InputConfig, PositionConfig
from kinformer.core.state import map_tensors
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.core.encoder import SequenceContext, StateOptions
    from kinformer.core.state import State

# Stochastic depth (Huang et al. 2016): in training a sublayer adds nothing to some sequences, redrawn each time.
#
#     x + b F(x) / (1 - p),   b ~ Bernoulli(1 - p) for each sequence;     p_l = p l / (L - 1),   l = 0 .. L - 1
#
# So the expectation of what is added is F(x), which is what is added outside of training. The probability rises
# linearly with depth from 0 in the first layer to p in the last, as in the code of DeiT and Swin (Huang et al. count
# from the input, p l / L), and every sublayer of a layer draws for itself.


class Droppable(nn.Module):
    """A sublayer's way into the stream, which can drop what the sublayer gives.

    ``drop_rate``: with which probability, per sequence, set by the stack; ``undroppable``: why it cannot, if so.
    """

    drop_rate: float = 0.0
    undroppable: str | None = None

    def dropped(self, y: Tensor) -> Tensor:
        """Return the sublayer's output ``y`` [batch, time, dim], zero for the sequences that drop it."""
        if not (self.training and self.drop_rate):
            return y
        assert y.dim() == 3, "some tokens of a sequence alone"
        remain = torch.rand(len(y), 1, 1, device=y.device) >= self.drop_rate
        # Not a product: the scale would be rounded to the type of y.
        return torch.where(remain, y / (1 - self.drop_rate), y.new_zeros(()))


def drop_rates(peak: float, layers: int) -> tuple[float, ...]:
    """Return the probability of each of ``layers`` layers, rising to ``peak`` in the last."""
    return tuple(peak if layers == 1 else peak * layer / (layers - 1) for layer in range(layers))


def drop_sublayers(layers: nn.ModuleList, peak: float) -> None:
    """Let the sublayers of ``layers`` be dropped with a probability that rises with depth up to ``peak``."""
    for layer, rate in zip(layers, drop_rates(peak, len(layers)), strict=True):
        droppable = [module for module in layer.modules() if isinstance(module, Droppable)]
        if not droppable:
            raise KinformerError(
                f"stack.stochastic_depth is {peak:g}, but {type(layer).__name__} has no residual sum past which its "
                "sublayers could be dropped; use the layer 'decoder' or 'encoder', or stack.stochastic_depth = 0."
            )
        for sublayer in droppable:
            if sublayer.undroppable is not None:
                raise KinformerError(
                    f"stack.stochastic_depth is {peak:g}, but {sublayer.undroppable}; use another residual (pre), or "
                    "stack.stochastic_depth = 0."
                )
            sublayer.drop_rate = rate


Use = Callable[[nn.Module, Tensor, int], Tensor]
"""(layer, x [batch, time, dim], number of the use) -> the layer's output; the state of a decoder is taken care of."""
BeforeUse = Callable[[Tensor, int], Tensor]
"""(x [batch, time, dim], number of the use) -> x, before each use of a layer: where a position enters every layer."""
ReadExit = Callable[[Tensor, int], Tensor]
"""(x [..., dim], a layer's output, number of the exit) -> logits [..., vocab], the prediction at that exit."""


class HaltingState(NamedTuple):
    """The progress of halting tokens before step ``number``: their outputs so far, ``out`` [batch, time, dim], the
    probability ``halted`` [batch, time] of having halted, and which are still ``running`` [batch, time] bool."""

    number: int
    out: Tensor
    halted: Tensor
    running: Tensor


class Branch(NamedTuple):
    """A sublayer without its residual sum, for stacks with streams of their own; a layer gives its ``branches()``.

    ``added, state = run(x, context, state)`` with x [batch, time, dim] and ``context`` a decoder's ``Chunk``, whose x
    is ignored, or an encoder's ``SequenceContext``. ``state`` is that of the mixer; anything where ``mixes`` is False.
    """

    run: Callable[[Tensor, Any, State], tuple[Tensor, State]]
    mixes: bool


@dataclass(frozen=True, kw_only=True)
class StackConfig(Config):
    """The config; ``build(layers)`` returns the stack of the built ``layers``.

    With ``checkpoint`` a training step keeps each use's input and computes the rest a second time in the backward, with
    the same random masks: less memory, about a third more work, equal gradients (Chen et al. 2016).
    ``stochastic_depth``: the probability with which a training step drops a sublayer of the last layer for a sequence,
    linearly less in layers before (``core.stack``).
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
        """Return the number of the layer that is applied in each use, in order; a layer may be used more than once."""
        return tuple(range(layers))

    def width(self, dim: int) -> int:
        """Return the width of the stack's outputs in a model of width ``dim``."""
        return dim

    def widths(self, dim: int, layers: int) -> tuple[int, ...]:
        """Return the width of each of ``layers`` layers, in a model of width ``dim``."""
        return (dim,) * layers

    def select(self, layers: Sequence[int]) -> StackConfig:
        """Return the stack of the layers with these numbers alone, ascending,
        that applies each once as this one does."""
        return StackConfig(checkpoint=self.checkpoint, stochastic_depth=self.stochastic_depth)

    @property
    def recomputes(self) -> bool:
        """Return whether a training step computes layers a second time rather than store their activations."""
        return self.checkpoint

    def check(self, position: nn.Module) -> None:
        """Refuse a model's ``position`` (``core.parts``) that this stack has no place for."""

    @property
    def reads_exits(self) -> bool:
        """Return whether a step without gradients computes what exits predict between its layers."""
        return False

    def exit_heads(self, layers: int) -> int:
        """Return how many exits have a head of their own, beside the model's, which is the last one's."""
        return 0

    def build(self, layers: Sequence[nn.Module]) -> Stack:
        return Stack(self, layers)

    def build_model(self, layers: Sequence[nn.Module], dim: int) -> Stack:
        """Build the stack of a model of width ``dim``, where it has weights of its own."""
        return self.build(layers)


class Stack(nn.Module):
    """The base of stacks: it owns the layers, applies them in the order of ``config.uses`` and has one state per use.

    ``units`` are the modules that an engine shards or compiles one by one. Parts that the layers share belong to the
    stack (see :func:`share`). ``shardable``: whether an engine may cut the weights of units (FSDP). ``halting``: a
    module ``(progress, x, y)`` that decides after each pass which tokens take another, or None. ``exits``: the uses
    after which a token may leave for the head, the last included; empty where all tokens go through every use.
    ``opens_values``: whether layers may read the values of the first.
    """

    shardable: bool = True
    opens_values: bool = False
    exits: tuple[int, ...] = ()

    def __init__(self, config: StackConfig, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.shared = share(self.layers)
        self._values = shares_values(self.layers, config.kind, self.opens_values)
        self.order = config.uses(len(self.layers))
        self.halting: nn.Module | None = None
        if config.stochastic_depth:
            drop_sublayers(self.layers, config.stochastic_depth)

    @property
    def units(self) -> tuple[nn.Module, ...]:
        return tuple(self.layers)

    @property
    def reads_source(self) -> bool:
        """Return whether the stack itself reads the mean vector of a source (``core.model.SourceModel``)."""
        return False

    @property
    def leaves_early(self) -> bool:
        """Return whether tokens may leave by an exit before the last, outside of training."""
        return False

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        """Return one state per use; ``options`` as of ``core.contract.initial_states``."""
        return tuple(self.layers[index].initial_state(batch, **options) for index in self.order)  # type: ignore[operator]

    def through(
        self, x: Tensor, use: Use, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return outputs [batch, time, dim] of all layers for x [batch, time, dim], and those of the uses in ``taps``.

        Override this for another wiring of the layers: decoders and encoders both go through it. Every use in the order
        of ``config.uses`` must happen exactly once, ``use(layer, before(x, number), number)``, and no token may be
        mixed with another here.
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
        """Return outputs [batch, time, dim] of a decoder's layers, the states after,
        and the outputs of the uses in ``taps``."""
        after: list[State] = []
        if self._values:
            chunk = chunk._replace(values=FirstValues())

        def use(layer: nn.Module, x: Tensor, number: int) -> Tensor:
            y, new_state = self._applied(layer, chunk._replace(x=x), state[number])
            after.append(new_state)
            return y

        x, tapped = self.through(chunk.x, use, before, taps)
        return x, tuple(after), tapped

    def absorb_early_exits(
        self,
        chunk: Chunk,
        state: tuple[State, ...],
        before: BeforeUse,
        taps: Sequence[int],
        read: ReadExit,
        source: Tensor | None = None,
    ) -> tuple[tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]], Tensor | None]:
        """Absorb like :meth:`absorb`, where tokens may leave early by their logits from ``read``, or by the mean of the
        rows' ``source`` [batch, dim]; also return the number of the exit by which each left, [batch, time] int64, None
        where all went through every use."""
        return self.absorb(chunk, state, before, taps), None

    def read(
        self, x: Tensor, text: SequenceContext, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return outputs [batch, time, dim] of an encoder's layers, and those of the uses in ``taps``."""
        if self._values:
            text = text._replace(values=FirstValues())
        return self.through(x, lambda layer, x, _: self._read(layer, x, text), before, taps)

    def _read(self, layer: nn.Module, x: Tensor, text: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        """Apply an encoder's ``layer`` to x, at least where ``output_mask`` [batch, time] bool (None: everywhere)."""
        inputs = (x, text, output_mask) if output_mask is not None and isinstance(layer, PartialOutput) else (x, text)
        return checkpoint(layer, *inputs, use_reentrant=False) if self._recomputes else layer(*inputs)

    def _applied(self, layer: nn.Module, *inputs: object) -> tuple[Tensor, State]:
        """Apply ``layer`` to a chunk, a state and whatever else it takes."""
        return checkpoint(_owning, layer, *inputs, use_reentrant=False) if self._recomputes else layer(*inputs)

    def _used(self, number: int, chunk: Chunk, state: State, output_mask: Tensor | None) -> tuple[Tensor, State]:
        """Apply use ``number`` of a layer; outputs are needed where ``output_mask`` [batch, time] bool (None:
        everywhere).

        A :class:`PartialOutput` computes no others, while its state absorbs all tokens.
        """
        layer = self.layers[self.order[number]]
        if output_mask is not None and isinstance(layer, PartialOutput):
            return self._applied(layer, chunk, state, output_mask)
        return self._applied(layer, chunk, state)

    @property
    def _recomputes(self) -> bool:
        return self.config.checkpoint and self.training and torch.is_grad_enabled()


def _owning(layer: nn.Module, *inputs: object) -> tuple[Tensor, State]:
    """Return a layer's result with a state of its own memory: a view would keep the tensors that it is a part of."""
    x, state = layer(*inputs)
    return x, map_tensors(torch.Tensor.clone, state)


def units_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the parts of a model that are sharded or compiled one by one: its stack's; none of any other module."""
    stack = getattr(model, "stack", None)
    return stack.units if isinstance(stack, Stack) else ()


class HasModules(Protocol):
    """A module, or a model by its protocol."""

    def modules(self) -> Iterator[nn.Module]: ...


def sparse_tables(model: HasModules) -> frozenset[Tensor]:
    """Return the tables of ``model`` whose gradients are sparse."""
    lookups = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return frozenset(lookup.weight for lookup in lookups if lookup.sparse)


def share(layers: nn.ModuleList) -> nn.ModuleList:
    """Make one of all parts in ``layers`` that are ``shared`` and have equal configs and shapes, for the stack to own.

    A part of a mixer says so by its attributes ``shared`` and ``config``, such as one table of biases for all layers.
    The layers go on calling it, but it is no longer among their submodules: it is saved, counted, moved and sharded
    once, with the module that keeps the result.
    """
    shared: dict[object, nn.Module] = {}
    for owner in list(layers.modules()):
        for name, part in list(owner.named_children()):
            if getattr(part, "shared", False):
                key = (type(part), part.config, *(parameter.shape for parameter in part.parameters()))
                delattr(owner, name)
                object.__setattr__(owner, name, shared.setdefault(key, part))
    return nn.ModuleList(shared.values())


# The configs of whole models and of the parts that only models have: embeddings and heads.


class EmbeddingConfig(Config):
    """The config; ``build(vocab_size, dim)`` returns a table (tokens, positions), both [batch, time] int64, -> [batch,
    time, dim].

    A tied head reads its ``weight`` [vocab_size, ...]. ``bounded_by_training``: as of positions (``core.parts``).
    ``by_vocabulary``: whether it is a look-up in ``weight`` alone, which may be cut by rows.
    """

    slot = "embedding"
    bounded_by_training: ClassVar[bool] = False
    by_vocabulary: ClassVar[bool] = False

    def build(self, vocab_size: int, dim: int) -> nn.Embedding:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The config; ``build()`` returns a whole model: ``input``, ``position``, the ``layers`` and the ``stack`` that
    applies them, and ``head``.

    ``protocol`` says what can be done with it: ``core.model.CausalModel``, ``WholeModel`` or ``SourceModel``.
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
        raise NotImplementedError

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

    ``input`` is the model's ``core.parts.Input``; a tied head reads its table. Logits are of positions [batch, time,
    ...] or, with ``per_position`` False, of whole inputs [batch, ...], which a decoder must not have.
    """

    slot = "head"
    per_position: ClassVar[bool] = True

    def check(self, dim: int, input: Input) -> None:
        """Refuse a model of width ``dim`` whose ``input`` has a table that this head, where it is tied, cannot use."""

    def build(self, dim: int, input: Input) -> nn.Module:
        raise NotImplementedError


def check_table(head: HeadConfig, dim: int, input: Input) -> None:
    """Refuse an ``input`` whose table is no output matrix [vocab_size, dim] for the tied ``head``."""
    expected, table = [vocab_size_of(input, head), dim], input.table
    shape = list(table.shape) if isinstance(table, Tensor) else None
    if shape != expected:
        has = f"is {shape}" if shape else "is none" if table is None else "is in clusters"
        untied = "give the head a matrix of its own (tied = false), or" if hasattr(head, "tied") else "give"
        raise KinformerError(
            f"the head {head.kind!r} is tied to the input's table, which must be [vocab_size, width] = {expected} but "
            f"{has}; {untied} the input another embedding."
        )


def vocab_size_of(input: Input, head: HeadConfig) -> int:
    """Return how many token ids ``input`` takes, for a ``head`` that predicts them; refuse one that takes none."""
    if input.vocab_size is None:
        raise KinformerError(
            f"the head {head.kind!r} predicts token ids, which the input of this model does not know; use the input "
            "tokens, or another head."
        )
    return input.vocab_size
