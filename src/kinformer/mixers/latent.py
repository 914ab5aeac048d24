"""Attention to one vector of every token, which all heads share: latent attention (MLA), and DeepSeek's sparse
attention (DSA), in which a query attends to some of these vectors."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinformer.core.attention_state import Past, ReservedSlots, TokenMemory, TokenMemoryState
from kinformer.core.contract import Chunk, MixerConfig, select_valid, state_dtype
from kinformer.core.parts import (
    PatternConfig,
    PositionConfig,
    ResidualOutput,
    ScoreConfig,
    UnpackedLinear,
    check_causal,
    check_heads,
    check_unpinned,
    head_width,
    is_plain,
    merge_heads,
)
from kinformer.core.probe import probe, probed
from kinformer.core.state import State
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.parts.output_parts import Gate, build_gate
from kinformer.parts.patterns.sequence import Causal
from kinformer.parts.projections import normed
from kinformer.parts.relative_positions import Rope
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.autograd import no_autocast, transformed
from kinformer.runtime.errors import KinformerError

Form = Literal["auto", "expanded", "absorbed"]


class LatentAttention(TokenMemory):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 19).

        c = rms(W_dkv x),   k^R = rotate(W_kr x)             the memory of a token, shared by all heads
        k_h = [W_uk,h c; k^R],   v_h = W_uv,h c
        q_h = [W_uq,h c^Q; rotate(W_qr,h c^Q)],   c^Q = rms(W_dq x), or x itself
        y = W_o [softmax(q_h k_h^T / sqrt(head_dim + rotary_dim)) v_h]_h

    A chunk has two forms. ``expanded`` makes the keys and values of every slot. ``absorbed`` moves W_uk to the query
    and W_uv behind the sum, so that it is attention with one head of keys, the memory itself:

        q_h . k_h = (W_uk,h^T q^C_h) . c + q^R_h . k^R,       sum_s p_s W_uv,h c_s = W_uv,h sum_s p_s c_s

    The mixer x [batch, time, dim] -> y [batch, time, dim]; its memory has ``latent_dim + rotary_dim`` numbers a token.

    ``head_dim`` (dim / num_heads by default) is the width of a key without its rotary part, ``value_dim`` (``head_dim``
    by default) the width of a value. ``rotary_dim`` (``head_dim`` / 2 by default) features of a key are common to all
    heads and turned by ``position``. ``latent_dim`` defaults to 4 ``head_dim``, ``query_latent_dim`` to queries
    straight from x. ``form``: "auto" takes the one with fewer multiplications.
    """

    class Config(MixerConfig):
        kind = "latent"
        LEAST = {"value_dim": 1, "latent_dim": 1, "query_latent_dim": 1, "rotary_dim": 0}
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        value_dim: int | None = None
        rotary_dim: int | None = None
        latent_dim: int | None = None
        query_latent_dim: int | None = None
        position: PositionConfig = Rope.Config(layout="interleaved")
        pattern: PatternConfig = Causal.Config()
        score: ScoreConfig = ScaledDot.Config()
        gate: Gate = "none"  # of the heads' outputs
        form: Form = "auto"
        eps: float = 1e-6  # of the norms of latents
        dropout: float = 0.0  # of the attention probabilities
        impl: AttentionImpl = "auto"

        def sizes(self, dim: int) -> tuple[int, int, int, int]:
            """Return head_dim, value_dim, rotary_dim and latent_dim."""
            width = self.head_dim or head_width(dim, self.num_heads)
            rotary_dim = width // 2 if self.rotary_dim is None else self.rotary_dim
            return width, self.value_dim or width, rotary_dim, self.latent_dim or 4 * width

        def explicit(self, dim: int) -> Self:
            """Return the config with these sizes."""
            names = "head_dim", "value_dim", "rotary_dim", "latent_dim"
            return self.replace(**dict(zip(names, self.sizes(dim), strict=True)))

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.dim, heads = config, dim, config.num_heads
        self.head_dim, self.value_dim, self.rotary_dim, self.latent_dim = config.sizes(dim)
        self.width = self.latent_dim + self.rotary_dim
        self.pattern = config.pattern.build()
        check_causal(config.pattern, self.pattern)
        check_heads(config.pattern, self.pattern, heads)
        check_unpinned(config.pattern, self.pattern)
        self.position = config.position.build_heads(dim, heads, self.rotary_dim or self.head_dim)
        self.score = config.score.build(heads, self.head_dim + self.rotary_dim)
        self._check_parts()
        check_impl(config.impl, Needs.of_parts(self.pattern, self.score, self.position, config.dropout), "latent")
        rank = config.query_latent_dim
        self.query_down = None if rank is None else nn.Linear(dim, rank, bias=False)
        self.query_norm = None if rank is None else nn.RMSNorm(rank, eps=config.eps)
        self.query = nn.Linear(rank or dim, heads * (self.head_dim + self.rotary_dim), bias=False)
        self.down = nn.Linear(dim, self.width, bias=False)
        self.norm = nn.RMSNorm(self.latent_dim, eps=config.eps)
        self.up = UnpackedLinear(self.latent_dim, heads * (self.head_dim + self.value_dim), bias=False)
        self.gate = build_gate(config.gate, dim, heads, self.value_dim)
        self.out = ResidualOutput(heads * self.value_dim, dim, bias=False)
        self.impl, self.form = config.impl, config.form
        self.growth = "linear" if self.pattern.horizon is None else "window"

    def _check_parts(self) -> None:
        """Refuse what one of the forms cannot do."""
        config, relative = self.config, self.position.relative(0, 1)
        by_distance = relative is not None and (relative.keys is not None or relative.values is not None)
        if by_distance or self.position.overrides("values"):
            raise KinformerError(
                f"the position {config.position.kind!r} adds keys or values by distance, which latents do not hold; "
                "use rope, t5 or alibi."
            )
        if self.position.overrides("rotate") and not self.rotary_dim:
            raise KinformerError(
                f"the position {config.position.kind!r} turns the features of keys that heads share, but "
                "rotary_dim = 0 leaves none; set rotary_dim, or the position none."
            )
        if self.score.form not in ("dot", "capped"):
            raise KinformerError(
                f"the score {config.score.kind!r} is not a function of the product of a query and a key, which "
                "latent attention makes of latents; use scaled_dot, dot, bilinear or capped."
            )

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        latents, keys = self.down(x).split([self.latent_dim, self.rotary_dim], -1)
        keys = keys[:, None]
        if self.rotary_dim:
            keys = self.position.rotate_keys(keys, positions)
        return x, torch.cat([normed(self.norm, latents)[:, None], keys], -1)

    def attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
        dropout = AttentionDropout.drawn(self.config.dropout, self.training)
        scoring = Scoring.of(self.score, self.position.relative(0, slots.shape[2] - 1), dropout)
        q = self._queries(self._query_latents(h), positions).to(slots.dtype)
        visibility = Visibility(self.pattern, positions, whole)
        if self._absorbs(h.shape[1]):
            heads = self._absorbed(q, slots, visibility, scoring)
        else:
            k, v = self._keys_values(slots)
            heads = attention(q, k, probe("values", v), visibility, scoring, impl=self.impl).out
        heads = probe("outputs", merge_heads(heads))
        y: Tensor = self.out(heads if self.gate is None else self.gate(heads, h))
        return y

    def _query_latents(self, x: Tensor) -> Tensor:
        """Return the vectors that queries are made of."""
        if self.query_down is None or self.query_norm is None:
            return x
        return normed(self.query_norm, self.query_down(x))

    def _queries(self, latents: Tensor, positions: Tensor) -> Tensor:
        """Return queries [batch, num_heads, time, head_dim + rotary_dim]; the rotary features are the last."""
        q = self.query(latents).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
        if self.position.overrides("rotate"):
            plain, turned = q.split([self.head_dim, self.rotary_dim], -1)
            q = torch.cat([plain, self.position.rotate(turned, turned, positions)[0]], -1)
        return self.score.queries(q)

    def _absorbs(self, time: int) -> bool:
        """Return whether ``time`` queries absorb the matrices: their sums over latents then cost less than to make the
        keys and values of every slot. Lengths of the past do not matter, so that a recorded step keeps its form."""
        # ``up`` may be more than a weight (an adapter), and only the expanded form has values of tokens for a probe.
        if not is_plain(self.up) or probed("values"):
            return False
        if self.form != "auto":
            return self.form == "absorbed"
        # Multiplications a slot and head: time (2 r + d_r) <= r (d + d_v) + time (d + d_r + d_v)
        both = self.head_dim + self.value_dim
        return time * (2 * self.latent_dim - both) <= self.latent_dim * both

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Return W_uk [num_heads, head_dim, latent_dim] and W_uv [num_heads, value_dim, latent_dim]."""
        weight = self.up.weight
        if not is_plain(self.up):  # an adapter adds to the weight
            weight = self.up(torch.eye(self.latent_dim, dtype=weight.dtype, device=weight.device)).mT
        keys, values = weight.unflatten(0, (self.config.num_heads, -1)).split([self.head_dim, self.value_dim], 1)
        return keys, values

    def _keys_values(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all heads of memories [batch, 1, slots, width]."""
        latents, shared = slots[:, 0].split([self.latent_dim, self.rotary_dim], -1)
        made = self.up(latents).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
        keys, values = made.split([self.head_dim, self.value_dim], -1)
        shared = shared[:, None].expand(-1, self.config.num_heads, -1, -1)
        return torch.cat([keys, shared.to(keys.dtype)], -1), values

    def _absorbed(self, q: Tensor, slots: Tensor, visibility: Visibility, scoring: Scoring) -> Tensor:
        keys, values = self._matrices()
        plain, turned = q.split([self.head_dim, self.rotary_dim], -1)
        q = torch.cat([torch.einsum("bhtd,hdr->bhtr", plain, keys.to(plain.dtype)), turned], -1)
        sums = attention(q, slots, slots[..., : self.latent_dim], visibility, scoring, impl=self.impl).out
        return torch.einsum("bhtr,hvr->bhtv", sums, values.to(sums.dtype))


