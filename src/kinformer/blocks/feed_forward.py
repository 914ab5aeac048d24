"""Feed-forward sublayers: the same two or three products for every token, and mixtures of experts.

With ``chunks`` above 1 a sequence goes through them in that many parts (Kitaev et al. 2020, section 3), and a training
step computes each part's hidden layer again in the backward pass: one part's is in memory at a time, the outputs are
equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kinformer.blocks.residual import per_slice
from kinformer.core.contract import divided, in_blocks, select_valid, state_dtype
from kinformer.core.learning import AuxLoss, OnlineLearner
from kinformer.core.parts import (
    FeedForwardConfig,
    PartlyUsed,
    ReadsPadding,
    ResidualOutput,
    Selection,
    UnpackedLinear,
    wide_product,
)
from kinformer.kernels import GroupedImpl, names_of
from kinformer.runtime.autograd import Context, autocast_together, differentiated_again, transformed
from kinformer.runtime.compiling import has_data, spare_operators, uncompiled
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError, plural


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
    """The feed-forward down(silu(gate(x)) * up(x)) (Shazeer 2020); ``hidden_dim`` defaults to about 8/3 * dim."""

    activation: Activation = "silu"

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

    class Config(SwiGLU.Config):
        kind = "geglu"
        activation: Literal["gelu", "gelu_tanh"] = "gelu"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.activation = config.activation


class Boom(nn.Module):
    """The feed-forward that sums the slices, ``dim`` wide each, of activation(up(x)) (Merity 2019, SHA-RNN, section
    3.3): an MLP whose second product is a fixed sum without weights. ``hidden_dim`` is a multiple of dim."""

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
        if has_data(slots):
            looked_up, place = slots.unique(return_inverse=True)
        else:  # as many as there may be
            looked_up, place = slots.new_empty(min(slots.numel(), len(table))), slots
        rows = gradient.new_zeros(len(looked_up), table.shape[1])
        for start in range(0, len(slots), tokens):
            some = slice(start, start + tokens)
            rows.index_add_(0, place[some].flatten(), (weights[some, :, None] * gradient[some, None]).flatten(0, 1))
        by_table = torch.sparse_coo_tensor(
            looked_up[None], rows, table.shape, check_invariants=False, is_coalesced=True
        )
        return None, torch.cat(by_weights), by_table


# Products of rows with the matrix of their group, y_i = x_i W_(group of i). The reference gathers a matrix a row.


def products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return y [rows, out] of x [rows, in] and ``weight`` [groups, in, out]; ``ends`` [groups]: the row behind each."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, rows, right=True)
    return torch.bmm(x[:, None], weight[group])[:, 0]


IMPLS = names_of(GroupedImpl)


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor, *, impl: GroupedImpl = "auto") -> Tensor:
    """Return y [rows, out] of x [rows, in], sorted by group, and the groups' matrices ``weight`` [groups, in, out].

    ends: [groups] int32, the end of each group's rows. impl: "native" is PyTorch's grouped product, which does not take
    float64; "reference" gathers a matrix for every row; "auto" is "native" except in float64, and in forward mode and
    second derivatives of ``torch.func``.
    """
    if impl not in IMPLS:
        raise KinformerError(f"grouped products: impl is {impl!r}, expected one of {', '.join(IMPLS)}.")
    x, weight = autocast_together(x, weight)
    if x.is_meta or (isinstance(x, FakeTensor) and not torch.compiler.is_compiling()):
        return _stand_in(x, weight)
    if impl == "reference" or (impl == "auto" and (x.dtype == torch.float64 or differentiated_again())):
        return products(x, weight, ends)
    multiple, (_, rows, columns) = 16 // x.element_size(), weight.shape
    more_rows, more_columns = -rows % multiple, -columns % multiple
    if not more_rows and not more_columns:
        return _native(x, weight, ends)
    # PyTorch's product takes rows of a multiple of 16 bytes alone.
    x, weight = functional.pad(x, (0, more_rows)), functional.pad(weight, (0, more_columns, 0, more_rows))
    return _native(x, weight, ends)[:, :columns]


def _native(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    # PyTorch's compiler knows the shapes of grouped products of bfloat16 alone; the operator has shapes for all types.
    if torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
        return _product(x, weight, ends)
    return functional.grouped_mm(x, weight, offs=ends)


@torch.library.custom_op("kinformer::grouped_product", mutates_args=())
def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(x, weight, offs=ends)


@torch.library.custom_op("kinformer::grouped_gradient", mutates_args=())
def _gradient(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient [groups, in, out] of the weight: x^T gradient over the rows of each group."""
    return functional.grouped_mm(x.mT, gradient, offs=ends)


