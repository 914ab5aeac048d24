"""DeepSeek's sparse attention, DSA: each query attends to the tokens that a small indexer chooses for it.

    I_ts = sum_j w_tj relu(q^I_tj . k^I_s) / sqrt(index_heads index_dim)      the indexer's scores
    y_t  = latent attention of token t over the ``topk`` earlier tokens s of largest I_ts

(DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, section 2.1). The attention is latent attention in its absorbed
form, in which all heads share the vector of a chosen token. The indexer learns from the weights p of the attention:

    cost = sum_t KL(p_t || softmax_s I_ts),    p_t = the weights of token t, averaged over heads

over all earlier tokens in the dense warm-up (``topk`` None), over the chosen tokens afterwards. p and, in training, the
inputs of the indexer are constants. The state's ``aux`` adds up the cost in training.

``BLOCK`` queries are computed at a time, and the backward pass computes a block again. So the indexer's scores exist
for one block, and memory between the passes holds time * topk numbers of the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinformer.core.attention_state import Past, ReservedSlots, TokenMemoryState
from kinformer.core.contract import Chunk, MixerConfig, select_valid, state_dtype
from kinformer.core.parts import PositionConfig, merge_heads
from kinformer.core.probe import probe, probed
from kinformer.core.state import State
from kinformer.mixers.memory import LatentAttention
from kinformer.parts.relative_positions import Rope
from kinformer.runtime.autograd import no_autocast, transformed
from kinformer.runtime.errors import KinformerError

BLOCK = 64


class IndexedState(NamedTuple):
    """The state: the cache ``attention``, whose memory [batch, 1, past, index_dim + rotary_dim + latent_dim] holds the
    indexer's key, the shared rotary key, and the latent of keys and values; ``aux`` [batch], the indexer's cost."""

    attention: TokenMemoryState | ReservedSlots
    aux: Tensor

    aux_name = "indexer"  # type: ignore[misc]


class Queries(NamedTuple):
    """The queries of a block of tokens: absorbed queries ``q`` [batch, time, heads, rotary_dim + latent_dim], scaled,
    the indexer's queries ``index`` [batch, time, index_heads, index_dim] and ``weights`` [batch, time, index_heads]."""

    q: Tensor
    index: Tensor
    weights: Tensor


