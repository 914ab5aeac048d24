"""Correct toy mixers: growing and windowed softmax attention, a decayed recurrence, a segment memory; and a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    advance,
    left_align,
    positions_of,
    real_resets,
    right_align,
    select_valid,
)
from kinformer.core.state import ReservedState, fork

DIM = 8


class PastState(NamedTuple):
    """Keys and values [batch, 1, slots, dim] of the past, right-aligned, and how many tokens were seen [batch]."""

    k: Tensor
    v: Tensor
    seen: Tensor

    def reserve(self, length: int) -> ReservedPast:
        room = self.k.new_zeros(*self.k.shape[:2], length, self.k.shape[3])
        k, v = (torch.cat([past, room], dim=2) for past in (self.k, self.v))
        return ReservedPast(k, v, self.seen.clone(), self.k.shape[2], [0])


PastState.slots = ("k", "v")


class ReservedPast(ReservedState):
    """The first ``length`` slots of the buffers ``k`` and ``v`` are the past."""

    def __init__(self, k: Tensor, v: Tensor, seen: Tensor, length: int, ticket: list[int]) -> None:
        super().__init__(ticket)
        self.k, self.v, self.seen, self.length = k, v, seen, length
        self.before = fork(self.view())  # later steps write over the past

    def view(self) -> PastState:
        return PastState(self.k[:, :, : self.length], self.v[:, :, : self.length], self.seen)

    def written(self, past: PastState, ticket: list[int]) -> ReservedPast:
        length = past.k.shape[2]
        self.k[:, :, :length], self.v[:, :, :length] = past.k, past.v
        return ReservedPast(self.k, self.v, past.seen, length, ticket)

    def value(self) -> PastState:
        self.check()
        return fork(self.view())

    def map(self, function: Callable[[Tensor], Tensor]) -> ReservedPast:
        self.check()
        k, v, seen = (function(leaf.clone()) for leaf in (self.k, self.v, self.seen))
        return type(self)(k, v, seen, self.length, [0])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.seen

    def reclaimed(self) -> ReservedPast:
        self._ticket[0] += 1
        k, v = (torch.zeros_like(leaf) for leaf in (self.k, self.v))
        k[:, :, : self.length], v[:, :, : self.length] = self.before.k, self.before.v
        return type(self)(k, v, self.seen, self.length, self._ticket)


def keep_newest(slots: Tensor, seen: Tensor, limit: int | None) -> Tensor:
    """The newest ``limit`` slots of [batch, 1, slots, dim]; those older than the row's sequence are zeros."""
    total = slots.shape[2]
    kept = total if limit is None else min(limit, total)
    age = total - torch.arange(total, device=slots.device)
    slots = torch.where((age <= seen[:, None])[:, None, :, None], slots, torch.zeros((), dtype=slots.dtype))
    return slots[:, :, total - kept :]


def absorbed(past: Tensor, new: Tensor, chunk: Chunk) -> Tensor:
    """``new`` [batch, 1, time, dim] appended to ``past``, right-aligned per row."""
    slots = torch.cat([past, new], dim=2)
    return slots if chunk.valid is None else right_align(slots, chunk.valid.sum(dim=1), new.shape[2])


