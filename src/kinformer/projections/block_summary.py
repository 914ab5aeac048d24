"""A block of tokens made one vector by a perceptron with positions in the block (Yuan et al. 2025, NSA, equation 7).

    summary = W_2 relu(W_1 [x_1 + p_1; ...; x_n + p_n] + b_1) + b_2

for the keys, or the values, of a block's n tokens; p_i is a vector for every head and place. The paper leaves the
hidden width open: with 2 head_dim the perceptron can compute the mean, with which it begins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BlockSummary(nn.Module):
    """The map of x [batch, kv_heads, blocks, block, head_dim] to [batch, kv_heads, blocks, head_dim], the same for all
    heads except for ``places`` [kv_heads, block, head_dim]."""

    initialised = True  # as the mean, rather than by the model's initialisation

    def __init__(self, kv_heads: int, block: int, head_dim: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(kv_heads, block, head_dim))
        self.hidden = nn.Linear(block * head_dim, 2 * head_dim)
        self.out = nn.Linear(2 * head_dim, head_dim)
        with torch.no_grad():
            mean, one = torch.eye(head_dim).repeat(1, block) / block, torch.eye(head_dim)
            # relu(m) - relu(-m) = m
            self.hidden.weight.copy_(torch.cat([mean, -mean]))
            self.out.weight.copy_(torch.cat([one, -one], 1))
            for product in (self.hidden, self.out):
                product.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        placed = (x + self.places.to(x.dtype)[:, None]).flatten(-2)
        summary: Tensor = self.out(torch.relu(self.hidden(placed)))
        return summary.to(x.dtype)
