"""Exit rules: they choose the exit of a stack by which a token leaves for the head, from the token and its past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import Config
from kinformer.core.contract import state_dtype
from kinformer.runtime.errors import KinformerError, plural


class AtExit(NamedTuple):
    """The n tokens that still run at exit ``number``, counted from 0.

    ``x`` [n, dim] are the outputs of the layer before the exit, ``earlier`` [n, dim] the outputs at the exit before (at
    the first exit the inputs of the stack), ``positions`` [n] int64 the positions in the tokens' sequences.
    ``logits()`` returns the logits [n, vocab] of the exit's head for ``x``. ``source`` [n, dim] is the mean vector of
    each token's source, for rules that read it.
    """

    number: int
    x: Tensor
    earlier: Tensor
    positions: Tensor
    logits: Callable[[], Tensor]
    source: Tensor | None = None


class AllExits(NamedTuple):
    """The outputs of all exits, the last included, in a training step, for the ``valid`` tokens [batch, time].

    ``hidden`` are the outputs [batch, time, dim] of the layer before each exit, ``nats`` [exits, batch, time] the
    numbers -ln p of the next token there, ``best`` [exits, batch, time] int64 the most probable token, ``targets``
    [batch, time] the right token. ``sequence`` [batch, time] int64: tokens of a row with different numbers belong to
    different sequences. ``source`` [batch, dim] is the mean vector of each row's source, for rules that read it.
    """

    hidden: tuple[Tensor, ...]
    nats: Tensor
    best: Tensor
    targets: Tensor
    valid: Tensor
    sequence: Tensor
    source: Tensor | None = None

    @classmethod
    def of(
        cls,
        hidden: tuple[Tensor, ...],
        logits: Sequence[Tensor],
        targets: Tensor,
        valid: Tensor,
        sequence: Tensor,
        source: Tensor | None = None,
    ) -> AllExits:
        """Make the outputs of the ``logits`` [batch, time, vocab] of all exits; only ``hidden`` has a graph."""
        with torch.no_grad():
            nats = [functional.cross_entropy(logit.float().mT, targets, reduction="none") for logit in logits]
            best = [logit.argmax(-1) for logit in logits]
        return cls(hidden, torch.stack(nats), torch.stack(best), targets, valid, sequence, source)


class ExitRule(nn.Module):
    """An exit rule; ``rule(at)`` returns the exit by which each token leaves, [n] int64: ``at.number`` or a later exit.

    The stack calls the rule at every exit but the last, for the tokens that do not leave by an earlier exit. ``exits``
    is the number of exits, the last included.
    """

    reads_source: ClassVar[bool] = False
    """Whether the rule reads the source of a sequence."""

    def __init__(self, exits: int) -> None:
        super().__init__()
        self.exits = exits

    @property
    def last(self) -> int:
        return self.exits - 1

    @property
    def off(self) -> bool:
        """Return whether the rule lets no token leave early."""
        return False

    def asks(self, number: int) -> bool:
        """Return whether the rule decides again at this exit."""
        return True

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        """Return the rule's training loss, a mean over tokens; None for a rule that learns nothing."""
        return None

    def forward(self, at: AtExit) -> Tensor:
        raise NotImplementedError


class ExitRuleConfig(Config):
    """The config of an exit rule; ``build(dim, exits)`` returns the rule of a stack of this width and number."""

    slot = "exit_rule"
    learns: ClassVar[bool] = False
    """Whether the rule has weights, which learn from all exits."""

    def build(self, dim: int, exits: int) -> ExitRule:
        return self.builds(self, dim, exits)


# Confidence measures with a threshold (CALM, Schuster et al. 2022, sections 3.4 and 3.5).
#
# A token leaves by the first exit where its confidence reaches the threshold. At position t the threshold is
#
#     threshold(t) = clip(0.9 lambda + 0.1 exp(-t / decay_tokens), 0, 1)          (equation 5, decay_tokens = N / tau)
#
# or lambda itself without a decay. Without thresholds, as before a calibration, all tokens take the last exit. The
# docstring of every rule has the formula too, because the formulas of a model are read from its parts' docstrings.


