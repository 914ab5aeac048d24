"""Adaptive computation time of positions (Graves 2016; Dehghani et al. 2019, section 2.2), as in tensor2tensor.

With x the input of a step, y its output and h the sum of the probabilities of earlier steps, a running token has

    p = sigmoid(w . x + b)        it halts now if h + p > threshold, with the weight u = 1 - h, else u = p
    basic          out = u y + (1 - u) out                   accumulated     out = out + u y          out begins at 0

``basic`` is the default of the official code, ``accumulated`` Graves' sum. A token that still runs after the last step
gets no remainder. A token's ponder cost is the number of its steps, which has no gradient, plus its remainder 1 - h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.core.contract import state_dtype
from kinformer.core.stack import HaltingState
from kinformer.runtime.errors import KinformerError


class HaltingConfig(Config):
    """The config of halting; ``build(dim)`` returns a module that says after every step which tokens take another."""

    slot = "halting"
    weight: float
    halted: str

    def build(self, dim: int) -> ACT:
        raise NotImplementedError


class Decided(NamedTuple):
    """The decision after a step: the ``progress``, and the step's share [batch] of
    the ponder cost, summed over positions."""

    progress: HaltingState
    cost: Tensor


class ACT(nn.Module):
    """Adaptive computation time; ``w`` begins at zero and b at ``bias``, so that at first all tokens take equally many
    steps.

    ``halted``: what becomes of a token that has halted. ``copied``: its vector stays, as in the paper, and each later
    step absorbs it as it is, with that step's signals. ``evolving``: as in the official code it goes through all steps,
    where others see it, and only its output stays; then no work is saved. ``weight``: of the ponder cost in the loss.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HaltingConfig):
        kind = "act"
        output: Literal["basic", "accumulated"] = "basic"
        threshold: float = 0.99
        bias: float = 1.0
        weight: float = 0.01
        halted: Literal["copied", "evolving"] = "copied"

        def __post_init__(self) -> None:
            if not 0 < self.threshold < 1:
                raise KinformerError(f"halting.threshold must lie between 0 and 1, but is {self.threshold:g}.")
            if not self.weight >= 0:
                raise KinformerError(f"halting.weight must be 0 or more, but is {self.weight:g}.")

        def build(self, dim: int) -> ACT:
            return ACT(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.w = nn.Parameter(torch.zeros(dim))
        self.b = nn.Parameter(torch.full((), config.bias))

    def begin(self, x: Tensor, valid: Tensor | None) -> HaltingState:
        """Return the progress before the first step of x [batch, time, dim]: all valid tokens run."""
        halted = x.new_zeros(x.shape[:2], dtype=state_dtype(x.dtype))
        running = torch.ones_like(halted, dtype=torch.bool) if valid is None else valid
        return HaltingState(0, torch.zeros_like(x, dtype=halted.dtype), halted, running)

    def forward(self, progress: HaltingState, x: Tensor, y: Tensor) -> Decided:
        """Decide after a step from x to y, [batch, time, dim] each; y of halted tokens is ignored."""
        number, out, halted, running = progress
        p = ((x.to(halted.dtype) * self.w.to(halted.dtype)).sum(-1) + self.b).sigmoid()
        # h + p > threshold halts the token now, with the remainder 1 - h as its weight.
        still = running & (halted + p <= self.config.threshold)
        rest = torch.where(running & ~still, 1 - halted, 0.0)
        share = torch.where(still, p, rest)[..., None]
        if self.config.output == "basic":
            # u y + (1 - u) out
            out = torch.lerp(out, y.to(out.dtype), share)
        else:
            out = out + share * y.to(out.dtype)
        return Decided(HaltingState(number + 1, out, halted + share[..., 0], still), (running + rest).sum(1))