# DeepSeek's sparse attention, ``BLOCK`` queries at a time. The backward pass computes a block again. So the indexer's
# scores exist for one block, and memory between the passes holds time * topk numbers of the choice.

BLOCK = 64


class IndexedState(NamedTuple):
    """The state: the cache ``attention``, whose memory [batch, 1, past, index_dim + rotary_dim + latent_dim] holds the
    indexer's key, the shared rotary key, and the latent of keys and values; ``aux`` [batch], the indexer's cost."""

    attention: TokenMemoryState | ReservedSlots
    aux: Tensor

    aux_name = "indexer"  # type: ignore[misc]


class Queries(NamedTuple):
    """The queries of a block of tokens: absorbed queries ``q`` [batch, time, heads, rotary_dim + latent_dim], scaled,
    the indexer's queries ``indexing`` [batch, time, index_heads, index_dim] and its ``weights`` [batch, time,
    index_heads]."""

    q: Tensor
    indexing: Tensor
    weights: Tensor


class IndexedAttention(LatentAttention):
    """DeepSeek's sparse attention, DSA (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv 2512.02556, section 2.1): each query
    attends to the tokens that a small indexer chooses for it.

        I_ts = sum_j w_tj relu(q^I_tj . k^I_s) / sqrt(index_heads index_dim)      the indexer's scores
        y_t  = latent attention of token t over the ``topk`` tokens s <= t of largest I_ts
        cost = sum_t KL(p_t || softmax_s I_ts),    p_t = the weights of token t, averaged over heads

    The attention is latent attention in its absorbed form, in which all heads share the vector of a chosen token. The
    cost runs over the chosen tokens. ``topk`` None is the dense warm-up: attention and cost run over all tokens. In
    training, p and the inputs of the indexer are constants of the cost, which the state's ``aux`` adds up.

    The mixer x [batch, time, dim] -> y [batch, time, dim]. The indexer has ``index_heads`` heads of ``index_dim``
    features (None: head_dim). Where scores are equal up to rounding, the last tokens are chosen. ``loss_weight``
    multiplies the cost; 0: the indexer does not learn. Latent attention has the same other settings.
    """

    crosses = False

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
    products = _products(queries.indexing, keys).relu()
    return (queries.weights.unsqueeze(2) @ products).squeeze(2)


PARTS = {"LatentAttention": LatentAttention.Config, "IndexedAttention": IndexedAttention.Config}
