"""Vectors as 8-bit integers with a scale each, symmetric about 0: keys and values in a quarter of float32.

    x ~ s q,    s >= max |x| / 127,    q = round(x / s) in -127 .. 127,    |x - s q| <= s / 2

A vector of n numbers is n + 3 bytes: q, and s = m 2^(e - 13) as e, m div 128 and m mod 128. s is larger than it must be
by a share of 2^-12 at most. Zeros stand for themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SCALE = 3
_MOST, _BITS, _LEAST = 127, 13, 1e-36


class Quantized(NamedTuple):
    """Keys or values whose past is in 8 bits: ``slots`` [batch, heads, past, width + 3], :func:`packed`, and those of
    the call's own tokens as they are, ``new`` [batch, heads, time, width]; the past takes no gradient."""

    slots: Tensor
    new: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the keys or values that they stand for."""
        batch, heads, past, _ = self.slots.shape
        return torch.Size((batch, heads, past + self.new.shape[2], self.new.shape[3]))

    def made(self) -> Tensor:
        """Return the keys or values, in the dtype of the new ones."""
        return torch.cat([unpacked(self.slots, self.new.dtype), self.new], 2)


def packed(x: Tensor) -> Tensor:
    """Return the vectors x [..., width] as int8 [..., width + 3]; no gradient passes."""
    x = x.detach().float()
    scale = x.abs().amax(-1, keepdim=True) / _MOST
    mantissa, exponent = torch.frexp(scale.where(scale > _LEAST, 0))
    m = (mantissa * 2**_BITS).ceil()  # up, so that no q exceeds 127
    high = (m / 128).floor()
    digits = torch.cat([exponent.to(m.dtype), high, m - 128 * high], -1)
    scale = _scale(digits)
    q = (x / scale.where(scale > 0, 1)).round().where(scale > 0, 0)
    return torch.cat([q, digits], -1).to(torch.int8)


def unpacked(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors that x [..., width + 3] stands for, [..., width]."""
    wide = x.float()  # at once: rows side by side are converted several times as fast as parts of rows
    return (wide[..., :-SCALE] * _scale(wide[..., -SCALE:])).to(dtype)


def scales(packed: Tensor) -> Tensor:
    """Return the scales [..., 1] of vectors packed [..., width + 3], in float32."""
    return _scale(packed[..., -SCALE:].float())


def _scale(digits: Tensor) -> Tensor:
    exponent, high, low = digits.split(1, -1)
    return (128 * high + low) * torch.exp2(exponent - _BITS)
