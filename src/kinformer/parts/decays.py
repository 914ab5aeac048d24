"""Decays of the state of kernel attention, and of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.attention_state import Past
from kinformer.core.config import Config
from kinformer.core.contract import Chunk, FollowsHeads, real_resets, state_dtype
from kinformer.core.parts import Position, Score
from kinformer.kernels.attention.spans import Reach
from kinformer.kernels.softmax import Scoring
from kinformer.runtime.errors import KinformerError

# The fraction of the state of kernel attention that each token retains: the part ``decay``.


class Decay(nn.Module):
    """A decay; ``forward(x)`` returns its logarithms, not above 0, for inputs x [batch, time, dim] of the mixer.

    [batch, heads, time], or [batch, heads, time, features] where every feature has its own; in float32 at least.
    ``coupled``: a token enters the state as :meth:`entering` times its key. ``by_channel``: every feature has its own.
    """

    coupled: bool = False
    by_channel: bool = False

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def entering(self, log_decay: Tensor) -> Tensor:
        """Return the factors 1 - a of keys, from the result of :meth:`forward`, log a."""
        # 1 - a = -expm1(log a), exact where a is near 1
        return -torch.expm1(log_decay)

    def fade(self, x: Tensor, k: Tensor, valid: Tensor | None, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys k [batch, heads, time, features] as they enter the state, and the logarithms of the decay for
        inputs x [batch, time, dim], 0 where not ``valid`` [batch, time]; ``more`` [batch, heads, time] is added to
        them."""
        log_decay = self(x)
        if self.coupled:
            enters = self.entering(log_decay)
            k = k * (enters if enters.dim() == 4 else enters.unsqueeze(-1)).to(k.dtype)
        by_channel = log_decay.dim() == 4
        if valid is not None:
            mask = valid[:, None, :, None] if by_channel else valid[:, None]
            log_decay = torch.where(mask, log_decay, log_decay.new_zeros(()))
        if more is not None:
            log_decay = log_decay + (more.unsqueeze(-1) if by_channel else more)
        return k, log_decay


class DecayConfig(Config):
    slot = "decay"

    def build(self, dim: int, num_heads: int, features: int) -> Decay:
        """Build the decay for inputs of width ``dim`` and heads of ``features`` features."""
        return self.builds(self, dim, num_heads, features)


class Fixed(FollowsHeads, Decay):
    """One constant decay a head (Sun et al. 2023, "Retentive Network", equation 8): gamma_h = 1 - 2^(-first - h) for
    heads h = 0, 1, ...; half of the state is left after 0.69 * 2^(first + h) tokens."""

    class Config(DecayConfig):
        kind = "fixed"
        ABOVE = {"first": 0}
        first: float = 5.0

    def __init__(self, config: Config, dim: int, num_heads: int, features: int) -> None:
        super().__init__()
        self.first, self.num_heads = config.first, num_heads

    def follow(self, whole: Fixed, part: int) -> None:
        self.first = whole.first + part * self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        exponents = torch.arange(self.num_heads, device=x.device, dtype=torch.float64) + self.first
        # log(1 - 2^-(first + h)), exact also where the decay is next to 1
        logs = torch.log1p(-torch.exp2(-exponents)).to(state_dtype(x.dtype))
        return logs[None, :, None].expand(x.shape[0], -1, x.shape[1])


