"""Memorizing attention (Wu et al. 2022): a window, and a search among very many memories of the same sequence.

    y = (1 - g) local + g external,   g = sigmoid(gate) per head,   then an output projection
    local     softmax(|scale| q . k) v over the last ``window`` tokens
    external  softmax(|scale| q . k) v over the ``topk`` memories that a search by q returns of earlier segments

q and k are normalised, q / sqrt(q . q + 1e-6), v is not. A query of segment i // segment may find the ``memory_size``
positions before its segment. Memories take no gradient, queries do. Before there are memories the
external part is 0, but has its share g, as in the authors' code. A ``position`` adds to the scores of the window alone,
by distance (the paper: T5's biases); memories have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.attention_state import KeysValues, ReservedKeysValues
from kinformer.core.config import describe
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    MixerConfig,
    advance,
    in_blocks,
    newest,
    positions_of,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.parts import Position, PositionConfig, ResidualOutput, Score, head_width, merge_heads
from kinformer.core.pattern import Band
from kinformer.core.probe import probe
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.lookup import Evicted, Search, Store, StoreSizes, Subsequence, join
from kinformer.parts.positions import NoPosition
from kinformer.runtime.compiling import uncompiled
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import HostDriven, host_ints

_BLOCKS = 16
"""How many times the memory is copied while it fills: tokens leave the window in this many blocks."""


class MemorizingState(NamedTuple):
    """The state: ``k``, ``v`` [batch, heads, memories, head_dim] of evicted tokens, right-aligned and without a graph,
    up to the last multiple of the mixer's ``batch_of``; ``recent`` holds later tokens and the window, with their
    graph."""

    recent: KeysValues | ReservedKeysValues
    k: Tensor
    v: Tensor

    slots = ("k", "v")  # type: ignore[misc]


class Memorizing(HostDriven, CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim].

    ``search``: how memories are searched, see ``kernels.lookup``; "bucketed" is the authors'. ``sees_itself``: whether
    a token is in its own window (in the authors' code it is not). ``memory_size`` = 0 leaves the window alone; it, the
    search and ``topk`` change no weights. ``torch.compile`` leaves the look-up outside of the graph, since it needs
    positions on the host.
    """

    growth = "window"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "memorizing"
        LEAST = {"window": 1, "segment": 1, "memory_size": 0, "topk": 1}
        by_heads = True
        retired = {"lists": 64, "probes": 3}
        num_heads: int = 4
        head_dim: int | None = None
        window: int = 512
        segment: int = 512
        memory_size: int = 8192
        topk: int = 32
        search: Literal["bucketed", "exact"] = "bucketed"
        sees_itself: bool = True
        position: PositionConfig = NoPosition.Config()  # of the window
        bias: bool = False
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            if self.memory_size % self.segment:
                raise KinformerError(
                    f"memory_size = {self.memory_size} is not a multiple of segment = {self.segment}; whole segments "
                    "are remembered, so give a multiple."
                )
            if self.search == "bucketed" and self.segment % self.topk:
                raise KinformerError(
                    f"topk = {self.topk} does not divide segment = {self.segment}, which the bucketed search needs; "
                    "choose a divisor, or the search exact."
                )

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.config = config
        self.num_heads, self.head_dim = config.num_heads, config.head_dim or head_width(dim, config.num_heads)
        width = self.num_heads * self.head_dim
        self.qkv = in_blocks(nn.Linear(dim, 3 * width, bias=config.bias), width, width, width)
        self.scale = nn.Parameter(torch.ones(config.num_heads))
        self.gate = nn.Parameter(torch.zeros(config.num_heads))
        self.out = ResidualOutput(width, dim, bias=config.bias)
        back = config.window - 1 if config.sees_itself else config.window
        self.pattern = Band(behind=back, ahead=0 if config.sees_itself else -1)
        self.position = config.position.build_heads(dim, config.num_heads, self.head_dim)
        _check_position(config.position, self.position)
        needs = Needs.of_parts(self.pattern, Score(), self.position)
        check_impl(config.impl, needs._replace(memories=config.memory_size > 0), "memorizing")
        self.batch_of = config.segment * max(1, config.memory_size // config.segment // _BLOCKS)
        """How many memories are evicted at a time, counted by positions."""
        self.most_past = max(back, self.batch_of - 1) if config.memory_size else back
        self.rules = StoreSizes(config.segment, config.memory_size, self.batch_of)

    @property
    def host_reads(self) -> str:
        return "it evicts and searches memories" if self.config.memory_size else ""

    @property
    def retained(self) -> int:
        size = self.config.memory_size
        return max(self.most_past, size + self.batch_of if size else 0)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> MemorizingState:
        empty = torch.zeros(batch, self.num_heads, 0, self.head_dim, device=device, dtype=dtype)
        recent = KeysValues(empty, empty, torch.zeros(batch, dtype=torch.int64, device=device))  # type: ignore[call-arg]
        return MemorizingState(recent, empty, empty)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        evicted = min(length // self.batch_of * self.batch_of, self.config.memory_size)
        slots = min(length, self.most_past) + evicted
        return 2 * self.num_heads * slots * self.head_dim * dtype.itemsize + 8

    def forward(self, chunk: Chunk, state: MemorizingState) -> tuple[Tensor, MemorizingState]:
        recent = state.recent
        if isinstance(recent, KeysValues):
            return self._absorb(chunk, state, recent)
        if chunk.valid is not None or chunk.reset is not None:
            room = recent.room
            y, after = self._absorb(chunk, state, value := recent.release())
            return y, after._replace(recent=ReservedKeysValues.of(after.recent, room))
        positions = recent.positions(chunk)
        q, k, v = self._project(chunk.x)
        k, v, recent_state, full = recent.append(k, v, self.most_past)
        y = self._local(q, k, v, positions, whole=full)
        external, evicted = self._external(chunk, q, k, v, positions[:, 0], state)
        return self._mix(y, external), MemorizingState(recent_state, *evicted)  # type: ignore[call-arg]

    def _absorb(self, chunk: Chunk, state: MemorizingState, recent: KeysValues) -> tuple[Tensor, MemorizingState]:
        positions = positions_of(chunk, recent.seen)
        seen = advance(recent.seen, chunk, positions)
        q, k, v = self._project(select_valid(chunk.x, chunk.valid))
        past = recent.k.shape[2]
        seeing = _after(recent, k, v, self.pattern.behind or 0)
        y = self._local(q, *seeing, positions, whole=not past and chunk.reset is None)
        k, v = _after(recent, k, v, past)
        external, evicted = self._external(chunk, q, k, v, recent.seen, state)
        k, v = (newest(chunk, slots, seen, self.most_past) for slots in (k, v))
        after = MemorizingState(KeysValues(k, v, seen), *evicted)  # type: ignore[call-arg]
        return select_valid(self._mix(y, external), chunk.valid), after

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries and keys, and values [batch, heads, time, head_dim]."""
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        wide = (tensor.to(state_dtype(v.dtype)) for tensor in (q, k))
        q, k = (tensor * (tensor.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for tensor in wide)
        lacking = "The window's probabilities and the memories' are mixed by the gate of their head."
        return q.to(v.dtype), k.to(v.dtype), probe("values", v, lacking=lacking)

    def _scaled(self, q: Tensor) -> Tensor:
        return q * self.scale.abs()[:, None, None].to(q.dtype)

    def _local(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, whole: bool) -> Tensor:
        visibility = Visibility(self.pattern, positions, whole)
        farthest = min(k.shape[2] - 1, self.pattern.behind or 0)
        scoring = Scoring(1.0, relative=self.position.relative(0, farthest))
        return attention(self._scaled(q), k, v, visibility, scoring, impl=self.config.impl).out

    def _mix(self, local: Tensor, external: Tensor | None) -> Tensor:
        """Join both parts by the gate and project them; ``external`` None: the mixer has no memories, and the local
        part has the whole weight."""
        gate = self.gate.sigmoid()[:, None, None].to(local.dtype)
        # (1 - g) local + g external; 0 * gate gives engines a gradient of every parameter.
        y = local + 0.0 * gate if external is None else torch.lerp(local, external.to(local.dtype), gate)
        return self.out(probe("outputs", merge_heads(y)))

    @uncompiled("memories are searched and evicted by the host")
    def _external(
        self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, before: Tensor, state: MemorizingState
    ) -> tuple[Tensor | None, Evicted]:
        """Return the external part [batch, heads, time, head_dim], and the evicted memories after the chunk.

        k, v: of the recent past and of the chunk; ``before`` [batch] counts the tokens that each row's sequence had.
        """
        old = Evicted(*(item.detach() for item in state[1:]))
        if not self.config.memory_size:
            return None, old
        seen = host_ints(before, 0)
        assert seen is not None
        impl = self.config.impl
        assert impl != "sdpa" and impl != "flex"  # refused when it was built
        search = Search(self.config.search, self.config.topk, impl)
        outputs, after = [], []
        for rows, runs in self._runs(chunk, seen):
            fresh = (k[rows].detach(), v[rows].detach())
            evicted = Evicted(*(item[rows] for item in old))
            store = Store(self.rules, search, evicted, seen[rows.start], fresh, chunk.x.shape[1])
            outputs.append(store.absorb(q[rows], self._scaled(q[rows]), runs))
            after.append(store.evicted)
        return join(outputs), Evicted(*(join(list(item)) for item in zip(*after, strict=True)))

    def _runs(self, chunk: Chunk, seen: list[int]) -> Iterator[tuple[slice, list[Subsequence]]]:
        """Yield rows with the same subsequences of the chunk (all rows, or one by one), and these subsequences."""
        batch, time = chunk.x.shape[:2]
        reset = real_resets(chunk)
        if chunk.valid is None and reset is None and len(set(seen)) == 1:
            yield slice(0, batch), [Subsequence(0, time, seen[0], True)]
            return
        counts = [time] * batch if chunk.valid is None else host_ints(chunk.valid.sum(dim=1), time)
        for row, (count, position) in enumerate(zip(counts or (), seen, strict=True)):
            begins = [] if reset is None else reset[row].nonzero()[:, 0].tolist()
            runs = [
                Subsequence(begin, end, 0 if index else position, not index)
                for index, (begin, end) in enumerate(zip([0, *begins], [*begins, count], strict=True))
                if begin < end
            ]
            yield slice(row, row + 1), runs


def _check_position(config: PositionConfig, position: Position) -> None:
    """Refuse a position that changes queries, keys or values, which the search has in common with the window."""
    hooks = ("rotate", "rotate_keys", "values")
    changes = any(getattr(type(position), hook) is not getattr(Position, hook) for hook in hooks)
    if (relative := position.relative(0, 1)) is not None:
        changes |= any(table is not None for table in (relative.factor, relative.keys, relative.values))
    if changes:
        raise KinformerError(
            f"{describe(config)} changes more than the scores of the window, but memories are looked up with the same "
            "queries and keys, without positions; give none, or one that adds to scores by distance (t5, alibi)."
        )


def _after(recent: KeysValues, k: Tensor, v: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Return keys and values after the last ``keep`` recent ones."""
    past = recent.k.shape[2]
    start = past - keep if past > keep else 0  # a branch, since Inductor lacks kernels for sizes that hold a maximum
    if start == past:
        return k, v
    k, v = (torch.cat([old[:, :, start:].to(new.dtype), new], dim=2) for old, new in ((recent.k, k), (recent.v, v)))
    return k, v


PARTS = {"MemorizingAttention": Memorizing.Config}
