"""Heads that predict tokens: logits, masked tokens, adaptive softmax, complex models, and heads with a datastore."""

from __future__ import annotations

from math import isfinite, log, log1p

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import embedding as rows_of
from torch.nn.functional import linear, log_softmax

from kinformer.core.contract import in_range
from kinformer.core.parts import Input, NeedsStore, Neighbours, OutputProduct, Searcher, is_plain
from kinformer.core.stack import HeadConfig, check_table, vocab_size_of
from kinformer.inputs.tokens import Clusters, Tables, check_clusters
from kinformer.runtime.errors import KinformerError


class LanguageModelHead(OutputProduct):
    """Language-model head: hidden states [batch, time, dim] to logits [batch, time, vocab].

    ``tied`` uses the token embedding as the output matrix (Press and Wolf 2017); the head then owns no weight.
    ``scale`` multiplies the hidden states (T5 with a tied head: dim ** -0.5). ``softcap``: logits x become softcap *
    tanh(x / softcap) (Gemma 2).
    """

    class Config(HeadConfig):
        kind = "language"
        tied: bool = True
        bias: bool = False
        scale: float | None = None
        softcap: float | None = None

        def check(self, dim: int, input: Input) -> None:
            if self.tied:
                check_table(self, dim, input)

        def __post_init__(self) -> None:
            for name, value in (("scale", self.scale), ("softcap", self.softcap)):
                if value is not None and not value > 0:
                    raise KinformerError(f"{name} must be above 0, but is {value:g}; null changes no logits.")

        def build(self, dim: int, input: Input) -> nn.Module:
            head = LanguageModelHead(self, dim, vocab_size_of(input, self))
            return head if self.scale is self.softcap is None else AdjustedHead(head, self.scale, self.softcap)

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.output = None if config.tied else nn.Linear(dim, vocab_size, bias=config.bias)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.tied and config.bias else None

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        if self.output is not None:
            return self.output(hidden_states)
        return functional.linear(hidden_states, input.table, self.bias)

    def product(self, input: Input) -> tuple[Tensor, Tensor | None] | None:
        if self.output is None:
            return input.table, self.bias
        return (self.output.weight, self.output.bias) if is_plain(self.output) else None


class AdjustedHead(nn.Module):
    """The head ``inner`` of ``scale`` times the hidden states; ``softcap`` bounds its logits."""

    def __init__(self, inner: LanguageModelHead, scale: float | None, softcap: float | None) -> None:
        super().__init__()
        self.inner, self.scale, self.softcap = inner, scale, softcap

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        logits = self.inner(hidden_states if self.scale is None else self.scale * hidden_states, input)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


