"""Encodings of positions as panels, computed from a position's hooks alone.

embed, layer_input    what is added, [position, feature]
rotate                the product of a feature with itself at a distance: cos(angle) of rotary positions
relative              bias or factor of the scores by distance, a curve per head; keys and values, [distance, feature]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, Relative
from kinformer.figures.panels import CurvePanel, Floats, HeatPanel, Panel

LENGTH = 128
MOST_LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """An encoding where it acts: at the tokens of a model of ``depth`` layers, or in heads of width ``head_dim``."""

    position: Position
    name: str
    place: str
    depth: int = 0
    head_dim: int | None = None


class OneToken(Position):
    """An embedding of tokens and positions, shown for token 0 at every position."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def embed(self, positions: Tensor) -> Tensor:
        return self.embedding(torch.zeros_like(positions), positions)


def encoding_panels(encoding: Encoding, length: int) -> list[Panel]:
    """Return the panels of an encoding over ``length`` positions or distances, or as many as it has."""
    limit = encoding.position.max_length
    length = length if limit is None else min(length, limit)
    with torch.no_grad():
        if encoding.head_dim is None:
            return list(_added(encoding, length))
        relative = encoding.position.relative(0, length - 1)
        return [*_rotated(encoding, length, encoding.head_dim), *_by_distance(encoding, relative, length)]


def _added(encoding: Encoding, length: int) -> Iterator[HeatPanel]:
    index = torch.arange(length)[None]
    if (table := encoding.position.embed(index)) is not None and not torch.equal(table[:, :-1], table[:, 1:]):
        yield _heat(table[0], encoding.name, encoding.place, "position")
    for layer in range(min(encoding.depth, MOST_LAYERS)):
        if (table := encoding.position.layer_input(index, layer)) is not None:
            yield _heat(table[0], encoding.name, f"layer {layer + 1} of {encoding.depth}", "position")


def _rotated(encoding: Encoding, length: int, width: int) -> Iterator[HeatPanel]:
    """Yield the product of every feature, alone in a row of its own, with itself at every distance."""
    probe = torch.eye(width, dtype=torch.float64)[:, None, None].expand(width, 1, length, width)
    _, k = encoding.position.rotate(probe, probe, torch.arange(length)[None].expand(width, length))
    if not torch.equal(k, probe):
        products = (k * k[:, :, :1]).sum(dim=-1)[:, 0].T
        yield _heat(products, f"{encoding.name}\na feature times itself", encoding.place, "distance")


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
    """Return [n, distances] of all distances below ``length``: ``rest`` where the encoding names none."""
    result = np.full((table.shape[0], length), rest)
    result[:, lowest : lowest + table.shape[1]] = table.double().numpy()[:, : length - lowest]
    return result


def _heat(table: Tensor, name: str, place: str, rows: str) -> HeatPanel:
    return HeatPanel(place=place, name=name, values=table.double().numpy(), rows=rows, columns="feature")
