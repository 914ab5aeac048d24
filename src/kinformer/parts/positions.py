"""Positions that act on tokens: learnt, sinusoidal, by timing, by type, and as complex numbers."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from kinformer.core.config import check_unused
from kinformer.core.parts import Position, PositionConfig, Relative
from kinformer.core.stack import EmbeddingConfig
from kinformer.runtime.errors import KinformerError


class NoPosition(Position):
    """No position encoding: order enters only through causality. Every hook returns its tensors unchanged."""

    class Config(PositionConfig):
        kind = "none"

        def build(self, dim: int) -> NoPosition:
            return NoPosition()


SLOWEST = 10000.0


def sinusoids(numbers: Tensor, width: int, base: float = SLOWEST, interleaved: bool = False) -> Tensor:
    """Return sin(n / base^(2i / width)) for all i, then the cosines, [..., width] float64; ``interleaved``: each cosine
    behind its sine."""
    index = torch.arange(0, width, 2, device=numbers.device, dtype=torch.float64)
    # At 10^6 a float32 angle is 0.06 rad off.
    angles = numbers[..., None].to(torch.float64) * base ** (-index / width)
    waves = [angles.sin(), angles.cos()]
    return torch.stack(waves, dim=-1).flatten(-2) if interleaved else torch.cat(waves, dim=-1)


class Sinusoidal(Position):
    """Sinusoidal positions (Vaswani et al. 2017, section 3.5), added to the token embeddings.

        PE(p, 2i) = sin(p / base^(2i / dim)),    PE(p, 2i + 1) = cos(p / base^(2i / dim))

    The layout ``split`` has the same numbers, all sines before all cosines, as tensor2tensor and Marian have them.
    """

    class Config(PositionConfig):
        kind = "sinusoidal"
        bounded_by_training = True
        base: float = 10000.0
        scale: float = 1.0  # factor on the encoding; 0.02-sized embeddings want a smaller one than 1
        layout: Literal["interleaved", "split"] = "interleaved"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        if dim % 2:
            raise KinformerError(f"sinusoidal positions need an even width, but the width is {dim}; change dim.")
        self.dim, self.base, self.scale, self.layout = dim, config.base, config.scale, config.layout

    def embed(self, positions: Tensor) -> Tensor:
        table = sinusoids(positions, self.dim, self.base, self.layout == "interleaved")
        return table.to(torch.get_default_dtype()) * self.scale


class Learned(Position):
    """Learned absolute positions (Gehring et al. 2017; GPT-2): a table [max_length, dim] is added to the token
    embeddings. A position at or beyond ``max_length`` is refused."""

    class Config(PositionConfig):
        kind = "learned"
        bounded_by_training = True
        LEAST = {"max_length": 1}
        max_length: int = 1024
        std: float = 0.02

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.table = nn.Parameter(torch.randn(config.max_length, dim) * config.std)

    def embed(self, positions: Tensor) -> Tensor:
        return _looked_up(self.table, positions)


def _looked_up(table: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of ``table`` [max_length, dim] at ``positions``; refuse a position without a row."""
    try:
        return nn.functional.embedding(positions, table)
    except IndexError:
        raise KinformerError(
            f"position {int(positions.max())} does not have an embedding: learned positions end at max_length = "
            f"{len(table)}; use a shorter context, or another position (rope, sinusoidal, none)."
        ) from None


class LearnedPerLayer(Position):
    """Learned positions at every layer (Al-Rfou et al. 2018, section 3.4): a table [max_length, dim] for each layer is
    added to its input. The sum enters the residual stream, so later layers see the tables of all earlier layers. A
    position at or beyond ``max_length`` is refused."""

    class Config(PositionConfig):
        kind = "learned_per_layer"
        bounded_by_training = True
        LEAST = {"max_length": 1}
        max_length: int = 512
        std: float = 0.02

        def build(self, dim: int) -> LearnedPerLayer:
            return self.build_model(dim, 1)

        def build_model(self, dim: int, depth: int) -> LearnedPerLayer:
            return LearnedPerLayer(self, dim, depth)

    def __init__(self, config: Config, dim: int, depth: int) -> None:
        super().__init__()
        self.max_length = config.max_length
        tables = torch.randn(depth, config.max_length, dim) * config.std
        self.tables = nn.ParameterList(table.clone() for table in tables)

    def layer_input(self, positions: Tensor, layer: int) -> Tensor:
        return _looked_up(self.tables[layer], positions)


class Timing(Position):
    """Coordinates of position and step, added before every step (Dehghani et al. 2019, section 2.1, equation 4).

        P(p, t) = signal(p) + step(t)        signal(n) = [sin(n f_0), sin(n f_1), ..., cos(n f_0), cos(n f_1), ...]
        f_k = 10000^(-k / (dim / 2 - 1))

    As in the official code (tensor2tensor), sines come first and cosines second, and the slowest wave has the length of
    10000 radians. ``step(t)`` is the same signal of the step's number, as in the paper, or a learned vector times the
    root of the width, as the official code has it by default: ``table`` [depth, dim] has one row per use of a layer.
    Angles are computed in float64.
    """

    class Config(PositionConfig):
        kind = "timing"
        bounded_by_training = True
        step: Literal["sinusoidal", "learned"] = "sinusoidal"

        def build(self, dim: int) -> Timing:
            return self.build_model(dim, 1)

        def build_model(self, dim: int, depth: int) -> Timing:
            if dim < 4 or dim % 2:
                raise KinformerError(f"timing signals need an even width of 4 or more, but it is {dim}; change dim.")
            return Timing(self, dim, depth)

    def __init__(self, config: Config, dim: int, depth: int) -> None:
        super().__init__()
        self.dim = dim
        learned = config.step == "learned"
        self.table = nn.Parameter(torch.randn(depth, dim) * dim**-0.5) if learned else None

    def layer_input(self, positions: Tensor, layer: int) -> Tensor:
        return timing_signal(positions, self.dim) + self._step(positions, layer)

    def _step(self, positions: Tensor, layer: int) -> Tensor:
        if self.table is None:
            return timing_signal(positions.new_full((), layer), self.dim)
        return self.table[layer] * self.dim**0.5


