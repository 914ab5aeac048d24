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

One exit for a whole translation is predicted from its source x (section 3.2.1), by the sums of its tokens' LL or C:

    sequence          q(n | x) = softmax(W s + b), s the mean of the encoder's outputs; all tokens leave by the arg max
    likelihood        q* = argmax_n (sum over t of LL_t^n - lambda n)
    correctness       q* = argmax_n (sum over t of C_t^n - lambda n)
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
    """The config of an oracle: ``penalty`` (lambda) is the price of an exit further up; ``alpha`` weighs the loss, from
    the share ``since`` of training on, before which exits are trained without it."""

    learns = True
    oracle: Literal["likelihood", "correctness"] = "likelihood"
    penalty: float = 0.1
    alpha: float = 1.0
    since: float = 0.5

    def __post_init__(self) -> None:
        self._require_positive("penalty", "alpha")
        if not 0 <= self.since <= 1:
            raise KinformerError(f"rule.since is a share of training, 0 to 1, but is {self.since:g}.")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= 0:
                raise KinformerError(f"rule.{name} must be 0 or more, but is {getattr(self, name):g}.")


@dataclass(frozen=True, kw_only=True)
class TokenOracleConfig(OracleConfig):
    """The config of an oracle for every token; ``smoothing`` (sigma) is in tokens squared."""

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("smoothing")


class PredictedExit(ExitRule):
    """The base of rules that predict the exit at the first one, by softmax(W x + b) of a vector x."""

    def __init__(self, config: OracleConfig, dim: int, exits: int) -> None:
        super().__init__(exits)
        self.config = config
        self.linear = nn.Linear(dim, exits)

    def asks(self, number: int) -> bool:
        return number == 0

    def _log_q(self, x: Tensor) -> Tensor:
        """Return ln q [..., exits] from x [..., dim]."""
        logits = self.linear(x)
        return functional.log_softmax(logits.to(state_dtype(logits.dtype)), dim=-1)


class Multinomial(PredictedExit):
    """The multinomial rule; W and b begin as the model's initialisation has them."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TokenOracleConfig):
        kind = "multinomial"

        def build(self, dim: int, exits: int) -> Multinomial:
            return Multinomial(self, dim, exits)

    config: Config

    def forward(self, at: AtExit) -> Tensor:
        return self.linear(at.x).argmax(-1)

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        return oracle_loss(self.config, self.log_probabilities(seen.hidden), seen, progress)

    def log_probabilities(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return ln q [batch, time, exits] from the hidden states at every exit, [batch, time, dim] each."""
        return self._log_q(hidden[0])


class SequenceMultinomial(PredictedExit):
    """The rule, for decoders over a source; W and b begin as the model's initialisation has them."""

    reads_source = True

    @dataclass(frozen=True, kw_only=True)
    class Config(OracleConfig):
        kind = "sequence_multinomial"

        def build(self, dim: int, exits: int) -> SequenceMultinomial:
            return SequenceMultinomial(self, dim, exits)

    config: Config

    def forward(self, at: AtExit) -> Tensor:
        assert at.source is not None
        return self.linear(at.source).argmax(-1)

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        assert seen.source is not None
        log_q = self._log_q(seen.source)
        return cross_entropy(self.config, log_q, self.oracle(seen), seen.valid.any(-1), progress)

    def oracle(self, seen: AllExits) -> Tensor:
        """Return the exit [batch] int64, from 0, that is best for every row's sequence."""
        scores = torch.where(seen.valid, scores_of(self.config, seen), 0.0).sum(-1)
        return cheapest(scores, self.config.penalty)


class Geometric(ThresholdRule):
    """The geometric-like rule (Poisson binomial): one w and b for all exits, as in the paper, or one each by
    ``per_exit``."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TokenOracleConfig, ThresholdConfig):
        kind = "geometric"
        thresholds: tuple[float, ...] = (0.5,)
        per_exit: bool = False

        def __post_init__(self) -> None:
            TokenOracleConfig.__post_init__(self)
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


def oracle_loss(config: TokenOracleConfig, log_q: Tensor, seen: AllExits, progress: float) -> Tensor:
    """Return alpha times the mean cross-entropy of ln q [batch, time, exits] with the oracle's exits, where valid."""
    return cross_entropy(config, log_q, oracle(config, seen), seen.valid, progress)


def cross_entropy(config: OracleConfig, log_q: Tensor, best: Tensor, valid: Tensor, progress: float) -> Tensor:
    """Return alpha times the mean of -ln q(best), of ln q [..., exits] and ``best`` [...] int64, where ``valid``."""
    nats = -log_q.gather(-1, best[..., None])[..., 0]
    mean = torch.where(valid, nats, 0.0).sum() / valid.sum().clamp_min(1)
    return (config.alpha if progress >= config.since else 0.0) * mean


def oracle(config: TokenOracleConfig, seen: AllExits) -> Tensor:
    """Return the exit [batch, time] int64, from 0, that is best for every token."""
    return cheapest(smoothed(scores_of(config, seen), seen, config.smoothing), config.penalty)


def scores_of(config: OracleConfig, seen: AllExits) -> Tensor:
    """Return LL or C of every exit and token, [exits, batch, time]."""
    return -seen.nats if config.oracle == "likelihood" else (seen.best == seen.targets).to(seen.nats.dtype)


def cheapest(scores: Tensor, penalty: float) -> Tensor:
    """Return the exit [...] int64 of the greatest ``scores`` [exits, ...] less ``penalty`` times its number."""
    numbers = torch.arange(len(scores), device=scores.device, dtype=scores.dtype)
    return (scores - penalty * numbers.view(-1, *[1] * (scores.dim() - 1))).argmax(0)


def smoothed(scores: Tensor, seen: AllExits, width: float) -> Tensor:
    """Return ``scores`` [exits, batch, time] summed over the tokens of a sequence, weighted by their distance."""
    if width == 0:
        return scores
    time = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype)
    # exp(-|t - t'|^2 / sigma)
    weights = torch.exp(-((time[:, None] - time) ** 2) / width)
    same = (seen.sequence[:, :, None] == seen.sequence[:, None]) & seen.valid[:, None]
    return torch.einsum("btu,ebu->ebt", torch.where(same, weights, 0.0), scores)
