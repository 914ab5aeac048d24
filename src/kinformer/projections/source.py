"""Queries from a chunk, keys and values from a source (Vaswani et al. 2017, section 3.2.3), which is projected once.

    Q = W_q x (``query``),   [K, V] = W_kv source (``key_value``)

The base of mixers that attend to tokens of a source. Positions of a target token over the source are those of the token
that it is aligned with,

    p_t = min(t, last real token of the source)

as in the monotonic alignment of Luong et al. 2015 (section 3.2, local-m).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import MixerConfig, activation_dtype
from kinformer.core.division import in_blocks
from kinformer.core.parts import (
    Position,
    PositionConfig,
    ResidualOutput,
    ScoreConfig,
    check_score,
    head_width,
)
from kinformer.core.source import SourceMixer
from kinformer.runtime.errors import KinformerError


class CrossState(NamedTuple):
    """The projected source: ``k``, ``v`` [batch, heads, source, head_dim] and ``valid`` [batch, 1, source] bool.

    A chunk of n times as many rows looks at it too: n neighbours share a row's source, as hypotheses of a beam do.
    """

    k: Tensor
    v: Tensor
    valid: Tensor

    slots = ("k", "v", "valid")  # type: ignore[misc]
    outlives_reset = True  # type: ignore[misc]

    def last(self, rows: int) -> Tensor:
        """Return the slot of the last real token of the source of each of ``rows`` neighbours, [rows] int64, 0 where
        there is none."""
        valid = self.valid[:, 0]
        slots = torch.arange(valid.shape[1], device=valid.device).where(valid, 0)
        return slots.amax(-1).repeat_interleave(rows // len(valid))


class AlignedState(NamedTuple):
    """The ``source``, and ``seen`` [batch] int64, the tokens of each row's sequence so far."""

    source: CrossState
    seen: Tensor

    @classmethod
    def new(cls, source: CrossState) -> AlignedState:
        return cls(source, torch.zeros(len(source.k), dtype=torch.int64, device=source.k.device))


@dataclass(frozen=True, kw_only=True)
class OverSourceConfig(MixerConfig):
    """What the configs of such mixers share. ``source_dim`` is the width of the source, ``dim`` if None."""

    by_heads = True
    num_heads: int
    head_dim: int | None
    source_dim: int | None
    score: ScoreConfig
    bias: bool


class OverSource(SourceMixer):
    """The projections, and the score of a token and a token of the source, with a ``position`` that acts on both.
    ``counts``: tokens have places in the source, so that a state counts them."""

    position: Position
    counts = False

    def __init__(self, config: OverSourceConfig, dim: int, position: PositionConfig) -> None:
        super().__init__()
        self.dim = dim
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.num_heads, self.head_dim = config.num_heads, head_dim
        self.score = config.score.build(config.num_heads, head_dim)
        self.position = position.build_heads(dim, config.num_heads, head_dim)
        if self.position.one_sided:
            raise KinformerError(
                f"the position {position.kind!r} tells only how far back a key lies, but a source has tokens on both "
                "sides of the aligned one; take one of two sides (rope, alibi, shaw, xl, t5 with bidirectional=true)."
            )
        check_score(config.score, self.score, self.position)
        width, self.source_dim = config.num_heads * head_dim, config.source_dim or dim
        self.query = nn.Linear(dim, width, bias=config.bias)
        self.key_value = in_blocks(nn.Linear(self.source_dim, 2 * width, bias=config.bias), width, width)
        self.out = ResidualOutput(width, dim, bias=config.bias)

    def over(
        self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None
    ) -> CrossState | AlignedState:
        kv = self.key_value(source).to(device, dtype or activation_dtype(self.out.weight))
        k, v = kv.view(*source.shape[:2], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        k = self.position.rotate_keys(k, torch.arange(k.shape[2], device=k.device).expand(len(k), -1))
        state = CrossState(k, self.position.values(v), valid[:, None].to(kv.device))  # type: ignore[call-arg]
        if self.counts and self.crossing is not None:
            return AlignedState(state, self.crossing.before)
        return AlignedState.new(state) if self.counts else state

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32, source_length: int = 0) -> int:
        return source_length * (2 * self.num_heads * self.head_dim * dtype.itemsize + 1) + 8 * self.counts