class Attention(CausalMixer):
    """One-headed causal softmax attention, over everything or over a window."""

    def __init__(self, dim: int = DIM, window: int | None = None) -> None:
        super().__init__()
        self.dim, self.window = dim, window
        self.growth = "linear" if window is None else "window"
        self.project = nn.Linear(dim, 3 * dim)

    @property
    def retained(self) -> int | None:
        return None if self.window is None else self.window - 1

    def initial_state(self, batch, *, device=None, dtype=None):
        empty = torch.zeros(batch, 1, 0, self.dim, device=device, dtype=dtype)
        return PastState(empty, empty.clone(), torch.zeros(batch, dtype=torch.int64, device=device))

    def state_bytes(self, length, *, dtype=torch.float32):
        return 2 * self.dim * dtype.itemsize * min(length, length if self.window is None else self.window - 1) + 8

    def visible(self, positions: Tensor, past: int) -> Tensor:
        """[batch, time, past + time]: a row's keys lie at consecutive positions, so slots differ as positions do."""
        query = past + torch.arange(positions.shape[1])[:, None]
        key = torch.arange(past + positions.shape[1])
        reach = positions if self.window is None else positions.clamp_max(self.window - 1)
        return (key <= query) & (key >= query - reach[..., None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scores = (q @ k[:, 0].mT / self.dim**0.5).masked_fill(~visible, -torch.inf)
        return scores.softmax(dim=-1).masked_fill(~visible, 0) @ v[:, 0]

    def forward(self, chunk, state):
        if isinstance(state, ReservedPast):
            ticket = state.consume()
            y, past = self.step(chunk, state.view())
            return y, state.written(past, ticket)
        return self.step(chunk, state)

    def step(self, chunk: Chunk, state: PastState) -> tuple[Tensor, PastState]:
        positions = positions_of(chunk, state.seen)
        q, k, v = self.project(select_valid(chunk.x, chunk.valid)).chunk(3, dim=-1)
        k, v = k[:, None].to(state.k.dtype), v[:, None].to(state.v.dtype)
        keys, values = torch.cat([state.k, k], dim=2), torch.cat([state.v, v], dim=2)
        y = self.attend(q.to(keys.dtype), keys, values, self.visible(positions, state.k.shape[2]))
        seen = advance(state.seen, chunk, positions)
        k, v = (
            keep_newest(absorbed(past, new, chunk), seen, self.retained) for past, new in ((state.k, k), (state.v, v))
        )
        return select_valid(y.to(chunk.x.dtype), chunk.valid), PastState(k, v, seen)


class SumState(NamedTuple):
    total: Tensor
    seen: Tensor


class Recurrence(CausalMixer):
    """A decayed sum of inputs, read through a gate."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.project = nn.Linear(dim, 2 * dim)

    def initial_state(self, batch, *, device=None, dtype=None):
        accumulate = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        total = torch.zeros(batch, self.dim, device=device, dtype=accumulate)
        return SumState(total, torch.zeros(batch, dtype=torch.int64, device=device))

    def state_bytes(self, length, *, dtype=torch.float32):
        return self.dim * torch.promote_types(dtype, torch.float32).itemsize + 8

    def forward(self, chunk, state):
        x = select_valid(chunk.x, chunk.valid)
        gate, value = self.project(x).to(state.total.dtype).chunk(2, dim=-1)
        total, outputs = state.total, []
        resets = real_resets(chunk)
        for t in range(x.shape[1]):
            if resets is not None:
                total = total.masked_fill(resets[:, t, None], 0)
            new = 0.8 * total + value[:, t]
            total = new if chunk.valid is None else torch.where(chunk.valid[:, t, None], new, total)
            outputs.append(gate[:, t].sigmoid() * total)
        seen = advance(state.seen, chunk, positions_of(chunk, state.seen))
        return select_valid(torch.stack(outputs, dim=1).to(x.dtype), chunk.valid), SumState(total, seen)


class HiddenState(NamedTuple):
    hidden: Tensor
    seen: Tensor


HiddenState.slots = ("hidden",)


class SegmentMemory(CausalMixer):
    """Transformer-XL: a query sees its own segment and ``memory`` hidden states before it, which are detached."""

    growth = "window"

    def __init__(self, dim: int = DIM, segment: int = 5, memory: int = 5) -> None:
        super().__init__()
        self.dim, self.segment, self.memory = dim, segment, memory
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)

    @property
    def retained(self) -> int:
        return self.memory + self.segment - 1

    def initial_state(self, batch, *, device=None, dtype=None):
        hidden = torch.zeros(batch, 1, 0, self.dim, device=device, dtype=dtype)
        return HiddenState(hidden, torch.zeros(batch, dtype=torch.int64, device=device))

    def state_bytes(self, length, *, dtype=torch.float32):
        return self.dim * dtype.itemsize * min(length, self.retained) + 8

    def begins(self, positions: Tensor) -> Tensor:
        """Where the segment of each position begins."""
        return positions - positions % self.segment

    def forward(self, chunk, state):
        x = select_valid(chunk.x, chunk.valid)
        positions = positions_of(chunk, state.seen)
        past, time = state.hidden.shape[2], x.shape[1]
        hidden = torch.cat([state.hidden, x[:, None].to(state.hidden.dtype)], dim=2)
        query = past + torch.arange(time)[:, None]
        key = positions[..., None] - (query - torch.arange(past + time))
        begin = self.begins(positions)[..., None]
        visible = (key >= 0) & (key <= positions[..., None]) & (key >= begin - self.memory)
        y = self.attend(x, hidden[:, 0], visible, key >= begin)
        seen = advance(state.seen, chunk, positions)
        kept = keep_newest(absorbed(state.hidden, x[:, None].to(hidden.dtype), chunk), seen, self.retained)
        return select_valid(y.to(chunk.x.dtype), chunk.valid), HiddenState(kept, seen)

    def attend(self, x: Tensor, hidden: Tensor, visible: Tensor, learns: Tensor) -> Tensor:
        q = self.query(x)
        k, v = self.key_value(hidden.to(x.dtype)).chunk(2, dim=-1)
        k_still, v_still = self.key_value(hidden.to(x.dtype).detach()).chunk(2, dim=-1)
        scores = torch.where(learns, q @ k.mT, q @ k_still.mT) / self.dim**0.5
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return (weights * learns) @ v + (weights * ~learns) @ v_still


class Model(nn.Module):
    """Two mixers with residuals between an embedding and a readout; ``valid`` may be any mask."""

    def __init__(self, vocab_size: int = 11, dim: int = DIM) -> None:
        super().__init__()
        self.embedding, self.readout = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
        self.mixers = nn.ModuleList([Recurrence(dim), Attention(dim, window=5), Attention(dim)])

    def forward(self, tokens, state=None, *, valid=None, reset=None):
        x = self.embedding(tokens)
        if valid is not None:
            aligned = left_align(valid)
            x = x.gather(1, aligned.order[..., None].expand_as(x))
            reset = None if reset is None else reset.gather(1, aligned.order)
            valid = aligned.valid
        if state is None:
            state = tuple(mixer.initial_state(len(x), dtype=x.dtype) for mixer in self.mixers)
        ends = []
        for mixer, own in zip(self.mixers, state, strict=True):
            y, end = mixer(Chunk(x, valid, reset), own)
            x = x + y
            ends.append(end)
        if valid is not None:
            x = x.gather(1, aligned.inverse[..., None].expand_as(x))
        return self.readout(x), tuple(ends)
