"""Scores: how a query and a key become a number, and the spans that a head learns."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid, state_dtype
from kinformer.core.learning import Regularized
from kinformer.core.parts import Cut, Following, Score, ScoreConfig, Span, SpanConfig, TokenSpan, host
from kinformer.runtime.compiling import gathered
from kinformer.runtime.errors import KinformerError


class ScaledDot(Score):
    """Scaled dot product (Vaswani et al. 2017, equation 1): q . k times ``scale``, by default 1 / sqrt(head_dim)."""

    class Config(ScoreConfig):
        kind = "scaled_dot"
        scale: float | None = None

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if config.scale is None else config.scale


class Dot(Score):
    """Plain dot product (Luong et al. 2015, equation 8, "dot"): q.k. T5 too, which leaves the scale to weights."""

    class Config(ScoreConfig):
        kind = "dot"

        def build(self, num_heads: int, head_dim: int) -> Dot:
            return Dot()


class Bilinear(Score):
    """Bilinear score (Luong et al. 2015, equation 8, "general"): q^T W k with a matrix W per head, ``weight`` [heads,
    head_dim, head_dim]. It begins as the scaled dot product."""

    class Config(ScoreConfig):
        kind = "bilinear"

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.eye(head_dim) * head_dim**-0.5).repeat(num_heads, 1, 1))

    def queries(self, q: Tensor) -> Tensor:
        # q^T W k = (W^T q) . k, so that only queries change.
        return q @ self.weight


class Capped(Score):
    """Scaled dot product with a soft cap (Gemma 2, Riviere et al. 2024, section 2): cap * tanh(scale * q.k / cap).

    No score exceeds ``cap``; far below ``cap`` the score equals ``scaled_dot``. Terms by distance are added before the
    cap. ``scale`` is head_dim ** -0.5 unless it is set.
    """

    form = "capped"

    class Config(ScoreConfig):
        kind = "capped"
        ABOVE = {"cap": 0}
        cap: float = 50.0
        scale: float | None = None

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        scale = head_dim**-0.5 if config.scale is None else config.scale
        self.scale, self.inner = config.cap, scale / config.cap

    def queries(self, q: Tensor) -> Tensor:
        return q * self.inner


class SinkLogit(Score):
    """A sink logit beside the scores of another part (gpt-oss, Agarwal et al. 2025, section 2.2).

        y = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(z))  =  softmax(s) v * sigmoid(logsumexp(s) - z)

    z, one for every head, is the score of a key of value 0 that every query sees, so a head can attend to nothing.
    ``learned = False`` keeps z at 0: softmax off by one (Miller 2023). A learnt z, ``logit`` [heads], begins at 0. If z
    is far below all scores, outputs equal the outputs of ``inner``.
    """

    class Config(ScoreConfig):
        kind = "sink_logit"
        inner: ScoreConfig = ScaledDot.Config()
        learned: bool = True

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.inner = inner = config.inner.build(num_heads, head_dim)
        if isinstance(inner, SinkLogit):
            raise KinformerError("a sink_logit stands around another; give its inner score, such as scaled_dot.")
        self.form, self.scale, logit = inner.form, inner.scale, torch.zeros(num_heads)
        if config.learned:
            self.logit = nn.Parameter(logit)
        else:
            self.register_buffer("logit", logit)  # kept in files: a meta model is filled by them

    def queries(self, q: Tensor) -> Tensor:
        return self.inner.queries(q)

    def vector(self) -> Tensor | None:
        return self.inner.vector()

    def sink(self) -> Tensor:
        return self.logit


class Additive(Score):
    """Additive score (Bahdanau et al. 2015, appendix A.1.2): v . tanh(W q + U k).

    The mixer's projections of queries and keys are W and U (and the bias inside). ``weight`` [heads, head_dim] is v,
    which begins as N(0, 1 / head_dim). A pair costs head_dim tanh.
    """

    form = "additive"

    class Config(ScoreConfig):
        kind = "additive"

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_heads, head_dim) * head_dim**-0.5)

    def vector(self) -> Tensor:
        return self.weight


class Modulus(Score):
    """Modulus of the complex product (Wang et al. 2020, complex-order embeddings): |q k| / sqrt(d).

    The first half of a head's features are real parts, the second half imaginary ones: d = head_dim / 2 complex
    numbers. The authors do not conjugate the query; with ``conjugate`` the product is Hermitian, so that for equal
    frequencies it depends on the distance alone.
    """

    form = "modulus"

    class Config(ScoreConfig):
        kind = "modulus"
        conjugate: bool = False

    def __init__(self, config: Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise KinformerError(
                f"the score 'modulus' pairs real and imaginary features, but head_dim is {head_dim}; make it even."
            )
        self.scale, self.conjugate = (head_dim / 2) ** -0.5, config.conjugate

    def queries(self, q: Tensor) -> Tensor:
        if not self.conjugate:
            return q
        real, imaginary = q.chunk(2, dim=-1)
        return torch.cat([real, -imaginary], dim=-1)


class SoftSpan(Following, Span, Regularized):
    """Adaptive attention span (Sukhbaatar et al. 2019, "Adaptive Attention Span in Transformers", section 2.2).

        m(x) = clamp((R + z - x) / R, 0, 1),    a_tr = m(x) exp(s_tr) / sum_q m(x') exp(s_tq)

    with one learnt span z = max_span * span per head and the ramp R; x = distance - 1 is 0 for the token before, as
    in the authors' code, and no token sees itself. The mask is a bias log m of the scores. Distances whose mask is 0
    are cut off, rounded up as the authors do, to max_span less a multiple of ``multiple``. Spans cost ``penalty``
    times the mean of z over the heads, added up over the layers, and are brought back to 0 ... max_span after every
    update. ``span`` [heads] is each head's learnt share of ``max_span``, from 0 to 1.
    """

    class Config(SpanConfig):
        kind = "soft_span"
        LEAST = {"max_span": 1, "ramp": 1, "multiple": 1, "penalty": 0}
        max_span: int = 1024
        ramp: int = 32
        initial: float = 0.0  # share of max_span
        penalty: float = 2e-6
        multiple: int = 64

        def __post_init__(self) -> None:
            if not 0 <= self.initial <= 1:
                raise KinformerError(f"initial is a share of max_span, from 0 to 1, but is {self.initial:g}.")

    def __init__(self, config: Config, dim: int, num_heads: int, cut: Cut) -> None:
        super().__init__()
        self.config = config
        self.span = nn.Parameter(torch.full((num_heads,), float(config.initial)))
        beginning = self._tokens(torch.tensor([config.initial], device="cpu"))  # rounded as the weights are
        self.follow(cut, ("span",), (window(config, beginning.item()),) * num_heads)

    def windows_of(self, *values: Tensor) -> tuple[int, ...]:
        return tuple(window(self.config, z) for z in host(self._tokens(values[0])))

    def spans(self) -> list[float]:
        return host(self._tokens(gathered(self.span)))

    def bias(self, farthest: int) -> Tensor:
        z = self._tokens(self.span)[:, None]
        return log_mask(z, torch.arange(farthest, device=z.device), self.config.ramp)

    def penalty(self) -> Tensor:
        return self.config.penalty * self._tokens(gathered(self.span)).mean()

    @torch.no_grad()
    def constrain(self) -> None:
        self.span.clamp_(0, 1)
        self.trim(gathered(self.span))

    def measures(self) -> dict[str, float]:
        spans = self.spans()
        return {"mean_span": sum(spans) / len(spans)}

    def _tokens(self, span: Tensor) -> Tensor:
        """Return spans in tokens. The bounds hold here, too, for weights that no trainer has clamped."""
        span = span.to(state_dtype(span.dtype))
        # Not `clamp`, whose gradient at a bound is 0 from PyTorch 2.14 on: a span at a bound would never leave it.
        return span.masked_fill(span < 0, 0).masked_fill(span > 1, 1) * self.config.max_span


def log_mask(z: Tensor, x: Tensor, ramp: int) -> Tensor:
    """Return log m(x) of spans z, -inf where the mask is 0."""
    return log_clamped((ramp + z - x) / ramp)


def log_clamped(mask: Tensor) -> Tensor:
    """Return log clamp(mask, 0, 1), -inf where the mask is 0 or less; a mask of exactly 1 has the gradient of log."""
    hidden = mask <= 0
    # Not `clamp`, whose gradient at a bound is 0 from PyTorch 2.14 on: spans that begin as 0 would not learn at x = 0.
    # log 0 = -inf has an infinite slope, which times 0 is NaN: the 0 is filled before the logarithm, and after it.
    return mask.masked_fill(hidden | (mask > 1), 1).log().masked_fill(hidden, -math.inf)


def window(config: SoftSpan.Config, z: float) -> int:
    """Return how many tokens back a head of the span z sees, rounded up as the authors do."""
    size = min(config.max_span, math.ceil(z) + config.ramp)
    return config.max_span - (config.max_span - size) // config.multiple * config.multiple


_ROUNDING = 1.0001  # spans are computed in float32
_EPS = 1e-12


class DynamicSpan(Following, TokenSpan, Regularized):
    """Dynamic attention span (Sukhbaatar et al. 2019, section 2.2): how far a head looks back follows from the token.

        z_t = S sigmoid(v^T x_t + b),   m_t(x) = clamp((R + z_t - x) / R, 0, 1),   a_tr = m_t(x) exp(s_tr) / sum
        bounded:   z_t = S sigmoid(v^T x_t / rms(x_t) + b)  <=  S sigmoid(sqrt(dim) |v| + b)

    with the longest span S, the ramp R, and v and b of each head; x = distance - 1, as of ``soft_span``. v begins at
    0, and b so that all spans begin as the share ``initial`` of S. A span costs ``penalty`` times its mean over
    heads, as a mean over tokens, by the state's ``aux``. What is computed follows the tokens' spans, tile by tile
    (``kernels.attention.spans``). A later token may look back S tokens, whatever the tokens before looked at, so
    that the state holds as many; with ``bounded`` no token can look farther than the weights let it, and the state
    is cut to that. ``state_penalty`` is the price of that bound, as a mean over heads, added up over the layers.
    ``weight`` [heads, dim] and ``bias`` [heads] are v and b.
    """

    class Config(SoftSpan.Config):
        kind = "dynamic_span"
        LEAST = {"state_penalty": 0}
        initial: float = 0.018  # share of max_span: b = -4
        bounded: bool = False
        state_penalty: float = 0.0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.state_penalty and not self.bounded:
                raise KinformerError(
                    f"state_penalty is {self.state_penalty:g}, the price of the farthest that any token may look, but "
                    "spans are not bounded; add `set` span.bounded=true, or leave it out."
                )
            if not 0 < self.initial < 1:
                raise KinformerError(f"initial must lie between 0 and 1, but is {self.initial:g}.")

    def __init__(self, config: Config, dim: int, num_heads: int, cut: Cut) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(num_heads, dim))
        self.bias = nn.Parameter(torch.full((num_heads,), math.log(config.initial / (1 - config.initial))))
        longest = window(config, config.initial * config.max_span * _ROUNDING) if config.bounded else config.max_span
        self.follow(cut, ("weight", "bias") if config.bounded else (), (longest,) * num_heads)

    def windows_of(self, *values: Tensor) -> tuple[int, ...]:
        return tuple(window(self.config, z * _ROUNDING) for z in host(self._longest(*values)))

    def of(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        x = x.to(dtype)
        if self.config.bounded:
            x = x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        spans = x @ self.weight.to(dtype).mT + self.bias.to(dtype)
        return self.config.max_span * spans.sigmoid().transpose(1, 2)

    def penalty(self) -> Tensor:
        if not self.config.state_penalty:
            return torch.zeros((), device=self.bias.device)
        return self.config.state_penalty * self._longest(gathered(self.weight), gathered(self.bias)).mean()

    @torch.no_grad()
    def constrain(self) -> None:
        if self.config.bounded:
            self.trim(gathered(self.weight), gathered(self.bias))

    def _longest(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the longest span [heads] that the weights give any token."""
        dtype = state_dtype(weight.dtype)
        norms = torch.linalg.vector_norm(weight.to(dtype), dim=1)
        return self.config.max_span * (math.sqrt(weight.shape[1]) * norms + bias.to(dtype)).sigmoid()

    def reach(self, z: float) -> int:
        return window(self.config, z)

    def log_mask(self, z: Tensor, distance: Tensor) -> Tensor:
        # As log_mask of soft_span, in one pass less over pairs: quotients are of spans and of distances.
        return log_clamped((z / self.config.ramp + 1) - (distance - 1).to(z.dtype) / self.config.ramp)

    def cost(self, z: Tensor, valid: Tensor | None) -> Tensor:
        return self.config.penalty * select_valid(z.mean(1), valid).sum(1)


PARTS = {
    "ScaledDotScore": ScaledDot.Config,
    "DotScore": Dot.Config,
    "BilinearScore": Bilinear.Config,
    "CappedScore": Capped.Config,
    "SinkLogitScore": SinkLogit.Config,
    "AdditiveScore": Additive.Config,
    "ModulusScore": Modulus.Config,
    "SoftSpan": SoftSpan.Config,
    "DynamicSpan": DynamicSpan.Config,
}
