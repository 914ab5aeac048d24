"""Attention with a memory and a compressed memory of earlier segments, and how memories are compressed.

At the end of each segment its inputs join the memory. The oldest memories are compressed, ``rate`` vectors into one,
and join the compressed memory, whose oldest vectors are dropped. Both begin empty. All are inputs as they enter the
layer; where its norm stands before the mixer, attention reads them through it. As in Transformer-XL no gradient of the
outputs reaches inputs of earlier segments, while the projections learn from both memories. Nor does it reach the
compression: that learns to preserve, measured where it happens, by a loss of :class:`Compressive`. Its old and h, the
norm and the projections of this attention (by content alone, before the output product) are constants here. The state's
``aux`` accumulates these costs times the tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from kinformer.core.config import Config, check_unused
from kinformer.core.contract import (
    AS_THEY_ARE,
    CausalMixer,
    Chunk,
    MixerConfig,
    RecomputesKV,
    real_resets,
    select_valid,
    state_dtype,
)
from kinformer.core.parts import PositionConfig, ProjectionConfig, Relative, check_forgetful, head_width, merge_heads
from kinformer.core.probe import probe
from kinformer.core.state import State, join_rows, select_rows
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl, slot_sums
from kinformer.parts.patterns.sequence import Causal
from kinformer.parts.projections import MultiHead
from kinformer.parts.relative_positions import TransformerXL
from kinformer.runtime.compiling import HostDriven, host_ints, uncompiled
from kinformer.runtime.errors import KinformerError

# The state of compressive attention: the memory, the compressed memory and their projections.


class CompressiveState(NamedTuple):
    """All slots right-aligned: ``hidden_states`` [batch, 1, past, dim] the last ``memory + segment - 1`` inputs,
    ``usage`` [batch, 1, past, 1 or 0] the probability with which queries looked at them, ``compressed`` [batch, 1,
    slots, dim]; ``k``, ``v`` and ``compressed_k``, ``compressed_v`` [batch, kv_heads, slots, head_dim] are their
    projections without gradients (with gradients no slots). ``aux`` [batch] compression's costs, ``seen`` [batch]."""

    hidden_states: Tensor
    k: Tensor
    v: Tensor
    usage: Tensor
    compressed: Tensor
    compressed_k: Tensor
    compressed_v: Tensor
    aux: Tensor
    seen: Tensor

    slots = ("hidden_states", "k", "v", "usage", "compressed", "compressed_k", "compressed_v")  # type: ignore[misc]
    derived = {  # type: ignore[misc]
        "k": "hidden_states",
        "v": "hidden_states",
        "compressed_k": "compressed",
        "compressed_v": "compressed",
    }
    aux_name = "compression"  # type: ignore[misc]


# Groups of a chunk's rows that stand at one position of their sequences, for mixers with rare events at positions.


class RowGroup(NamedTuple):
    """A group of rows: ``chosen`` (None: all rows), their ``time`` in tokens, how many tokens their sequences have
    ``seen`` before, and where in the chunk new sequences ``begin``."""

    chosen: list[int] | None
    time: int
    seen: int
    begin: tuple[int, ...]


def last_slots(slots: Tensor, count: int) -> Tensor:
    """Return the last ``count`` of ``slots`` [batch, heads, slots, ...], or as many as there are."""
    start = max(0, slots.shape[2] - count)
    # A view would keep the other slots in memory.
    return slots[:, :, start:].clone() if start > count else slots[:, :, start:]


_Run = Callable[[Tensor, State, RowGroup], tuple[Tensor, State]]


def by_position(chunk: Chunk, state: State, past: int, run: _Run) -> tuple[Tensor, State]:
    """Return outputs and state of a chunk, from ``run(x [rows, time, dim], state, rows)`` for each group of rows.

    ``state`` has the leaf ``seen`` [batch], and ``past`` slots where tensors are shapes alone.
    """
    x, time = select_valid(chunk.x, chunk.valid), chunk.x.shape[1]
    groups = list(_alike(chunk, state.seen, past))
    if len(groups) == 1 and groups[0].chosen is None:
        return run(x, state, groups[0])
    outputs, ends, order = [], [], []
    for rows in groups:
        index = torch.tensor(rows.chosen, device=x.device)
        y, end = run(x[index, : rows.time], select_rows(state, index), rows)
        outputs.append(pad(y, (0, 0, 0, time - rows.time)))
        ends.append(end)
        order += rows.chosen or []
    back = torch.tensor(order, device=x.device).argsort()
    return torch.cat(outputs)[back], select_rows(join_rows(ends), back)


