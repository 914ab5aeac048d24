"""The numbers of a picture of attention: a panel for each pattern that differs, named by its layers and heads.

A cell of a pattern's panel stands for neighbouring queries (down) and keys (across), and its value is the share of
pairs that the pattern allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kinformer.core.config import Config, field_types
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.encoder import EncoderMixer, GridOnly, SequenceContext
from kinformer.core.parts import PatternConfig, Position, Relative
from kinformer.core.pattern import Pattern, Raster
from kinformer.runtime.errors import plural

# The pattern of a full sequence in an encoder with its global input, for pictures.


@dataclass(frozen=True)
class FullSequence(Pattern):
    """A pattern of the global input and the long input, with the pattern ``inner`` between tokens of the long input.
    The first ``num_global`` positions, the global input of the config ``global_input``, and the first ``global_tokens``
    positions of the long input see all positions, and all positions see them."""

    inner: Pattern
    global_tokens: int = 0
    global_input: Any = None
    num_global: int = 0

    behind = None
    ahead = None

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return self.inner.num_heads

    def at(self, head: int) -> Pattern:
        return FullSequence(self.inner.at(head), self.global_tokens, self.global_input, self.num_global)

    def sized(self, length: int) -> Pattern:
        """Return the pattern of ``length`` tokens: the longest long input that leaves room for its global input."""
        num_global = 0
        if self.global_input is not None:
            built = self.global_input.build(1)
            counts = ((built.count(None, time), time) for time in range(length, 0, -1))
            num_global = next((count for count, time in counts if count + time <= length), length)
        inner = self.inner.sized(max(1, length - num_global))
        return FullSequence(inner, self.global_tokens, self.global_input, num_global)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        edge = self.num_global + self.global_tokens
        query, key = ((positions - self.num_global).clamp_min(0) for positions in (q, k))
        return (q < edge) | (k < edge) | self.inner.allowed(query, key)


def in_text(pattern: Pattern, config: object) -> Pattern:
    """Return ``pattern`` with the global tokens of the model of ``config``; unchanged for a model without them."""
    count, global_input = getattr(config, "global_tokens", 0), getattr(config, "global_input", None)
    return FullSequence(pattern, count, global_input) if count or global_input is not None else pattern


def global_token_words(text: FullSequence) -> str:
    """Return a sequence's global tokens in words."""
    count, global_input = text.global_tokens, text.global_input
    words = [plural(count, "global token")] if count else []
    if global_input is not None:
        extra = getattr(global_input, "count", None)
        words.append(f"global input of {plural(extra, 'token')}" if extra else "global input of sentences")
    return ", ".join(words)


