"""The interfaces of the parts of a mixer: position, pattern, score, projection, feature map.

Softmax attention = what (projection) x where (position) x who (pattern) x how much (score).
Kernel attention = feature map x update rule. Every part has a ``Config`` of its slot, built by its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from kinformer.core.config import Config, describe
from kinformer.core.contract import Divisible, state_dtype, undivided
from kinformer.core.pattern import Pattern
from kinformer.core.probe import probe
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.compiling import has_data
from kinformer.runtime.errors import KinformerError, plural


class Relative(NamedTuple):
    """The effect of a distance (query position - key position) on a score, for the n distances ``lowest``, ``lowest +
    1``, ...

        score = scale * (q . k + (q + shift) . keys[d]) + bias[d]        output += probability * values[d]
        with ``factor``:  scale * (q . k) becomes relu(scale * (q . k)) * factor[d]

    ``bias``, ``factor`` [heads or 1, n]; ``keys``, ``values`` [heads or 1, n, head_dim]; ``shift`` [heads, 1, head_dim]
    is a vector added to every query. A table of None and distances outside the range do not change the score.
    A ``factor`` covers every requested distance. ``keys`` need scores by dot products (see :func:`check_score`).
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
    """The hooks through which an encoding of positions enters; by default a hook changes nothing.

    ``max_length`` is the number of positions with an encoding, or None for an encoding of every position. ``shared``:
    the paper has one encoding for all layers, so layers of equal ``config`` use one module, which the model owns.
    ``one_sided``: the encoding does not distinguish keys ahead of the query. ``relative_tables``: the
    tables that :meth:`relative` returns; None where a call has to show them.
    """

    max_length: int | None = None
    shared: bool = False
    one_sided: bool = False
    relative_tables: tuple[str, ...] | None = None

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
        """Return rotated keys k, turned on as if their tokens stood ``distances`` [batch, time] later."""
        return k

    def values(self, v: Tensor) -> Tensor:
        """Return values [batch, kv_heads, time, head_dim] as the state holds them, with the term of every distance."""
        return v

    def relative(self, lowest: int, highest: int) -> Relative | None:
        """Return the tables by distance.

        The tables may cover a narrower range than ``lowest .. highest`` (ends included); other distances then have no
        effect. A constant per query may be left out of all scores, because softmax does not see it.
        """
        return None


AT_TOKENS = ("embed", "layer_input")
IN_ATTENTION = ("rotate", "rotate_keys", "values", "relative")


class PositionConfig(Config):
    """The config of an encoding for a model of width ``dim`` and ``depth`` layers, or for the heads of one mixer.

    ``bounded_by_training``: whether positions or distances beyond the training range are new to a trained model.
    """

    slot = "position"
    bounded_by_training: ClassVar[bool] = False

    def build(self, dim: int) -> Position:
        """Build for vectors of width ``dim``; raise where the encoding can only be built for a model, or for heads."""
        heads, model = (
            getattr(type(self), name) is not getattr(PositionConfig, name) for name in ("build_heads", "build_model")
        )
        if heads or model:
            raise self._misplaced(at_tokens=heads)
        return self.builds(self, dim)

    def build_model(self, dim: int, depth: int) -> Position:
        """Build the model's position; raise for an encoding that acts only inside attention."""
        position = self.build(dim)
        if position.overrides(*IN_ATTENTION) and not position.overrides(*AT_TOKENS):
            raise self._misplaced(at_tokens=True)
        return position

    def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Position:
        """Build a mixer's position; raise for an encoding that acts only at the tokens."""
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
        """Build the pattern, which takes the fields of the config by their names."""
        return self.builds(**vars(self))


def check_heads(config: PatternConfig, pattern: Pattern, num_heads: int) -> None:
    """Raise for a ``pattern``, built from ``config``, whose number of heads differs from the mixer's."""
    if pattern.num_heads not in (None, num_heads):
        raise KinformerError(
            f"the pattern {config.kind!r} is for {plural(pattern.num_heads, 'head')}, but the mixer has {num_heads}; "
            "give it one pattern per head, or set num_heads."
        )


