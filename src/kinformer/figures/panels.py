"""The numbers of a picture of attention: a panel for each pattern that differs, named by its layers and heads.

A cell of a pattern's panel stands for some tokens of queries (down) and of keys (across) and holds the share of their
pairs that are allowed. Equal patterns are shown once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kinformer.core.config import Config, field_types
from kinformer.core.parts import PatternConfig
from kinformer.core.pattern import Pattern
from kinformer.core.raster import Raster

Floats = NDArray[np.float64]
CellOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Positions of a sequence -> rows and columns of an image."""

CELLS = 48
MOST_CELLS = 64
MOST_TOKENS_PER_CELL = 64
SPARSE, SPARSER = 0.5, 0.35


@dataclass(frozen=True, kw_only=True)
class PatternPanel:
    """The panel of a pattern: ``shares`` [cells, cells] from 0 to 1; ``causal``: no query sees a later key.

    Of the ``allowed_pairs`` among ``length`` tokens, ``computed_pairs`` is how many the executor computes, or None.
    """

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
    """The panel of one query in a raster image: ``shown`` [height, width] of LATER, UNSEEN, SEEN and ITSELF."""

    place: str
    name: str
    shown: NDArray[np.int8]
    query: int


@dataclass(frozen=True, kw_only=True)
class HeatPanel:
    """The panel of numbers [rows, columns] as colours; ``signed``: around zero in two colours, else from zero in one. A
    cell stands for ``tokens_per_cell`` rows and columns, which are counted from ``first``."""

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
    """A part of a model's config, of the slot that was looked for, with its owner's config and the layers (from 0) that
    have it; None: no layer's."""

    part: Any
    owner: Any
    path: str
    layers: tuple[int, ...] | None


def parts_of(config: Config, slot: str) -> list[Placed]:
    """Return the parts of a slot in a model's config, equal ones of equal owners together, in order of first layers;
    those of an encoder of the model's source are that one's."""
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
    """Return whether owners give a part the same sizes; mixers take theirs from the full layer."""
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
    """Return the patterns of the heads that differ, their names, and which heads (from 0); () means every head."""
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


def pattern_panel(pattern: Pattern, name: str, place: str, tokens_per_cell: int, cells: int) -> PatternPanel:
    """Return the panel of one head's pattern over ``cells * tokens_per_cell`` tokens."""
    shares = shares_of(pattern.sized(cells * tokens_per_cell), tokens_per_cell, cells)
    return PatternPanel(
        place=place,
        name=name,
        shares=shares,
        tokens_per_cell=tokens_per_cell,
        causal=pattern.ahead == 0,
        length=cells * tokens_per_cell,
        allowed_pairs=round(float(shares.sum()) * tokens_per_cell**2),
    )


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
    """Return the tokens per cell, a power of two, at which the structure of all ``patterns`` is visible.

    Of a pattern with structure, that is where less than half of the pairs of the picture are allowed, or little more
    than a third where single tokens do not show anyway.
    """
    needed = 1
    for pattern in patterns:
        pairs = cells * (cells + 1) / 2 if pattern.ahead == 0 else cells * cells
        for tokens in _powers(MOST_TOKENS_PER_CELL):
            shares = shares_of(pattern.sized(cells * tokens), tokens, cells)
            if shares.sum() < (SPARSE if tokens == 1 else SPARSER) * pairs:
                needed = max(needed, tokens)
                break
    return needed


def _powers(limit: int) -> Iterator[int]:
    power = 1
    while power <= limit:
        yield power
        power *= 2


def grid(length: int | None, patterns: Sequence[Pattern]) -> tuple[int, int]:
    """Return (tokens per cell, cells) for a picture of ``length`` tokens, or of as many as the patterns need."""
    if length is None:
        return scale(patterns), CELLS
    tokens = -(-length // MOST_CELLS)
    return tokens, -(-length // tokens)


def field_panel(pattern: Pattern, name: str, place: str, shape: tuple[int, int], cell: CellOf) -> FieldPanel:
    """Return the panel of a query about three fifths down an image of ``shape``;
    ``cell(positions)`` returns rows and columns."""
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
    """Return the shape of the image whose pixels a pattern's positions are, and where each stands; None where there is
    none.

    ``width``: take the positions for the pixels of a raster so wide.
    """
    if width is not None:
        return (width, width), lambda positions: (positions // width, positions % width)
    rasters: Iterator[Raster] = (getattr(item, "raster") for item in _inside(pattern) if hasattr(item, "raster"))  # noqa: B009
    return next((((raster.height, raster.width), raster.cell) for raster in rasters), None)


def _inside(pattern: Pattern) -> Iterator[Pattern]:
    """Yield a pattern and those that it is made of."""
    yield pattern
    if dataclasses.is_dataclass(pattern):
        for field in dataclasses.fields(pattern):
            value = getattr(pattern, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Pattern):
                    yield from _inside(item)


def describe(config: Config) -> str:
    """Return a part in words: ``local: window 8``, ``strided: stride 8 | local: window 4``; defaults are left out."""
    inner = [_inner(item) for item in getattr(config, "patterns", ())]
    name = config.kind.replace("_", " ")
    if config.kind in ("union", "intersection"):
        return (" | " if config.kind == "union" else " & ").join(inner)
    if config.kind == "complement":
        return f"not {_inner(config.pattern)}"  # type: ignore[attr-defined]
    if inner:
        return name
    words = [_option(field, getattr(config, field.name), config) for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    return ": ".join(filter(None, [name, ", ".join(filter(None, words))]))


def _inner(config: Config) -> str:
    return f"({describe(config)})" if config.kind in ("union", "intersection") else describe(config)


def _option(field: dataclasses.Field[object], value: object, config: Config) -> str:
    """Return one option in words, or nothing: sizes of a pattern always, all else where it is not the default."""
    size = config.slot == "pattern" and isinstance(value, int) and not isinstance(value, bool) and value
    if value is None or isinstance(value, Config) or (value == field.default and not size):
        return ""
    name = field.name.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:g}" if isinstance(value, (int, float)) else f"{name} {value}"


def numbered(what: str, indices: Sequence[int]) -> str:
    """Return numbers in words: ``layers 1-4``, ``head 2``, ``layers 1, 3, 5``, counted from 1."""
    if not indices:
        return ""
    first, last = indices[0] + 1, indices[-1] + 1
    if len(indices) == 1:
        return f"{what} {first}"
    if list(indices) == list(range(first - 1, last)):
        return f"{what}s {first}\N{EN DASH}{last}"
    listed = ", ".join(str(index + 1) for index in indices[:6])
    return f"{what}s {listed}{', ...' if len(indices) > 6 else ''}"
