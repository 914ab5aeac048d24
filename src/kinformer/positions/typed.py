"""Typed relations between tokens (Ainslie et al. 2020, ETC, section 3.1): distances, and whether one stands for
the other's sentence, as rows of one table.

    score(q, k) = (q . k + q . E[id] + c[id]) / sqrt(head_dim)

    id          0    1 ... K               K + 1 ... 2 K        2 K + 1      2 K + 2      2 K + 3
    the key is  q    so far to the right   so far to the left   unlike       same         another, in no order

"Same" and "unlike" are between the two inputs: the global token stands for the sentence of the long input's token, or
for another. E[id] is the
paper's a^K of a relative position label, c[id] a bias that the authors' code adds; K is its clipping distance k, and
distances beyond K are K.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.core.parts import Relative


def ids_of(max_distance: int) -> int:
    """Return the number of relation ids for a clipping distance."""
    return 2 * max_distance + 4


class TypedRelations(nn.Module):
    """The tables ``keys`` [rows, heads, head_dim] (the authors' E) and ``bias`` [rows, heads]
    (their c); rows beyond the ids are spare."""

    def __init__(self, max_distance: int, num_heads: int, head_dim: int, rows: int | None = None) -> None:
        super().__init__()
        ids = ids_of(max_distance)
        self.max_distance, self.scale = max_distance, head_dim**-0.5
        keys = torch.empty(rows or ids, num_heads, head_dim)
        self.keys = nn.Parameter(nn.init.trunc_normal_(keys, std=0.5, a=-1.0, b=1.0))
        self.bias = nn.Parameter(torch.zeros(rows or ids, num_heads))
        self.unlike, self.same, self.unordered = range(ids - 3, ids)

    def of_distance(self, distance: Tensor) -> Tensor:
        """Return the id of every distance (query position - key position), int64."""
        limit = self.max_distance
        return torch.where(distance <= 0, (-distance).clamp_max(limit), limit + distance.clamp_max(limit))

    def relative(self, farthest: int) -> Relative:
        """Return the keys and biases of the distances up to ``farthest`` to the left and to the right."""
        ids = self.of_distance(torch.arange(-farthest, farthest + 1, device=self.bias.device))
        return Relative(-farthest, bias=(self.bias[ids] * self.scale).mT, keys=self.keys[ids].transpose(0, 1))

    def scores(self, q: Tensor) -> Tensor:
        """Return the term of each id in the score of each query: [batch, heads,
        n, head_dim] -> [batch, heads, n, ids]."""
        products = (q * self.scale) @ self.keys.permute(1, 2, 0).to(q.dtype)
        return products + (self.bias * self.scale).mT[:, None]

    def by_sentence(self, scores: Tensor, in_sentence: Tensor | None) -> Tensor:
        """Return the entries of :meth:`scores` for keys of the other input, [batch, heads, n, keys].

        in_sentence: bool [batch, n, keys], whether query and key belong together; None if there are no sentences.
        """
        unlike = scores[..., self.unlike, None]
        if in_sentence is None:
            return unlike
        return torch.where(in_sentence[:, None], scores[..., self.same, None], unlike)
