"""Projections of the four pieces of attention between two inputs (Ainslie et al. 2020, ETC, section 3.2).

The long input (a document) and the global one (the tokens of its side) see themselves and each other: l2l, l2g, g2g and
g2l, named by who asks and who is seen.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn

from kinformer.projections.multi_head import MultiHead

Sharing = Literal["all", "sides", "pieces"]
KeysValues = tuple[Tensor, Tensor]


class Pieces(NamedTuple):
    """Queries [batch, heads, n, head_dim] of the ``long`` input and of the ``side``, keys and values of each piece."""

    long: Tensor
    side: Tensor
    l2l: KeysValues
    l2g: KeysValues
    g2g: KeysValues
    g2l: KeysValues


class ByPiece(MultiHead):
    """One projection for all that the document's tokens see, and for the rest what ``sharing`` says:

    ``all``     it is that of the side's tokens too;
    ``sides``   these have one of their own, ``of_global``: 2 queries, 2 keys and 2 values;
    ``pieces``  and the keys and values of l2g and g2l have theirs: 2 queries, 4 keys and 4 values.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, sharing: Sharing, bias: bool) -> None:
        config = MultiHead.Config(bias=bias)
        super().__init__(config, dim, num_heads, head_dim)
        own = sharing == "pieces"
        self.of_global = None if sharing == "all" else config.build(dim, num_heads, head_dim)
        self.l2g = nn.Linear(dim, 2 * num_heads * head_dim, bias=bias) if own else None
        self.g2l = nn.Linear(dim, 2 * num_heads * head_dim, bias=bias) if own else None

    def pieces(self, x: Tensor, side: int) -> Pieces:
        """Of x [batch, side + time, dim]."""
        if self.of_global is None:
            q, k, v = self(x)
            beside, long = ((k[:, :, part], v[:, :, part]) for part in (slice(side), slice(side, None)))
            return Pieces(q[:, :, side:], q[:, :, :side], long, beside, beside, long)
        inner, document = x[:, :side], x[:, side:]
        long, *l2l = self(document)
        own, *g2g = self.of_global(inner)
        l2g = self.keys_values(inner) if self.l2g is None else self._split(self.l2g(inner))
        g2l = self.of_global.keys_values(document) if self.g2l is None else self._split(self.g2l(document))
        return Pieces(long, own, (l2l[0], l2l[1]), l2g, (g2g[0], g2g[1]), g2l)

    def _split(self, found: Tensor) -> KeysValues:
        k, v = found.unflatten(-1, (2, *self.shape[1:])).permute(2, 0, 3, 1, 4).unbind()
        return k, v
