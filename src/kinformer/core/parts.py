"""The interfaces of the parts of a mixer: position, pattern, score, projection, feature map.

Softmax attention = what (projection) x where (position) x who (pattern) x how much (score).
Kernel attention = feature map x update rule. Every part has a :class:`Config` of its slot, built by its owner.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import Config, describe
from kinformer.core.contract import state_dtype
from kinformer.core.division import undivided
from kinformer.core.pattern import Pattern
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


class Relative(NamedTuple):
    """The effect of a distance (query position - key position) on a score, for ``lowest``, ``lowest + 1``, ... (n of
    them).

        score = scale * (q . k + (q + shift) . keys[d]) + bias[d]        output += probability * values[d]
        with ``factor``:  scale * (q . k) becomes relu(scale * (q . k)) * factor[d]

    ``bias``, ``factor`` [heads or 1, n]; ``keys``, ``values`` [heads or 1, n, head_dim]; ``shift`` [heads, 1, head_dim]
    is a query that all have in common; None does nothing, and so do distances outside the range. A ``factor`` has every
    distance of the request. ``keys`` are for scores that are products (see :func:`check_score`).
    """

    lowest: int
    bias: Tensor | None = None
    factor: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    shift: Tensor | None = None

    def below(self, distance: int) -> Relative:
        """Return these tables without the distances from ``distance`` on."""
        count, tables = max(0, distance - self.lowest), (self.bias, self.factor, self.keys, self.values)
        bias, factor, keys, values = (None if table is None else table[:, :count] for table in tables)
        return self._replace(bias=bias, factor=factor, keys=keys, values=values)


class Position(nn.Module):
    """The hooks through which an encoding of positions enters; each does nothing unless overridden.

    ``max_length`` is the first position that has no encoding, or None where every position has one. ``shared``: the
    paper has one such encoding for all layers, so layers of equal ``config`` use one module, which the model owns.
    ``one_sided``: it does not tell keys ahead of the query apart.
    """

    max_length: int | None = None
    shared: bool = False
    one_sided: bool = False

    def overrides(self, *hooks: str) -> bool:
        """Return whether the class overrides one of the ``hooks``."""
        return any(getattr(type(self), hook) is not getattr(Position, hook) for hook in hooks)

    def embed(self, positions: Tensor) -> Tensor | None:
        """Return the term added to token embeddings: [batch, time, dim] for ``positions`` [batch, time], or None."""
        return None

    def layer_input(self, positions: Tensor, layer: int) -> Tensor | None:
        """Return the term added to the input of layer number ``layer``: [batch, time, dim], or None."""
        return None

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [batch, heads, time, head_dim] after the encoding of ``positions`` [batch, time]."""
        return q, k

    def rotate_keys(self, k: Tensor, positions: Tensor) -> Tensor:
        """Return keys alone, of tokens without queries."""
        return self.rotate(k[:, :1], k, positions)[1]

    def moved(self, k: Tensor, distances: Tensor) -> Tensor:
        """Return keys as :meth:`rotate` left them, as it leaves those of tokens ``distances`` [batch, time] later."""
        return k

    def values(self, v: Tensor) -> Tensor:
        """Return values [batch, kv_heads, time, head_dim] as the state holds them, with the term of every distance."""
        return v

    def relative(self, lowest: int, highest: int) -> Relative | None:
        """Return the tables by distance.

        They may name a narrower range than ``lowest .. highest`` (ends included), the rest of which then does nothing.
        A constant per query may be left out of all scores: softmax does not see it.
        """
        return None


AT_TOKENS = ("embed", "layer_input")
IN_ATTENTION = ("rotate", "rotate_keys", "values", "relative")


