"""Confidence measures with a threshold (CALM, Schuster et al. 2022, sections 3.4 and 3.5).

A token leaves by the first exit where its confidence reaches the threshold. At position t it is

    threshold(t) = clip(0.9 lambda + 0.1 exp(-t / decay_tokens), 0, 1)          (equation 5, decay_tokens = N / tau)

or lambda itself without a decay. No thresholds: no token leaves early, as before a calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.contract import state_dtype
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.stacks.exit_rules import AllExits, AtExit, ExitRule, ExitRuleConfig


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig(ExitRuleConfig):
    """The config of confidence rules; ``thresholds``: one for all exits, or one for each but the last."""

    thresholds: tuple[float, ...] = ()
    decay_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.decay_tokens is not None and not self.decay_tokens > 0:
            raise KinformerError(
                f"rule.decay_tokens is a number of tokens and must be above 0, but is {self.decay_tokens:g}."
            )

    def at(self, exits: int) -> tuple[float, ...]:
        """Return the threshold of every exit but the last."""
        if len(self.thresholds) not in (0, 1, exits - 1):
            raise KinformerError(
                f"rule.thresholds has {plural(len(self.thresholds), 'number')}, but the stack has "
                f"{plural(exits - 1, 'exit')} before the last; give one for all, or one for each."
            )
        return self.thresholds * (exits - 1) if len(self.thresholds) == 1 else self.thresholds


class ThresholdRule(ExitRule):
    """A rule by confidence; ``confidence(at)`` [n] is at least 0 and, if it is no cosine, at most 1."""

    def __init__(self, config: ThresholdConfig, exits: int) -> None:
        super().__init__(exits)
        self.decay_tokens, self.thresholds = config.decay_tokens, config.at(exits)

    @property
    def off(self) -> bool:
        return not self.thresholds

    def confidence(self, at: AtExit) -> Tensor:
        raise NotImplementedError

    def threshold(self, at: AtExit) -> Tensor | float:
        """Return the threshold of each token [n], or of all."""
        level = self.thresholds[at.number]
        if self.decay_tokens is None:
            return level
        # Equation 5, with lambda the level and t the position
        return (0.9 * level + 0.1 * (-at.positions.double() / self.decay_tokens).exp()).clamp(0.0, 1.0)

    def forward(self, at: AtExit) -> Tensor:
        reached = self.confidence(at) >= self.threshold(at)
        return torch.where(reached, at.number, self.last)


class SoftmaxResponse(ThresholdRule):
    """Confidence by the exit's head: the ``difference`` of its two highest probabilities, or the ``maximum``."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ThresholdConfig):
        kind = "softmax_response"
        measure: Literal["difference", "maximum"] = "difference"

        def build(self, dim: int, exits: int) -> SoftmaxResponse:
            return SoftmaxResponse(self, exits)

    def __init__(self, config: Config, exits: int) -> None:
        super().__init__(config, exits)
        self.measure = config.measure

    def confidence(self, at: AtExit) -> Tensor:
        logits = at.logits()
        if self.measure == "maximum":
            return logits.to(state_dtype(logits.dtype)).softmax(-1).amax(-1)
        highest = logits.to(state_dtype(logits.dtype)).softmax(-1).topk(2, dim=-1).values
        return highest[..., 0] - highest[..., 1]


class Saturation(ThresholdRule):
    """Confidence by saturation: the cosine of a token's vectors at this exit and the one before."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ThresholdConfig):
        kind = "saturation"

        def build(self, dim: int, exits: int) -> Saturation:
            return Saturation(self, exits)

    def confidence(self, at: AtExit) -> Tensor:
        dtype = state_dtype(at.x.dtype)
        return functional.cosine_similarity(at.x.to(dtype), at.earlier.to(dtype), dim=-1)


class ExitClassifier(ThresholdRule):
    """Confidence sigmoid(w . h + b), the probability that the last exit would predict the same, by one w and b of all
    exits.

    (In the paper a softmax over two classes, which is the same function.) Its loss is the cross-entropy of that,
    both answers weighing alike, on average over the exits but the last. It moves w and b alone.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(ThresholdConfig):
        kind = "classifier"
        learns = True

        def build(self, dim: int, exits: int) -> ExitClassifier:
            return ExitClassifier(self, dim, exits)

    def __init__(self, config: Config, dim: int, exits: int) -> None:
        super().__init__(config, exits)
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
                # The mean within each answer, so that both weigh alike however rare one is.
                classes.append(torch.where(which, losses, 0.0).sum() / which.sum().clamp_min(1))
            costs.append(0.5 * (classes[0] + classes[1]))
        return torch.stack(costs).mean()

    def _logits(self, x: Tensor) -> Tensor:
        return self.linear(x)[..., 0].to(state_dtype(x.dtype))
