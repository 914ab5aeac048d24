"""The base of all models: an input, positions, a stack of layers, a norm and a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kinformer.blocks.residual import Initialisation, NormConfig
from kinformer.core.contract import CausalMixer, select_valid
from kinformer.core.encoder import EncoderMixer
from kinformer.core.parts import Input
from kinformer.core.stack import ModelConfig, StackConfig
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.sequential import Sequential


@dataclass(frozen=True, kw_only=True)
class CommonConfig(ModelConfig):
    """The fields of all models. ``norm`` follows the last layer, ``dropout`` falls on the first layer's input."""

    LEAST = {"dim": 1}

    stack: StackConfig = Sequential.Config()
    norm: NormConfig | None = None
    dropout: float = 0.0
    initialisation: Initialisation = Initialisation()

    def __post_init__(self) -> None:
        if not self.layers:
            raise KinformerError("layers must hold at least one layer, but is empty.")


class Trunk(nn.Module):
    """A model without its head: input, positions, a stack of layers and a norm; models define ``hidden`` themselves.

    ``config`` is a model's config, or the config of an encoder inside a model: it has ``position``, ``layers``,
    ``uses``, ``stack``, ``norm`` and ``dropout``. ``owns``: whether ``input`` is saved and trained with this module.
    """

    def __init__(self, config: Any, dim: int, input: Input, owns: bool = True) -> None:
        super().__init__()
        self.config = config
        if owns:
            self.input = input
        else:
            object.__setattr__(self, "input", input)
        self.position = config.position.build_model(dim, len(config.uses))
        self._build_entrance(dim)
        config.stack.check(self.position)
        widths = config.stack.widths(dim, len(config.layers))
        layers = [layer.build(width) for layer, width in zip(config.layers, widths, strict=True)]
        self.stack = config.stack.build_model(layers, dim)
        self.norm = config.norm.build(config.stack.width(dim)) if config.norm else nn.Identity()
        mixers = (
            module.max_length for module in self.stack.modules() if isinstance(module, CausalMixer | EncoderMixer)
        )
        self._max_length = min((n for n in (self.position.max_length, *mixers) if n is not None), default=None)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    def _build_entrance(self, dim: int) -> None:
        """Build the parts between the input and the stack."""

    @property
    def max_length(self) -> int | None:
        """Return the greatest length of a sequence for its position and every mixer, or None."""
        return self._max_length

    def _embedded(self, values: Tensor, positions: Tensor, valid: Tensor | None, **others: Tensor) -> Tensor:
        """Return ``values`` [batch, time, ...] as vectors [batch, time, dim] plus the encodings of ``positions``."""
        if valid is not None:  # padding is not read, and does not have a position
            values, positions = self.input.without_padding(values, valid), positions.masked_fill(~valid, 0)
        x = self.input(values, positions, **others)
        encoded = self.position.embed(positions)
        return x if encoded is None else x + encoded.to(x.dtype)

    def _check(self, values: Tensor, masks: Mapping[str, Tensor | None], integers: Mapping[str, Tensor | None]) -> None:
        """Refuse ``values`` that this model cannot read, and masks and integers of another shape or type."""
        for name, value in {"values": values, **masks, **integers}.items():
            if not isinstance(value, Tensor) and (value is not None or name == "values"):
                raise KinformerError(f"{name} must be a tensor, but is of the type {type(value).__name__}.")
        self.input.check(values)
        shape = (len(values), self.input.length(values))
        if shape[0] < 1:
            raise KinformerError("there must be one row or more, but the batch has 0; leave the call out.")
        for checks, dtype in ((masks, torch.bool), (integers, torch.int64)):
            for name, value in checks.items():
                if value is not None and (tuple(value.shape) != shape or value.dtype != dtype):
                    raise KinformerError(
                        f"{name} is {value.dtype} {list(value.shape)}, but must be {dtype} [batch, time] = "
                        f"{list(shape)}; give one for every position."
                    )

    def _entered(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return the first layer's input."""
        return select_valid(x if self.dropout is None else self.dropout(x), valid)


class CommonModel(Trunk):
    """A trunk with a head; models define ``forward`` and ``hidden`` themselves."""

    config: CommonConfig

    def __init__(self, config: CommonConfig) -> None:
        super().__init__(config, config.dim, config.input.build(config.dim))
        config.head.check(config.width, self.input)
        self._build_head()
        config.initialisation.apply(self)
        self.initialised = True

    def _build_head(self) -> None:
        self.head = self.config.head.build(self.config.width, self.input)

    @property
    def layers(self) -> nn.ModuleList:
        """Return the layers of the stack, as the paths of ``set`` name them."""
        return self.stack.layers

    @property
    def vocab_size(self) -> int:
        """Return how many ids the input takes."""
        if self.input.vocab_size is None:
            raise KinformerError(f"the input {self.config.input.kind!r} of this model does not read token ids.")
        return self.input.vocab_size