def _alike(chunk: Chunk, seen: Tensor, past: int) -> Iterator[RowGroup]:
    """Yield the groups of rows with equally many tokens before and in the chunk, and resets at the same tokens."""
    batch, time = chunk.x.shape[:2]
    before = host_ints(seen, past)
    assert before is not None
    counts = [time] * batch if chunk.valid is None else chunk.valid.sum(dim=1).tolist()
    begin: list[list[int]] = [[] for _ in range(batch)]
    reset = real_resets(chunk)
    for row, position in [] if reset is None else reset.nonzero().tolist():
        begin[row].append(position)
    groups: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for row in range(batch):
        groups.setdefault((counts[row], before[row], tuple(begin[row])), []).append(row)
    for (count, first, begins), rows in groups.items():
        yield RowGroup(None if len(rows) == batch and count == time else rows, count, first, begins)


# The reconstruction cost of compression, which trains the compression alone (Rae et al. 2019, section 3.1).


def attention_loss(projection: nn.Module, tokens: Tensor, old: Tensor, compressed: Tensor, scale: float) -> Tensor:
    """Return the mean square [batch] of the difference between attention of ``tokens`` [batch, time, dim] to ``old``
    [batch, n, dim] and to ``compressed`` [batch, n / rate, dim], by content alone.

    ``projection`` makes q, k, v of each, a norm before it included. Its weights are constants here, and so are
    ``tokens`` and ``old``.
    """
    with torch.no_grad():
        q = projection(tokens)[0]
        _, k, v = projection(old)
        expected = _read(q, k, v, scale)
    weights = {name: weight.detach() for name, weight in projection.named_parameters()}
    _, k, v = functional_call(projection, weights, (compressed,))
    error = (_read(q, k, v, scale) - expected).to(state_dtype(old.dtype))
    return error.square().mean(dim=(1, 2, 3))


