"""Positions by distance: rotations, biases, factors, and keys or values of distances."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from kinformer.core.config import check_unused
from kinformer.core.contract import FollowsHeads, state_dtype
from kinformer.core.parts import Position, PositionConfig, Relative, is_plain
from kinformer.parts.positions import sinusoids
from kinformer.runtime.autograd import autocast_dtype
from kinformer.runtime.compiling import arguments_trusted
from kinformer.runtime.errors import KinformerError

YARN = ("original_length", "beta_fast", "beta_slow", "attention_factor", "truncate")
LLAMA3 = ("original_length", "low_freq_factor", "high_freq_factor")
LONGROPE = ("original_length", "factors", "attention_factor")
"""The settings that the scaling of that name reads beside its factor; longrope does not have a factor."""


class Rope(Position):
    """Rotary position embedding (Su et al. 2021, RoFormer, equation 34): queries and keys are rotated by their
    position.

        (x_i, x_j) -> (x_i cos a - x_j sin a, x_i sin a + x_j cos a),   a = position * f_i,   f_i = base^(-2i / width)

    The product of a query and a key therefore depends on their distance only. ``layout`` says which features form a
    pair: ``half`` pairs i with i + width/2 (GPT-NeoX, Llama), ``interleaved`` pairs 2i with 2i + 1 (the paper).
    ``fraction`` is the share of each head's features that turn (GPT-NeoX: the first quarter); the others are not
    changed.

    A model trained at ``original_length`` runs ``factor`` times as far with other frequencies:

        linear   f_i / factor                                     (position interpolation, Chen et al. 2023)
        ntk      base * factor^(width / (width - 2)) as the base  (NTK-aware: stretches slow pairs, keeps fast pairs)
        yarn     f_i where a pair turns ``beta_fast`` times or more within ``original_length``, f_i / factor where it
                 turns ``beta_slow`` times or less, a linear ramp over i between, whose ends are rounded to whole pairs
                 if ``truncate``; cosine and sine times ``attention_factor``, 0.1 ln(factor) + 1 by default
                 (Peng et al. 2023, section 3)
        llama3   f_i where a pair turns more than ``high_freq_factor`` times within ``original_length``, f_i / factor
                 where it turns less than ``low_freq_factor`` times, a ramp linear in the turns between (Llama 3.1)
        longrope f_i / ``factors``[i], one number per pair; cosine and sine times ``attention_factor`` (Ding et al.
                 2024, LongRoPE)

    These scalings do not add weights. Frequencies that follow the length of the sequence (dynamic NTK) are not
    supported, because cached keys would become wrong. LongRoPE's second table, for longer texts, is another position.
    Angles are computed in float64, and rotations in the activations' dtype.
    """

    class Config(PositionConfig):
        kind = "rope"
        bounded_by_training = True
        LEAST = {"factor": 1, "original_length": 1}
        ABOVE = {"attention_factor": 0}
        base: float = 10000.0
        layout: Literal["half", "interleaved"] = "half"
        fraction: float = 1.0
        scaling: Literal["none", "linear", "ntk", "yarn", "llama3", "longrope"] = "none"
        factor: float = 1.0
        original_length: int | None = None
        beta_fast: float = 32.0
        beta_slow: float = 1.0
        attention_factor: float | None = None
        truncate: bool = True
        low_freq_factor: float = 1.0
        high_freq_factor: float = 4.0
        factors: tuple[float, ...] = ()

        def __post_init__(self) -> None:
            if not 0 < self.fraction <= 1:
                raise KinformerError(f"fraction must be above 0 and at most 1, but is {self.fraction:g}.")
            if not 0 < self.beta_slow < self.beta_fast:
                raise KinformerError(
                    f"beta_slow = {self.beta_slow:g} must lie between 0 and beta_fast = {self.beta_fast:g}."
                )
            if not 0 < self.low_freq_factor < self.high_freq_factor:
                raise KinformerError(
                    f"low_freq_factor = {self.low_freq_factor:g} must lie between 0 and high_freq_factor = "
                    f"{self.high_freq_factor:g}."
                )
            if not all(0 < factor < math.inf for factor in self.factors):
                raise KinformerError(f"factors must be above 0 and finite, but are {self.factors}.")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.width = config, int(config.fraction * dim)
        _check(config, dim, self.width)
        self.magnitude = 1 + 0.1 * math.log(config.factor) if config.scaling == "yarn" else 1.0
        if config.attention_factor is not None:
            self.magnitude = config.attention_factor

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = self._turns(positions)
        cos, sin = ((x if self.magnitude == 1 else x * self.magnitude).to(q.dtype) for x in turns)
        if q.shape[2] == 1 and q.dtype == k.dtype:  # a step of generation: operators take longer to start than to turn
            heads = [q.shape[1], k.shape[1]]
            turned_q, turned_k = self._turn(torch.cat([q, k], 1), cos, sin).split(heads, 1)
            return turned_q, turned_k
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def moved(self, k: Tensor, distances: Tensor) -> Tensor:
        return self._turn(k, *(turn.to(k.dtype) for turn in self._turns(distances)))

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [batch, 1, time, width / 2] of the angles at ``positions``, float64."""
        rate = frequencies(self.config, self.width, positions.device)
        # At position 10^6 a float32 angle is 0.06 rad off; only sines and cosines are rounded.
        angles = (positions[..., None].to(torch.float64) * rate)[:, None]
        return angles.cos(), angles.sin()

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self.width], x[..., self.width :]
        if self.config.layout == "half":
            a, b = turned.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def frequencies(config: Rope.Config, width: int, device: torch.device | None = None) -> Tensor:
    """Return radians per position of each pair of ``width`` features, [width /
    2] float64, scaled as ``config`` says."""
    base = config.base
    if config.scaling == "ntk":
        base *= config.factor ** (width / (width - 2))
    index = torch.arange(width // 2, device=device, dtype=torch.float64)
    rate = base ** (-2 * index / width)
    if config.scaling == "linear":
        return rate / config.factor
    if config.scaling == "longrope":
        return rate / torch.tensor(config.factors, device=device, dtype=torch.float64)
    if config.scaling == "yarn":
        low, high = _ramp(config, width)
        slow = ((index - low) / (high - low)).clamp(0, 1)
        return rate * (1 - slow) + rate / config.factor * slow
    if config.scaling == "llama3":
        assert config.original_length is not None
        turns = config.original_length * rate / (2 * math.pi)
        fast = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        return rate / config.factor + (rate - rate / config.factor) * fast.clamp(0, 1)
    return rate


def _ramp(config: Rope.Config, width: int) -> tuple[float, float]:
    """Return the pairs between which YaRN goes over from f_i to f_i / factor; the interval is never empty."""
    original = config.original_length
    assert original is not None

    def pair(turns: float) -> float:
        """Return the pair that makes this many ``turns`` within the original length."""
        # original * base^(-2i / width) = 2 pi turns, solved for i
        return width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(config.base))

    first, last = pair(config.beta_fast), pair(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, width - 1)
    return low, max(high, low + 0.001)