Floats = NDArray[np.float64]
CellOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions of a sequence -> rows and columns of an image."""

CELLS = 48
MOST_CELLS = 64
MOST_TOKENS_PER_CELL = 64
SPARSE, SPARSER = 0.5, 0.35


@dataclass(frozen=True, kw_only=True)
class PatternPanel:
    """The panel of a pattern: ``shares`` [cells, cells] from 0 to 1. ``causal``: no query sees a later key. Of the
    pairs among ``length`` tokens, the pattern allows ``allowed_pairs``, and the executor computes ``computed_pairs``,
    or None."""

    place: str
    name: str
    shares: Floats
    tokens_per_cell: int
    causal: bool
    length: int
    allowed_pairs: int
    computed_pairs: int | None = None


@dataclass(frozen=True, kw_only=True)
class FieldPanel:
    """The panel of one query in a raster image: ``shown`` [height, width] with LATER, UNSEEN, SEEN or ITSELF."""

    place: str
    name: str
    shown: NDArray[np.int8]
    query: int


@dataclass(frozen=True, kw_only=True)
class HeatPanel:
    """The panel of numbers [rows, columns] as colours: two around zero if ``signed``, else one from zero. A cell stands
    for ``tokens_per_cell`` rows and columns, which are counted from ``first``."""

    place: str
    name: str
    values: Floats
    rows: str
    columns: str
    signed: bool = True
    tokens_per_cell: int = 1
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class CurvePanel:
    """The panel of ``curves`` [heads, distances], one line per head."""

    place: str
    name: str
    curves: Floats


Panel = PatternPanel | FieldPanel | HeatPanel | CurvePanel
LATER, UNSEEN, SEEN, ITSELF = range(4)


@dataclass(frozen=True)
class Placed:
    """A part in a slot of a model's config, with the config of its owner, and the numbers, from 0, of the ``layers``
    with this part; None for a part outside the layers."""

    part: Any
    owner: Any
    path: str
    layers: tuple[int, ...] | None


def parts_of(config: Config, slot: str) -> list[Placed]:
    """Return the parts of a slot in a model's config, in order of their first layers; equal parts of equal owners are
    one entry. Parts of an encoder that reads the source belong to the encoder."""
    panels: list[Placed] = []
    for path, part, owner in _walk(config, slot, (), config):
        if path[0] == "encoder":
            continue
        layers = (int(path[1]),) if path[0] == "layers" else None
        for index, other in enumerate(panels):
            same = other.part == part and _alike(slot, other.owner, owner)
            if same and layers and other.layers:
                if layers[0] not in other.layers:
                    panels[index] = dataclasses.replace(other, layers=other.layers + layers)
                break
            if same and layers is other.layers is None and other.path.split(".")[0] == path[0]:
                break
        else:
            panels.append(Placed(part, owner, ".".join(path), layers))
    return panels


def _alike(slot: str, one: object, other: object) -> bool:
    """Return whether two owners give a part the same sizes; a mixer depends on the whole layer."""
    if slot in ("mixer", "encoder_mixer"):
        return bool(one == other)
    sizes = ("num_heads", "head_dim", "vocab_size", "kind")
    return all(getattr(one, name, None) == getattr(other, name, None) for name in sizes)


def _walk(
    node: object, slot: str, path: tuple[str, ...], owner: Config
) -> Iterator[tuple[tuple[str, ...], Config, Config]]:
    if isinstance(node, Config):
        if node.slot == slot:
            yield path, node, owner
            return
        for name in field_types(type(node)):
            yield from _walk(getattr(node, name), slot, (*path, name), node)
    elif isinstance(node, tuple):
        for index, item in enumerate(node):
            yield from _walk(item, slot, (*path, str(index)), owner)


def heads_of(config: PatternConfig) -> list[tuple[Pattern, str, tuple[int, ...]]]:
    """Return the different patterns of heads, their names, and the numbers of their heads (from 0; () means all)."""
    pattern = config.build()
    if pattern.num_heads is None:
        return [(pattern, describe(config), ())]
    patterns = getattr(config, "patterns", ())
    groups: list[tuple[Pattern, str, tuple[int, ...]]] = []
    for head in range(pattern.num_heads):
        one = pattern.at(head)
        name = describe(patterns[head]) if config.kind == "per_head" else describe(config)
        for index, (other, described, heads) in enumerate(groups):
            if other == one:
                groups[index] = (other, described, (*heads, head))
                break
        else:
            groups.append((one, name, (head,)))
    return groups


def shares_of(pattern: Pattern, tokens_per_cell: int, cells: int) -> Floats:
    """Return the share of allowed pairs of every cell, [cells, cells], a row of cells at a time."""
    keys = torch.arange(cells * tokens_per_cell)[None]
    shares = np.empty((cells, cells))
    for row in range(cells):
        queries = torch.arange(row * tokens_per_cell, (row + 1) * tokens_per_cell)[:, None]
        seen = pattern.allowed(queries, keys).expand(len(queries), keys.shape[1])
        shares[row] = seen.reshape(len(queries), cells, -1).double().mean(dim=(0, 2)).numpy()
    return shares


def scale(patterns: Sequence[Pattern], cells: int = CELLS) -> int:
    """Return the tokens per cell, a power of two, at which all ``patterns`` allow less than half of the picture's
    pairs, or, if cells stand for several tokens, little more than a third: their structure is then visible."""
    needed = 1
    for pattern in patterns:
        pairs = cells * (cells + 1) / 2 if pattern.ahead == 0 else cells * cells
        for tokens in (2**power for power in range(MOST_TOKENS_PER_CELL.bit_length())):
            shares = shares_of(pattern.sized(cells * tokens), tokens, cells)
            if shares.sum() < (SPARSE if tokens == 1 else SPARSER) * pairs:
                needed = max(needed, tokens)
                break
    return needed


def grid(length: int | None, patterns: Sequence[Pattern]) -> tuple[int, int]:
    """Return (tokens per cell, cells) for a picture of ``length`` tokens, or of as many as the patterns need."""
    if length is None:
        return scale(patterns), CELLS
    tokens = -(-length // MOST_CELLS)
    return tokens, -(-length // tokens)


def field_panel(pattern: Pattern, name: str, place: str, shape: tuple[int, int], cell: CellOf) -> FieldPanel:
    """Return the panel of a query three fifths down an image of ``shape``, by the rows and columns of ``cell``."""
    height, width = shape
    positions = torch.arange(height * width)
    rows, columns = (item.numpy() for item in cell(positions))
    middle = (round(0.6 * (height - 1)), width // 2)
    query = int(np.flatnonzero((rows == middle[0]) & (columns == middle[1]))[0])
    seen = pattern.allowed(torch.tensor(query), positions).numpy()
    kinds = np.where(seen, SEEN, np.where(positions.numpy() > query, LATER, UNSEEN)).astype(np.int8)
    kinds[query] = ITSELF
    shown = np.empty(shape, np.int8)
    shown[rows, columns] = kinds
    return FieldPanel(place=place, name=name, shown=shown, query=query)


def raster(pattern: Pattern, width: int | None) -> tuple[tuple[int, int], CellOf] | None:
    """Return the shape of a pattern's image, and a function from positions to rows and columns; None for a pattern
    whose positions are not pixels. With ``width``, positions are the pixels of a square image of this width, line by
    line."""
    if width is not None:
        return (width, width), lambda positions: (positions // width, positions % width)
    rasters: Iterator[Raster] = (getattr(item, "raster") for item in _inside(pattern) if hasattr(item, "raster"))  # noqa: B009
    return next((((raster.height, raster.width), raster.cell) for raster in rasters), None)


def _inside(pattern: Pattern) -> Iterator[Pattern]:
    """Yield a pattern and, recursively, its parts."""
    yield pattern
    if dataclasses.is_dataclass(pattern):
        for field in dataclasses.fields(pattern):
            value = getattr(pattern, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Pattern):
                    yield from _inside(item)


def describe(config: Config) -> str:
    """Return a part in words without default values: ``local: window 8``, ``strided: stride 8 | local: window 4``."""
    inner = [_inner(item) for item in getattr(config, "patterns", ())]
    name = config.kind.replace("_", " ")
    if config.kind in ("union", "intersection"):
        return (" | " if config.kind == "union" else " & ").join(inner)
    if config.kind == "complement":
        return f"not {_inner(config.pattern)}"  # type: ignore[attr-defined]
    if inner:
        return name
    words = [_option(field, getattr(config, field.name), config) for field in dataclasses.fields(config)]
    return ": ".join(filter(None, [name, ", ".join(filter(None, words))]))


def _inner(config: Config) -> str:
    return f"({describe(config)})" if config.kind in ("union", "intersection") else describe(config)


def _option(field: dataclasses.Field[object], value: object, config: Config) -> str:
    """Return one option in words; an option with its default value gives "", except for the sizes of a pattern."""
    size = config.slot == "pattern" and isinstance(value, int) and not isinstance(value, bool) and value
    if value is None or isinstance(value, Config) or (value == field.default and not size):
        return ""
    name = field.name.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:g}" if isinstance(value, (int, float)) else f"{name} {value}"


def numbered(what: str, indices: Sequence[int]) -> str:
    """Return numbers in words, counted from 1: ``layers 1-4``, ``head 2``, ``layers 1, 3, 5``."""
    if not indices:
        return ""
    first, last = indices[0] + 1, indices[-1] + 1
    if len(indices) == 1:
        return f"{what} {first}"
    if list(indices) == list(range(first - 1, last)):
        return f"{what}s {first}\N{EN DASH}{last}"
    listed = ", ".join(str(index + 1) for index in indices[:6])
    return f"{what}s {listed}{', ...' if len(indices) > 6 else ''}"


# Encodings of positions as panels, computed from a position's hooks alone.
#
#     embed, layer_input    the added vectors, [position, feature]
#     rotate                the product of a feature with itself at a distance: cos(angle) of rotary positions
#     relative              bias or factor of the scores by distance, a curve per head; keys and values by distance

LENGTH = 128
MOST_LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An encoding with its place: at the tokens of a model of ``depth`` layers, or in heads of width ``head_dim``."""

    position: Position
    name: str
    place: str
    depth: int = 0
    head_dim: int | None = None