def _read(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention of every query to every key."""
    return attention(q, k, v, Visibility(), Scoring(scale), impl="chunked").out


# Compressions of old memories: every ``rate`` memories become one (Rae et al. 2019, Compressive Transformers).
#
# A function takes the memories that fall out of a queue together, oldest first, and gives as many as ``rate`` goes
# into them. Those with weights are trained by reconstruction alone: see ``mixers.compressive``.


class Compression(nn.Module):
    """The base of compressions: (old [batch, n, dim], usage [batch, n]) -> [batch, n / rate, dim]; ``rate`` divides n.

    ``usage`` is the mean probability with which queries looked at each, for a function with ``counts``; else None.
    """

    counts: bool = False

    def __init__(self, config: CompressionConfig, dim: int) -> None:
        super().__init__()
        self.rate = config.rate

    @property
    def learns(self) -> bool:
        """Return whether the compression has weights."""
        return any(True for _ in self.parameters())

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        raise NotImplementedError


class CompressionConfig(Config):
    slot = "compression"
    LEAST = {"rate": 1}  # 1: nothing is compressed
    rate: int = 4

    def build(self, dim: int) -> Compression:
        return self.builds(self, dim)


class Pool(Compression):
    """The largest or mean value of each feature over ``rate`` neighbours."""

    class Config(CompressionConfig):
        kind = "pool"
        take: Literal["mean", "max"] = "mean"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.take = config.take

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        groups = old.unflatten(1, (-1, self.rate))
        return groups.mean(2) if self.take == "mean" else groups.amax(2)


class Convolution(Compression):
    """A convolution with kernel and stride ``rate``: one product of ``rate`` neighbours."""

    class Config(CompressionConfig):
        kind = "convolution"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.product = nn.Linear(config.rate * dim, dim)

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        return self.product(old.unflatten(1, (-1, self.rate)).flatten(2))


class DilatedConvolution(Convolution):
    """Convolutions of three memories each, with dilations 1, 2, 4, ..., then one with kernel and stride ``rate``.

    The paper names dilated convolutions without their sizes: these are ours. Beyond both ends stand zeros.
    """

    class Config(Convolution.Config):
        kind = "dilated"
        LEAST = {"depth": 1}
        depth: int = 2

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.dilated = nn.ModuleList(nn.Linear(3 * dim, dim) for _ in range(config.depth))

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        count = old.shape[1]
        for level, product in enumerate(self.dilated):
            dilation = 2**level
            wide = pad(old, (0, 0, dilation, dilation))
            old = product(torch.cat([wide[:, i * dilation : i * dilation + count] for i in range(3)], dim=-1)).relu()
        return super().forward(old, usage)


class MostUsed(Compression):
    """The one in ``rate`` memories with the most attention; of equals the older goes. The order stays."""

    counts = True

    class Config(CompressionConfig):
        kind = "most_used"

    def forward(self, old: Tensor, usage: Tensor | None) -> Tensor:
        assert usage is not None
        ranked = usage.flip(1).argsort(dim=1, descending=True, stable=True)
        chosen = (old.shape[1] - 1 - ranked[:, : old.shape[1] // self.rate]).sort(dim=1).values
        return old.gather(1, chosen[..., None].expand(-1, -1, old.shape[2]))


class Expansion(nn.Linear):
    """The learnt inverse of a compression: [batch, n, dim] -> [batch, n * rate, dim]."""

    def __init__(self, rate: int, dim: int) -> None:
        super().__init__(dim, rate * dim)
        self.rate = rate

    def forward(self, compressed: Tensor) -> Tensor:
        return super().forward(compressed).unflatten(-1, (self.rate, -1)).flatten(1, 2)


_LACKING = "What a row lacks of 1 is on compressed memories, which are not tokens of the text."


class Compressive(RecomputesKV, HostDriven, CausalMixer):
    """Attention with a memory and a compressed memory of earlier segments (Rae et al. 2019, Compressive Transformers).

        softmax attention over [compressed; memory; own segment so far], distances counted in slots
        auto-encoding   mean |old - expand(compress(old))|^2
        attention       mean |attend(h, old) - attend(h, compress(old))|^2      (h: the finished segment)

    The last two lines are the losses of the compression (``loss``). ``head_dim`` defaults to dim / num_heads.
    """

    growth = "window"

    class Config(MixerConfig):
        kind = "compressive"
        indivisible = "its state adds up costs of all heads"
        LEAST = {"segment": 1, "memory": 0, "compressed": 0}
        num_heads: int = 4
        head_dim: int | None = None
        segment: int = 128
        memory: int = 128
        compressed: int = 128
        compression: CompressionConfig = Convolution.Config()
        loss: Literal["attention", "auto-encoding"] = "attention"
        loss_weight: float = 1.0
        projection: ProjectionConfig = MultiHead.Config(bias=False)
        position: PositionConfig = TransformerXL.Config()
        bias: bool = False  # of the output projection
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def __post_init__(self) -> None:
            rate = self.compression.rate
            for name in ("segment", "memory"):
                if getattr(self, name) % rate:
                    raise KinformerError(
                        f"{name} = {getattr(self, name)} is not a multiple of the compression's rate of {rate}, so "
                        f"that memories would be left over; use {getattr(self, name) // rate * rate + rate}."
                    )

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.dim, self.head_dim = config, dim, config.head_dim or head_width(dim, config.num_heads)
        self.segment, self.memory = config.segment, config.memory
        self.projection = config.projection.build(dim, config.num_heads, self.head_dim)
        check_forgetful(self.projection, config.projection)
        self.position = config.position.build_heads(dim, config.num_heads, self.head_dim)
        self.compression = config.compression.build(dim)
        if not self.compression.learns:
            why = f"with the compression {config.compression.kind!r}, which does not have weights"
            check_unused(config, why, "loss", "loss_weight")
        autoencodes = self.compression.learns and config.loss == "auto-encoding"
        self.expansion = Expansion(self.compression.rate, dim) if autoencodes else None
        self.out = config.projection.build_output(dim, config.num_heads, self.head_dim, config.bias)
        self.scale, self.pattern = self.head_dim**-0.5, Causal.Config().build()
        check_impl(config.impl, Needs(lse=True), "compressive")  # sums of attention by slot come from log-sum-exps
        self.most_past = config.memory + config.segment - 1

    @property
    def host_reads(self) -> str:
        return "it cuts segments where each sequence has come to"

    @property
    def retained(self) -> int:
        lookback = self.memory + self.config.compressed * self.compression.rate
        return max(self.most_past, -(-lookback // self.segment) * self.segment)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> CompressiveState:
        hidden_states = torch.zeros(batch, 1, 0, self.dim, device=device, dtype=dtype)
        empty = hidden_states.new_zeros(batch, self.projection.num_kv_heads, 0, self.head_dim)
        usage = hidden_states.new_zeros(batch, 1, 0, int(self.compression.counts), dtype=state_dtype(dtype))
        aux = usage.new_zeros(batch)
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return CompressiveState(hidden_states, empty, empty, usage, hidden_states, empty, empty, aux, seen)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        wide, past = state_dtype(dtype).itemsize, min(length, self.most_past)
        slots = past + self._compressed_after(length)
        width = self.dim + 2 * self.projection.num_kv_heads * self.head_dim
        return slots * width * dtype.itemsize + past * wide * self.compression.counts + wide + 8

    def _compressed_after(self, seen: int) -> int:
        """Return how many compressed vectors a sequence of ``seen`` tokens has."""
        evicted = max(0, seen // self.segment * self.segment - self.memory)
        return min(self.config.compressed, evicted // self.compression.rate)

    @uncompiled("segments are cut where each row has come to, which the host reads")
    def forward(
        self, chunk: Chunk, state: CompressiveState, norm: nn.Module = AS_THEY_ARE
    ) -> tuple[Tensor, CompressiveState]:
        slots = state.hidden_states.shape[2] + state.compressed.shape[2] + chunk.x.shape[1]
        relative = self.position.relative(0, min(slots, self.config.compressed + self.most_past + 1) - 1)
        run = partial(self._rows, relative=relative, norm=norm)
        return by_position(chunk, state, state.hidden_states.shape[2], run)

    def _rows(
        self, x: Tensor, state: CompressiveState, rows: RowGroup, relative: Relative | None, norm: nn.Module
    ) -> tuple[Tensor, CompressiveState]:
        """Absorb ``x`` [rows, time, dim] of sequences at one position, by parts that end with a segment or sequence."""
        seen, outputs, at = rows.seen, [], 0
        state = self._trimmed(state, seen)
        while at < x.shape[1]:
            if at in rows.begin:
                new = self.initial_state(x.shape[0], device=x.device, dtype=state.hidden_states.dtype)
                seen, state = 0, new._replace(aux=state.aux)
            stop = min(x.shape[1], at + self.segment - seen % self.segment, *(i for i in rows.begin if i > at))
            y, state = self._piece(x[:, at:stop], state, seen, relative, norm)
            outputs.append(y)
            seen, at = seen + stop - at, stop
            if seen % self.segment == 0:
                state = self._turned(state, seen, norm)
            state = self._trimmed(state, seen)
        if self.training and torch.is_grad_enabled() and self.config.compressed:
            # Engines expect a gradient of every parameter, also where no segment ended.
            parts = [part for part in (self.compression, self.expansion) if part is not None]
            nothing = sum(0.0 * weight.sum() for part in parts for weight in part.parameters())
            state = state._replace(aux=state.aux + nothing)
        return torch.cat(outputs, dim=1) if outputs else x, state

    def _piece(
        self, x: Tensor, state: CompressiveState, seen: int, relative: Relative | None, norm: nn.Module
    ) -> tuple[Tensor, CompressiveState]:
        """Absorb ``x``, within one segment of sequences with ``seen`` tokens before it; a query sees all before it."""
        filled, time = seen % self.segment, x.shape[1]
        remembered, edge = min(seen - filled, self.memory), state.hidden_states.shape[2] - filled
        hidden_states = torch.cat([state.hidden_states[:, :, :edge].detach(), state.hidden_states[:, :, edge:]], dim=2)
        q, k, v = self.projection(norm(x))
        v, recent = self.position.values(probe("values", v, seen, lacking=_LACKING)), slice(edge - remembered, None)
        if torch.is_grad_enabled():
            before = torch.cat([state.compressed.detach(), hidden_states[:, :, recent]], dim=2)
            before_k, before_v = self._keys_values(before, norm)
            state = state._replace(
                **{name: getattr(state, name)[:, :, :0].detach() for name in CompressiveState.derived}
            )
        else:
            state = self._projected(state, k, norm)
            before_k = torch.cat([state.compressed_k, state.k[:, :, recent]], dim=2)
            before_v = torch.cat([state.compressed_v, state.v[:, :, recent]], dim=2)
            state = state._replace(k=torch.cat([state.k, k], dim=2), v=torch.cat([state.v, v], dim=2))
        keys, values = torch.cat([before_k, k], dim=2), torch.cat([before_v, v], dim=2)
        y, sums = self._attend(q, keys, values, relative)
        if sums is not None:
            usage = pad(state.usage, (0, 0, 0, time))
            usage[:, :, recent] += sums[:, -(remembered + filled + time) :].unsqueeze(1).unsqueeze(-1)
            state = state._replace(usage=usage)
        hidden_states = torch.cat([hidden_states, x[:, None].to(hidden_states.dtype)], dim=2)
        y = self.out(probe("outputs", merge_heads(y), seen))
        return y, state._replace(hidden_states=hidden_states, seen=state.seen + time)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, relative: Relative | None) -> tuple[Tensor, Tensor | None]:
        """Return outputs and, where the compression counts them, the probabilities [batch, slots] of the slots, summed
        over the queries, mean over heads. The last slots of k and v belong to the queries themselves."""
        batch, slots, time = k.shape[0], k.shape[2], q.shape[2]
        slot_positions = torch.arange(slots, device=k.device).expand(batch, -1)
        q, _ = self.position.rotate(q, k[:, :, -time:], slot_positions[:, -time:])
        k = self.position.rotate_keys(k, slot_positions)
        dropout = AttentionDropout.drawn(self.config.dropout, self.training)
        relative = None if relative is None else relative.below(slots)
        visibility = Visibility(self.pattern, slot_positions[:, -time:], whole=True)
        scoring, impl = Scoring(self.scale, relative=relative, dropout=dropout), self.config.impl
        y = attention(q, k, v, visibility, scoring, impl=impl).out
        if not self.compression.counts:
            return y, None
        return y, slot_sums(q, k, v, visibility, scoring, impl=impl).mean(1)

    def _turned(self, state: CompressiveState, seen: int, norm: nn.Module) -> CompressiveState:
        """Return the state after a segment, which ends at ``seen`` tokens: older memories than ``memory`` are
        compressed."""
        state = state._replace(hidden_states=state.hidden_states.detach())
        lookback = min(seen, self.memory + self.segment)  # tokens since the oldest that was not compressed before
        falling = lookback - min(seen, self.memory)
        if not falling or not self.config.compressed:
            return state
        start = state.hidden_states.shape[2] - lookback
        tokens = state.hidden_states[:, 0].to(self.out.weight.dtype)  # type: ignore[arg-type]
        old, usage = tokens[:, start : start + falling], None
        if self.compression.counts:
            queries = torch.arange(lookback, lookback - falling, -1, device=old.device)
            # The mean over the queries that could see a slot: more queries could see older slots.
            usage = state.usage[:, 0, start : start + falling, 0] / queries
        new = self.compression(old, usage)
        if torch.is_grad_enabled() and self.compression.learns:
            cost = self._cost(tokens[:, -self.segment :], old, new, norm)
            state = state._replace(aux=state.aux + cost)
        new_states = new.detach().to(state.hidden_states.dtype)[:, None]
        if not torch.is_grad_enabled():
            pairs = zip((state.compressed_k, state.compressed_v), self._keys_values(new_states, norm), strict=True)
            k, v = (torch.cat(pair, dim=2) for pair in pairs)
            state = state._replace(compressed_k=k, compressed_v=v)
        return state._replace(compressed=torch.cat([state.compressed, new_states], dim=2))

    def _cost(self, tokens: Tensor, old: Tensor, new: Tensor, norm: nn.Module) -> Tensor:
        """Return a segment's cost [batch]: ``tokens`` of the finished segment, ``old`` memories and ``new`` ones."""
        if self.expansion is not None:
            loss = (self.expansion(new) - old).to(state_dtype(old.dtype)).square().mean(dim=(1, 2))
        else:
            loss = attention_loss(nn.Sequential(norm, self.projection), tokens, old, new, self.scale)
        return self.config.loss_weight * self.segment * loss

    def _projected(self, state: CompressiveState, like: Tensor, norm: nn.Module) -> CompressiveState:
        """Return the state with the projections that it lacks after a step with gradients."""
        if state.k.shape[2] < state.hidden_states.shape[2]:
            k, v = self._keys_values(state.hidden_states, norm)
            state = state._replace(k=k, v=v)
        if state.compressed_k.shape[2] < state.compressed.shape[2]:
            k, v = self._keys_values(state.compressed, norm)
            state = state._replace(compressed_k=k, compressed_v=v)
        return state._replace(**{name: getattr(state, name).to(like.dtype) for name in CompressiveState.derived})

    def _keys_values(self, hidden_states: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        k, v = self.projection.keys_values(norm(hidden_states[:, 0].to(self.out.weight.dtype)))  # type: ignore[arg-type]
        return k, self.position.values(v)

    def _trimmed(self, state: CompressiveState, seen: int) -> CompressiveState:
        """Return the state with the slots that sequences of ``seen`` tokens have; rows beside them may have more."""
        past, compressed = min(seen, self.most_past), self._compressed_after(seen)
        counts = {name: compressed if name.startswith("compressed") else past for name in CompressiveState.slots}
        return state._replace(**{name: last_slots(getattr(state, name), count) for name, count in counts.items()})


PARTS = {
    "CompressiveAttention": Compressive.Config,
    "PoolCompression": Pool.Config,
    "ConvolutionCompression": Convolution.Config,
    "DilatedCompression": DilatedConvolution.Config,
    "MostUsedCompression": MostUsed.Config,
}
