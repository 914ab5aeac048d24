"""Learnt exits (Depth-Adaptive Transformer, Elbayad et al. 2020, section 3.2): a distribution q_t over N exits.

    multinomial       q_t = softmax(W h_t^1 + b), from the first exit's vector alone; a token leaves by the arg max
    geometric-like    q_t(n) = chi^n prod_{m < n} (1 - chi^m), q_t(N) the rest, with chi^n = sigmoid(w . h_t^n + b);
                      a token leaves by the first exit with chi^n >= threshold

The geometric-like distribution is also called Poisson binomial. What they learn is an oracle's choice, from the
log-likelihoods LL_t^n of the right token, or from C_t^n, 1 where the most probable token is the right one, else 0
(equations 13 to 16):

    likelihood     q*_t = argmax_n (smoothed LL_t^n - lambda n)
    correctness    q*_t = argmax_n (smoothed C_t^n - lambda n)
    smoothed S_t = sum over t' of exp(-|t - t'|^2 / sigma) S_t', over the sequence; sigma = 0 leaves it as it is

The loss is alpha times the mean of -ln q_t(q*_t), which moves the network too. Of equal values the lowest exit counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.confidence import ThresholdConfig, ThresholdRule
from kinformer.stacks.exit_rules import AllExits, AtExit, ExitRule, ExitRuleConfig


@dataclass(frozen=True, kw_only=True)
class OracleConfig(ExitRuleConfig):
    """The config of the oracle: ``penalty`` (lambda) is the price of an exit further up; ``smoothing``
    (sigma) is in tokens squared; ``alpha`` weighs the loss, from the share ``since`` of training on,
    before which exits are trained without it."""

    learns = True
    oracle: Literal["likelihood", "correctness"] = "likelihood"
    penalty: float = 0.1
    smoothing: float = 0.0
    alpha: float = 1.0
    since: float = 0.5

    def __post_init__(self) -> None:
        for name in ("penalty", "smoothing", "alpha"):
            if not getattr(self, name) >= 0:
                raise KinformerError(f"rule.{name} must be 0 or more, but is {getattr(self, name):g}.")
        if not 0 <= self.since <= 1:
            raise KinformerError(f"rule.since is a share of training, 0 to 1, but is {self.since:g}.")


class Multinomial(ExitRule):
    """The multinomial rule; W and b begin as the model's initialisation has them."""

    @dataclass(frozen=True, kw_only=True)
    class Config(OracleConfig):
        kind = "multinomial"

        def build(self, dim: int, exits: int) -> Multinomial:
            return Multinomial(self, dim, exits)

    def __init__(self, config: Config, dim: int, exits: int) -> None:
        super().__init__(exits)
        self.config = config
        self.linear = nn.Linear(dim, exits)

    def asks(self, number: int) -> bool:
        return number == 0

    def forward(self, at: AtExit) -> Tensor:
        return self.linear(at.x).argmax(-1)

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        return oracle_loss(self.config, self.log_probabilities(seen.hidden), seen, progress)

    def log_probabilities(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return ln q [batch, time, exits] from the hidden states at every exit, [batch, time, dim] each."""
        logits = self.linear(hidden[0])
        return functional.log_softmax(logits.to(state_dtype(logits.dtype)), dim=-1)


class Geometric(ThresholdRule):
    """The geometric-like rule (Poisson binomial): one w and b for all exits, as in the paper, or one each by
    ``per_exit``."""

    @dataclass(frozen=True, kw_only=True)
    class Config(OracleConfig, ThresholdConfig):
        kind = "geometric"
        thresholds: tuple[float, ...] = (0.5,)
        per_exit: bool = False

        def __post_init__(self) -> None:
            OracleConfig.__post_init__(self)
            ThresholdConfig.__post_init__(self)

        def build(self, dim: int, exits: int) -> Geometric:
            return Geometric(self, dim, exits)

    def __init__(self, config: Config, dim: int, exits: int) -> None:
        super().__init__(config, exits)
        self.config = config
        self.linear = nn.Linear(dim, max(1, exits - 1) if config.per_exit else 1)

    def confidence(self, at: AtExit) -> Tensor:
        return self._logits(at.x, at.number).sigmoid()

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        return oracle_loss(self.config, self.log_probabilities(seen.hidden), seen, progress)

    def log_probabilities(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return ln q [batch, time, exits] from the hidden states at every exit, [batch, time, dim] each."""
        logits = torch.stack([self._logits(x, number) for number, x in enumerate(hidden[:-1])], dim=-1)
        # ln prod_{m <= n} (1 - chi^m), by logarithms so that long products do not underflow
        stays = functional.logsigmoid(-logits).cumsum(-1)
        before = functional.pad(stays[..., :-1], (1, 0))
        return torch.cat([functional.logsigmoid(logits) + before, stays[..., -1:]], dim=-1)

    def _logits(self, x: Tensor, number: int) -> Tensor:
        logits = self.linear(x)[..., number if self.config.per_exit else 0]
        return logits.to(state_dtype(logits.dtype))


def oracle_loss(config: OracleConfig, log_q: Tensor, seen: AllExits, progress: float) -> Tensor:
    """Return alpha times the mean cross-entropy of ln q [batch, time, exits] with the oracle's exits, where valid."""
    best = oracle(config, seen)
    nats = -log_q.gather(-1, best[..., None])[..., 0]
    mean = torch.where(seen.valid, nats, 0.0).sum() / seen.valid.sum().clamp_min(1)
    return (config.alpha if progress >= config.since else 0.0) * mean


def oracle(config: OracleConfig, seen: AllExits) -> Tensor:
    """Return the exit [batch, time] int64, from 0, that is best for every token."""
    scores = -seen.nats if config.oracle == "likelihood" else (seen.best == seen.targets).to(seen.nats.dtype)
    scores = smoothed(scores, seen, config.smoothing)
    layers = torch.arange(len(scores), device=scores.device, dtype=scores.dtype)
    return (scores - config.penalty * layers[:, None, None]).argmax(0)


def smoothed(scores: Tensor, seen: AllExits, width: float) -> Tensor:
    """Return ``scores`` [exits, batch, time] summed over the tokens of a sequence, weighted by their distance."""
    if width == 0:
        return scores
    time = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype)
    # exp(-|t - t'|^2 / sigma)
    weights = torch.exp(-((time[:, None] - time) ** 2) / width)
    same = (seen.sequence[:, :, None] == seen.sequence[:, None]) & seen.valid[:, None]
    return torch.einsum("btu,ebu->ebt", torch.where(same, weights, 0.0), scores)
