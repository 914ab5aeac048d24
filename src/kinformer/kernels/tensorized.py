"""Products of three factors over pairs of tokens, in blocks of queries (Ma et al. 2019); see ``mixers.tensorized``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Block(NamedTuple):
    """A block of tokens, from slot ``first`` on, and all slots up to the block's last token.

    ``queries`` [batch, tokens, width], ``keys`` [batch, slots, width], ``v`` [batch, slots, rank]; width is rank, or
    2 * rank where keys of content and of positions stand side by side. ``number`` [batch, all slots] or None: the
    number of the sequence in the chunk that a slot belongs to.
    """

    queries: Tensor
    keys: Tensor
    v: Tensor
    first: int
    number: Tensor | None

    def outputs(self, weight: Tensor, total: Tensor) -> Tensor:
        """Return y [batch, tokens, dim]; ``total`` is M of the slots before."""
        # M ((q_i + u) * g), the pairs of earlier slots
        y = torch.einsum("btr,bdr->btd", self.queries, total.to(self.queries.dtype))
        if self.number is not None:
            y = torch.where((self._present == self._before)[..., None], y, y.new_zeros(()))
        tensor = self._tensor().flatten(2)
        if len(weight) == 1:
            return y + linear(tensor, weight[0].flatten(1))
        return y + torch.einsum("btp,bdp->btd", tensor, weight.flatten(2))

    def _tensor(self) -> Tensor:
        """Return T [batch, tokens, tokens, slots + first] of queries, keys of the block and all values; then of
        queries, values of the block and earlier keys; zero where either is hidden from the query."""
        first, rank = self.first, self.v.shape[-1]
        queries, keys, v = self.queries[:, :, None], self.keys[:, None, first:], self.v[:, None, first:]
        by_key = (queries * keys).unflatten(-1, (-1, rank)).sum(-2) @ self.v.mT[:, None]
        by_value = (queries * v.repeat(1, 1, 1, queries.shape[-1] // rank)) @ self.keys[:, None, :first].mT
        index = torch.arange(self.v.shape[1], device=self.v.device)
        shown = index <= index[first:, None]
        if self.number is not None:
            shown = shown & (self.number[:, None, : len(index)] == self._present[..., None])
        shown = shown[..., first:, None] & torch.cat([shown, shown[..., :first]], -1)[..., None, :]
        tensor = torch.cat([by_key, by_value], -1)
        return torch.where(shown, tensor, tensor.new_zeros(()))

    def sums(self, weight: Tensor, total: Tensor) -> Tensor:
        """Return M of all slots of the last token's sequence."""
        keys, v, first = self.keys, self.v, self.first
        if self.number is not None:
            last = self._present[:, -1:]
            same = (self.number[:, : v.shape[1]] == last)[..., None]
            keys, v = (torch.where(same, item, item.new_zeros(())) for item in (keys, v))
            total = torch.where((last == self._before)[..., None], total, total.new_zeros(()))
        v = v.repeat(1, 1, keys.shape[-1] // v.shape[-1])
        products = torch.cat([keys[:, first:, None] * v[:, None], v[:, first:, None] * keys[:, None, :first]], 2)
        products = products.flatten(1, 2)
        if len(weight) == 1:
            return total + torch.einsum("dp,bpr->bdr", weight[0].flatten(1), products)
        return total + torch.einsum("bdp,bpr->bdr", weight.flatten(2), products)

    @property
    def _present(self) -> Tensor:
        """Return the sequence number of each token, [batch, tokens]."""
        assert self.number is not None
        return self.number[:, self.first : self.v.shape[1]]

    @property
    def _before(self) -> Tensor:
        """Return the sequence number of the slot before the block, [batch, 1];
        the first of a chunk continues the past."""
        assert self.number is not None
        return self.number[:, self.first - 1 : self.first] if self.first else torch.zeros_like(self.number[:, :1])
