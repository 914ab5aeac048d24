"""Feed-forward sublayers: the same two or three products for every token.

With ``chunks`` above 1 a sequence goes through them in that many parts (Kitaev et al. 2020, section 3), and a training
step computes each part's hidden layer again in the backward pass: one part's is in memory at a time, the outputs are
equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kinformer.blocks.residual import per_slice
from kinformer.core.contract import divided, in_blocks, state_dtype
from kinformer.core.parts import FeedForwardConfig, PartlyUsed, ReadsPadding, ResidualOutput
from kinformer.runtime.autograd import Context, transformed
from kinformer.runtime.compiling import uncompiled
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.host import has_data


def in_chunks(inner: Callable[[Tensor], Tensor], x: Tensor, chunks: int, random: bool = False) -> Tensor:
    """Apply ``inner`` to x [batch, time, ...] in ``chunks`` parts of time; ``random``: it draws random numbers."""
    if chunks == 1 or x.dim() <= 2 or x.shape[1] == 1:
        return inner(x)
    parts = x.tensor_split(min(chunks, x.shape[1]), dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([inner(part) for part in parts], dim=1)
    again = (checkpoint(inner, part, use_reentrant=False, preserve_rng_state=random) for part in parts)
    return torch.cat(list(again), dim=1)


Activation = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "gelu_sigmoid", "silu"]


class MLP(nn.Module):
    """The feed-forward down(activation(up(x))) (Vaswani et al. 2017, equation 2).

    With ``slices`` above 1 every slice of a token goes through the same weights, and becomes ``hidden_dim`` wide.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "mlp"
        hidden_dim: int | None = None
        activation: Activation = "gelu"
        bias: bool = True
        slices: int = 1
        chunks: int = 1

        def part(self, dim: int, parts: int) -> MLP.Config:
            hidden_dim = divided(self, "hidden_dim", self.hidden_dim or 4 * dim // self.slices, parts)
            return self.replace(hidden_dim=hidden_dim)

        def build(self, dim: int) -> nn.Module:
            return per_slice(lambda width: MLP(self, width), dim, self.slices)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden_dim = config.hidden_dim or 4 * dim
        self.activation, self.chunks = config.activation, config.chunks
        self.up = nn.Linear(dim, hidden_dim, bias=config.bias)
        self.down = ResidualOutput(hidden_dim, dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self._part, x, self.chunks)

    def _part(self, x: Tensor) -> Tensor:
        return self.down(_activate(self.up(x), self.activation))


def _activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return x.relu()
    if name == "squared_relu":
        return x.relu().square()
    if name == "silu":
        return functional.silu(x)
    if name == "gelu_sigmoid":
        # The sigmoid approximation of gelu, x sigmoid(1.702 x) (Hendrycks and Gimpel 2016).
        return x * (1.702 * x).sigmoid()
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class SwiGLU(nn.Module):
    """The feed-forward down(silu(gate(x)) * up(x)) (Shazeer 2020); ``hidden_dim``
    defaults to 8/3 * dim, up to a multiple of 8."""

    activation: Activation = "silu"

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "swiglu"
        hidden_dim: int | None = None
        bias: bool = False
        chunks: int = 1

        def part(self, dim: int, parts: int) -> SwiGLU.Config:
            return self.replace(hidden_dim=divided(self, "hidden_dim", self.width(dim), parts))

        def width(self, dim: int) -> int:
            """Return the hidden features in a model ``dim`` wide."""
            return self.hidden_dim or -(-8 * dim // 3 // 8) * 8

        def explicit(self, dim: int) -> Self:
            """Return the config with this ``hidden_dim``."""
            return self.replace(hidden_dim=self.width(dim))

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden_dim = config.width(dim)
        self.chunks = config.chunks
        self.gate_up = in_blocks(nn.Linear(dim, 2 * hidden_dim, bias=config.bias), hidden_dim, hidden_dim)
        self.down = ResidualOutput(hidden_dim, dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self._part, x, self.chunks)

    def _part(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(_activate(gate, self.activation) * up)


class GeGLU(SwiGLU):
    """The feed-forward down(gelu(gate(x)) * up(x)) (Shazeer 2020), whose gate is ``activation``: exact, or by tanh."""

    @dataclass(frozen=True, kw_only=True)
    class Config(SwiGLU.Config):
        kind = "geglu"
        activation: Literal["gelu", "gelu_tanh"] = "gelu"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.activation = config.activation


class Boom(nn.Module):
    """The feed-forward that sums the slices, ``dim`` wide each, of activation(up(x)) (Merity 2019, SHA-RNN, section
    3.3): an MLP whose second product is a fixed sum without weights. ``hidden_dim`` is a multiple of dim."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "boom"
        indivisible = "its second product is a sum of slices as wide as the stream"
        hidden_dim: int | None = None
        activation: Activation = "gelu_sigmoid"
        bias: bool = True
        dropout: float = 0.0  # of the activations
        chunks: int = 1

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        hidden_dim = config.hidden_dim or 4 * dim
        if hidden_dim % dim:
            raise KinformerError(
                f"hidden_dim = {hidden_dim} of the feed-forward 'boom' must be a multiple of dim = {dim}."
            )
        self.activation, self.chunks = config.activation, config.chunks
        self.up = nn.Linear(dim, hidden_dim, bias=config.bias)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self._part, x, self.chunks, random=self.dropout is not None)

    def _part(self, x: Tensor) -> Tensor:
        y = _activate(self.up(x), self.activation)
        y = y if self.dropout is None else self.dropout(y)
        return y.unflatten(-1, (-1, x.shape[-1])).sum(dim=-2)


_GATHERED = 1 << 22
"""Numbers that a backward gathers at a time."""


class ProductKeys(ReadsPadding, PartlyUsed, nn.Module):
    """Product-key memory (Lample et al. 2019, Large Memory Layers with Product Keys): a feed-forward with a table
    look-up.

        y(x) = sum over heads, and over the topk slots (i, j) of largest score, of softmax(score)_(i, j) value_(i, j)
        score_(i, j) = q1 . keys1_i + q2 . keys2_j,    [q1, q2] = norm(W x + b), two halves per head

    With n keys in each half there are n^2 values, and the exact best values are found among the topk^2 pairs of the
    best keys of each half, at the cost of 2 n products. With topk = n^2 it is a softmax over all values.

    ``norm``: the norm of the queries. ``layer`` normalises each half of each head's query; ``batch`` (the published
    norm) normalises over the valid tokens of a training batch, so rows depend on each other. ``sparse``: the values'
    gradient holds only the rows that were looked up, and the values have a separate optimiser.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(FeedForwardConfig):
        kind = "product_keys"
        indivisible = "every head looks values up in one table"
        LEAST = {"num_keys": 1, "num_heads": 1, "topk": 1, "key_dim": 1}
        num_keys: int = 128  # of each half: there are num_keys ** 2 values
        num_heads: int = 4
        topk: int = 32
        key_dim: int = 128  # of both halves together
        norm: Literal["layer", "batch", "none"] = "layer"
        sparse: bool = True

        def __post_init__(self) -> None:
            if self.topk > self.num_keys**2:
                raise KinformerError(
                    f"topk = {self.topk} is more than the {plural(self.num_keys**2, 'value')} that num_keys = "
                    f"{self.num_keys} make; give fewer, or more keys."
                )
            if self.key_dim % 2:
                raise KinformerError(f"key_dim = {self.key_dim} is odd, but has two halves; give an even number.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.num_keys, self.topk = config.num_keys, config.topk
        half, width = config.key_dim // 2, config.num_heads * config.key_dim
        self.query = nn.Linear(dim, width)
        self.norm = {"layer": lambda: nn.LayerNorm(half), "batch": lambda: nn.BatchNorm1d(width), "none": nn.Identity}[
            config.norm
        ]()
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
        """Return slots [tokens, num_heads * topk] int64 of x [tokens, dim], and weights, which sum to 1 per head."""
        q = self._queries(x, valid)
        scores = torch.einsum("nhpd,hpkd->nhpk", q, self.keys.to(q.dtype))
        best, keys = scores.to(state_dtype(scores.dtype)).topk(min(self.topk, self.num_keys), dim=-1)
        # Scores q1 . keys1_i + q2 . keys2_j add, so the topk pairs lie among the pairs of the topk keys of each half.
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
        if transformed():
            return (weights[..., None] * self.weight[slots]).sum(1)
        if self.sparse:
            return _Sum.apply(slots, weights, self.weight)
        return super().forward(slots, per_sample_weights=weights)


class _Sum(torch.autograd.Function):
    """The function ``embedding_bag`` with a sparse gradient, also of shapes alone, for which PyTorch's own fails."""

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


PARTS = {
    "MLP": MLP.Config,
    "SwiGLU": SwiGLU.Config,
    "GeGLU": GeGLU.Config,
    "Boom": Boom.Config,
    "ProductKeys": ProductKeys.Config,
}