def timing_signal(numbers: Tensor, width: int) -> Tensor:
    """Return tensor2tensor's signal [..., width] of ``numbers`` [...] int64, as of :class:`Timing`."""
    count = width // 2
    index = torch.arange(count, device=numbers.device, dtype=torch.float64)
    angles = numbers[..., None].to(torch.float64) * SLOWEST ** (-index / max(1, count - 1))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.get_default_dtype())


# Typed relations between tokens (Ainslie et al. 2020, ETC, section 3.1): distances, and whether one stands for
# the other's sentence, as rows of one table.
#
#     score(q, k) = (q . k + q . E[id] + c[id]) / sqrt(head_dim)
#
#     id          0    1 ... K               K + 1 ... 2 K        2 K + 1      2 K + 2      2 K + 3
#     the key is  q    so far to the right   so far to the left   unlike       same         another, in no order
#
# "Same" and "unlike" are between the two inputs: the global token stands for the sentence of the long input's token,
# or for another. E[id] is the paper's a^K of a relative position label, c[id] a bias that the authors' code adds; K is
# its clipping distance k, and distances beyond K are K.


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

        in_sentence: bool [batch, n, keys], whether query and key belong together; None without sentences.
        """
        unlike = scores[..., self.unlike, None]
        if in_sentence is None:
            return unlike
        return torch.where(in_sentence[:, None], scores[..., self.same, None], unlike)


class ComplexOrder(nn.Embedding):
    """Complex-order embeddings (Wang et al. 2020, Encoding word order in complex embeddings, section 3.2).

        token j at position p  ->  r_j e^{i (w_j p + t_j)},   stored as [r_j cos(w_j p + t_j); r_j sin(w_j p + t_j)]

    A token's amplitudes r are its meaning; its frequencies w say how fast its features turn with its position, t
    with what phase they begin. ``sharing`` says who has a frequency in common: ``none`` gives every token one per
    feature, ``features`` every token one for all its features, ``tokens`` every feature one for all tokens. Angles
    are computed in float64. The result is [batch, time, dim], dim / 2 complex features, real parts first.

    ``weight`` [vocab, dim / 2] are the amplitudes. Frequencies begin as base^(-2 floor(k / 2) / (dim / 2)), for all
    tokens alike, and are learned as ``offset`` from there, so that weight decay does not draw them to zero; or,
    where they are ``random``, evenly between -pi and pi, from 0.
    """

    class Config(EmbeddingConfig):
        kind = "complex_order"
        bounded_by_training = True
        sharing: Literal["none", "features", "tokens"] = "none"
        phase: bool = False  # learn a first phase too, shared as the frequencies are; it begins at 0
        frequencies: Literal["geometric", "random"] = "geometric"  # as they begin
        base: float = 10000.0

        def __post_init__(self) -> None:
            if self.frequencies == "random":
                check_unused(self, "with frequencies = 'random'", "base")
            if self.sharing == "features":
                check_unused(self, "with sharing = 'features', whose only frequency is the first, 1", "base")

    def __init__(self, config: Config, vocab_size: int, dim: int) -> None:
        if dim % 2:
            raise KinformerError(f"complex embeddings need an even width, but the width is {dim}; change dim.")
        super().__init__(vocab_size, dim // 2)
        self.base = None if config.frequencies == "random" else config.base
        rows = 1 if config.sharing == "tokens" else vocab_size
        columns = 1 if config.sharing == "features" else dim // 2
        offset = torch.zeros(rows, columns)
        self.offset = nn.Parameter(offset if self.base else offset.uniform_(-math.pi, math.pi))
        self.phase = nn.Parameter(torch.zeros(rows, columns)) if config.phase else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        amplitude = super().forward(tokens)
        angle = (self._first(tokens.device) + self._of(self.offset, tokens)) * positions[..., None]
        if self.phase is not None:
            angle = angle + self._of(self.phase, tokens)
        dtype = torch.promote_types(amplitude.dtype, torch.float32)
        # Reduced in float64: a float32 angle of 10^6 radians is off by 0.06.
        angle = angle.remainder(2 * math.pi).to(dtype)
        turned = (amplitude * turn.to(amplitude.dtype) for turn in (angle.cos(), angle.sin()))
        return torch.cat([*turned], dim=-1)

    def _first(self, device: torch.device) -> Tensor:
        """Return the frequencies that ``offset`` is added to, [dim / 2 or 1] float64: one for all features is the first
        of them."""
        if self.base is None:
            return torch.zeros(self.offset.shape[1], device=device, dtype=torch.float64)
        index = torch.arange(self.offset.shape[1], device=device, dtype=torch.float64)
        return self.base ** (-2 * (index / 2).floor() / self.embedding_dim)

    def _of(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens' rows of ``table``, in float64."""
        return (table[0] if table.shape[0] == 1 else nn.functional.embedding(tokens, table)).double()


PARTS = {
    "ComplexOrderEmbedding": ComplexOrder.Config,
    "NoPosition": NoPosition.Config,
    "SinusoidalPositions": Sinusoidal.Config,
    "LearnedPositions": Learned.Config,
    "LearnedPositionsPerLayer": LearnedPerLayer.Config,
    "TimingSignal": Timing.Config,
}