@_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_gradient.register_fake
def _(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], gradient.shape[1])


def _save(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    return _product(gradient, weight.mT, ends), _gradient(x, gradient, ends), None


_product.register_autograd(_differentiate, setup_context=_save)
spare_operators(_product, _gradient)


def _stand_in(x: Tensor, weight: Tensor) -> Tensor:
    """Return an output of the right shape for meta and fake tensors, at the cost that the FLOP counter knows."""
    groups, rows = len(weight), len(x)
    per_group = -(-rows // groups)
    padded = functional.pad(x, (0, 0, 0, groups * per_group - rows)) if groups * per_group > rows else x
    return torch.bmm(padded.view(groups, per_group, -1), weight).flatten(0, 1)[:rows]


class Experts(ReadsPadding, PartlyUsed, OnlineLearner):
    """A mixture of experts as a feed-forward (Shazeer et al. 2017; Fedus et al. 2021, Switch Transformers; Jiang et al.
    2024, Mixtral; DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2).

        y = scale * sum over the topk experts e of largest s_e + b_e, of g_e E_e(x)  +  shared(x)
        s = softmax(W x), or sigmoid(W x);   g_e = s_e, divided by the sum over the chosen ones if ``normalise``
        E_e(x) = down_e(silu(gate_e x) * up_e x)

    Tokens choose experts, never experts tokens, which would show them their future; no token is dropped. Two ways
    keep the experts' loads alike:

        balance     adds balance * num_experts * sum_e f_e p_e to the loss of every token, f_e the share of a sequence's
                    choices that fall on e, p_e its mean s_e, divided by the sum over experts (Switch, equation 4)
        bias_rate   after each step b_e <- b_e + bias_rate * sign(mean load - load of e); b chooses, but weighs nothing
                    (DeepSeek-V3, equation 16)

    ``hidden_dim``: hidden features of one expert; by default ``topk`` experts together cost as much as a SwiGLU.
    ``shared_dim``: hidden features of the expert that all tokens use, 0 for none. Its weight is 1, or with
    ``shared_gate``, as in Qwen3-Next, sigmoid(u . x). With ``groups`` of neighbouring experts, a token chooses among
    the experts of ``topk_groups`` groups. A group's score is its largest s_e, or the sum of its two largest s_e + b_e
    with the sigmoid (DeepSeek-V2 and V3).
    """

    bias: Tensor | None

    class Config(FeedForwardConfig):
        kind = "experts"
        LEAST = {"shared_dim": 0, "balance": 0, "bias_rate": 0}
        ABOVE = {"scale": 0}
        num_experts: int = 8
        topk: int = 2
        groups: int = 1
        topk_groups: int = 1
        hidden_dim: int | None = None
        shared_dim: int = 0
        shared_gate: bool = False
        router: Literal["softmax", "sigmoid"] = "softmax"
        normalise: bool = True
        scale: float = 1.0
        balance: float = 0.01
        bias_rate: float = 0.0
        impl: GroupedImpl = "auto"

        def __post_init__(self) -> None:
            if not 1 <= self.topk <= self.num_experts:
                raise KinformerError(f"topk must be from 1 to num_experts = {self.num_experts}, but is {self.topk}.")
            if self.groups < 1 or self.num_experts % self.groups:
                raise KinformerError(f"groups must divide num_experts = {self.num_experts}, but is {self.groups}.")
            if not 1 <= self.topk_groups <= self.groups:
                raise KinformerError(
                    f"topk_groups must be from 1 to groups = {self.groups}, but is {self.topk_groups}."
                )
            if self.topk > (chosen := self.num_experts // self.groups * self.topk_groups):
                raise KinformerError(
                    f"topk is {self.topk}, but topk_groups = {self.topk_groups} of the groups have {chosen}."
                )
            if self.shared_gate and not self.shared_dim:
                raise KinformerError(
                    "shared_gate gates the expert that all tokens use; give shared_dim, or leave it out."
                )

        def part(self, dim: int, parts: int) -> Experts.Config:
            shared = self.shared_dim and divided(self, "shared_dim", self.shared_dim, parts)
            hidden_dim = divided(self, "hidden_dim", self.width(dim), parts)
            return self.replace(hidden_dim=hidden_dim, shared_dim=shared)

        def width(self, dim: int) -> int:
            """Return the hidden features of an expert in a model ``dim`` wide."""
            return self.hidden_dim or -(-8 * dim // (3 * self.topk) // 8) * 8

        def explicit(self, dim: int) -> Self:
            """Return the config with this ``hidden_dim``."""
            return self.replace(hidden_dim=self.width(dim))

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config = config
        hidden = config.width(dim)
        in_blocks(self, hidden, hidden)  # of gate_up
        self.router = UnpackedLinear(dim, config.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(config.num_experts, hidden, dim))
        for weight, width in ((self.gate_up, dim), (self.down, hidden)):
            nn.init.uniform_(weight, -(width**-0.5), width**-0.5)
        self.register_buffer("bias", torch.zeros(config.num_experts) if config.bias_rate else None)
        self.selection = Selection(config.num_experts)
        self.balance = AuxLoss("balance") if config.balance and config.num_experts > 1 else None
        self.shared_expert = SwiGLU.Config(hidden_dim=config.shared_dim).build(dim) if config.shared_dim else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if config.shared_gate else None
        self._loads: Tensor | None = None

    @property
    def unused_parameters(self) -> int:
        whole = self.gate_up.numel() + self.down.numel()
        return whole - whole // self.config.num_experts * self.config.topk

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        if valid is not None:
            x = torch.where(valid[..., None], x, x.new_zeros(()))
        scores = self._scores(x)
        experts, weights = self._choose(scores)
        self.selection(experts, weights)
        balances = self.bias is not None or self.balance is not None
        if balances and self.training and torch.is_grad_enabled():
            self._learn_from(scores, experts, valid)
        y = self._apply_experts(x.flatten(0, -2), experts.flatten(0, -2), weights.flatten(0, -2)).view(x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            y = y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
        return y if valid is None else torch.where(valid[..., None], y, y.new_zeros(()))

    def _scores(self, x: Tensor) -> Tensor:
        """Return s [..., num_experts] in float32 at least: a choice must not depend on autocast."""
        logits = wide_product(self.router, x)
        return logits.softmax(-1) if self.config.router == "softmax" else logits.sigmoid()

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [..., topk] int64 and their weights."""
        biased = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        if self.config.topk_groups < self.config.groups:
            grouped = biased.unflatten(-1, (self.config.groups, -1))
            best = min(1 + (self.config.router == "sigmoid"), grouped.shape[-1])
            of_groups = grouped.topk(best, dim=-1).values.sum(-1)
            chosen = of_groups.topk(self.config.topk_groups, dim=-1).indices
            beside = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, chosen, False)
            biased = grouped.masked_fill(beside[..., None], -torch.inf).flatten(-2)
        experts = biased.topk(self.config.topk, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.config.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        return experts, weights * self.config.scale

    def _apply_experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [tokens, dim] of the chosen experts' outputs for x [tokens, dim]."""
        tokens, topk = experts.shape
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ends = torch.zeros(self.config.num_experts, dtype=torch.int32, device=x.device)
        ends = ends.index_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        impl = self.config.impl
        gate, up = grouped_products(x[order // topk], self.gate_up, ends, impl=impl).chunk(2, -1)
        by_expert = grouped_products(functional.silu(gate) * up, self.down, ends, impl=impl)
        place = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0], device=x.device))
        outputs = by_expert[place].view(tokens, topk, -1)
        return torch.einsum("nkd,nk->nd", outputs, weights.to(outputs.dtype)).to(x.dtype)

    @uncompiled("loads and losses are gathered outside the model's graph")
    def _learn_from(self, scores: Tensor, experts: Tensor, valid: Tensor | None) -> None:
        """Gather the loads of experts, and the cost of unlike ones, of scores [..., time, num_experts]."""
        chosen = torch.zeros_like(scores).scatter_(-1, experts, 1.0).detach()
        chosen, scores = (select_valid(item, valid) if valid is not None else item for item in (chosen, scores))
        if self.bias is not None:
            loads = chosen.flatten(0, -2).sum(0)
            self._loads = loads if self._loads is None else self._loads + loads
        if self.balance is None or scores.dim() < 3:
            return
        # f_e and p_e of each sequence; the cost of a sequence is the sum over its tokens.
        tokens = chosen.sum((-2, -1)) / self.config.topk
        shares = scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)
        f = chosen.sum(-2) / (tokens * self.config.topk).clamp_min(1)[..., None]
        p = shares.sum(-2) / tokens.clamp_min(1)[..., None]
        self.balance(self.config.balance * self.config.num_experts * tokens * (f * p).sum(-1))

    @torch.no_grad()
    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        if self.bias is None:
            return
        loads = self._loads if self._loads is not None else torch.zeros_like(self.bias)
        loads, self._loads = total(loads), None
        self.bias.add_(self.config.bias_rate * (loads.mean() - loads).sign().to(self.bias.dtype))


PARTS = {
    "MLP": MLP.Config,
    "SwiGLU": SwiGLU.Config,
    "GeGLU": GeGLU.Config,
    "Boom": Boom.Config,
    "ProductKeys": ProductKeys.Config,
    "Experts": Experts.Config,
}