class PositionConfig(Config):
    """The config of an encoding for a model of width ``dim`` and ``depth`` layers, or for the heads of one mixer.

    ``bounded_by_training``: whether positions, or distances, beyond those of training are new to a trained model.
    """

    slot = "position"
    bounded_by_training: ClassVar[bool] = False

    def build(self, dim: int) -> Position:
        """Build for vectors of width ``dim``; refused where the encoding only builds for a model, or for heads."""
        raise self._misplaced(at_tokens=type(self).build_heads is not PositionConfig.build_heads)

    def build_model(self, dim: int, depth: int) -> Position:
        """Build the model's position; one that acts inside attention alone would do nothing there and is refused."""
        position = self.build(dim)
        if position.overrides(*IN_ATTENTION) and not position.overrides(*AT_TOKENS):
            raise self._misplaced(at_tokens=True)
        return position

    def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Position:
        """Build a mixer's position; one that acts at the tokens alone would do nothing there and is refused."""
        position = self.build(head_dim)
        if position.overrides(*AT_TOKENS) and not position.overrides(*IN_ATTENTION):
            raise self._misplaced(at_tokens=False)
        return position

    def _misplaced(self, at_tokens: bool) -> KinformerError:
        if at_tokens:
            return KinformerError(
                f"{describe(self)} acts inside attention, but was given to the model; set it as "
                "layers.*.mixer.position, and the model's position to none."
            )
        return KinformerError(
            f"{describe(self)} is added to token embeddings, but was given to a mixer; set it as the model's position, "
            "and the mixer's to none or to one that acts on attention (rope, alibi, shaw, t5, xl)."
        )


class PatternConfig(Config):
    slot = "pattern"

    def build(self) -> Pattern:
        raise NotImplementedError


def check_heads(config: PatternConfig, pattern: Pattern, num_heads: int) -> None:
    """Refuse a ``pattern``, built from ``config``, that is for another number of heads than a mixer has."""
    if pattern.num_heads not in (None, num_heads):
        raise KinformerError(
            f"the pattern {config.kind!r} is for {plural(pattern.num_heads, 'head')}, but the mixer has {num_heads}; "
            "give it one pattern per head, or set num_heads."
        )


def check_causal(config: PatternConfig, pattern: Pattern) -> None:
    """Refuse a ``pattern`` that shows a decoder's tokens later ones."""
    if pattern.ahead != 0:
        raise KinformerError(
            f"the pattern {config.kind!r} lets a token see later ones, which a decoder must not; "
            "use a causal pattern (causal, local)."
        )


def check_unpinned(config: PatternConfig, pattern: Pattern) -> None:
    """Refuse a ``pattern`` that counts positions in a decoder's cache."""
    if pattern.pinned:
        raise KinformerError(
            f"the pattern {config.kind!r} is that of a decoder, which keeps its first tokens; here, use a union of "
            "global_tokens and window, or local."
        )


class Score(nn.Module):
    """The score of a query and a key. ``scale`` multiplies their product.

    ``form`` names how the kernels combine them: ``dot`` q.k, ``capped`` tanh(q.k), ``modulus`` the absolute value of
    the complex product of q and k (first half real, second half imaginary, not conjugated), ``additive`` vector .
    tanh(q + k).
    """

    form: str = "dot"
    scale: float = 1.0

    def queries(self, q: Tensor) -> Tensor:
        """Return queries [batch, heads, time, head_dim] as the product takes them."""
        return q

    def vector(self) -> Tensor | None:
        """Return the vector [heads, head_dim] of the form ``additive``."""
        return None

    def sink(self) -> Tensor | None:
        """Return the scores [heads] of a key of value 0 that every query sees, or None where there is none."""
        return None


class ScoreConfig(Config):
    slot = "score"

    def build(self, num_heads: int, head_dim: int) -> Score:
        raise NotImplementedError


def check_score(config: ScoreConfig, score: Score, position: Position) -> None:
    """Refuse a ``score`` that is no product together with a ``position`` that moves keys by distance."""
    if score.form != "dot" and (relative := position.relative(0, 1)) is not None and relative.keys is not None:
        raise KinformerError(
            f"the score {config.kind!r} is no product of a query and a key, but the position moves keys by distance "
            "(shaw, xl); use a score that is one (scaled_dot, dot, bilinear), or a position such as rope, t5 or alibi."
        )


class GlobalProjection(nn.Module):
    """The projections of an encoder's global tokens: dim -> the width of all heads, each."""

    def __init__(self, dim: int, width: int, bias: bool) -> None:
        super().__init__()
        self.query = nn.Linear(dim, width, bias=bias)
        self.key = nn.Linear(dim, width, bias=bias)
        self.value = nn.Linear(dim, width, bias=bias)