def _check(config: Rope.Config, dim: int, width: int) -> None:
    """Refuse settings that conflict with each other or with the width of a head."""
    if width < 2 or width % 2:
        share = "" if config.fraction == 1 else f", and fraction = {config.fraction:g} leaves {width}"
        raise KinformerError(f"rope needs an even head_dim, but head_dim is {dim}{share}.")
    if (config.scaling in ("none", "longrope")) != (config.factor == 1):
        raise KinformerError(
            f"rope's scaling is {config.scaling!r} with factor = {config.factor:g}; set both, scaling (linear, ntk, "
            "yarn, llama3) and a factor above 1, or neither."
        )
    if config.scaling == "ntk" and width < 4:
        raise KinformerError(f"rope's scaling 'ntk' needs 4 or more features that turn, but there are {width}.")
    used = {"yarn": YARN, "llama3": LLAMA3, "longrope": LONGROPE}.get(config.scaling, ())
    unused = sorted({*YARN, *LLAMA3, *LONGROPE} - {*used})
    check_unused(config, f"with scaling = {config.scaling!r}", *unused)
    if used and config.original_length is None:
        raise KinformerError(
            f"rope's scaling {config.scaling!r} needs original_length, the length that the model was trained at."
        )
    if config.scaling == "longrope" and len(config.factors) != width // 2:
        raise KinformerError(
            f"rope's scaling 'longrope' needs a factor of each of the {width // 2} pairs that turn, but factors has "
            f"{len(config.factors)}."
        )


