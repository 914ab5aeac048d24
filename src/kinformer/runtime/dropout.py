"""Dropout (Srivastava et al. 2014) by 16 random bits an element, on a CPU.

PyTorch's CPU draws a mask one double at a time on one thread, which took a tenth of the time in training steps of small
models. Here four elements share one draw of 64 bits, so the probability is rounded to a multiple of 2^-16. The scale
uses the rounded probability, so expectations are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEVELS = 1 << 16
_DRAWS_PER_WORD = 4
"""Elements that a draw of 64 bits decides."""


class Dropout(nn.Dropout):
    """The module ``nn.Dropout``; on other devices than a CPU, PyTorch's dropout. Masks follow PyTorch's global
    generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x of any shape with elements zeroed with probability p and the others multiplied by 1 / (1 - p)."""
        dropped = round(self.p * _LEVELS)
        ours = self.training and 0 < dropped < _LEVELS and x.device.type == "cpu" and not self.inplace
        if not ours:
            return super().forward(x)
        words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // _DRAWS_PER_WORD),), device=x.device)
        # int16 is uniform from -2^15 on, so it lies below dropped - 2^15 with probability dropped / 2^16.
        retained = words.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
        # The scale of the rounded probability keeps the expectation exact.
        return x * retained.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))