class ThresholdConfig(ExitRuleConfig):
    """The config of confidence rules; ``thresholds`` has one number, or one for each exit but the last."""

    ABOVE = {"decay_tokens": 0}
    thresholds: tuple[float, ...] = ()
    decay_tokens: float | None = None

    def at(self, exits: int) -> tuple[float, ...]:
        """Return the threshold of every exit but the last."""
        if len(self.thresholds) not in (0, 1, exits - 1):
            raise KinformerError(
                f"rule.thresholds has {plural(len(self.thresholds), 'number')}, but the stack has "
                f"{plural(exits - 1, 'exit')} before the last; give one for all, or one for each."
            )
        return self.thresholds * (exits - 1) if len(self.thresholds) == 1 else self.thresholds


class ThresholdRule(ExitRule):
    """A rule by confidence: ``confidence(at)`` returns numbers [n] from 0 to 1, or cosines from -1 to 1."""

    def __init__(self, config: ThresholdConfig, dim: int, exits: int) -> None:
        super().__init__(exits)
        self.decay_tokens, self.thresholds = config.decay_tokens, config.at(exits)

    @property
    def off(self) -> bool:
        return not self.thresholds

    def confidence(self, at: AtExit) -> Tensor:
        raise NotImplementedError

    def threshold(self, at: AtExit) -> Tensor | float:
        """Return the threshold of each token, [n], or one number for all tokens."""
        level = self.thresholds[at.number]
        if self.decay_tokens is None:
            return level
        # Equation 5, with lambda the level and t the position
        return (0.9 * level + 0.1 * (-at.positions.double() / self.decay_tokens).exp()).clamp(0.0, 1.0)

    def forward(self, at: AtExit) -> Tensor:
        reached = self.confidence(at) >= self.threshold(at)
        return torch.where(reached, at.number, self.last)


class SoftmaxResponse(ThresholdRule):
    """Confidence by the exit's head: the ``difference`` of its two highest probabilities, or the ``maximum``.

    threshold(t) = clip(0.9 lambda + 0.1 exp(-t / decay_tokens), 0, 1)          (equation 5, decay_tokens = N / tau)
    """

    class Config(ThresholdConfig):
        kind = "softmax_response"
        measure: Literal["difference", "maximum"] = "difference"

    def __init__(self, config: Config, dim: int, exits: int) -> None:
        super().__init__(config, dim, exits)
        self.measure = config.measure

    def confidence(self, at: AtExit) -> Tensor:
        logits = at.logits()
        probabilities = logits.to(state_dtype(logits.dtype)).softmax(-1)
        if self.measure == "maximum":
            return probabilities.amax(-1)
        highest = probabilities.topk(2, dim=-1).values
        return highest[..., 0] - highest[..., 1]


class Saturation(ThresholdRule):
    """Confidence by saturation: the cosine of a token's vectors at this exit and at the exit before.

    threshold(t) = clip(0.9 lambda + 0.1 exp(-t / decay_tokens), 0, 1)          (equation 5, decay_tokens = N / tau)
    """

    class Config(ThresholdConfig):
        kind = "saturation"

    def confidence(self, at: AtExit) -> Tensor:
        dtype = state_dtype(at.x.dtype)
        return functional.cosine_similarity(at.x.to(dtype), at.earlier.to(dtype), dim=-1)