class Alibi(FollowsHeads, Position):
    """ALiBi, attention with linear biases (Press et al. 2022, section 3): -m_h |i - j| is added to every scaled score.

    ALiBi does not have parameters and replaces any other encoding of positions: a model trained at one length runs at
    longer lengths.

    Slopes m_h = 2^(-8 h / H), h = 1 ... H, if the number H of heads is a power of two. Otherwise the slopes of the next
    lower power c, followed by the first, third, fifth ... slope of 2 c until there are H: the authors' rule, whose jump
    between the two is intended. Biases are in float64, on both sides of a query.
    """

    class Config(PositionConfig):
        kind = "alibi"

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Alibi:
            return Alibi(num_heads)

    relative_tables = ("bias",)
    exponents: Tensor  # whole numbers, which keep their values when a model changes its dtype

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.power = 1 << (num_heads.bit_length() - 1)
        exponents = [*range(2, 2 * self.power + 1, 2), *range(1, 2 * self.power, 2)][:num_heads]
        self.register_buffer("exponents", torch.tensor(exponents))  # kept in files: a meta model is filled by them

    def follow(self, whole: Alibi, part: int) -> None:
        self.power = whole.power

    def slopes(self) -> Tensor:
        """Return m_h of every head, [heads] float64."""
        return 2.0 ** (self.exponents.to(torch.float64) * (-4 / self.power))

    def relative(self, lowest: int, highest: int) -> Relative:
        distance = torch.arange(lowest, highest + 1, device=self.exponents.device).abs()
        return Relative(lowest, bias=-self.slopes()[:, None] * distance)


class HeadsConfig(PositionConfig):
    """The base of configs that build a position for a mixer's heads alone."""

    def build_heads(self, dim: int, num_heads: int, head_dim: int) -> Position:
        return self.builds(self, dim, num_heads, head_dim)


class T5(Position):
    """T5's relative positions (Raffel et al. 2020, section 2.1): one learned bias per head and bucket of distances.

    Half of a side's n buckets hold one distance each; the others widen logarithmically up to ``max_distance``, and
    the last bucket holds all larger distances. Its bias is subtracted from all scores (softmax does not see a constant
    of the query), so only distances below ``max_distance`` are looked up. The table is [num_buckets, heads]; if
    ``shared``, all layers of a model use one table. ``bidirectional``: half of the buckets are for keys ahead of the
    query; otherwise these keys share the first bucket.
    """

    class Config(HeadsConfig):
        kind = "t5"
        num_buckets: int = 32
        max_distance: int = 128
        bidirectional: bool = False
        shared: bool = True

        def __post_init__(self) -> None:
            parts = 4 if self.bidirectional else 2
            if self.num_buckets < parts or self.num_buckets % parts:
                raise KinformerError(f"num_buckets must be a multiple of {parts}, but is {self.num_buckets}.")
            if self.max_distance <= self.num_buckets // parts:
                raise KinformerError(
                    f"max_distance must be above {self.num_buckets // parts}, the number of distances with a "
                    f"separate bucket, but is {self.max_distance}."
                )

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.relative_tables = ("bias",)
        self.config, self.shared, self.one_sided = config, config.shared, not config.bidirectional
        self.table = nn.Parameter(torch.randn(config.num_buckets, num_heads) * dim**-0.5)

    def relative(self, lowest: int, highest: int) -> Relative | None:
        far = self.config.max_distance
        if lowest >= far:
            return None
        # All distances, however short the past: a step with a growing table could not be recorded.
        distance = torch.arange(lowest, far, device=self.table.device)
        last = self.config.num_buckets // (1 + self.config.bidirectional) - 1
        # Softmax ignores a constant of the row: subtracting the farthest bias leaves 0 beyond ``far``.
        return Relative(lowest, bias=(self.table[buckets(self.config, distance)] - self.table[last]).mT)


def buckets(config: T5.Config, distance: Tensor) -> Tensor:
    """Return the bucket of every distance (query position - key position), int64."""
    count = config.num_buckets // 2 if config.bidirectional else config.num_buckets
    ahead = count * (distance < 0) if config.bidirectional else 0
    distance = distance.abs() if config.bidirectional else distance.clamp_min(0)
    single = count // 2
    # In float32, as the authors do: where a border is a whole number, rounding decides.
    ratio = (distance.clamp_min(1).float() / single).log() / math.log(config.max_distance / single)
    wide = (single + (ratio * (count - single)).to(torch.int64)).clamp_max(count - 1)
    return ahead + torch.where(distance < single, distance, wide)


class DistanceTable(nn.Module):
    """The table ``keys`` [max_distance, head_dim], row d - 1 for the distance d; ``shared``: by all layers."""

    def __init__(self, config: DistanceKeys.Config, head_dim: int) -> None:
        super().__init__()
        self.config, self.shared = config, config.share_layers
        self.keys = nn.Parameter(torch.randn(config.max_distance, head_dim))