class IndexedAttention(LatentAttention):
    """The mixer x [batch, time, dim] -> y [batch, time, dim].

    A query attends to ``topk`` tokens; None: to all, the dense warm-up. ``index_heads`` heads of ``index_dim`` features
    (None: head_dim) choose them. Where scores are equal up to rounding, the last tokens are chosen. ``loss_weight``
    multiplies the indexer's cost; 0: the indexer does not learn. Latent attention has the same other settings.
    """

    crosses = False

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "indexed"
        indivisible = "its indexer learns from the weights of all heads"
        LEAST = LatentAttention.Config.LEAST | {"topk": 1, "index_heads": 1, "index_dim": 1, "loss_weight": 0}
        num_heads: int = 4
        head_dim: int | None = None
        value_dim: int | None = None
        rotary_dim: int | None = None
        latent_dim: int | None = None
        query_latent_dim: int | None = None
        position: PositionConfig = Rope.Config(layout="interleaved")
        topk: int | None = 64
        index_heads: int = 4
        index_dim: int | None = None
        index_position: PositionConfig = Rope.Config(fraction=0.5)
        loss_weight: float = 1.0
        eps: float = 1e-6  # of the norms of latents and of the indexer's keys

    def __init__(self, config: Config, dim: int) -> None:
        names = "num_heads", "head_dim", "value_dim", "rotary_dim", "latent_dim", "query_latent_dim", "position", "eps"
        super().__init__(LatentAttention.Config(**{name: getattr(config, name) for name in names}), dim)
        self.topk, self.loss_weight = config.topk, config.loss_weight
        self.index_heads, self.index_dim = config.index_heads, config.index_dim or self.head_dim
        self.width += self.index_dim
        self.index_position = config.index_position.build_heads(dim, self.index_heads, self.index_dim)
        for position, kind in (self.position, config.position.kind), (self.index_position, config.index_position.kind):
            if position.relative(0, 1) is not None or position.overrides("values"):
                raise KinformerError(
                    f"the position {kind!r} acts by the distance of a query and a key, but the mixer indexed gathers "
                    "keys without their distances; use rope or none."
                )
        self.index_query = nn.Linear(self.query.in_features, self.index_heads * self.index_dim, bias=False)
        self.index_key = nn.Linear(dim, self.index_dim, bias=False)
        self.index_norm = nn.LayerNorm(self.index_dim, eps=config.eps)
        self.index_weights = nn.Linear(dim, self.index_heads, bias=False)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        aux = torch.zeros(batch, device=device, dtype=state_dtype(dtype))
        return IndexedState(super().empty_state(batch, device, dtype), aux)  # type: ignore[call-arg]

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return super().state_bytes(length, dtype=dtype) + state_dtype(dtype).itemsize

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x, memory = super().remember(x, positions)
        index = self.index_norm(self.index_key(self._constant(x)))[:, None].to(memory.dtype)
        latents, turned = memory.split([self.latent_dim, self.rotary_dim], -1)
        return x, torch.cat([self.index_position.rotate_keys(index, positions), turned, latents], -1)

    def forward(self, chunk: Chunk, state: IndexedState) -> tuple[Tensor, IndexedState]:  # type: ignore[override]
        past = Past(chunk, state.attention, self)
        x, new = self.remember(select_valid(chunk.x, chunk.valid), past.positions)
        (slots,), _, after = past.remember((new,), None)
        slots = slots[:, 0]
        if probed("values"):  # The latents, which all heads share. Values are read at the end of a slot.
            latents = probe("values", slots[:, None, :, -self.latent_dim :])
            slots = torch.cat([slots, latents[:, 0]], -1)
        queries = self._all_queries(x, past.positions)
        with no_autocast(x.device):
            sums, cost = self._attend_blocks(queries, slots, past.positions)
        values = self._matrices()[1]
        sums = probe("outputs", sums.transpose(1, 2).to(queries.q.dtype))
        y = self.out(merge_heads(torch.einsum("bhtr,hvr->bhtv", sums, values.to(sums.dtype))))
        aux = state.aux + select_valid(cost, chunk.valid).sum(1).to(state.aux.dtype)
        return select_valid(y, chunk.valid), IndexedState(after, aux)  # type: ignore[call-arg]

    def _all_queries(self, x: Tensor, positions: Tensor) -> Queries:
        """Return the queries of the tokens x [batch, time, dim]."""
        latents = self._query_latents(x)
        plain, turned = self._queries(latents, positions).split([self.head_dim, self.rotary_dim], -1)
        q = torch.einsum("bhtd,hdr->bhtr", plain, self._matrices()[0].to(plain.dtype))
        q = torch.cat([turned, q], -1).transpose(1, 2) * self.score.scale
        index = self.index_query(self._constant(latents)).unflatten(-1, (self.index_heads, -1)).transpose(1, 2)
        index = self.index_position.rotate(index, index, positions)[0].transpose(1, 2)
        weights = self.index_weights(self._constant(x)) * (self.index_heads * self.index_dim) ** -0.5
        return Queries(q, index, weights)

    def _constant(self, x: Tensor) -> Tensor:
        """Return ``x`` as an input of the indexer, whose cost must not change what makes ``x``."""
        return x.detach() if self.training else x

    def _attend_blocks(self, queries: Queries, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over latents [batch, time, heads, latent_dim] in the slots [batch, past + time, width], and
        the cost [batch, time] of every token, ``BLOCK`` tokens at a time."""
        wide, time, parts = state_dtype(slots.dtype), positions.shape[1], []
        recompute = torch.is_grad_enabled() and time > BLOCK and not transformed()
        again: Any = partial(checkpoint, self._block, use_reentrant=False, preserve_rng_state=False)
        block = again if recompute else self._block
        for start in range(0, time, BLOCK):
            stop = min(start + BLOCK, time)
            some = Queries(*(leaf[:, start:stop].to(wide) for leaf in queries))
            seen = slots[:, : slots.shape[1] - time + stop]
            slot = torch.arange(start - time, stop - time, device=slots.device) + slots.shape[1]
            first = slot - positions[:, start:stop]  # the slot of the first token of the query's sequence
            chosen = None if self.topk is None or seen.shape[1] <= self.topk else self._choose(some, seen, first, slot)
            parts.append(block(some, seen, first, slot, chosen))
        sums, costs = zip(*parts, strict=True)
        return torch.cat(sums, 1), torch.cat(costs, 1)

    @torch.no_grad()
    def _choose(self, queries: Queries, slots: Tensor, first: Tensor, slot: Tensor) -> Tensor:
        """Return the slots that each query attends to, [batch, time, topk] int64, -1 where there are fewer."""
        assert self.topk is not None
        scores = _index_scores(queries, slots[:, None, :, : self.index_dim].to(queries.q.dtype)).float()
        # Scores of 18 bits (Veltkamp's splitting), so that rounding does not decide, and between equals the place. The
        # place of a slot adds less than a bit up to 2^26 slots.
        coarse = (65 * scores - (65 * scores - scores)).double()
        index = torch.arange(slots.shape[1], device=slots.device)
        order = coarse + (coarse.abs() + 1e-30) * index * 2.0**-45
        order = order.masked_fill((index < first[..., None]) | (index > slot[:, None]), -torch.inf)
        top, chosen = order.topk(self.topk, sorted=False)
        return chosen.masked_fill(top == -torch.inf, -1)

    def _block(
        self, queries: Queries, slots: Tensor, first: Tensor, slot: Tensor, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sums over latents [batch, time, heads, latent_dim] and the cost [batch, time] of some queries in
        the ``chosen`` slots, or in all slots of their sequences up to their own."""
        wide = queries.q.dtype
        if chosen is None:
            index = torch.arange(slots.shape[1], device=slots.device)
            rows, seen = slots[:, None], (index >= first[..., None]) & (index <= slot[:, None])
        else:
            # Of one sequence at a time, rows are copied whole; ``gather`` copies number by number.
            pairs = zip(slots.unbind(), chosen.clamp_min(0).flatten(1).unbind(), strict=True)
            rows = torch.stack([row.index_select(0, place) for row, place in pairs]).unflatten(1, chosen.shape[1:])
            seen = chosen >= 0
        rows = rows.to(wide)  # [batch, time or 1, n, width]
        keys = rows[..., self.index_dim : self.width]
        weights = _products(queries.q, keys).masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
        sums = _products(weights, rows[..., -self.latent_dim :].mT)
        if not (self.training and torch.is_grad_enabled() and self.loss_weight):
            return sums, sums.new_zeros(seen.shape[:2])
        target = weights.detach().mean(2)
        scores = _index_scores(queries, rows[..., : self.index_dim]).masked_fill(~seen, -torch.inf)
        likely = scores.log_softmax(-1).masked_fill(~seen, 0)
        return sums, self.loss_weight * (torch.xlogy(target, target) - target * likely).sum(-1)


def _products(x: Tensor, rows: Tensor) -> Tensor:
    """Return the products of x [batch, time, heads, width] with ``rows`` [batch, time or 1, n, width] of each token or
    of all tokens, [batch, time, heads, n]."""
    return (x.reshape(len(x), rows.shape[1], -1, x.shape[-1]) @ rows.mT).view(*x.shape[:3], -1)


def _index_scores(queries: Queries, keys: Tensor) -> Tensor:
    """Return the indexer's scores [batch, time, n] of its ``keys`` [batch, time or 1, n, index_dim]."""
    products = _products(queries.index, keys).relu()
    return (queries.weights.unsqueeze(2) @ products).squeeze(2)


PARTS = {"IndexedAttention": IndexedAttention.Config}