class ExitClassifier(ThresholdRule):
    """Confidence sigmoid(w . h + b), the probability that the last exit would predict the same token; all exits share w
    and b.

        threshold(t) = clip(0.9 lambda + 0.1 exp(-t / decay_tokens), 0, 1)          (equation 5, decay_tokens = N / tau)

    The paper writes it as a softmax over two classes, which is the same function. The loss is the cross-entropy of this
    probability, with equal weights for both answers, averaged over the exits but the last. It trains w and b alone.
    """

    class Config(ThresholdConfig):
        kind = "classifier"
        learns = True

    def __init__(self, config: Config, dim: int, exits: int) -> None:
        super().__init__(config, dim, exits)
        self.linear = nn.Linear(dim, 1)

    def confidence(self, at: AtExit) -> Tensor:
        return self._logits(at.x).sigmoid()

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        costs = []
        for x, best in zip(seen.hidden[:-1], seen.best, strict=False):
            agrees = best == seen.best[-1]
            logits = self._logits(x.detach())
            losses = functional.binary_cross_entropy_with_logits(logits, agrees.to(logits.dtype), reduction="none")
            classes = []
            for which in (agrees & seen.valid, ~agrees & seen.valid):
                # A mean within each answer, so that both answers have equal weights even if one is rare.
                classes.append(torch.where(which, losses, 0.0).sum() / which.sum().clamp_min(1))
            costs.append(0.5 * (classes[0] + classes[1]))
        return torch.stack(costs).mean()

    def _logits(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., 0].to(state_dtype(x.dtype))


# Learnt exits (Depth-Adaptive Transformer, Elbayad et al. 2020, section 3.2): a distribution q_t over N exits, whose
# formula stands in the docstring of the rule. A rule for tokens learns the choice of an oracle, from the
# log-likelihoods LL_t^n of the right token, or from C_t^n, which is 1 if the right token is the most probable token,
# else 0 (equations 13 to 16):
#
#     likelihood     q*_t = argmax_n (smoothed LL_t^n - lambda n)
#     correctness    q*_t = argmax_n (smoothed C_t^n - lambda n)
#     smoothed S_t = sum over t' of exp(-|t - t'|^2 / sigma) S_t', over the sequence; sigma = 0 does not smooth
#
# The loss is alpha times the mean of -ln q_t(q*_t), and it trains the network too. Between exits of equal value the
# oracle takes the lowest.
#
# The exit of a whole translation is predicted from its source (section 3.2.1). The oracle sums LL or C over the tokens
# of the translation:
#
#     likelihood        q* = argmax_n (sum over t of LL_t^n - lambda n)
#     correctness       q* = argmax_n (sum over t of C_t^n - lambda n)


class OracleConfig(ExitRuleConfig):
    """The config of an oracle: ``penalty`` (lambda) is the cost of each further exit, ``alpha`` the weight of the
    rule's loss. The loss begins at the share ``since`` of training; before, exits are trained without it."""

    learns = True
    LEAST = {"penalty": 0, "alpha": 0}
    oracle: Literal["likelihood", "correctness"] = "likelihood"
    penalty: float = 0.1
    alpha: float = 1.0
    since: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.since <= 1:
            raise KinformerError(f"rule.since is a share of training, 0 to 1, but is {self.since:g}.")


class TokenOracleConfig(OracleConfig):
    """The config of an oracle for every token; ``smoothing`` (sigma) is in tokens squared."""

    LEAST = {"smoothing": 0}
    smoothing: float = 0.0


