"""The states of softmax attention: its cache, and what projections, patterns and spans add to it; and what a call
brings and projects."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kinformer.core.contract import Chunk
from kinformer.core.reserved import KeysValues, ReservedKeysValues


class Pinned(NamedTuple):
    """Keys and values ``k``, ``v`` [batch, kv_heads, n, head_dim] of the first n tokens of a sequence."""

    k: Tensor
    v: Tensor


class ContextState(NamedTuple):
    """The state of attention whose projection has a context; ``recent`` [batch, heads, up to context, head_dim] are the
    projections of the last tokens, right-aligned."""

    attention: KeysValues | ReservedKeysValues
    recent: Tensor

    slots = ("recent",)  # type: ignore[misc]


Slots = KeysValues | ReservedKeysValues | ContextState


class PinnedState(NamedTuple):
    """The state ``attention`` of attention whose pattern pins the first tokens, and their keys and values
    [batch, kv_heads, pinned, head_dim], position j in slot j, zero where there is none yet."""

    attention: Slots
    first_keys: Tensor
    first_values: Tensor

    slots = ("first_keys", "first_values")  # type: ignore[misc]


class SpanState(NamedTuple):
    """The state ``attention`` of tokens with spans of their own, and ``aux`` [batch], the cost of the spans."""

    attention: Slots
    aux: Tensor

    aux_name = "span"  # type: ignore[misc]


CacheState = Slots | PinnedState | SpanState


def initial(empty: Tensor, seen: Tensor, recent: Tensor | None, pinned: int, aux: Tensor | None) -> CacheState:
    """Return the state of new sequences, from ``empty`` keys [batch, kv_heads, 0, head_dim] and ``seen``; ``recent``,
    ``pinned`` tokens and ``aux`` where there are any."""
    cache = KeysValues(empty, empty, seen)  # type: ignore[call-arg]
    state: Slots = cache if recent is None else ContextState(cache, recent)  # type: ignore[call-arg]
    first = empty.new_zeros(*empty.shape[:2], pinned, empty.shape[3])
    pins = PinnedState(state, first, first) if pinned else state  # type: ignore[call-arg]
    return pins if aux is None else SpanState(state, aux)  # type: ignore[call-arg]


class AttentionCall(NamedTuple):
    """A chunk and the tokens whose outputs are needed; ``z`` [batch, heads, time], the spans of its tokens, where each
    has its own; ``first``, the tokens pinned before it, where the pattern pins some."""

    chunk: Chunk
    output_mask: Tensor | None
    z: Tensor | None = None
    first: Pinned | None = None


class NewTokens(NamedTuple):
    """What is projected of a chunk: q (None where no output is needed), k and v, turned by position; ``far``, the
    queries turned by their ranks, for pinned tokens; ``recent``, what later tokens need of the projection."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    far: Tensor | None
    recent: Tensor | None
