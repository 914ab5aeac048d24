"""Encodings of positions to draw: those of a trained model, or untrained ones that are no random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from kinformer.core.config import Config
from kinformer.core.model_config import EmbeddingConfig
from kinformer.core.parts import Position, PositionConfig
from kinformer.figures.panels import Placed, describe, numbered
from kinformer.figures.positions import Encoding, OneToken
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import nn

M = TypeVar("M", bound="nn.Module")
DIM, NUM_HEADS, HEAD_DIM, DEPTH = 512, 8, 64, 1


class Side(NamedTuple):
    """A model, or the encoder that reads its source: config, width, and the trained module or None."""

    config: Any
    dim: int
    model: nn.Module | None


def undrawn(build: Callable[[], M]) -> M | None:
    """Return what ``build`` makes, or None if its numbers depend on the seed: before training they say nothing."""
    built = []
    for seed in (0, 1):
        with private_numbers(seed):
            built.append(build())
    values = [module.state_dict() for module in built]
    return built[0] if all(torch.equal(values[0][name], values[1][name]) for name in values[0]) else None


def alone(config: PositionConfig | EmbeddingConfig) -> Encoding | None:
    """Return an encoding outside of any model: at the tokens where it can stand there, else in eight heads of 64
    features; None where it is learnt."""
    if isinstance(config, EmbeddingConfig):
        return one_token(undrawn(lambda: config.build(1, DIM)), config)
    position: Position | None
    with suppress(KinformerError):  # it acts inside attention
        position = undrawn(lambda: config.build_model(DIM, DEPTH))
        return None if position is None else Encoding(position=position, name=describe(config), place="", depth=DEPTH)
    position = undrawn(lambda: config.build_heads(NUM_HEADS * HEAD_DIM, NUM_HEADS, HEAD_DIM))
    return None if position is None else Encoding(position=position, name=describe(config), place="", head_dim=HEAD_DIM)


def encoding_of(placed: Placed, side: Side) -> Encoding | None:
    """Return the encoding of a part of a model's config; None where it is learnt and the model untrained."""
    config, dim, model = side
    depth, name, place = len(config.uses), describe(placed.part), place_of(placed)
    if placed.layers is None:
        if model is None:
            position = undrawn(lambda: config.position.build_model(dim, depth))
        else:
            position = module_at(model, "position")
        return None if position is None else Encoding(position=position, name=name, place="at the tokens", depth=depth)
    heads = placed.owner.num_heads
    head_dim = placed.owner.head_dim or dim // heads
    if model is None:
        position = undrawn(lambda: placed.part.build_heads(dim, heads, head_dim))
    else:
        position = module_at(model, placed.path)
    return None if position is None else Encoding(position=position, name=name, place=place, head_dim=head_dim)


def one_token(embedding: nn.Module | None, config: Config) -> Encoding | None:
    """Return the encoding of an embedding of tokens and positions, shown for one token; None without an embedding."""
    if embedding is None:
        return None
    return Encoding(position=OneToken(embedding), name=f"{describe(config)}\none token at every position", place="")


def module_at(model: nn.Module, path: str) -> Any:
    """Return the module that was built of the part of the config at ``path``."""
    return model.get_submodule(f"stack.{path}" if path.startswith("layers.") else path)


def place_of(placed: Placed) -> str:
    """Return in words where a part stands."""
    return "in the input" if placed.path.startswith("input.") else numbered("layer", placed.layers or ())
