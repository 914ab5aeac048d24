"""From a member's name, or a config as data, to a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinformer.core.config import from_dict, override
from kinformer.core.errors import choose
from kinformer.core.model import ModelConfig
from kinformer.family.kinds import kinds
from kinformer.family.table import member


def configure(
    name: str, recipe: str = "small", vocab_size: int | None = None, set: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The config of member ``name`` by ``recipe``, with overrides such as ``{"layers.*.mixer.num_heads": 8}``."""
    record = member(name)
    config = record.recipes[choose(recipe, record.recipes, f"recipe of {name}")](vocab_size)
    return override(config, set or {}, kinds())


def build(name: str, recipe: str = "small", vocab_size: int | None = None, set: Mapping[str, Any] | None = None) -> Any:
    """A new Decoder or Encoder of member ``name``, randomly initialised from PyTorch's global generator."""
    return configure(name, recipe, vocab_size, set).build()


def model_config(data: Any, place: str = "config") -> ModelConfig:
    """A model config from its dict form, as a run folder keeps it."""
    return from_dict(ModelConfig, data, kinds(), place)
