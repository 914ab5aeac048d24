"""Rotary position embedding (Su et al. 2021, RoFormer, equation 34): queries and keys are rotated by their position.

    (x_i, x_j) -> (x_i cos a - x_j sin a, x_i sin a + x_j cos a),   a = position * f_i,   f_i = base^(-2i / width)

so that a product of a query and a key depends on their distance only. ``layout`` says which features form a pair:
``half`` pairs i with i + width/2 (GPT-NeoX, Llama), ``interleaved`` pairs 2i with 2i + 1 (the paper). ``fraction`` is
the share of each head's features that turn (GPT-NeoX: the first quarter); the rest passes through.

A model that was trained at ``original_length`` runs ``factor`` times as far with other frequencies:

    linear   f_i / factor                                     (position interpolation, Chen et al. 2023)
    ntk      base * factor^(width / (width - 2)) as the base  (NTK-aware: slow pairs are stretched, fast ones are not)
    yarn     f_i where a pair turns ``beta_fast`` times or more within ``original_length``, f_i / factor where it turns
             ``beta_slow`` times or less, a linear ramp over i between, whose ends are rounded to whole pairs if
             ``truncate``; cosine and sine times ``attention_factor``, 0.1 ln(factor) + 1 by default
             (Peng et al. 2023, section 3)
    llama3   f_i where a pair turns more than ``high_freq_factor`` times within ``original_length``, f_i / factor where
             it turns less than ``low_freq_factor`` times, a ramp linear in the turns between (Llama 3.1)

They add no weights. Frequencies that follow the length of the sequence (dynamic NTK) would make keys that are
remembered wrong, so there are none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinformer.core.config import check_unused
from kinformer.core.parts import Position, PositionConfig
from kinformer.runtime.errors import KinformerError

YARN = ("original_length", "beta_fast", "beta_slow", "attention_factor", "truncate")
LLAMA3 = ("original_length", "low_freq_factor", "high_freq_factor")
"""The settings that the scaling of that name reads beside its factor."""


class Rope(Position):
    """Angles in float64, rotation in the activations' dtype."""

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "rope"
        bounded_by_training = True
        base: float = 10000.0
        layout: Literal["half", "interleaved"] = "half"
        fraction: float = 1.0
        scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
        factor: float = 1.0
        original_length: int | None = None
        beta_fast: float = 32.0
        beta_slow: float = 1.0
        attention_factor: float | None = None
        truncate: bool = True
        low_freq_factor: float = 1.0
        high_freq_factor: float = 4.0

        def __post_init__(self) -> None:
            if not 0 < self.fraction <= 1:
                raise KinformerError(f"fraction must be above 0 and at most 1, but is {self.fraction:g}.")
            if not self.factor >= 1:
                raise KinformerError(f"factor must be 1 or more, but is {self.factor:g}.")
            if self.original_length is not None and self.original_length < 1:
                raise KinformerError(f"original_length must be 1 or more, but is {self.original_length}.")
            if not 0 < self.beta_slow < self.beta_fast:
                raise KinformerError(
                    f"beta_slow = {self.beta_slow:g} must lie between 0 and beta_fast = {self.beta_fast:g}."
                )
            if not 0 < self.low_freq_factor < self.high_freq_factor:
                raise KinformerError(
                    f"low_freq_factor = {self.low_freq_factor:g} must lie between 0 and high_freq_factor = "
                    f"{self.high_freq_factor:g}."
                )
            if self.attention_factor is not None and not self.attention_factor > 0:
                raise KinformerError(f"attention_factor must be above 0, but is {self.attention_factor:g}.")

        def build(self, dim: int) -> Rope:
            return Rope(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.width = config, int(config.fraction * dim)
        _check(config, dim, self.width)
        self.magnitude = 1 + 0.1 * math.log(config.factor) if config.scaling == "yarn" else 1.0
        if config.attention_factor is not None:
            self.magnitude = config.attention_factor

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = ((turn * self.magnitude).to(q.dtype) for turn in self._turns(positions))
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def moved(self, k: Tensor, distances: Tensor) -> Tensor:
        return self._turn(k, *(turn.to(k.dtype) for turn in self._turns(distances)))

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [batch, 1, time, width / 2] of the angles at ``positions``, float64."""
        rate = frequencies(self.config, self.width, positions.device)
        # At position 10^6 a float32 angle is 0.06 rad off; only sines and cosines are rounded.
        angles = (positions[..., None].to(torch.float64) * rate)[:, None]
        return angles.cos(), angles.sin()

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self.width], x[..., self.width :]
        if self.config.layout == "half":
            a, b = turned.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def frequencies(config: Rope.Config, width: int, device: torch.device | None = None) -> Tensor:
    """Return radians per position of each pair of ``width`` features, [width /
    2] float64, scaled as ``config`` says."""
    base = config.base
    if config.scaling == "ntk":
        base *= config.factor ** (width / (width - 2))
    index = torch.arange(width // 2, device=device, dtype=torch.float64)
    rate = base ** (-2 * index / width)
    if config.scaling == "linear":
        return rate / config.factor
    if config.scaling == "yarn":
        low, high = _ramp(config, width)
        slow = ((index - low) / (high - low)).clamp(0, 1)
        return rate * (1 - slow) + rate / config.factor * slow
    if config.scaling == "llama3":
        assert config.original_length is not None
        turns = config.original_length * rate / (2 * math.pi)
        fast = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        return rate / config.factor + (rate - rate / config.factor) * fast.clamp(0, 1)
    return rate


def _ramp(config: Rope.Config, width: int) -> tuple[float, float]:
    """Return the pairs between which YaRN goes over from f_i to f_i / factor; the interval is never empty."""
    original = config.original_length
    assert original is not None

    def pair(turns: float) -> float:
        """Return the pair that makes this many ``turns`` within the original length."""
        # original * base^(-2i / width) = 2 pi turns, solved for i
        return width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(config.base))

    first, last = pair(config.beta_fast), pair(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, width - 1)
    return low, max(high, low + 0.001)


def _check(config: Rope.Config, dim: int, width: int) -> None:
    """Refuse settings that conflict with each other or with the width of a head."""
    if width < 2 or width % 2:
        share = "" if config.fraction == 1 else f", of which fraction = {config.fraction:g} leaves {width}"
        raise KinformerError(f"rope needs an even head_dim, but head_dim is {dim}{share}.")
    if (config.scaling == "none") != (config.factor == 1):
        raise KinformerError(
            f"rope's scaling is {config.scaling!r} with factor = {config.factor:g}; set both, scaling (linear, ntk, "
            "yarn, llama3) and a factor above 1, or neither."
        )
    if config.scaling == "ntk" and width < 4:
        raise KinformerError(f"rope's scaling 'ntk' needs 4 or more features that turn, but there are {width}.")
    used = {"yarn": YARN, "llama3": LLAMA3}.get(config.scaling, ())
    unused = sorted({*YARN, *LLAMA3} - {*used})
    check_unused(config, f"with scaling = {config.scaling!r}", *unused)
    if used and config.original_length is None:
        raise KinformerError(
            f"rope's scaling {config.scaling!r} needs original_length, the length that the model was trained at."
        )
