"""Projections of the four pieces of attention between two inputs (Ainslie et al. 2020, ETC, section 3.2).

The long input and the global one see themselves and each other: l2l, l2g, g2g and g2l, where x2y has the queries of x
and the keys and values of y.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn

from kinformer.projections.multi_head import MultiHead

Sharing = Literal["all", "inputs", "pieces"]
KeysValues = tuple[Tensor, Tensor]


class Pieces(NamedTuple):
    """The queries [batch, heads, n, head_dim] of the long and of the global input, keys and values of each piece."""

    q_long: Tensor
    q_global: Tensor
    l2l: KeysValues
    l2g: KeysValues
    g2g: KeysValues
    g2l: KeysValues


class ByPiece(MultiHead):
    """One projection for the long input, and for the rest what ``sharing`` says:

    ``all``     it is that of the global input too;
    ``inputs``  this has one of its own, ``of_global``: 2 queries, 2 keys and 2 values;
    ``pieces``  and the keys and values of l2g and g2l have theirs: 2 queries, 4 keys and 4 values.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, sharing: Sharing, bias: bool) -> None:
        config = MultiHead.Config(bias=bias)
        super().__init__(config, dim, num_heads, head_dim)
        separate = sharing == "pieces"
        self.of_global = None if sharing == "all" else config.build(dim, num_heads, head_dim)
        self.l2g = nn.Linear(dim, 2 * num_heads * head_dim, bias=bias) if separate else None
        self.g2l = nn.Linear(dim, 2 * num_heads * head_dim, bias=bias) if separate else None

    def pieces(self, x: Tensor, num_global: int) -> Pieces:
        """Project x [batch, num_global + time, dim] into the pieces."""
        if self.of_global is None:
            q, k, v = self(x)
            short, long = ((k[:, :, part], v[:, :, part]) for part in (slice(num_global), slice(num_global, None)))
            return Pieces(q[:, :, num_global:], q[:, :, :num_global], long, short, short, long)
        global_input, long_input = x[:, :num_global], x[:, num_global:]
        q_long, *l2l = self(long_input)
        q_global, *g2g = self.of_global(global_input)
        l2g = self.keys_values(global_input) if self.l2g is None else self._split(self.l2g(global_input))
        g2l = self.of_global.keys_values(long_input) if self.g2l is None else self._split(self.g2l(long_input))
        return Pieces(q_long, q_global, (l2l[0], l2l[1]), l2g, (g2g[0], g2g[1]), g2l)

    def _split(self, projected: Tensor) -> KeysValues:
        k, v = projected.unflatten(-1, (2, *self.shape[1:])).permute(2, 0, 3, 1, 4).unbind()
        return k, v