class OneToken(Position):
    """An embedding of tokens and positions as an encoding: the vectors of token 0 at every position."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def embed(self, positions: Tensor) -> Tensor:
        return self.embedding(torch.zeros_like(positions), positions)


def encoding_panels(encoding: Encoding, length: int) -> list[Panel]:
    """Return the panels of an encoding over ``length`` positions or distances, or fewer if the encoding ends before."""
    limit = encoding.position.max_length
    length = length if limit is None else min(length, limit)
    with torch.no_grad():
        if encoding.head_dim is None:
            return list(_added(encoding, length))
        # the products of every feature with itself at every distance
        probe = torch.eye(encoding.head_dim, dtype=torch.float64)[:, None, None].expand(-1, 1, length, -1)
        _, k = encoding.position.rotate(probe, probe, torch.arange(length)[None].expand(len(probe), length))
        products = (k * k[:, :, :1]).sum(dim=-1)[:, 0].T
        rotated = _heat(products, f"{encoding.name}\na feature times itself", encoding.place, "distance")
        by_distance = _by_distance(encoding, encoding.position.relative(0, length - 1), length)
        return [*by_distance] if torch.equal(k, probe) else [rotated, *by_distance]


def _added(encoding: Encoding, length: int) -> Iterator[HeatPanel]:
    index = torch.arange(length)[None]
    if (table := encoding.position.embed(index)) is not None and not torch.equal(table[:, :-1], table[:, 1:]):
        yield _heat(table[0], encoding.name, encoding.place, "position")
    for layer in range(min(encoding.depth, MOST_LAYERS)):
        if (table := encoding.position.layer_input(index, layer)) is not None:
            yield _heat(table[0], encoding.name, f"layer {layer + 1} of {encoding.depth}", "position")


def _by_distance(encoding: Encoding, relative: Relative | None, length: int) -> Iterator[Panel]:
    if relative is None:
        return
    name, place = encoding.name, encoding.place
    for field, effect, rest in (("bias", "added to the score", 0.0), ("factor", "multiplies the score", 1.0)):
        if (table := getattr(relative, field)) is not None:
            curves = _whole(table, relative.lowest, length, rest)
            yield CurvePanel(place=place, name=f"{name}\n{effect}", curves=curves)
    if relative.keys is not None and relative.shift is not None:
        table = (relative.keys @ relative.shift.mT)[..., 0]
        curves = _whole(table, relative.lowest, length, 0.0)
        yield CurvePanel(place=place, name=f"{name}\nadded to every product", curves=curves)
    for field in ("keys", "values"):
        if (table := getattr(relative, field)) is not None:
            head = " of head 1" if table.shape[0] > 1 else ""
            values = _whole(table[0].T, relative.lowest, length, 0.0).T
            title = f"{name}\nadded to {field}{head}"
            yield HeatPanel(place=place, name=title, values=values, rows="distance", columns="feature")


def _whole(table: Tensor, lowest: int, length: int, rest: float) -> Floats:
    """Return ``table`` [n, distances] for all distances below ``length``; ``rest`` fills distances outside it."""
    result = np.full((table.shape[0], length), rest)
    result[:, lowest : lowest + table.shape[1]] = table.double().numpy()[:, : length - lowest]
    return result


def _heat(table: Tensor, name: str, place: str, rows: str) -> HeatPanel:
    return HeatPanel(place=place, name=name, values=table.double().numpy(), rows=rows, columns="feature")


# The influence of keys on queries in a mixer without a pattern: the change of outputs when input tokens are replaced.
#
# Gradients would miss memories: a gradient does not reach the inputs of an earlier segment, although the memory of this
# segment influences the query.

PATCHES = 64
MOST_TOKENS = 1536
"""The most tokens in a picture without a given length."""
AT_ONCE = 1 << 14
"""The most tokens in one call of the mixer."""
ROUNDING = 1e-10
"""Changes below this share of the largest change in a row count as rounding errors, so as 0."""


def influence_panel(
    mixer: CausalMixer | EncoderMixer, name: str, place: str, dim: int, length: int | None, trained: bool = True
) -> HeatPanel:
    """Return the influence of the keys of a cell on the queries of a cell: [query cell, key cell] from 0 to 1.

    All inputs are random. The influence is the mean norm of the change in an output when the inputs of a key cell are
    drawn again. Each row is divided by its largest value off the diagonal, and values are cut at 1: the influence of
    a token on its own output may exceed all other influences, and the picture should show the context. ``length`` None
    means 1.5 times the tokens that the mixer sees.
    """
    tokens, cells = _extent(mixer) if length is None else grid(length, ())
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, tokens * cells, dim, generator=generator, dtype=torch.float64)
    # In float64 a change by rounding is far below ROUNDING, and a true influence is above it.
    mixer = deepcopy(mixer).double().eval()
    before, columns = _outputs(mixer, x[None]), []
    for keys in torch.arange(cells).split(max(1, AT_ONCE // len(x))):
        drawn_again = torch.arange(len(x)) // tokens == keys[:, None]
        after = _outputs(mixer, torch.where(drawn_again[:, :, None], other, x))
        columns.append((after - before).norm(dim=-1).unflatten(1, (cells, tokens)).mean(dim=2))
    strength = torch.cat(columns).T
    strength = torch.where(strength > ROUNDING * strength.amax(dim=1, keepdim=True), strength, 0.0)
    others = strength.clone().fill_diagonal_(0.0).amax(dim=1, keepdim=True)
    return HeatPanel(
        place=place,
        name=f"{name}\ninfluence on the output{'' if trained else ', at random weights'}",
        values=(strength / others.clamp_min(torch.finfo(others.dtype).tiny)).clamp_max(1.0).numpy(),
        rows="query",
        columns="key",
        signed=False,
        tokens_per_cell=tokens,
    )


def _extent(mixer: CausalMixer | EncoderMixer) -> tuple[int, int]:
    """Return (tokens per cell, cells) for 1.5 times the tokens that a query sees, or for 8 x 8 patches."""
    if isinstance(mixer, GridOnly):
        return 1, PATCHES
    seen = getattr(mixer, "retained", None)
    if seen is None:
        return 1, min(CELLS, mixer.max_length or CELLS)
    length, tokens = min(MOST_TOKENS, max(CELLS, (seen + 1) * 3 // 2)), 1
    while tokens * CELLS < length:
        tokens *= 2
    return tokens, -(-length // tokens)


@torch.no_grad()
def _outputs(mixer: CausalMixer | EncoderMixer, x: Tensor) -> Tensor:
    if isinstance(mixer, EncoderMixer):
        rows = next(index for index in range(isqrt(x.shape[1]), 0, -1) if x.shape[1] % index == 0)
        grid = (rows, x.shape[1] // rows) if isinstance(mixer, GridOnly) else None
        return mixer(x, SequenceContext(grid=grid))
    return mixer(Chunk(x), mixer.initial_state(len(x)))[0]
