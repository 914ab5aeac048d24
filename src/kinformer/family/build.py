"""From a member's name, or a config as data, to a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kinformer.core.config import describe, from_dict, override, parts_in, to_dict
from kinformer.core.stack import ModelConfig
from kinformer.family.kinds import kinds
from kinformer.family.table import member
from kinformer.runtime.errors import KinformerError, choose, require, require_kind
from kinformer.runtime.plugins import PARTS

PURPOSES = {
    "tiny": "a model of a few thousand parameters, for tests and checks",
    "small": "a model for comparisons at one budget",
    "benchmark": "the shape of timings: 4 layers, dim 256, 4 heads of 64, feed-forward 1024",
}
"""The purposes of the recipes that commands choose by default."""


def configure(
    name: str, recipe: str = "small", vocab_size: int | None = None, set: Mapping[str, object] | None = None
) -> ModelConfig:
    """Return the config of member ``name`` by ``recipe``, with overrides by their paths (``set``)."""
    require_kind("member", name, str)
    require_kind("recipe", recipe, str)
    require_kind("vocab_size", vocab_size, int, type(None))
    require("vocab_size", vocab_size, 1)
    require_kind("set", set, Mapping, type(None))
    if wrong := [path for path in set or {} if not isinstance(path, str)]:
        raise KinformerError(f"`set` holds the path {wrong[0]!r}, but paths must be text.")
    record = member(name)
    if recipe in PURPOSES and recipe not in record.recipes:
        raise KinformerError(
            f"{name} does not have the recipe {recipe!r} ({PURPOSES[recipe]}); add it to the recipes of its record, "
            f'{{"{recipe}": a function of the vocabulary size that returns a model config}}, or choose '
            f"{' or '.join(record.recipes)}."
        )
    config = record.recipes[choose(recipe, record.recipes, f"recipe of {name}")](vocab_size)
    if vocab_size is not None and not hasattr(config.input, "vocab_size"):
        raise KinformerError(f"vocab_size is {vocab_size}, but {name} reads no ids; leave it out.")
    return override(config, set, kinds()) if set else config


def build(
    name: str, recipe: str = "small", vocab_size: int | None = None, set: Mapping[str, object] | None = None
) -> Any:
    """Return a new Decoder or Encoder of member ``name``, randomly initialised from PyTorch's global generator."""
    return configure(name, recipe, vocab_size, set).build()


def model_config(data: object, place: str = "config") -> ModelConfig:
    """Return a model config from its dict form, as a run folder stores it."""
    return from_dict(ModelConfig, data, kinds(), place)


def storable(config: ModelConfig) -> dict[str, object]:
    """Return the dict form of a model config for a file, from which :func:`model_config` can read it again."""
    table = kinds()
    for part in parts_in(config):
        if part.slot and (part.slot not in table or table[part.slot].get(part.kind) is not type(part)):
            raise KinformerError(
                f"{describe(part)} is of the class {type(part).__qualname__}, which could not be found when this model "
                f"is loaded again; call kinformer.register({type(part).__qualname__}) before, or add the entry point "
                f"'{part.slot}.{part.kind}' to the group {PARTS!r} of the package that defines "
                f"{type(part).__module__}, and install that package."
            )
    data = to_dict(config)
    try:
        same = model_config(json.loads(json.dumps(data))) == config
    except TypeError as error:
        raise KinformerError(f"the model's config cannot be written as JSON ({error}); use plain values.") from None
    if not same:
        raise KinformerError(
            "the model's config is another one when it is read again; use exactly the classes that its fields are "
            "declared with, or give yours a slot and a kind."
        )
    return data


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of everything that a model of ``config`` stores, by name; nothing is allocated."""
    from kinformer.runtime.compiling import unallocated

    with unallocated():
        return {name: tuple(weight.shape) for name, weight in config.build().state_dict().items()}