class MaskedLanguageHead(nn.Module):
    """The masked-language-model head (Devlin et al. 2018): hidden states h [..., dim] -> logits [..., vocab] =
    norm(gelu(W h + b)) E^T + c. ``tied``: E is the embedding. ``bias``: whether there is b, and one of the norm."""

    class Config(HeadConfig):
        kind = "masked_language"
        tied: bool = True
        eps: float = 1e-5
        tanh_gelu: bool = False
        bias: bool = True

        def check(self, dim: int, input: Input) -> None:
            if self.tied:
                check_table(self, dim, input)

        def build(self, dim: int, input: Input) -> MaskedLanguageHead:
            return MaskedLanguageHead(self, dim, vocab_size_of(input, self))

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim, bias=config.bias)
        self.norm = nn.LayerNorm(dim, eps=config.eps, bias=config.bias)
        self.output = None if config.tied else nn.Linear(dim, vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.approximate = "tanh" if config.tanh_gelu else "none"

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        x = self.norm(functional.gelu(self.dense(hidden_states), approximate=self.approximate))
        if self.output is not None and not is_plain(self.output):
            return self.output(x) + self.bias
        return functional.linear(x, input.table if self.output is None else self.output.weight, self.bias)


STD, PROJECTION_STD = 0.02, 0.01
"""Of the weights' first values, as the authors'."""


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax (Grave et al. 2017, Efficient Softmax Approximation for GPUs), as Transformer-XL has it.

        log p(token of first cluster)   = log softmax([E_0; C] P_0' h + b_0)[token]
        log p(token of cluster i > 0)   = log softmax([E_0; C] P_0' h + b_0)[-i] + log softmax(E_i P_i' h + b_i)[token]

    The columns C of the clusters are read from the last column backwards, as in the authors' code, so cluster 1 has the
    last column. The results are log-probabilities [batch, time, vocab], which are also valid logits.

    ``tied``: tables, and the projections of all clusters but the first, are shared with the token embedding: an
    ``adaptive`` embedding with the same clusters, or (``divisor = 1``) one table of the model's width.
    """

    class Config(HeadConfig):
        kind = "adaptive"
        cutoffs: tuple[int, ...] = (20000, 40000, 200000)
        divisor: int = 4
        width: int | None = None
        tied: bool = True

        def __post_init__(self) -> None:
            check_clusters(self.cutoffs, self.divisor, self.width)

        def check(self, dim: int, input: Input) -> None:
            table, clusters = input.table, self.clusters(dim, vocab_size_of(input, self))
            if not self.tied:
                return
            if isinstance(table, Tensor) and self.plain(dim):
                check_table(self, dim, input)
            elif not isinstance(table, Tables) or not _fit(table, clusters, dim):
                raise KinformerError(
                    f"the head {self.kind!r} is tied to an embedding of clusters of {list(clusters.sizes)} tokens and "
                    f"widths {list(clusters.widths)}, which the input of this model has not; give it the embedding "
                    "adaptive with the same cutoffs, divisor and width, or the head tied = false."
                )

        def plain(self, dim: int) -> bool:
            """Return whether all clusters are of the model's width, so that nothing is projected."""
            return self.divisor == 1 and self.width in (None, dim)

        def clusters(self, dim: int, vocab_size: int) -> Clusters:
            return Clusters(self.cutoffs, vocab_size, self.width or dim, self.divisor)

        def build(self, dim: int, input: Input) -> AdaptiveSoftmax:
            return AdaptiveSoftmax(self, dim, vocab_size_of(input, self))

    def __init__(self, config: Config, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.clusters = config.clusters(dim, vocab_size)
        widths = self.clusters.widths
        projected = 0 if config.plain(dim) else 1 if config.tied else len(widths)
        self.projections = nn.ParameterList(torch.randn(dim, width) * PROJECTION_STD for width in widths[:projected])
        shapes = () if config.tied else zip(self.clusters.sizes, widths, strict=True)
        self.tables = nn.ParameterList(torch.randn(size, width) * STD for size, width in shapes)
        self.columns = nn.Parameter(torch.randn(len(config.cutoffs), widths[0]) * STD)
        self.column_bias = nn.Parameter(torch.zeros(len(config.cutoffs)))
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        tables, projections = self._weights(input.table)
        biases = self.bias.split(list(self.clusters.sizes))
        parts = []
        for index, (table, projection, bias) in enumerate(zip(tables, projections, biases, strict=True)):
            x = hidden_states if projection is None else hidden_states @ projection.to(hidden_states.dtype)
            if index == 0:
                table, bias = torch.cat([table, self.columns]), torch.cat([bias, self.column_bias])
            parts.append(log_softmax(linear(x, table, bias), dim=-1))
        first, *rest = parts
        # log p(cluster i) + log p(token | cluster i); the authors read the clusters' columns from the last one on.
        tails = [tail + first[..., -index, None] for index, tail in enumerate(rest, start=1)]
        return torch.cat([first[..., : self.clusters.sizes[0]], *tails], dim=-1)

    def _weights(self, embedding: Tensor | Tables) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tables [size, width] and the projections [dim, width] of all clusters."""
        local: list[Tensor | None] = list(self.projections)
        if len(self.tables):
            return list(self.tables), local or [None] * len(self.tables)
        if isinstance(embedding, Tensor):
            return list(embedding.split(list(self.clusters.sizes))), [None] * len(self.clusters.sizes)
        return list(embedding.tables), [*local, *embedding.projections[len(local) :]]


def _fit(embedding: Tables, clusters: Clusters, dim: int) -> bool:
    """Return whether the ``embedding`` has these clusters, each of the model's width or projected to it."""
    shapes = [tuple(table.shape) for table in embedding.tables]
    widths = [None if projection is None else tuple(projection.shape) for projection in embedding.projections]
    return shapes == list(zip(clusters.sizes, clusters.widths, strict=True)) and all(
        cluster == (dim, width) or (cluster is None and width == dim)
        for cluster, width in zip(widths, clusters.widths, strict=True)
    )


EPS = 1e-12


class ModulusHead(nn.Module):
    """Head of a complex model (Wang et al. 2020): hidden states [real; imaginary] -> inner(|real + i imaginary| /
    divisor). ``EPS`` under the root keeps the gradient finite at 0."""

    class Config(HeadConfig):
        kind = "modulus"
        ABOVE = {"divisor": 0}
        inner: HeadConfig = LanguageModelHead.Config()
        divisor: float = 1.5  # of the authors' language model

        @property
        def per_position(self) -> bool:  # type: ignore[override]
            """Return whether the inner head is per position."""
            return self.inner.per_position

        def check(self, dim: int, input: Input) -> None:
            self.inner.check(dim // 2, input)

        def build(self, dim: int, input: Input) -> ModulusHead:
            if dim % 2:
                raise KinformerError(
                    f"the head {self.kind!r} pairs real and imaginary features, but dim is {dim}; use an even one."
                )
            return ModulusHead(self, dim, input)

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        super().__init__()
        self.inner, self.divisor = config.inner.build(dim // 2, input), config.divisor

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        real, imaginary = in_range(hidden_states).chunk(2, dim=-1)
        size = (real.square() + imaginary.square() + EPS).sqrt().to(hidden_states.dtype)
        return self.inner(size / self.divisor, input, valid)


# kNN-LM's output (Khandelwal et al. 2020, "Generalization through Memorization"): a store's next tokens, mixed in.
#
#     p(y) = w p_kNN(y) + (1 - w) p_LM(y)        p_kNN(y) = sum over the k nearest entries i with token y of
#                                                          softmax_i(-||q - k_i||^2 / temperature)
#
# The softmax runs over the k nearest entries only; ``temperature`` is 1 in the paper. The sum is taken as
# logsumexp(log p_kNN + log w, log p_LM + log(1 - w)), and a token that no neighbour has gets log p_kNN = -10000.

ABSENT = -10000.0


class KnnMixture(nn.Module):
    """The mixture (logits [n, vocab], queries [n, key width]) -> log-probabilities [n, vocab], float32 at least.

    ``searcher`` is read-only and does not own weights. Without a searcher, with ``weight`` 0, and for a query without
    neighbours, the logits are returned unchanged.
    """

    def __init__(
        self, searcher: Searcher | None, *, weight: float = 0.25, temperature: float = 1.0, neighbours: int = 32
    ) -> None:
        super().__init__()
        if not 0 <= weight <= 1:
            raise KinformerError(f"the store's weight is {weight} but must be at least 0 and at most 1.")
        if not (isfinite(temperature) and temperature > 0):
            raise KinformerError(f"the temperature of the neighbours is {temperature} but must be above 0.")
        if neighbours < 1:
            raise KinformerError(f"neighbours is {neighbours} but must be 1 or more.")
        self.searcher = searcher
        self.weight, self.temperature, self.neighbours = weight, temperature, neighbours

    def forward(self, logits: Tensor, queries: Tensor) -> Tensor:
        if self.searcher is None or self.weight == 0:
            return logits
        neighbours = self.searcher.search(queries, self.neighbours)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        near = knn_log_probs(neighbours, logits.shape[-1], self.temperature).to(wide.dtype)
        mixed = mix(wide.log_softmax(dim=-1), near, self.weight)
        return torch.where(neighbours.distances[:, :1].isfinite(), mixed, wide)


def knn_log_probs(neighbours: Neighbours, vocab_size: int, temperature: float = 1.0) -> Tensor:
    """Return log p_kNN [n, vocab] float32."""
    # Slots without a neighbour have an infinite distance, so their share is 0.
    shares = (-neighbours.distances / temperature).softmax(dim=-1)
    sums = shares.new_zeros(len(shares), vocab_size).scatter_add_(1, neighbours.tokens, shares)
    return torch.where(sums > 0, sums.log(), ABSENT)


def mix(model: Tensor, store: Tensor, weight: float) -> Tensor:
    """Return log(weight exp(store) + (1 - weight) exp(model)) of log-probabilities of one shape."""
    if weight in (0, 1):
        return store if weight else model
    # log(w e^store + (1 - w) e^model), without leaving the logarithms
    return torch.logaddexp(store + log(weight), model + log1p(-weight))


class SpalmHead(nn.Module):
    """SPALM's head (Yogatama et al. 2021, Adaptive Semiparametric Language Models): a gate to a long-term memory.

        m = sum over the neighbours i of softmax_i(y_i . h) y_i        y_i: the embedding of the token that followed i
        g = sigmoid(w . h)
        z = (1 - g) m + g h                                            logits = E z + b, E the token embedding

    Neighbours are the entries of a store with the nearest frozen keys; their distances are not used. y_i are rows of E,
    so gradients flow through them into the table. A gate of 1 ignores the memory.

    The head (hidden_states [batch, time, dim], input, neighbours= [batch, time, k] int64) -> logits [batch, time,
    vocab].

    ``neighbours`` are the tokens that followed, -1 for a missing neighbour. A token without neighbours, and every token
    if ``neighbours`` is None (no store), gets exactly the logits of the tied language-model head for h. ``elementwise``
    gives every feature a separate gate; w is then a matrix.
    """

    class Config(NeedsStore, HeadConfig):
        kind = "spalm"
        elementwise: bool = False
        bias: bool = False

        def check(self, dim: int, input: Input) -> None:
            check_table(self, dim, input)

        def build(self, dim: int, input: Input) -> SpalmHead:
            return SpalmHead(self, dim, input)

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        super().__init__()
        self.inner = LanguageModelHead.Config(tied=True, bias=config.bias).build(dim, input)
        self.gate = nn.Linear(dim, dim if config.elementwise else 1, bias=False)

    def forward(
        self, hidden_states: Tensor, input: Input, valid: Tensor | None = None, *, neighbours: Tensor | None = None
    ) -> Tensor:
        if neighbours is not None:
            hidden_states = self.fuse(hidden_states, input.table, neighbours)
        elif self.training:  # engines expect a gradient of every parameter
            hidden_states = hidden_states + 0.0 * self.gate(hidden_states)
        return self.inner(hidden_states, input)

    def fuse(self, hidden: Tensor, embedding: Tensor, neighbours: Tensor) -> Tensor:
        """Return z [batch, time, dim], the gated sum of memory and hidden state."""
        filled = neighbours >= 0
        some = filled.any(dim=-1, keepdim=True)
        following = rows_of(neighbours.clamp_min(0), embedding)
        scores = (following @ hidden[..., None])[..., 0]
        # A row without any neighbour is not masked: softmax over -inf alone is NaN, and ``where`` below drops the row.
        shares = scores.masked_fill(some & ~filled, -torch.inf).softmax(dim=-1)
        memory = (shares[..., None, :] @ following)[..., 0, :]
        gate = self.gate(hidden).sigmoid()
        return torch.where(some, (1 - gate) * memory + gate * hidden, hidden)


PARTS = {
    "AdaptiveSoftmaxHead": AdaptiveSoftmax.Config,
    "LanguageModelHead": LanguageModelHead.Config,
    "ModulusHead": ModulusHead.Config,
    "SpalmHead": SpalmHead.Config,
    "MaskedLanguageHead": MaskedLanguageHead.Config,
}
