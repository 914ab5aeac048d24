"""Product-key memory (Lample et al. 2019, Large Memory Layers with Product Keys): a feed-forward with a table look-up.

    y(x) = sum over heads, and over the topk slots (i, j) of largest score, of softmax(score)_(i, j) value_(i, j)
    score_(i, j) = q1 . keys1_i + q2 . keys2_j,    [q1, q2] = norm(W x + b), two halves per head

With n keys in each half there are n^2 values, and the best of them are found among the topk^2 pairs of the best keys of
each half: exactly, at the cost of 2 n products. With topk = n^2 it is a softmax over all values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.contract import state_dtype
from kinformer.core.feed_forward import FeedForwardConfig, PartlyUsed, ReadsPadding
from kinformer.runtime.compiling import uncompiled
from kinformer.runtime.derivatives import Context
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import has_data
from kinformer.runtime.words import plural

_GATHERED = 1 << 22
"""Numbers that a backward gathers at a time."""


class ProductKeys(ReadsPadding, PartlyUsed, nn.Module):
    """The feed-forward x [..., dim] -> [..., dim]; ``valid`` [...] bool or None marks real tokens.

    ``norm``: of the queries. ``layer`` norms each half of each head's query by itself; ``batch`` is the published one,
    over the valid tokens of a training batch, so that rows then depend on each other. ``sparse``: the values' gradient
    holds the rows that were looked up, no others, and an optimiser of their own moves them.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "product_keys"
        indivisible = "every head looks values up in one table"
        num_keys: int = 128  # of each half: there are num_keys ** 2 values
        num_heads: int = 4
        topk: int = 32
        key_dim: int = 128  # of both halves together
        norm: Literal["layer", "batch", "none"] = "layer"
        sparse: bool = True

        def __post_init__(self) -> None:
            for name in ("num_keys", "num_heads", "topk", "key_dim"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")
            if self.topk > self.num_keys**2:
                raise KinformerError(
                    f"topk = {self.topk} is more than the {plural(self.num_keys**2, 'value')} that num_keys = "
                    f"{self.num_keys} make; give fewer, or more keys."
                )
            if self.key_dim % 2:
                raise KinformerError(f"key_dim = {self.key_dim} is odd, but has two halves; give an even number.")

        def build(self, dim: int) -> ProductKeys:
            return ProductKeys(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.num_keys, self.topk = config.num_keys, config.topk
        half, width = config.key_dim // 2, config.num_heads * config.key_dim
        self.query = nn.Linear(dim, width)
        self.norm = {
            "layer": lambda: nn.LayerNorm(half),
            "batch": lambda: nn.BatchNorm1d(width),
            "none": nn.Identity,
        }[config.norm]()
        self.keys = nn.Parameter(torch.empty(config.num_heads, 2, config.num_keys, half))
        nn.init.uniform_(self.keys, -(half**-0.5), half**-0.5)
        self.values = Values(config.num_keys**2, dim, sparse=config.sparse)

    @property
    def unused_parameters(self) -> int:
        looked_up = self.keys.shape[0] * self.topk
        return max(0, self.values.num_embeddings - looked_up) * self.values.embedding_dim

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        valid = None if valid is None else valid.flatten()
        slots, weights = self.look_up(x.flatten(0, -2), valid)
        if valid is not None:
            # ``where`` rather than a product: weights of padding may be NaN.
            weights = torch.where(valid[:, None], weights, weights.new_zeros(()))
        return self.values(slots, weights).to(x.dtype).view(x.shape)

    def look_up(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return slots [tokens, num_heads * topk] int64 of x [tokens, dim], and
        their weights, which sum to 1 per head."""
        q = self._queries(x, valid)
        scores = torch.einsum("nhpd,hpkd->nhpk", q, self.keys.to(q.dtype))
        best, keys = scores.to(state_dtype(scores.dtype)).topk(min(self.topk, self.num_keys), dim=-1)
        # Scores q1 . keys1_i + q2 . keys2_j add, so the topk pairs lie among those of the topk keys of each half.
        pairs = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(-2)
        slots = (keys[:, :, 0, :, None] * self.num_keys + keys[:, :, 1, None, :]).flatten(-2)
        top, chosen = pairs.topk(self.topk, dim=-1)
        return slots.gather(-1, chosen).flatten(1), top.softmax(dim=-1).flatten(1)

    def _queries(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return the queries [tokens, num_heads, 2, key_dim / 2]."""
        q = self.query(x)
        if isinstance(self.norm, nn.BatchNorm1d):
            q = self._batch_norm(q, valid)
        q = q.view(x.shape[0], self.keys.shape[0], 2, -1)
        return self.norm(q) if isinstance(self.norm, nn.LayerNorm) else q

    def _batch_norm(self, q: Tensor, valid: Tensor | None) -> Tensor:
        if not self.training:
            return self.norm(q)
        real = q if valid is None else q[valid]
        if len(real) < 2:
            raise KinformerError(
                f"the norm 'batch' of a product-key memory needs 2 tokens or more in training, but the batch has "
                f"{len(real)}; train on more at a time, or choose the norm 'layer'."
            )
        normed = self.norm(real)
        return normed if valid is None else q.new_zeros(q.shape).to(normed.dtype).index_put((valid,), normed)


class Values(nn.EmbeddingBag):
    """The table [slots, dim]: (slots, weights), both [tokens, n], -> the weighted sums [tokens, dim]."""

    def __init__(self, slots: int, dim: int, sparse: bool) -> None:
        super().__init__(slots, dim, mode="sum", sparse=sparse)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    @uncompiled("gradients of the table are rows alone")
    def forward(self, slots: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        weights = weights.to(self.weight.dtype)
        if self.sparse:
            return _Sum.apply(slots, weights, self.weight)
        return super().forward(slots, per_sample_weights=weights)


class _Sum(torch.autograd.Function):
    """The function ``embedding_bag`` with a sparse gradient, also where there are
    only shapes (PyTorch's own fails there)."""

    @staticmethod
    def forward(ctx: Context, slots: Tensor, weights: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(slots, weights, table)
        return nn.functional.embedding_bag(slots, table, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (gradient,) = gradients
        slots, weights, table = ctx.saved_tensors
        tokens = max(1, _GATHERED // (slots.shape[1] * table.shape[1]))
        by_weights = [
            torch.bmm(table[some], of_some[..., None])[..., 0]
            for some, of_some in zip(slots.split(tokens), gradient.split(tokens), strict=True)
        ]
        looked_up, place = _distinct(slots, len(table))
        rows = gradient.new_zeros(len(looked_up), table.shape[1])
        for start in range(0, len(slots), tokens):
            some = slice(start, start + tokens)
            rows.index_add_(0, place[some].flatten(), (weights[some, :, None] * gradient[some, None]).flatten(0, 1))
        by_table = torch.sparse_coo_tensor(
            looked_up[None], rows, table.shape, check_invariants=False, is_coalesced=True
        )
        return None, torch.cat(by_weights), by_table


def _distinct(slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the slots that occur in ``slots``, of ``count`` there are, in order, and where each of ``slots`` is among
    them; where there are only shapes, as many as there may be."""
    if has_data(slots):
        looked_up, place = slots.unique(return_inverse=True)
        return looked_up, place
    return slots.new_empty(min(slots.numel(), count)), slots
