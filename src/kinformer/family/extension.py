"""A short encoder becomes a long one: a run of BERT's weights as those of Longformer, Big Bird or ETC.

As their authors did it: the table of positions is copied over and over (Beltagy et al. 2020, section 5), and what is
projected twice begins as two copies (section 3.1). ETC (Ainslie et al. 2020) has no table of positions, and its
relations between tokens are initialised as in a new model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.family.build import weight_shapes
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kinformer.core.model_config import ModelConfig
    from kinformer.models.encoder import Encoder

POSITIONS, HEAD = "position.table", "head."
NEW = re.compile(r"global_input\.|stack\.layers\.\d+\.mixer\.(global_)?relations\.")
"""Weights that no short model has anything for."""

QKV = ("query", "key", "value")
COPIES = re.compile(
    r"(stack\.layers\.\d+\.mixer\.)(?:(projection\.)(?:of_global\.(qkv|query|key|value)|l2g|g2l)|global_out)\.(\w+)"
)
"""Further projections of a layer, and further output projections."""

FROM, TO = ("bidirectional",), ("bidirectional", "etc")
"""Kinds of mixers that weights are taken from, and given to."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightSource:
    """The source of a weight: rows ``first`` to ``last`` of the ``name`` of the short model, over and over."""

    name: str
    first: int
    last: int

    def rows(self, weights: Mapping[str, Tensor], count: int) -> Tensor:
        """Return ``count`` rows of the source, repeated from its first one where it has fewer."""
        import torch

        source = weights[self.name][self.first : self.last]
        return torch.cat([source] * -(-count // len(source)))[:count]


def extended_config(short: ModelConfig, recipe: ModelConfig, place: Path | str) -> Encoder.Config:
    """Return the config ``short`` of ``place`` with the attention, positions and global tokens of the long ``recipe``.

    Where the depths differ, a layer has the attention of the layer at its depth in the recipe's stack.
    """
    fields_here: Any = short
    long: Any = recipe
    depth = len(fields_here.layers)
    layers = []
    for index, layer in enumerate(fields_here.layers):
        mixer = long.layers[index * len(long.layers) // depth].mixer
        if layer.mixer.kind not in FROM or mixer.kind not in TO:
            raise KinformerError(
                f"{place}: has the mixer {layer.mixer.kind!r}, whose weights {mixer.kind!r} cannot take over; "
                "begin with a run of 'bert', or with none."
            )
        layers.append(layer.replace(mixer=_mixer(layer.mixer, mixer, index)))
    fields_here = fields_here.replace(layers=tuple(layers), position=long.position)
    return fields_here.replace(global_input=long.global_input, global_tokens=long.global_tokens)


def _mixer(short: Any, long: Any, layer: int) -> Any:
    """The config ``long`` with the heads of ``short``, for layer number ``layer``."""
    changes = {name: getattr(short, name) for name in ("num_heads", "head_dim", "bias", "dropout")}
    pattern, projection = getattr(long, "pattern", None), getattr(long, "projection", None)
    if pattern is not None:
        fields_here = {field.name: getattr(pattern, field.name) for field in fields(pattern)}
        changes["pattern"] = pattern.replace(
            **({"seed": layer} if "seed" in fields_here else {}),
            **({"num_heads": short.num_heads} if fields_here.get("num_heads") else {}),
        )
    if projection is not None:
        changes["projection"] = projection.replace(bias=short.projection.bias)
    return long.replace(**changes)


def origins(short: Mapping[str, Shape], long: Mapping[str, Shape], place: Path | str) -> dict[str, WeightSource]:
    """Return the source of each weight of the ``long`` model, by the shapes of both; weights without one are new.

    Errors: ``KinformerError`` where the long model lacks a weight of the short one, or has another that is of a
    different size or comes from nowhere. ``place`` is where the short one is.
    """
    source: dict[str, WeightSource] = {}
    for name, shape in long.items():
        origin = _origin(name, short)
        if origin is None:
            if NEW.match(name):
                continue
            raise KinformerError(
                f"{place}: has no {name}, which the model to be trained needs; begin with another run, or with none."
            )
        rows = origin.last - origin.first
        if short[origin.name][1:] != shape[1:] or (rows != shape[0] and name != POSITIONS):
            raise KinformerError(
                f"{place}: {origin.name} is {short[origin.name]}, but {name} of the model to be trained is {shape}; "
                "what begins with another run keeps its width and its vocabulary, so leave such a `set` out."
            )
        source[name] = origin
    used = {origin.name for origin in source.values()} | {POSITIONS}
    if lost := sorted(short.keys() - used):
        raise KinformerError(
            f"{place}: has {lost[0]}, which the model to be trained has not; begin with a run of 'bert', or with none."
        )
    return source


def _origin(name: str, short: Mapping[str, Shape]) -> WeightSource | None:
    if name in short:
        return WeightSource(name, 0, short[name][0])
    copied = COPIES.fullmatch(name)
    if copied is None:
        return None
    layer, projection, part, last = copied.groups()
    source = f"{layer}projection.qkv.{last}" if projection else f"{layer}out.{last}"
    if source not in short:
        return None
    rows = short[source][0]
    if part in QKV:
        return WeightSource(source, QKV.index(part) * rows // 3, (QKV.index(part) + 1) * rows // 3)
    return WeightSource(source, 0 if part or not projection else rows // 3, rows)


def extended_weights(weights: Mapping[str, Tensor], model: nn.Module, place: Path | str) -> dict[str, Tensor]:
    """Return the ``weights`` of a short model of ``place`` as those of the long ``model``; new ones are its own."""
    fields_here = model.state_dict()
    source = origins(shapes(weights), shapes(fields_here), place)
    return {
        name: source[name].rows(weights, len(weight)) if name in source else weight
        for name, weight in fields_here.items()
    }


def check_extension(short: ModelConfig, long: ModelConfig, place: Path | str) -> None:
    """Refuse a ``long`` model that the weights of the ``short`` one at ``place`` do not make; allocates nothing."""
    before, after = weight_shapes(short), weight_shapes(long)
    if getattr(short, "head", None) != getattr(long, "head", None):
        before = {name: shape for name, shape in before.items() if not name.startswith(HEAD)}
        after = {name: shape for name, shape in after.items() if not name.startswith(HEAD)}
    origins(before, after, place)


def shapes(weights: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shape of every weight by its name."""
    return {name: tuple(weight.shape) for name, weight in weights.items()}