def check_causal(config: PatternConfig, pattern: Pattern) -> None:
    """Raise for a ``pattern`` in which a token of a decoder sees later tokens."""
    if pattern.ahead != 0:
        raise KinformerError(
            f"the pattern {config.kind!r} lets a token see later ones, which a decoder must not; "
            "use a causal pattern (causal, local)."
        )


def check_unpinned(config: PatternConfig, pattern: Pattern) -> None:
    """Raise for a ``pattern`` that counts positions in a decoder's cache."""
    if pattern.pinned:
        raise KinformerError(
            f"the pattern {config.kind!r} is for decoders, which keep their first tokens; here, use a union of "
            "global_tokens and window, or local."
        )


class Score(nn.Module):
    """The score of a query and a key. ``scale`` multiplies their product.

    ``form`` names how the kernels combine them: ``dot`` q.k, ``capped`` tanh(q.k), ``modulus`` the absolute value of
    the complex product of q and k (halves: real, imaginary; not conjugated), ``additive`` vector . tanh(q + k).
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
        return self.builds(self, num_heads, head_dim)


def check_score(config: ScoreConfig, score: Score, position: Position) -> None:
    """Raise for a ``score`` other than a dot product together with a ``position`` that moves keys by distance."""
    if score.form != "dot" and (relative := position.relative(0, 1)) is not None and relative.keys is not None:
        raise KinformerError(
            f"the score {config.kind!r} is not a product of a query and a key, but the position moves keys by distance "
            "(shaw, xl); use a product (scaled_dot, dot, bilinear), or a position such as rope, t5 or alibi."
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

    A projection with ``context`` above 0 also reads ``context`` tokens before each token: the mixer caches the outputs
    of ``forward`` for the last tokens, and ``combine`` makes q, k and v of these and the new outputs.
    """

    num_kv_heads: int
    context: int = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v alone, of tokens without queries."""
        return self(x)[1:]

    def global_projection(self) -> GlobalProjection | None:
        """Return the projection of global tokens that see all others, or None for the projection of all tokens."""
        return None

    def combine(self, tokens: Tensor, positions: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of the last tokens of ``tokens`` [batch, heads, context + time, head_dim], all but the
        first ``context``. ``tokens`` holds the heads of q, k and v from ``forward``, zero before a sequence begins.
        ``positions`` [batch, time] are given if a token of the chunk may begin a sequence; x are the new tokens."""
        raise NotImplementedError


