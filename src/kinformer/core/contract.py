"""The one contract of every causal sequence mixer: a chunk and a state in, an output and a state out.

    y, state = mixer(Chunk(x, valid, reset), state)

The law (partition invariance): for every way of cutting a sequence into chunks, the joined outputs, the gradients
and the final state equal the results of one chunk. In code, for every ``0 < t < time``::

    y, end = mixer(Chunk(x), start)
    left, middle = mixer(Chunk(x[:, :t]), start)
    right, last = mixer(Chunk(x[:, t:]), middle)
    assert allclose(y, cat([left, right], 1)) and allclose(end, last)

Semantic boundaries (windows, segments, blocks) come from the position counter inside the state, never from the
length of a chunk. ``kinformer.testing`` checks all of this for any mixer.

Shapes: batch first, ``x [batch, time, dim]``, ``valid`` and ``reset`` ``[batch, time]`` bool, ``seen [batch]`` int64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import Config, describe
from kinformer.core.state import State, require_rows
from kinformer.runtime.autograd import autocast_dtype
from kinformer.runtime.compiling import checks_calls
from kinformer.runtime.errors import KinformerError

M = TypeVar("M", bound=nn.Module)


class Chunk(NamedTuple):
    """A chunk: some consecutive tokens of each row.

    ``x``      [batch, time, dim], time >= 1.
    ``valid``  [batch, time] bool or None (all valid): False marks padding. Inside the model the valid tokens of a
               row are a prefix of the chunk; :func:`left_align` makes them so at the model's edge.
    ``reset`` [batch, time] bool or None (never): this token begins a new sequence in its row. ``positions`` [batch,
    time] int64 or None: the result of :func:`positions_of`, where the model has computed it already. ``values``: the
    channel of a stack whose layers read the values of the first.
    """

    x: Tensor
    valid: Tensor | None = None
    reset: Tensor | None = None
    positions: Tensor | None = None
    values: FirstValues | None = None


class ChecksChunk:
    """Mixin of modules that absorb a chunk after a state: a wrong call raises an error before anything is computed."""

    dim: int = 0
    """The width of the module's input; 0 where calls are not checked."""

    def __call__(self, chunk: Chunk, state: State, *rest: object, **options: object) -> tuple[Tensor, State]:
        """Call ``forward`` after a check of the arguments, which takes about a microsecond."""
        if checks_calls():
            require_chunk(chunk, state, self.dim)
        return super().__call__(chunk, state, *rest, **options)  # type: ignore[misc]


