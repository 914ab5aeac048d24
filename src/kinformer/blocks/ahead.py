"""Predictions of the tokens beyond the next (Gloeckle et al. 2024, "Multi-token prediction"; DeepSeek-V3, section 2.2).

The objective multi-token trains them (``lab.tasks.next_token``), and generation takes their most probable
tokens as a draft (``generation.drafts``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.parts import Input


class Ahead(nn.ModuleList):
    """The predictions of ``count`` tokens beyond the next, one :class:`FurtherToken` each; a decoder owns them."""

    def __init__(self, count: int, width: int, dim: int) -> None:
        super().__init__(FurtherToken(width, dim) for _ in range(count))

    def further(self, number: int, hidden: Tensor, tokens: Tensor, input: Input) -> Tensor:
        """Return the hidden states [batch, time, width] that predict the tokens after ``tokens`` [batch, time].

        ``hidden`` [batch, time, width] predicts ``tokens``: the model's hidden states for ``number`` 1, otherwise the
        result for ``number`` - 1. ``input`` is the model's.
        """
        return self[number - 1](hidden, input(tokens, torch.zeros_like(tokens)))

    def guesses(self, hidden: Tensor, tokens: Tensor, limit: int, input: Input, head: nn.Module) -> Tensor:
        """Return the most probable tokens [batch, n] after ``tokens`` [batch, 1], with n at most ``limit``.

        ``tokens`` were drawn by the model's hidden states ``hidden`` [batch, 1, width]; ``input`` and ``head`` are the
        model's.
        """
        guesses = []
        for number in range(1, min(limit, len(self)) + 1):
            hidden = self.further(number, hidden, tokens, input)
            tokens = head(hidden, input).argmax(dim=-1)
            guesses.append(tokens)
        return torch.cat(guesses, dim=1)


class FurtherToken(nn.Module):
    """The map from hidden states that predict a token, and the token's vector, to hidden states that predict the token
    after it:

        z' = z + V silu(U [rms(z); rms(e)])

    z [batch, time, width] are the model's hidden states or results of this map, e [batch, time, dim] the vectors of the
    tokens. The model's head reads z and z'. DeepSeek-V3's equation 21 continues with a layer of attention, which would
    need a state; it is left out here.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width + dim, 2 * width, bias=False)
        self.outer = nn.Linear(2 * width, width, bias=False)

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        joined = torch.cat([_normed(z), _normed(e).to(z.dtype)], dim=-1)
        return z + self.outer(functional.silu(self.inner(joined)))


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])