class Sigmoid(Decay):
    """A decay for every token and head (Peng et al. 2021, "Random Feature Attention").

        a_t = sigmoid(w . x_t + b)^(1 / temperature)

    The paper's temperature is 1. A model begins with w . x_t + b near 0, so that half of the past is lost with every
    token, and recall does not begin (``benchmarks/mqar.py``); at 16, as in GLA, it begins with a_t = 0.96. ``coupled``,
    as in the paper: S_t = a_t S_(t-1) + (1 - a_t) k_t v_t^T.
    """

    class Config(DecayConfig):
        kind = "sigmoid"
        ABOVE = {"temperature": 0}
        coupled: bool = True
        temperature: float = 1.0

    def __init__(self, config: Config, dim: int, num_heads: int, features: int) -> None:
        super().__init__()
        self.coupled, self.temperature = config.coupled, config.temperature
        self.gate = nn.Linear(dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        # The transpose comes last: the backward of logsigmoid breaks in a compiled graph behind a transposed tensor.
        return (functional.logsigmoid(gate.to(state_dtype(gate.dtype))) / self.temperature).transpose(1, 2)


_LOW, _HIGH, _LARGEST = 1e-3, 0.1, 16.0


class Softplus(Decay):
    """A decay for every token and head, a_t = exp(-A softplus(w . x_t + b)) (Gu and Dao 2023, Mamba; Dao and Gu 2024).

    Gated DeltaNet's (Yang et al. 2025). A, one number a head, begins uniform in 0 .. 16; b so that softplus(b) is
    log-uniform in 0.001 .. 0.1. Coupled, softplus(w . x_t + b) is the step by which a token enters the state
    (Mamba-2). ``log_rate`` [heads] is log A, and ``step`` [heads] is b.
    """

    class Config(DecayConfig):
        kind = "softplus"
        coupled: bool = False

    def __init__(self, config: Config, dim: int, num_heads: int, features: int) -> None:
        super().__init__()
        self.coupled = config.coupled
        self.gate = nn.Linear(dim, num_heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1e-4, _LARGEST).log_())
        self.step = nn.Parameter(first_steps(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        dtype = state_dtype(gate.dtype)
        softplus = functional.softplus(gate.to(dtype) + self.step.to(dtype))
        return (-self.log_rate.to(dtype).exp() * softplus).transpose(1, 2)

    def entering(self, log_decay: Tensor) -> Tensor:
        """Return the steps softplus(w . x + b), log a divided by -A."""
        return -log_decay * (-self.log_rate.to(log_decay.dtype)).exp().unsqueeze(-1)


def first_steps(*shape: int) -> Tensor:
    """Return biases b of that shape with which softplus(b) is log-uniform in 0.001 .. 0.1."""
    step = torch.empty(shape).uniform_(math.log(_LOW), math.log(_HIGH)).exp_()
    # The inverse of softplus: b = s + log(1 - e^-s)
    return step + torch.log(-torch.expm1(-step))


class SoftplusChannels(Decay):
    """A decay for every token and channel, a_t = exp(-A softplus(W_2 W_1 x_t + b)), with one A a head.

    (The Kimi team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 4.) A begins uniform
    in 1 .. 16; b so that softplus(b) is log-uniform in 0.001 .. 0.1. With a ``lower_bound`` l < 0, a_t = exp(l
    sigmoid(A (W_2 W_1 x_t + b))) instead, no less than exp(l), and A begins at 1. ``log_rate`` [heads] is log A, and
    ``step`` [heads, features] is b. ``rank``: the rank of W_1 (None: the number of a head's features).
    """

    by_channel = True

    class Config(DecayConfig):
        kind = "softplus_channels"
        rank: int | None = None
        lower_bound: float | None = None

        def __post_init__(self) -> None:
            if self.rank is not None and self.rank < 1:
                raise KinformerError(f"rank = {self.rank} must be 1 or more, or None for a head's features.")
            if self.lower_bound is not None and self.lower_bound >= 0:
                raise KinformerError(
                    f"lower_bound = {self.lower_bound:g} must be below 0, as it bounds the logarithm of a decay; use "
                    "about -5, or None for no bound."
                )

    def __init__(self, config: Config, dim: int, num_heads: int, features: int) -> None:
        super().__init__()
        self.lower_bound, rank = config.lower_bound, config.rank or features
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, num_heads * features, bias=False)
        rate = torch.empty(num_heads).uniform_(1.0, 16.0).log_() if self.lower_bound is None else torch.zeros(num_heads)
        self.log_rate = nn.Parameter(rate)
        self.step = nn.Parameter(first_steps(num_heads, features))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(self.down(x)).unflatten(-1, self.step.shape).transpose(1, 2)
        dtype = state_dtype(gate.dtype)
        gate = gate.to(dtype) + self.step.to(dtype).unsqueeze(1)
        rate = self.log_rate.to(dtype).exp().view(-1, 1, 1)
        if self.lower_bound is not None:
            return self.lower_bound * torch.sigmoid(rate * gate)
        return -rate * functional.softplus(gate)


class LowRank(Decay):
    """A decay for every token and channel, a_t = sigmoid(W_2 W_1 x_t + b)^(1 / temperature).

    (Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.3; W_1 of
    rank 16, temperature 16, so that decays begin near 1.)
    """

    by_channel = True

    class Config(DecayConfig):
        kind = "low_rank"
        LEAST = {"rank": 1}
        ABOVE = {"temperature": 0}
        rank: int = 16
        temperature: float = 16.0

    def __init__(self, config: Config, dim: int, num_heads: int, features: int) -> None:
        super().__init__()
        self.num_heads, self.temperature = num_heads, config.temperature
        self.down = nn.Linear(dim, config.rank, bias=False)
        self.up = nn.Linear(config.rank, num_heads * features)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(self.down(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        # log sigmoid(g)^(1 / temperature)
        return functional.logsigmoid(gate.to(state_dtype(gate.dtype))) / self.temperature


# The decay of softmax attention's scores (Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget
# Gate, arXiv 2503.02130, equation 4).
#
#     p_ij = softmax_j(s_ij + c_i - c_j),    c_t = log a_1 + ... + log a_t
#
# a_t is a ``decay`` by head. Sums are in float64: they only fall, and differences of near ones count.


class Sums(NamedTuple):
    """The sums c [batch, heads, time, 1] float64 of a chunk: ``going_on`` continues from the past, for pairs of a query
    and any key; ``counted`` begins at each token's sequence, for the state."""

    going_on: Tensor
    counted: Tensor


def build_head_decay(config: DecayConfig, dim: int, num_heads: int, head_dim: int) -> Decay:
    """Return a decay with one number a head, which can be added to scores."""
    decay = config.build(dim, num_heads, head_dim)
    if decay.by_channel:
        raise KinformerError(
            f"the decay {config.kind!r} has a number for every feature, but a score has one for its head; use sigmoid "
            "with coupled = false, softplus or fixed."
        )
    if decay.coupled:
        raise KinformerError(
            f"the decay {config.kind!r} is coupled: a key enters a state by it, but softmax attention does not have "
            "this state; set coupled = false."
        )
    return decay


def build_score_decay(
    config: Any, dim: int, head_dim: int, score: Score, position: Position, lasting: bool
) -> Decay | None:
    """Return the module of the field ``decay`` of a mixer's ``config``, or None for None. Refuse decays that scores
    cannot have, and scores to which a decay cannot be added. ``lasting``: the pattern keeps the first tokens, or tokens
    have spans."""
    if config.decay is None:
        return None
    relative = position.relative(0, 1)
    decay = build_head_decay(config.decay, dim, config.num_heads, head_dim)
    if score.form != "dot":
        raise KinformerError(
            f"the score {config.score.kind!r} is not a product of a query and a key, to which a decay is added; use "
            "a product (scaled_dot, dot, bilinear, sink_logit), or leave decay out."
        )
    if lasting or (relative is not None and relative.factor is not None):
        raise KinformerError(
            "a decay fades with all that lies between two tokens, but here positions multiply scores (distance_aware), "
            "the pattern keeps the first tokens (sinks) or each token has a span (dynamic_span); leave one out."
        )
    return decay


def sums_of(decay: Decay, x: Tensor, chunk: Chunk, positions: Tensor, last: Tensor) -> Sums:
    """Return the sums of a chunk with inputs x [batch, time, dim]; ``last`` [batch, heads, 0 or 1, 1] precedes it."""
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


class DecayReach(Reach):
    """The scores of a chunk's queries decay: the sums of the decay stand beside keys and values."""

    def __init__(self, mixer: Any, state: Any, past: Past, x: Tensor) -> None:
        super().__init__(mixer, state, past, x)
        self.sums = sums_of(mixer.decay, x, past.chunk, past.positions, past.last(2))

    def slots(self, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        of_pairs, of_state = self.sums
        return (k, v, of_pairs), (k, v, of_state)

    def scoring(self, slots: Sequence[Any]) -> Scoring:
        return super().scoring(slots)._replace(decay=slots[2][..., 0])


PARTS = {
    "FixedDecay": Fixed.Config,
    "SigmoidDecay": Sigmoid.Config,
    "SoftplusDecay": Softplus.Config,
    "LowRankDecay": LowRank.Config,
    "SoftplusChannelsDecay": SoftplusChannels.Config,
}