class Projection(nn.Module):
    """The projection of x [batch, time, dim] to q [batch, num_heads, time, head_dim], k and v [batch, num_kv_heads,
    ...].

    A projection with ``context`` above 0 also looks at that many tokens before each token: the mixer remembers what
    ``forward`` made of the last ones, and ``combine`` makes q, k and v of that and of the new tokens.
    """

    num_kv_heads: int
    context: int = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v alone, of tokens without queries."""
        return self(x)[1:]

    def global_projection(self) -> GlobalProjection | None:
        """Return the projection of global tokens that see all others, or None where that is as for all tokens."""
        return None

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of the last tokens of ``tokens`` [batch, heads, context + time, head_dim], all but the
        first ``context``; its heads are those of q, k and v as ``forward`` made them, zero before a sequence begins.
        ``positions`` [batch, time] are present where a token of the chunk may begin a sequence; x [batch, time, dim]
        are the new tokens."""
        raise NotImplementedError


class ProjectionConfig(Config):
    """The config of the projection before attention, and of that after it, from
    the heads to the width of the stream."""

    slot = "projection"

    def build(self, dim: int, num_heads: int, head_dim: int) -> Projection:
        raise NotImplementedError

    def part(self, parts: int) -> ProjectionConfig:
        """Return the config for one of ``parts`` equal parts of the heads (``core.division``)."""
        raise undivided(self, "nothing says what a part of its heads projects")

    def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> nn.Module:
        """Build a module with a ``weight``: merged heads [batch, time, num_heads * head_dim] -> [batch, time, dim]."""
        return ResidualOutput(num_heads * head_dim, dim, bias=bias)


def check_forgetful(projection: Projection, config: ProjectionConfig) -> None:
    """Refuse a projection that a memory of hidden states cannot repeat slot by slot."""
    if projection.context:
        raise KinformerError(
            f"the projection {config.kind!r} looks at earlier tokens, which a memory of hidden states cannot project "
            "again; use one that looks at each token alone (multi_head, grouped)."
        )


class ResidualOutput(nn.Linear):
    """A product that writes into the residual stream; some initialisations shrink these by the model's depth."""


class UnpackedLinear(nn.Linear):
    """A product whose weight is also read by itself, head by head or in another dtype, so that no layout of it may
    replace it."""


def is_plain(product: nn.Module) -> bool:
    """Return whether ``product`` computes x W^T + b and nothing else, so that its weight may be read in its place.

    An adapter such as LoRA's, a hook or a forward of a subclass adds something: then the module must be called.
    """
    if type(product).forward is not nn.Linear.forward or "forward" in vars(product):
        return False
    return not (product._forward_hooks or product._forward_pre_hooks)


def features_of(product: nn.Module, x: Tensor, features: slice) -> Tensor:
    """Return some features of ``product(x)``; a plain product computes no others."""
    if not is_plain(product):
        every: Tensor = product(x)
        return every[..., features]
    weight, bias = product.weight, product.bias
    return functional.linear(x, weight[features], None if bias is None else bias[features])  # type: ignore[index]


def wide_product(product: nn.Module, x: Tensor) -> Tensor:
    """Return ``product(x)`` in float32 at least, whatever autocast says; weights of half precision are widened where
    the product is plain."""
    wide = state_dtype(x.dtype)
    with no_autocast(x.device):
        if not is_plain(product):
            made: Tensor = product(x.to(next(product.parameters()).dtype))
            return made.to(wide)
        weight, bias = product.weight, product.bias
        return functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))  # type: ignore[arg-type]


def head_width(dim: int, num_heads: int) -> int:
    """Return dim / num_heads, which must be whole."""
    if num_heads < 1 or dim % num_heads:
        raise KinformerError(
            f"num_heads = {num_heads} does not divide dim = {dim}; choose a divisor, or give head_dim."
        )
    return dim // num_heads


def merge_heads(y: Tensor) -> Tensor:
    """Return [batch, heads, time, head_dim] as [batch, time, heads * head_dim]."""
    return y.transpose(1, 2).flatten(2)
