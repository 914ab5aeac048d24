"""The decay of softmax attention's scores (Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget
Gate, arXiv 2503.02130, equation 4).

    p_ij = softmax_j(s_ij + c_i - c_j),    c_t = log a_1 + ... + log a_t

a_t is a ``decay`` by head. Sums are in float64: they only fall, and differences of near ones count.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kinformer.core.contract import Chunk, real_resets
from kinformer.core.parts import Position, Score, ScoreConfig
from kinformer.decays.decay import Decay, DecayConfig
from kinformer.runtime.errors import KinformerError


class Sums(NamedTuple):
    """The sums c [batch, heads, time, 1] float64 of a chunk: ``going_on`` from what was before it, as pairs of its own
    tokens and of the past need them; ``counted``, from where each token's sequence begins, as the state holds them."""

    going_on: Tensor
    counted: Tensor


class Config(Protocol):
    """What is read of a mixer's config."""

    @property
    def num_heads(self) -> int: ...
    @property
    def score(self) -> ScoreConfig: ...
    @property
    def decay(self) -> DecayConfig | None: ...


def build_score_decay(
    config: Config, dim: int, head_dim: int, score: Score, position: Position, lasting: bool
) -> Decay | None:
    """Return the module of a mixer's field ``decay``, or None for None; refuse what is none of scores, and scores that
    it cannot be added to. ``lasting``: the pattern keeps the first tokens, or tokens have their own spans."""
    if config.decay is None:
        return None
    kind, relative = config.decay.kind, position.relative(0, 1)
    decay = config.decay.build(dim, config.num_heads, head_dim)
    if decay.by_channel:
        raise KinformerError(
            f"the decay {kind!r} has a number for every feature, but a score has one for its head; use sigmoid with "
            "coupled = false, softplus or fixed."
        )
    if decay.coupled:
        raise KinformerError(
            f"the decay {kind!r} is coupled, so that a key enters a state by it, but softmax attention has no such "
            "state; set coupled = false."
        )
    if score.form != "dot":
        raise KinformerError(
            f"the score {config.score.kind!r} is no product of a query and a key, which a decay is added to; use one "
            "that is (scaled_dot, dot, bilinear, sink_logit), or leave decay out."
        )
    if lasting or (relative is not None and relative.factor is not None):
        raise KinformerError(
            "a decay fades with all that lies between two tokens, but here positions multiply scores (distance_aware), "
            "the pattern keeps the first tokens (sinks) or each token has a span (dynamic_span); leave one of them out."
        )
    return decay


def sums_of(decay: Decay, x: Tensor, chunk: Chunk, positions: Tensor, last: Tensor) -> Sums:
    """Return the sums of a chunk with inputs x [batch, time, dim]; ``last`` [batch, heads, 0 or 1, 1] is that before
    it."""
    logs = decay(x).double()
    before = last[..., 0] if last.shape[2] else logs.new_zeros(*logs.shape[:2], 1)
    going_on = before + logs.cumsum(-1)
    if real_resets(chunk) is None:
        return Sums(going_on[..., None], going_on[..., None])
    # A sequence that begins at slot b of the chunk counts from there: without what was summed before b.
    start = torch.arange(x.shape[1], device=x.device) - positions
    index = start.clamp_min(0)[:, None].expand(-1, logs.shape[1], -1)
    earlier = torch.cat([before, going_on[..., :-1]], -1).gather(-1, index)
    counted = going_on - torch.where((start >= 0)[:, None], earlier, 0)
    return Sums(going_on[..., None], counted[..., None])
