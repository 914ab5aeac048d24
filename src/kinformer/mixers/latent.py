"""Mixers that cache one vector of every token for all heads: latent attention, and the single head of SHA-RNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from kinformer.core.attention_state import TokenMemory
from kinformer.core.contract import MixerConfig, activation_dtype
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
from kinformer.core.pattern import Band
from kinformer.core.probe import probe, probed
from kinformer.kernels import AttentionImpl
from kinformer.kernels.attention import AttentionDropout, Needs, Scoring, Visibility, attention, check_impl
from kinformer.parts.output_parts import Gate, build_gate
from kinformer.parts.patterns.sequence import Causal
from kinformer.parts.projections import normed
from kinformer.parts.relative_positions import Rope
from kinformer.parts.scores import ScaledDot
from kinformer.runtime.draws import Dropout
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

    @dataclass(frozen=True, kw_only=True)
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
        call = self._queries(h, positions).to(slots.dtype), slots, Visibility(self.pattern, positions, whole), scoring
        heads = merge_heads(self._absorbed(*call) if self._absorbs(h.shape[1]) else self._expanded(*call))
        heads = probe("outputs", heads)
        y: Tensor = self.out(heads if self.gate is None else self.gate(heads, h))
        return y

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries [batch, num_heads, time, head_dim + rotary_dim]; the rotary features are the last."""
        if self.query_down is not None and self.query_norm is not None:
            x = normed(self.query_norm, self.query_down(x))
        q = self.query(x).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
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
        keys, values = self.up.weight.unflatten(0, (self.config.num_heads, -1)).split(
            [self.head_dim, self.value_dim], 1
        )
        return keys, values

    def _keys_values(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all heads of memories [batch, 1, slots, width]."""
        latents, shared = slots[:, 0].split([self.latent_dim, self.rotary_dim], -1)
        made = self.up(latents).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
        keys, values = made.split([self.head_dim, self.value_dim], -1)
        shared = shared[:, None].expand(-1, self.config.num_heads, -1, -1)
        return torch.cat([keys, shared.to(keys.dtype)], -1), values

    def _expanded(self, q: Tensor, slots: Tensor, visibility: Visibility, scoring: Scoring) -> Tensor:
        k, v = self._keys_values(slots)
        return attention(q, k, probe("values", v), visibility, scoring, impl=self.impl).out

    def _absorbed(self, q: Tensor, slots: Tensor, visibility: Visibility, scoring: Scoring) -> Tensor:
        keys, values = self._matrices()
        plain, turned = q.split([self.head_dim, self.rotary_dim], -1)
        q = torch.cat([torch.einsum("bhtd,hdr->bhtr", plain, keys.to(plain.dtype)), turned], -1)
        sums = attention(q, slots, slots[..., : self.latent_dim], visibility, scoring, impl=self.impl).out
        return torch.einsum("bhtr,hvr->bhtv", sums, values.to(sums.dtype))


class SingleHead(TokenMemory):
    """Single-headed attention without projections of keys and values (Merity 2019, SHA-RNN, section 3.2).

        h, m = norm(x), norm'(x)           keys and values are m itself, of the last ``memory`` tokens
        q = norm''(W h + b) * sigmoid(q_gate),   k = m * sigmoid(k_gate),   v = m * sigmoid(f) * tanh(c)
        y = h + softmax(q k^T / sqrt(dim)) v,    [c, f] = W' sigmoid(v_gate) + b'

    norm, norm' and norm'' are ``input_norm``, ``memory_norm`` and ``query_norm``; W is ``query``, W' and b' are
    ``value``, c ``content`` and f ``strength``. Gates are vectors that no input changes, so they are taken out of
    the sums: only m is remembered, once. The sum with h is the residual one of the paper, whose stream is normed
    before the sum.

    The mixer x [batch, time, dim] -> y [batch, time, dim], the residual sum included; a query sees ``memory``
    tokens, its own being the last. ``dropout`` falls on the output of attention.
    """

    growth = "window"

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "single_head"
        indivisible = "it has one head"
        LEAST = {"memory": 1}
        memory: int = 1024
        dropout: float = 0.0
        eps: float = 1e-12
        impl: AttentionImpl = "auto"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.width, self.impl = dim, dim, config.impl
        self.pattern = Band(behind=config.memory - 1)
        check_impl(config.impl, Needs(), "single_head")
        self.input_norm, self.memory_norm, self.query_norm = (nn.LayerNorm(dim, eps=config.eps) for _ in range(3))
        self.query = nn.Linear(dim, dim)
        self.q_gate, self.k_gate, self.v_gate = (nn.Parameter(torch.zeros(dim)) for _ in range(3))
        self.value = nn.Linear(dim, 2 * dim)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    def like(self) -> Tensor:
        return self.q_gate

    def remember(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the queries, and the new memory [batch, 1, time, dim]."""
        return self.input_norm(x), self.memory_norm(x)[:, None].to(activation_dtype(self.q_gate))

    def attend(self, h: Tensor, slots: Tensor, positions: Tensor, whole: bool) -> Tensor:
        # (q * g_q) . (m * g_k) = (q * g_q * g_k) . m: the key's gate moves to the query, so m is stored once.
        q = self.query_norm(self.query(h)) * (self.q_gate.sigmoid() * self.k_gate.sigmoid())
        q, visibility = q[:, None].to(slots.dtype), Visibility(self.pattern, positions, whole)
        y = attention(q, slots, probe("values", slots), visibility, Scoring(self.dim**-0.5), impl=self.impl).out
        mixed = probe("outputs", y)[:, 0]
        content, strength = self.value(self.v_gate.sigmoid()[None])[0].chunk(2, dim=-1)
        # v = m * sigmoid(f) * tanh(c) is linear in m, so the gate moves out of the sum over keys.
        added = mixed * (strength.sigmoid() * content.tanh())
        return h + (added if self.dropout is None else self.dropout(added)).to(h.dtype)


PARTS = {"LatentAttention": LatentAttention.Config, "SingleHeadAttention": SingleHead.Config}