class ProjectionConfig(Config):
    """The config of the projection before attention, and of the projection after it to the width of the stream."""

    slot = "projection"

    def build(self, dim: int, num_heads: int, head_dim: int) -> Projection:
        return self.builds(self, dim, num_heads, head_dim)

    def part(self, parts: int) -> ProjectionConfig:
        """Return the config for one of ``parts`` equal parts of the heads (``core.contract``)."""
        raise undivided(self, "it does not define the projection of a part of its heads")

    def build_output(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> nn.Module:
        """Build a module with a ``weight``: merged heads [batch, time, num_heads * head_dim] -> [batch, time, dim]."""
        return ResidualOutput(num_heads * head_dim, dim, bias=bias)


def check_forgetful(projection: Projection, config: ProjectionConfig) -> None:
    """Raise for a projection that a memory of hidden states cannot repeat slot by slot."""
    if projection.context:
        raise KinformerError(
            f"the projection {config.kind!r} looks at earlier tokens, which a memory of hidden states cannot project "
            "again; use one that looks at each token alone (multi_head, grouped)."
        )


class ResidualOutput(nn.Linear):
    """A product that writes into the residual stream; some initialisations shrink these by the model's depth."""


class UnpackedLinear(nn.Linear):
    """A product whose weight is also read directly, so that a packed layout must not replace the weight."""


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
    """Return ``product(x)`` in float32 at least, also under autocast; weights of a plain product are widened."""
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


# The interface of a feature map, which replaces the exponential of softmax attention so that attention is a sum.


class FeatureMap(nn.Module):
    """A map of queries and keys [batch, heads, time, head_dim] to features [..., size]; ``size(head_dim)`` is the
    width.

    ``signed``: products of features may be negative or vanish, so that their sum cannot be a normaliser. ``negative``:
    features may be negative. ``positive_on_average``: products are positive only on average, so that a sum of a few
    products may vanish. ``bounded``: the features of a token have a norm of at most 1, which keeps the delta rule
    stable. ``scaled``: the result of ``keys`` lacks a factor, which may be too large or too small for a number, so its
    logarithm comes with the result; the result of ``queries`` may lack any factor, as only quotients are used.
    """

    signed: bool = False
    negative: bool = False
    positive_on_average: bool = False
    bounded: bool = False
    scaled: bool = False

    def __init__(self, *config_and_sizes: object) -> None:
        super().__init__()

    def size(self, head_dim: int) -> int:
        return head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of queries and keys, where they are alike."""
        raise NotImplementedError

    def queries(self, q: Tensor) -> Tensor:
        return self(q)

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return features, and the logarithm [batch, heads, time] of the factor that they lack (None: none)."""
        return self(k), None


def check_normaliser(feature_map: FeatureMap, kind: str, floor: float, otherwise: str = "") -> None:
    """Raise for a ``feature_map`` whose products cannot be summed in a normaliser of at least ``floor``."""
    if feature_map.signed or (feature_map.positive_on_average and not floor):
        remedy = "" if feature_map.signed else "floor = 0.1, or "
        raise KinformerError(
            f"the feature map {kind!r} has products of either sign, whose sum may vanish, but the normaliser divides "
            f"by it; use {remedy}a feature map of positive features (elu, relu, favor){otherwise}."
        )


class FeatureMapConfig(Config):
    slot = "feature_map"

    def build(self, head_dim: int) -> FeatureMap:
        return self.builds(self, head_dim)

    def build_heads(self, num_heads: int, head_dim: int) -> FeatureMap:
        """Build the map for a mixer of ``num_heads`` heads, where heads differ."""
        return self.build(head_dim)


# The interface of the feed-forwards of layers.


class ReadsPadding:
    """Mixin of a feed-forward whose ``forward`` also takes ``valid`` [...] bool or None, because its results or counts
    depend on which tokens are real."""


class FeedForwardConfig(Divisible, Config):
    """The config; ``build(dim)`` returns a module [..., dim] -> [..., dim]. ``hidden_dim`` defaults to 4 * dim.

    A :class:`ReadsPadding` also takes ``valid``. A feed-forward that reads other tokens is a mixer: ``build`` returns
    an ``EncoderMixer``, and ``build_causal``, for layers of decoders, a ``CausalMixer``.
    """

    slot = "feed_forward"

    def build(self, dim: int) -> nn.Module:
        return self.builds(self, dim)

    def build_causal(self, dim: int) -> nn.Module:
        return self.build(dim)


class PartlyUsed:
    """Mixin of a feed-forward of whose weights every token uses a part: a table, a mixture of experts."""

    @property
    def unused_parameters(self) -> int:
        """Return the number of weights that one token does not use."""
        raise NotImplementedError


def active_parameters(model: nn.Module) -> int:
    """Return the number of parameters of ``model`` that one token uses."""
    unused = sum(part.unused_parameters for part in model.modules() if isinstance(part, PartlyUsed))
    return sum(parameter.numel() for parameter in model.parameters()) - unused


class Selection(nn.Module):
    """A module whose input is the experts chosen among ``size``, for probes and for hooks that measure usage."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, chosen: Tensor, weights: Tensor) -> None:
        """Take the experts ``chosen`` [..., n] int64 and their ``weights`` [..., n]."""
        probe("experts", chosen, weights=weights, count=self.size)


# The input of a model: the values of a position, and how they become a vector.


class Input(nn.Module):
    """The map of values [batch, time, ...] to [batch, time, dim]: token ids, frames of sound, patches, typed values,
    ...

    ``vocab_size``: values are ids below this number; None for other values. ``values_per_position``: the number of
    values at one position, all predicted there.
    """

    vocab_size: int | None = None

    @property
    def levels(self) -> int | None:
        """Return the number of intensities, for heads that predict them: the number of ids where values are numbers."""
        return self.vocab_size

    @property
    def values_per_position(self) -> int:
        return 1

    @property
    def table(self) -> Any:
        """Return the table that a tied head takes as its output matrix, such as [vocab_size, dim], or None."""
        return None

    @property
    def lower(self) -> tuple[Any, ...]:
        """Return the models that encode parts of a value before this input does, the lowest first."""
        return ()

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    def check(self, values: Tensor) -> None:
        """Raise ``KinformerError`` where ``values`` have another shape than this input takes."""
        raise NotImplementedError

    def length(self, values: Tensor) -> int:
        """Return the number of positions of ``values``: their second axis, unless the input is whole."""
        return values.shape[1]

    def predicted(self, values: Tensor) -> Tensor:
        """Return the part of ``values`` that a head predicts: all values, unless a position also holds conditions."""
        return values

    def grid(self, values: Tensor) -> tuple[int, int] | None:
        """Return the rows and columns of the patches of images, which are the last positions; None without patches."""
        return None

    def forward(self, values: Tensor, positions: Tensor, **others: Tensor) -> Tensor:
        """Return vectors of ``values`` at ``positions`` [batch, time] int64; ``others`` are inputs such as types."""
        raise NotImplementedError

    def without_padding(self, values: Tensor, valid: Tensor) -> Tensor:
        """Return ``values`` with zeros where not ``valid`` [batch, time]: padding may be no input at all."""
        return values.masked_fill(~valid.reshape(*valid.shape, *([1] * (values.dim() - 2))), 0)

    def example(self, batch: int, time: int, device: torch.device | str | None = None) -> Tensor:
        """Return some ``values`` of ``batch`` rows and ``time`` positions, to look at shapes with."""
        raise NotImplementedError


class InputConfig(Config):
    """The config; ``build(dim)`` returns the input of a model of width ``dim``.

    ``whole``: values are read at once, such as images, so a decoder cannot absorb them piece by piece. ``length``: the
    fixed number of positions, or None.
    """

    slot = "input"
    whole: ClassVar[bool] = False

    @property
    def length(self) -> int | None:
        return None

    def build(self, dim: int) -> Input:
        return self.builds(self, dim)


# The interfaces of heads beside logits: a product with a table, a distribution of values, a search in a store.


class VocabularyShare(Protocol):
    """The tokens of a vocabulary whose logits one process has."""

    def nats(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of ``targets`` [rows] for x [rows, dim], a scalar, in all processes."""


class OutputProduct(nn.Module):
    """A head whose logits are x W^T + b. ``vocabulary_part``: the tokens of W where processes share the vocabulary."""

    vocabulary_part: VocabularyShare | None = None

    def product(self, input: Input) -> tuple[Tensor, Tensor | None] | None:
        """Return W [vocab, dim] and b [vocab] or None; ``input`` is the model's, whose table may be W. Return None
        where an adapter adds to the product, so that the head must be called."""
        raise NotImplementedError


class Likelihood(nn.Module):
    """A head that predicts ordered values by a distribution: its logits [batch, time, parameters] are the parameters.

    ``draws``: the number of uniform numbers for a draw of one position.
    """

    draws: int

    def nats(self, logits: Tensor, values: Tensor) -> Tensor:
        """Return -ln p(values), float32 at least: [...] of ``logits`` [..., parameters] and ``values`` int64 [...], or
        [..., channels] where a position holds several, which are then scored together."""
        raise NotImplementedError

    def draw(self, logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
        """Draw values int64 (see :meth:`nats`) by ``uniform`` [..., draws] from [0, 1). ``temperature`` 1 draws from
        the predicted distribution; 0 takes the most probable value or a value near it."""
        raise NotImplementedError


class NeedsStore:
    """Mixin of the config of a head that searches a datastore while it is trained, such as SPALM.

    Its ``forward`` also takes ``neighbours`` [batch, time, k] int64, the tokens that followed the nearest entries of a
    datastore, -1 where there is none, or None without a datastore. ``datastore`` supplies them, in training too.
    """


class Neighbours(NamedTuple):
    """The entries of a store nearest to each of n queries, nearest first; k is at most the number that was requested.

    ``distances`` [n, k] float32, squared L2; ``tokens`` [n, k] int64, the token that followed; ``entries`` [n, k]
    int64, numbers in the store. Where a query has fewer than k neighbours, the last ones are (infinity, 0, -1).
    """

    distances: Tensor
    tokens: Tensor
    entries: Tensor


class Searcher(Protocol):
    """A store of (key, next token) entries that a head searches.

    A store outlives every sequence: it is a read-only attachment of a head, never part of a state. ``bytes_read``
    counts the bytes that all searches so far have read from its files.
    """

    @property
    def bytes_read(self) -> int: ...

    @property
    def entries(self) -> int:
        """Return the largest number of entries that a search may return."""

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries of ``queries`` [n, dim], on their device."""


# The part ``span``: the learnt distance that a head of softmax attention looks back.
#
# A span is a learnt bias of the scores by distance and head, with probability 0 beyond a distance. The mixer cuts its
# pattern and its state to the windows that the weights allow now. Windows are numbers on the host; the mixer reads
# them again when the weights change. A captured graph uses the windows of the trainer's last trim. The trainer adds
# the penalty of spans to the loss and moves weights back into their bounds after each step (``core.learning``).

Cut = Callable[[tuple[int, ...]], Pattern]


class Span(nn.Module):
    """A span, which weighs keys by their distance (query position - key position) from 1 on; a query does not see
    itself.

    ``windows``: the distances 1 ... windows[h] are all that head h sees, as the weights are now: nothing else is
    computed or remembered. Numbers on the host, to choose shapes. ``pattern`` is the mixer's, cut to them.
    """

    @property
    def windows(self) -> tuple[int, ...]:
        raise NotImplementedError

    def spans(self) -> list[float]:
        """Return the learnt span of every head, in tokens; all processes must call it together."""
        raise NotImplementedError

    @property
    def pattern(self) -> Pattern:
        raise NotImplementedError

    def bias(self, farthest: int) -> Tensor:
        """Return the biases [heads, farthest] of scores at the distances 1 ... ``farthest``, -inf for hidden keys."""
        raise NotImplementedError

    def joined(self, relative: Relative | None, farthest: int) -> Relative | None:
        """Return a position's tables at its distances among 1 ... ``farthest``, with the span's bias added."""
        if farthest < 1:
            return relative
        bias = self.bias(farthest)
        if relative is None:
            return Relative(1, bias=bias)
        before = relative.lowest - 1
        tables = {name: getattr(relative, name) for name in ("bias", "keys", "values")}
        tables = {name: _widened(table, before, farthest) for name, table in tables.items() if table is not None}
        # m exp(s) = exp(s + log m): a soft mask m of the probabilities is a bias log m of the scores.
        tables["bias"] = bias + tables["bias"] if "bias" in tables else bias
        return relative._replace(lowest=1, **tables)


class TokenSpan(nn.Module):
    """A span of each token; ``windows`` and ``pattern`` belong to the longest possible span."""

    @property
    def windows(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def pattern(self) -> Pattern:
        raise NotImplementedError

    def of(self, x: Tensor) -> Tensor:
        """Return spans [batch, heads, time] in tokens, for the mixer's input x [batch, time, dim]."""
        raise NotImplementedError

    def reach(self, z: float) -> int:
        """Return the largest distance to a key that a query of the span ``z`` sees."""
        raise NotImplementedError

    def log_mask(self, z: Tensor, distance: Tensor) -> Tensor:
        """Return the logarithm of the soft mask of spans z at a ``distance`` of 1 or more (both broadcast): -inf where
        the mask is 0, and 0 where z > distance - 1."""
        raise NotImplementedError

    def cost(self, z: Tensor, valid: Tensor | None) -> Tensor:
        """Return the cost [batch] of the spans z of a chunk, a sum over valid tokens."""
        raise NotImplementedError


class Following(nn.Module):
    """A span whose ``windows`` and ``pattern`` follow the values of some parameters, which it reads again when they
    have changed; where the host cannot read them, the windows stay."""

    def follow(self, cut: Cut, names: tuple[str, ...], windows: tuple[int, ...]) -> None:
        """Begin with ``windows``, which follow the parameters ``names``, or stay where there are none."""
        self._cut, self._names = cut, names
        self._windows, self._pattern = windows, cut(windows)
        self._stamps: tuple[tuple[object, ...] | None, ...] = (None,) * len(names)

    def windows_of(self, *values: Tensor) -> tuple[int, ...]:
        """Return the windows for the ``values`` of the parameters."""
        raise NotImplementedError

    @property
    def windows(self) -> tuple[int, ...]:
        self._read()
        return self._windows

    @property
    def pattern(self) -> Pattern:
        self._read()
        return self._pattern

    @torch.no_grad()  # saves no tensor: a checkpoint counts the saved tensors, and its second pass does not trim
    def trim(self, *values: Tensor) -> None:
        """Cut the windows to the spans of ``values``, the full (unsharded) parameters."""
        windows = self.windows_of(*values)
        if windows != self._windows:
            self._windows, self._pattern = windows, self._cut(windows)
        self._stamps = tuple(map(stamp_of, self._parameters_followed()))

    def _parameters_followed(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._names]

    def _read(self) -> None:
        parameters = self._parameters_followed()
        if not all(map(readable, parameters)):
            return
        stamps = tuple(map(stamp_of, parameters))
        if None in stamps or stamps != self._stamps:
            self.trim(*parameters)


class SpanConfig(Config):
    slot = "span"

    def build(self, dim: int, num_heads: int, cut: Cut) -> Span | TokenSpan:
        """Build a span; ``cut(windows)`` is the mixer's pattern where heads see so far."""
        return self.builds(self, dim, num_heads, cut)


def relative_of(position: Position, span: Span | TokenSpan | None, farthest: int) -> Relative | None:
    """Return the tables of a ``position`` up to the distance ``farthest``, with the bias of a ``span``."""
    if span is None:
        return position.relative(0, farthest)
    farthest = min(farthest, max(span.windows))
    if isinstance(span, TokenSpan):
        return position.relative(1, farthest) if farthest > 0 else None
    return span.joined(position.relative(1, farthest), farthest)


def _widened(table: Tensor, before: int, count: int) -> Tensor:
    """Return ``table`` [heads, n, ...] between zeros, ``count`` distances in all."""
    after = count - before - table.shape[1]
    if not (before or after):
        return table
    return pad(table, (0, 0) * (table.dim() - 2) + (before, after))


def stamp_of(parameter: Tensor) -> tuple[object, ...] | None:
    """Return a value that changes with a parameter's values, or None for tensors of inference mode and within
    transforms of ``torch.func``, which have none. Writes through ``.data`` are not noticed."""
    if parameter.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        return None
    return parameter.data_ptr(), parameter._version, parameter.dtype


def readable(parameter: Tensor) -> bool:
    """Return whether a parameter has values to look at now: not while a graph is captured or costs are counted."""
    return not torch.compiler.is_compiling() and has_data(parameter)


def host(values: Tensor) -> list[float]:
    """Return the numbers of a tensor; this waits for its device."""
    with torch.no_grad():
        return values.detach().double().tolist()