class PredictedExit(ExitRule):
    """The base of rules that predict the exit at the first exit, by softmax(W x + b) of a vector x."""

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
    """The multinomial rule: a learnt distribution over all exits, predicted at the first exit.

    multinomial       q_t = softmax(W h_t^1 + b), from the first exit's vector alone; a token leaves by the arg max
    """

    class Config(TokenOracleConfig):
        kind = "multinomial"

    config: Config

    def forward(self, at: AtExit) -> Tensor:
        return self.linear(at.x).argmax(-1)

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        log_q = self.log_probabilities(seen.hidden)
        return cross_entropy(self.config, log_q, oracle(self.config, seen), seen.valid, progress)

    def log_probabilities(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return ln q [batch, time, exits] from the hidden states at every exit, [batch, time, dim] each."""
        return self._log_q(hidden[0])


class SequenceMultinomial(PredictedExit):
    """The multinomial rule for decoders over a source: one exit for a whole sequence, from its source's mean.

    sequence          q(n | x) = softmax(W s + b), s the mean of the encoder's outputs; all leave by the arg max
    """

    reads_source = True

    class Config(OracleConfig):
        kind = "sequence_multinomial"

    config: Config

    def forward(self, at: AtExit) -> Tensor:
        assert at.source is not None
        return self.linear(at.source).argmax(-1)

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        assert seen.source is not None
        log_q = self._log_q(seen.source)
        return cross_entropy(self.config, log_q, self.oracle(seen), seen.valid.any(-1), progress)

    def oracle(self, seen: AllExits) -> Tensor:
        """Return the best exit [batch] int64, counted from 0, of each row's sequence."""
        scores = torch.where(seen.valid, scores_of(self.config, seen), 0.0).sum(-1)
        return cheapest(scores, self.config.penalty)


class Geometric(ThresholdRule):
    """The geometric-like rule (Poisson binomial): a learnt probability chi of leaving, at every exit.

        geometric-like    q_t(n) = chi^n prod_{m < n} (1 - chi^m), q_t(N) the rest, with chi^n = sigmoid(w . h_t^n + b);
                          a token leaves by the first exit with chi^n >= threshold

    All exits share w and b, as in the paper, or with ``per_exit`` each exit has separate ones.
    """

    class Config(TokenOracleConfig, ThresholdConfig):
        kind = "geometric"
        thresholds: tuple[float, ...] = (0.5,)
        per_exit: bool = False

    def __init__(self, config: Config, dim: int, exits: int) -> None:
        super().__init__(config, dim, exits)
        self.config = config
        self.linear = nn.Linear(dim, max(1, exits - 1) if config.per_exit else 1)

    def confidence(self, at: AtExit) -> Tensor:
        return self._logits(at.x, at.number).sigmoid()

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        log_q = self.log_probabilities(seen.hidden)
        return cross_entropy(self.config, log_q, oracle(self.config, seen), seen.valid, progress)

    def log_probabilities(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return ln q [batch, time, exits] from the hidden states at every exit, [batch, time, dim] each."""
        logits = torch.stack([self._logits(x, number) for number, x in enumerate(hidden[:-1])], dim=-1)
        # ln prod_{m <= n} (1 - chi^m), as a sum of logarithms so that long products do not underflow
        stays = functional.logsigmoid(-logits).cumsum(-1)
        before = functional.pad(stays[..., :-1], (1, 0))
        return torch.cat([functional.logsigmoid(logits) + before, stays[..., -1:]], dim=-1)

    def _logits(self, x: Tensor, number: int) -> Tensor:
        logits = self.linear(x)[..., number if self.config.per_exit else 0]
        return logits.to(state_dtype(logits.dtype))


def cross_entropy(config: OracleConfig, log_q: Tensor, best: Tensor, valid: Tensor, progress: float) -> Tensor:
    """Return alpha times the mean of -ln q(best), of ln q [..., exits] and ``best`` [...] int64, where ``valid``."""
    nats = -log_q.gather(-1, best[..., None])[..., 0]
    mean = torch.where(valid, nats, 0.0).sum() / valid.sum().clamp_min(1)
    return (config.alpha if progress >= config.since else 0.0) * mean


def oracle(config: TokenOracleConfig, seen: AllExits) -> Tensor:
    """Return the best exit [batch, time] int64, counted from 0, of each token."""
    return cheapest(smoothed(scores_of(config, seen), seen, config.smoothing), config.penalty)


def scores_of(config: OracleConfig, seen: AllExits) -> Tensor:
    """Return LL or C of every exit and token, [exits, batch, time]."""
    return -seen.nats if config.oracle == "likelihood" else (seen.best == seen.targets).to(seen.nats.dtype)


def cheapest(scores: Tensor, penalty: float) -> Tensor:
    """Return the exit [...] int64 with the greatest ``scores`` [exits, ...] less ``penalty`` times its number."""
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


PARTS = {
    "SoftmaxResponseExit": SoftmaxResponse.Config,
    "SaturationExit": Saturation.Config,
    "ClassifierExit": ExitClassifier.Config,
    "MultinomialExit": Multinomial.Config,
    "GeometricExit": Geometric.Config,
    "SequenceMultinomialExit": SequenceMultinomial.Config,
}