class CausalMixer(ChecksChunk, nn.Module):
    """The base of a decoder's mixers, which absorb a chunk after a state.

    A subclass defines ``empty_state`` (or all of ``initial_state``) and ``forward``, and declares ``growth``, the
    growth of its state with the number of absorbed tokens: ``"none"``, ``"constant"``, ``"window"`` or ``"linear"``.

    Rules that the battery enforces:

    * outputs at invalid positions are zero, and the state is the same as without the invalid tokens;
    * a state is an immutable ``NamedTuple`` of tensors, batch axis first in every leaf, never None;
      using it twice gives the same result;
    * no output depends on a later token or on another row.
    """

    growth: str = "constant"
    max_length: int | None = None
    """The largest number of tokens of a sequence, None for any number."""

    @property
    def retained(self) -> int | None:
        """Return the largest number of past positions in a state of ``growth = "window"``, None for other growths."""
        return None

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """Return the state of ``batch`` new sequences: zero-length or zero-valued tensors of constant structure."""
        weight = self.like()
        return self.empty_state(batch, device or weight.device, dtype or activation_dtype(weight))

    def like(self) -> Tensor:
        """Return a weight with the device and dtype of activations, by default the weight of ``out``."""
        if (product := getattr(self, "out", None)) is None:
            raise NotImplementedError(f"{type(self).__name__} does not have a product `out`; override like.")
        weight: Tensor = product.weight
        return weight

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        """Return the state of :meth:`initial_state` for activations of ``dtype``."""
        raise NotImplementedError

    def forward(self, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        """Absorb ``chunk`` after ``state``; return y ``[batch, time, dim]`` and the new state."""
        raise NotImplementedError

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        """Return the declared bytes of one row's state after ``length`` tokens with activations of ``dtype``."""
        raise NotImplementedError


def require_chunk(chunk: object, state: object, dim: int) -> None:
    """Raise unless ``chunk`` and ``state`` are such that a mixer or layer of width ``dim`` can absorb them."""
    if not isinstance(chunk, Chunk):
        raise KinformerError(
            f"the first argument is of the type {type(chunk).__name__} but must be a Chunk; write Chunk(x) with "
            "kinformer.core.contract.Chunk."
        )
    require_input(chunk.x, dim)
    for name, mask in (("valid", chunk.valid), ("reset", chunk.reset)):
        if mask is not None and (mask.dtype != torch.bool or mask.shape != chunk.x.shape[:2]):
            raise KinformerError(
                f"{name} is {mask.dtype} {list(mask.shape)}, but must be torch.bool [batch, time] = "
                f"{list(chunk.x.shape[:2])}."
            )
    if state is None:
        raise KinformerError("the state is None; begin with initial_state(batch) of the mixer or layer.")
    require_rows(state, chunk.x.shape[0], chunk.x.device)


def require_input(x: object, dim: int) -> None:
    """Raise unless ``x`` is a floating-point tensor [batch, time, dim] with one row and one token at least."""
    if not isinstance(x, Tensor):
        raise KinformerError(f"x is of the type {type(x).__name__} but must be a tensor [batch, time, dim].")
    if x.dim() != 3 or 0 in x.shape[:2] or (dim and x.shape[2] != dim):
        expected = "[batch, time, dim]" if not dim else f"[batch, time, dim = {dim}]"
        raise KinformerError(
            f"x has the shape {list(x.shape)} but must be {expected} with batch >= 1 and time >= 1; leave the call out "
            "where a batch is empty."
        )
    if not x.is_floating_point():
        raise KinformerError(f"x is {x.dtype} but must be a floating-point tensor; convert it by x.float().")


class ReadsSource:
    """Mixin of a mixer over a source: ``initial_state`` also takes ``source`` [batch, length, width] and
    ``source_valid`` [batch, length] bool, the sequence that all queries attend to."""


class RecomputesKV:
    """Mixin of a mixer whose state holds inputs of the layer, from which it projects keys and values again.

    ``forward(chunk, state, norm)`` also takes the layer's norm. Chunk and state hold the layer's inputs before the
    norm, and the mixer applies the norm to both, so the norm always has the present weights and learns from both.
    """


class PartialOutput:
    """Mixin of mixers and layers whose ``forward`` also takes ``output_mask`` [batch, time] bool (None: everywhere).

    It selects the tokens whose outputs are needed; the state absorbs all tokens. Elsewhere a mixer's outputs are zero
    and cost little, and a layer returns its input.
    """


AS_THEY_ARE = nn.Identity()
"""The ``norm`` of a mixer in a layer that does not normalise the mixer's input."""


# The channel from the first layer to later layers: a stack opens a channel for each pass.


class FirstValues:
    """The values [batch, kv_heads, time, head_dim] of the first mixer that shares values."""

    def __init__(self) -> None:
        self._values: Tensor | None = None

    def of(self, v: Tensor) -> Tensor:
        """Return the first values: ``v`` in the first call. A recomputed layer reads the values of its forward pass."""
        if self._values is None:
            self._values = v
        return self._values


class SharesValues:
    """Mixin of modules that read the first values; ``value_shape``: (kv_heads, head_dim) of their values."""

    value_shape: tuple[int, int]


def shares_values(layers: Iterable[nn.Module], kind: str, opens: bool) -> bool:
    """Return whether modules in ``layers`` read first values. Raise for such modules in a stack ``kind`` without a
    channel for first values (``opens`` False), and for layers whose values differ in shape."""
    shapes = {module.value_shape for layer in layers for module in layer.modules() if isinstance(module, SharesValues)}
    if shapes and not opens:
        raise KinformerError(
            f"value_residual reads the values of the first layer, which the stack {kind!r} does not hand on; use the "
            "stack 'sequential', or leave it out."
        )
    if len(shapes) > 1:
        shown = " and ".join(f"{heads} x {width}" for heads, width in sorted(shapes))
        raise KinformerError(
            f"value_residual mixes the values of all layers, which are {shown} (heads x width) here; give every such "
            "layer the same number of key heads and the same head_dim."
        )
    return bool(shapes)


# The division of a model's heads, hidden features and vocabulary into equal parts.
#
# ``MixerConfig.part`` and ``FeedForwardConfig.part`` return the config of one of ``parts`` equal parts: a config of
# fewer heads, or of fewer hidden features. The sum of the parts' outputs is the output of the whole. The rows of a
# weight in a part follow from the shapes of the whole and of the part, and from the blocks of joint products, such as
# queries, keys and values side by side.


def in_blocks(module: M, *sizes: int) -> M:
    """Note that the rows of ``module``'s weights stand in blocks of these ``sizes``, each by heads; return it."""
    object.__setattr__(module, "blocks", sizes)
    return module


class Divisible:
    """Mixin of the config of a mixer or a feed-forward, which may be divided; ``indivisible`` is the reason why not.

    ``by_heads``: whether a part of a mixer is the same mixer with fewer heads.
    """

    indivisible: ClassVar[str] = "no config says how one part computes its share"
    by_heads: ClassVar[bool] = False

    def part(self, dim: int, parts: int) -> Self:
        """Return the config of one of ``parts`` equal parts, for a stream of width ``dim``."""
        config: Any = self
        if self.by_heads:
            return config.replace(**fewer_heads(config, dim, parts))
        raise undivided(config, self.indivisible)


class FollowsHeads:
    """Mixin of modules that hold something beside tensors which follows from the number of heads."""

    def follow(self, whole: Self, part: int) -> None:
        """Become part number ``part`` of ``whole``, such a module for all heads."""
        raise NotImplementedError


def undivided(config: Config, why: str) -> KinformerError:
    """Return the error for a ``config`` that cannot be divided, with the reason."""
    return KinformerError(f"{describe(config)} cannot be divided among processes: {why}; leave `parallel` tp out.")


def fewer_heads(config: Config, dim: int, parts: int) -> dict[str, object]:
    """Return the fields of ``config`` for the heads of one of ``parts`` parts; raise where heads differ in pattern."""
    values: Any = config
    for name, why in (("span", "has costs of all heads"), ("differential", "takes differences over all heads")):
        if getattr(values, name, None) is not None:
            raise undivided(config, f"its {name} {why}")
    pattern = getattr(values, "pattern", None)
    if pattern is not None and pattern.build().num_heads is not None:
        raise undivided(config, f"its pattern {pattern.kind!r} is another one for every head")
    heads = divided(config, "num_heads", values.num_heads, parts)
    changes: dict[str, object] = {"num_heads": heads, "head_dim": values.head_dim or dim // values.num_heads}
    if getattr(values, "key_heads", None) is not None:
        changes["key_heads"] = divided(config, "key_heads", values.key_heads, parts)
    if hasattr(values, "projection"):
        changes["projection"] = values.projection.part(parts)
    return changes


def divided(config: Config, name: str, number: int, parts: int) -> int:
    """Return ``number``, the value of ``config``'s field ``name``, divided by ``parts``."""
    if number % parts:
        raise undivided(config, f"{name} = {number} is not a multiple of {parts}")
    return number // parts


class MixerConfig(Divisible, Config):
    """Base of the configs that build a sequence mixer: ``build(dim) -> CausalMixer``."""

    slot = "mixer"

    def build(self, dim: int) -> CausalMixer:
        return self.builds(self, dim)


class StateOptions(TypedDict, total=False):
    """The keywords of ``initial_state`` of layers and stacks, which pass them to their mixers."""

    device: torch.device | None
    dtype: torch.dtype | None
    source: Tensor | None
    source_valid: Tensor | None


def initial_states(mixers: Iterable[CausalMixer], batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
    """Return the states of ``batch`` new sequences, one per mixer; some need ``source`` [batch, length, width]."""
    plain: Any = {name: value for name, value in options.items() if name not in ("source", "source_valid")}
    return tuple(mixer.initial_state(batch, **options if isinstance(mixer, ReadsSource) else plain) for mixer in mixers)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulators beside activations of ``dtype``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def in_range(x: Tensor) -> Tensor:
    """Return ``x``, in float32 if it is float16: squares and sums over a text exceed 65,504, the largest float16."""
    return x.float() if x.dtype == torch.float16 else x


def unit_vectors(x: Tensor) -> Tensor:
    """Return vectors [..., width] divided by their lengths, 0 for 0.

    Lengths of float16 vectors are computed in float32: the least length 1e-12 is 0 in float16, and a square above
    65,504 is infinite. bfloat16 has float32's range.
    """
    return functional.normalize(in_range(x), dim=-1).to(x.dtype)


def width_of(x: Tensor) -> int:
    """Return the last size of ``x`` as a Python number: a traced size is a tensor, whose powers are float32."""
    return int(x.shape[-1])


def activation_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of activations computed with ``weight``: the weight's dtype, or autocast's if autocast is on."""
    dtype = autocast_dtype(weight.device)
    return weight.dtype if dtype is None or weight.dtype != torch.float32 else dtype


def select_valid(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return ``x`` [batch, time, ...] with zeros at invalid positions, not by a product (0 x NaN is NaN)."""
    if valid is None:
        return x
    mask = valid.reshape(*valid.shape, *([1] * (x.dim() - 2)))
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def real_resets(chunk: Chunk) -> Tensor | None:
    """Return the resets [batch, time] of a chunk that stand on valid tokens, or None when there can be none."""
    if chunk.reset is None or chunk.valid is None:
        return chunk.reset
    return chunk.reset & chunk.valid


def positions_of(chunk: Chunk, seen: Tensor) -> Tensor:
    """Return the position of every token of the chunk within its sequence, [batch, time] int64.

    ``seen`` [batch] is the number of tokens of the row's current sequence before this chunk. A model computes the
    positions once for all its layers, and passes them on in the chunk.
    """
    if chunk.positions is not None:
        return chunk.positions
    time = chunk.x.shape[1]
    index = torch.arange(time, device=seen.device)
    reset = real_resets(chunk)
    if reset is None:
        return seen[:, None] + index
    start = torch.where(reset, index, -1).cummax(dim=1).values
    return torch.where(start >= 0, index - start, seen[:, None] + index)


def advance(seen: Tensor, chunk: Chunk, positions: Tensor) -> Tensor:
    """Return the counter [batch] after a chunk with the tokens' ``positions`` [batch, time]."""
    if chunk.valid is None:
        return positions[:, -1] + 1
    count = chunk.valid.sum(dim=1)
    last = positions.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0] + 1
    return torch.where(count > 0, last, seen)


class Alignment(NamedTuple):
    """A left-alignment of rows: ``order`` [batch, time] gathers, ``inverse`` [batch, time] puts back."""

    order: Tensor
    inverse: Tensor
    valid: Tensor

    def align(self, x: Tensor) -> Tensor:
        """Return ``x`` [batch, time, ...] in the aligned order."""
        return _gathered(x, self.order)

    def restore(self, x: Tensor) -> Tensor:
        """Return ``x`` [batch, time, ...] in the caller's order, zero where it is not valid."""
        return _gathered(select_valid(x, self.valid), self.inverse)


def _gathered(x: Tensor, order: Tensor) -> Tensor:
    """Return rows of ``x`` [batch, time, ...] gathered by ``order`` [batch, time]."""
    return x.gather(1, order.reshape(*order.shape, *([1] * (x.dim() - 2))).expand(-1, -1, *x.shape[2:]))


def left_align(valid: Tensor) -> Alignment:
    """Return the stable order that moves each row's valid tokens to its front; a model calls this once per forward."""
    order = torch.argsort((~valid).to(torch.int8), dim=1, stable=True)
    inverse = torch.argsort(order, dim=1)
    return Alignment(order, inverse, valid.gather(1, order))


def right_align(slots: Tensor, count: Tensor, time: int) -> Tensor:
    """Shift rows of ``slots`` [batch, heads, past + time, ...] right so that each ends with its last valid token.

    ``count`` [batch] is the number of valid slots among the last ``time`` slots (a prefix). Slots that open up on the
    left repeat an arbitrary old slot; the caller clears them with its counter.
    """
    total = slots.shape[2]
    index = torch.arange(total, device=slots.device)[None] - (time - count)[:, None]
    index = index.clamp_min(0).reshape(slots.shape[0], 1, total, *([1] * (slots.dim() - 3)))
    return slots.gather(2, index.expand(-1, slots.shape[1], -1, *slots.shape[3:]))


def newest(chunk: Chunk, slots: Tensor, seen: Tensor, keep: int | None) -> Tensor:
    """Return the last ``keep`` (None: all) of ``slots`` [batch, heads, past + time, head_dim], the chunk's being the
    last.

    Right-aligned, zero where a row has none: ``seen`` [batch] counts its tokens after the chunk.
    """
    if chunk.valid is not None:
        slots = right_align(slots, chunk.valid.sum(dim=1), chunk.x.shape[1])
    total = slots.shape[2]
    start = 0 if keep is None else max(0, total - keep)
    if start:
        slots = slots[:, :, start:].clone()  # a view would keep the whole chunk in memory
    if chunk.valid is None and chunk.reset is None:
        return slots
    age = torch.arange(total - start, 0, -1, device=seen.device)
    filled = (age <= seen[:, None])[:, None, :, None]
    return torch.where(filled, slots, slots.new_zeros(()))