class DistanceKeys(Position):
    """Learnt vectors by distance on the keys, for all heads and layers (Sukhbaatar et al. 2019, section 2.1).

        score(i, j) = q_i . (k_j + p[i - j]) / sqrt(head_dim),    i - j = 1 ... max_distance

    Attention with adaptive spans uses this simplification of Shaw et al. 2018, without values and without clipping. The
    authors call it ``key_pe``; its entries begin as N(0, 1). Distance 0 and distances beyond the last do not have a
    vector. All heads share a table and, with ``share_layers``, all layers.
    """

    one_sided = True

    class Config(HeadsConfig):
        kind = "distance_keys"
        bounded_by_training = True
        LEAST = {"max_distance": 1}
        max_distance: int = 1024
        share_layers: bool = True

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.table = DistanceTable(config, head_dim)

    def relative(self, lowest: int, highest: int) -> Relative | None:
        first, last = max(lowest, 1), min(highest, len(self.table.keys))
        if last < first:
            return None
        return Relative(first, keys=self.table.keys[None, first - 1 : last])


class Shaw(Position):
    """Relative position representations (Shaw et al. 2018, equations 3 and 4): learned vectors by clipped distance.

        score(i, j) = q_i . (k_j + a^K[r]) / sqrt(head_dim),   r = clip(j - i, -k, k)
        out_i = sum_j p_ij (v_j + a^V[r])

    Distances of k and more share one row. This row is added to every value and subtracted from all scores (softmax does
    not see a constant of the query), so only distances below k are looked up. Heads share the tables [2k + 1,
    head_dim], whose row r + k belongs to r.
    """

    class Config(HeadsConfig):
        kind = "shaw"
        LEAST = {"max_distance": 1}
        max_distance: int = 16  # the paper's k
        on_values: bool = True  # the second term, a^V

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.max_distance = config.max_distance
        shape = (2 * config.max_distance + 1, head_dim)
        self.key_table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.value_table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape))) if config.on_values else None
        self.relative_tables = ("keys", "values") if config.on_values else ("keys",)

    def values(self, v: Tensor) -> Tensor:
        return v if self.value_table is None else v + self.value_table[0].to(v.dtype)

    def relative(self, lowest: int, highest: int) -> Relative | None:
        far = self.max_distance
        if lowest >= far:
            return None
        distance = torch.arange(lowest, min(highest, far - 1) + 1, device=self.key_table.device)
        # Here distance = query - key, so r = -distance; the row of the farthest keys, 0, is subtracted from all.
        row = far - distance.clamp(-far, far)
        tables = (self.key_table, self.value_table)
        keys, values = (None if table is None else (table[row] - table[0])[None] for table in tables)
        return Relative(lowest, keys=keys, values=values)


class Biases(nn.Module):
    """The biases ``content`` (the paper's u) and ``position`` (its v), [heads, head_dim]; ``shared``: by all layers."""

    def __init__(self, config: TransformerXL.Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.shared = config, config.share_biases
        self.content = nn.Parameter(torch.randn(num_heads, head_dim) * 0.02)
        self.position = nn.Parameter(torch.randn(num_heads, head_dim) * 0.02)


class TransformerXL(Position):
    """Transformer-XL's relative positions (Dai et al. 2019, section 3.3).

        score(i, j) = ((q_i + u) . k_j + (q_i + v) . W_R R_{i-j}) / sqrt(head_dim)

    R_d is a sinusoid of the model's width, all sines before all cosines. Queries are handed on as q + u; a distance
    moves every key by W_R R_d, which a query meets as q + u + (v - u). Other scores of products take both sums as
    they take q. W_R is learned per layer; u and v are shared by all layers, as in the authors' PyTorch code, or learned
    per layer. Beyond ``clamp`` distances count as ``clamp`` (None: no limit).
    """

    class Config(HeadsConfig):
        kind = "xl"
        LEAST = {"clamp": 1}
        bounded_by_training = True
        clamp: int | None = None
        share_biases: bool = True
        base: float = 10000.0

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.relative_tables = ("keys",)
        if dim % 2:
            raise KinformerError(f"xl positions need an even width, but dim is {dim}.")
        self.config, self.dim, self.shape = config, dim, (num_heads, head_dim)
        self.projection = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.biases = Biases(config, num_heads, head_dim)
        self._recent: _Rows | None = None

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q + self.biases.content[:, None].to(q.dtype), k

    def rotate_keys(self, k: Tensor, positions: Tensor) -> Tensor:
        return k

    def relative(self, lowest: int, highest: int) -> Relative | None:
        if self.config.clamp is not None:
            highest = min(highest, self.config.clamp - 1)
        if highest < lowest:
            return None
        # q + v = (q + u) + (v - u): the queries are already q + u, and distances meet them shifted by v - u.
        shift = (self.biases.position - self.biases.content)[:, None]
        return Relative(lowest, keys=self._rows(lowest, highest), shift=shift)

    def _rows(self, lowest: int, highest: int) -> Tensor:
        """Return the rows of :meth:`_project`, from a cache without gradients while the weights stay the same. Only on
        a CPU, as comparing weights elsewhere would wait for the device."""
        if torch.compiler.is_compiling() or not is_plain(self.projection):  # the weight says not all of an adapter
            return self._project(lowest, highest)
        weight = self.projection.weight
        if lowest < 0 or torch.is_grad_enabled() or weight.device.type != "cpu" or weight.is_inference():
            self._recent = None
            return self._project(lowest, highest)
        rows = self._recent
        name = _name(weight)
        # A step follows a chunk that has compared the bits.
        if rows is None or rows.name != name or not (arguments_trusted() or rows.bits == _sum_of_bits(weight)):
            rows = _Rows(self._project(0, highest), weight.detach(), name, _sum_of_bits(weight))
        if (count := rows.keys.shape[1]) <= highest:
            more = self._project(count, max(highest, 2 * count))
            rows = rows._replace(keys=torch.cat([rows.keys, more], 1))
        self._recent = rows
        return rows.keys[:, lowest : highest + 1]

    def _project(self, lowest: int, highest: int) -> Tensor:
        """Return the keys [heads, n, head_dim] of the distances ``lowest .. highest``.

        With a clamp they are relative to the farthest: a constant per query, which softmax does not see.
        """
        weight, (heads, head_dim) = self.biases.content, self.shape
        distance = torch.arange(lowest, highest + 1, device=weight.device)
        if self.config.clamp is not None:
            distance = torch.cat([distance, distance.new_tensor([self.config.clamp])])
        keys = self.projection(sinusoids(distance, self.dim, self.config.base).to(weight.dtype))
        keys = keys.view(-1, heads, head_dim).transpose(0, 1)
        if self.config.clamp is not None:
            keys = keys[:, :-1] - keys[:, -1:]
        return keys


class _Rows(NamedTuple):
    """The projected rows of the distances 0, 1, ..., and the weight that made them; holding it keeps its
    address from going to another tensor."""

    keys: Tensor
    weight: Tensor
    name: tuple[object, ...]
    bits: int


def _name(weight: Tensor) -> tuple[object, ...]:
    """Return an identity of the weight that changes with every write that PyTorch counts."""
    return weight.data_ptr(), weight._version, weight.dtype, autocast_dtype(weight.device)


def _sum_of_bits(weight: Tensor) -> int:
    """Return a number that also changes when values are written through ``.data``, which no version counts."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().view(integers).sum(dtype=torch.int64))


class DistanceAware(Position):
    """Distance-aware attention (Wu et al. 2021, DA-Transformer, section 3.2): real distances rescale rectified scores.

        score(i, j) = relu(q_i . k_j) f(w_h |i - j|; v_h) / sqrt(head_dim),    f(x; v) = (1 + e^v) / (1 + e^(v - x))

    f(0) = 1; with w > 0 f grows with the distance to at most 1 + e^v, with w < 0 it falls to 0. A score of 0 still
    takes part in the softmax, so attention stays dense. This position replaces any other encoding of positions. Each
    head learns ``rate`` (the paper's w) and ``steepness`` (its v). The paper does not give their initial values: here w
    is spread over the heads from -spread to spread, and v is 0.
    """

    class Config(HeadsConfig):
        kind = "distance_aware"
        spread: float = 0.1

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.relative_tables = ("factor",)
        self.steepness = nn.Parameter(torch.zeros(num_heads))
        spread, device = config.spread, self.steepness.device  # transformers has linspace on the CPU unless named
        self.rate = nn.Parameter(torch.linspace(-spread, spread, num_heads, device=device))

    def relative(self, lowest: int, highest: int) -> Relative:
        dtype = state_dtype(self.rate.dtype)
        distance = torch.arange(lowest, highest + 1, device=self.rate.device).abs()
        x, v = self.rate.to(dtype)[:, None] * distance, self.steepness.to(dtype)[:, None]
        # f = (1 + e^v) / (1 + e^(v - x)) = sigmoid(x - v) / sigmoid(-v), by logarithms so that e^v cannot overflow
        return Relative(lowest, factor=(logsigmoid(x - v) - logsigmoid(-v)).exp())


PARTS = {
    "RotaryPositions": Rope.Config,
    "ShawPositions": Shaw.Config,
    "TransformerXLPositions": TransformerXL.Config,
    "T5Bias": T5.Config,
    "AlibiBias": Alibi.Config,
    "DistanceAwareScaling": DistanceAware.Config,
    "DistanceKeys": DistanceKeys.Config,
}
