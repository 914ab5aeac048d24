"""The protocol of encoder mixers, which encode a full sequence at once: ``y = mixer(x, context)``.

A :class:`SequenceContext` describes the tokens beside their vectors: the valid tokens, the *global* tokens (which see
all tokens and are seen by all tokens), and the number of tokens of the *global input*, which stands before the *long
input* (Ainslie et al. 2020, ETC). The model makes the context once, from masks and kinds.

Shapes: ``x [batch, num_global + time, dim]``; in either input, the valid tokens of a row are a prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.core.contract import CausalMixer, Divisible, FirstValues, ReadsSource, require_input, select_valid
from kinformer.core.crossing import Crossing, Row
from kinformer.core.state import State
from kinformer.runtime.compiling import checks_calls
from kinformer.runtime.errors import KinformerError, plural

NEEDS_PATCHES = (
    "is for the patches of images and nothing else; use the input patches with class_token = false, and a head that "
    "takes their mean, as `set` input.class_token=false `set` head.pooling=mean."
)
LOCAL, GLOBAL = 0, 1
"""Kinds of tokens of the long input, as ``model(tokens, kinds=...)`` takes them."""


class SequenceContext(NamedTuple):
    """The context of the tokens [batch, num_global + time]: everything that a mixer needs besides their vectors.

    ``valid``             bool or None (all valid): False marks padding.
    ``global_positions``  [batch, n] int64 or None: the positions of global tokens in the long input, filled up with -1.
    ``sentences``         [batch, num_global + time] int64 or None: the sentence of a token of the long input, or the
                          sentence that a token of the global input stands for; -1 for no sentence.
    ``num_global``        the number of tokens of the global input before the long input; they do not have a position.
    ``grid``              rows and columns of an image's patches (the last tokens, row by row); None without an image.
    ``values``            the channel of a stack whose layers read the values of the first layer.
    ``row``               set if the tokens are one stretch of a row (``core.crossing``).
    """

    valid: Tensor | None = None
    global_positions: Tensor | None = None
    sentences: Tensor | None = None
    num_global: int = 0
    grid: tuple[int, int] | None = None
    values: FirstValues | None = None
    row: Row | None = None

    def positions(self, x: Tensor) -> Tensor:
        """Return the positions [batch, num_global + time] of the tokens x in the long input, 0 of the global input."""
        time = x.shape[1]
        begin = 0 if self.row is None else self.row.begin(time)
        return (torch.arange(begin, begin + time, device=x.device) - self.num_global).clamp_min(0).expand(len(x), -1)

    @property
    def long_valid(self) -> Tensor | None:
        """Return ``valid`` of the long input alone, bool [batch, time] or None."""
        return None if self.valid is None else self.valid[:, self.num_global :]


class GridOnly:
    """Mixin of mixers and stacks over the grid of an image's patches, which must be all tokens."""


class ChecksInput:
    """Mixin of modules over whole sequences: a wrong shape raises an error before anything is computed."""

    dim: int = 0
    """The width of the module's input; 0 where calls are not checked."""

    def __call__(self, x: Tensor, *rest: object, **options: object) -> Tensor:
        """Call ``forward`` after a check of the shape of x [batch, time, dim]."""
        if checks_calls():
            require_input(x, self.dim)
        return super().__call__(x, *rest, **options)  # type: ignore[misc]


class EncoderMixer(ChecksInput, nn.Module):
    """The base of an encoder's mixers, which encode a full sequence at once.

    Rules that the battery enforces: outputs at invalid positions are zero; inputs at invalid positions, NaN included,
    do not change other outputs; a row's outputs do not depend on other rows or on the amount of padding.
    """

    max_length: int | None = None
    """The largest number of tokens of a text, None for any number."""
    crosses: bool = False
    """Whether the mixer can read one stretch of a row whose other stretches other processes hold (``context.row``)."""
    lacks_global: str = ""
    """Why the mixer refuses global tokens and a global input: the first half of the message; empty: it reads both."""

    def check(self, global_tokens: bool, global_input: bool) -> None:
        """Raise for a model with global tokens or a global input, where this mixer does not support them."""
        if self.lacks_global and (global_tokens or global_input):
            raise KinformerError(f"{self.lacks_global}; leave global_tokens, global_input and kinds of tokens out.")

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        """Return y [batch, time, dim] of x [batch, time, dim]."""
        raise NotImplementedError


class EncoderMixerConfig(Divisible, Config):
    """Base of the configs that build an encoder's mixer: ``build(dim) -> EncoderMixer``."""

    slot = "encoder_mixer"

    def build(self, dim: int) -> EncoderMixer:
        return self.builds(self, dim)


class EncoderLayerConfig(Config):
    """The config; ``build(dim)`` returns a layer (x [batch, time, dim], context) -> y [batch, time, dim]."""

    slot = "encoder_layer"

    @property
    def main_field(self) -> str:
        """Return the name of the field with the mixer that the layer is known for."""
        return "mixer"

    def build(self, dim: int) -> nn.Module:
        return self.builds(self, dim)


def gridded(x: Tensor, context: SequenceContext, kind: str) -> tuple[int, int]:
    """Return the grid of the patches x [batch, rows * columns, dim], for a mixer ``kind`` that reads images only."""
    if context.grid is None or context.grid[0] * context.grid[1] != x.shape[1]:
        raise KinformerError(
            f"the mixer {kind} is for the patches of images and nothing else; give grid=(rows, columns), the grid of "
            f"these {x.shape[1]} patches."
        )
    return context.grid


def within(x: Tensor, valid: Tensor | None, end: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return the long input x [batch, time, dim], padding beyond ``end`` cut off; raise for real tokens there."""
    if x.shape[1] <= end:
        return x, valid
    if valid is None or valid.is_meta or bool(valid[:, end:].any()):
        longest = x.shape[1] if valid is None or valid.is_meta else int(valid.sum(1).max())
        raise KinformerError(
            f"a text of {plural(longest, 'token')} is longer than max_length = {end} of the mixer {kind}, which "
            "does not have weights for more; give shorter texts, or the mixer a larger max_length."
        )
    return x[:, :end], valid[:, :end]


def global_positions(kinds: Tensor, valid: Tensor | None) -> Tensor | None:
    """Return the positions [batch, n] of the tokens of kind GLOBAL in rising order, -1 behind them, or None."""
    chosen = kinds == GLOBAL
    if valid is not None:
        chosen = chosen & valid
    count = chosen.sum(1)
    largest = int(count.max())
    if largest == 0:
        return None
    positions = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[:, :largest]
    return positions.masked_fill(torch.arange(largest, device=kinds.device) >= count[:, None], -1)


# Mixers over a source, the sequence that all queries attend to: their initial states, and the padding of the source.


def checked_source(source: Tensor | None, valid: Tensor | None, batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Return ``source`` [batch, length, width], zero where it is padding, and ``valid`` [batch, length] bool (None: all
    tokens are valid). Raise for another shape, or without a source."""
    if source is None:
        raise KinformerError(
            f"cross-attention has nothing to look at; begin with initial_state(batch, source=[batch, length, {width}])."
        )
    if source.dim() != 3 or source.shape[0] != batch or source.shape[2] != width:
        raise KinformerError(f"source has the shape {tuple(source.shape)}, expected [{batch}, length, {width}].")
    if valid is None:
        valid = torch.ones(source.shape[:2], dtype=torch.bool, device=source.device)
    return select_valid(source, valid), valid


class SourceMixer(ReadsSource, CausalMixer):
    """A mixer that attends to an encoded source. Its state holds the projected source and the number of tokens
    absorbed; ``source_dim`` is the width of the source. ``crossing``: set while a row is split over processes."""

    source_dim: int
    crossing: Crossing | None = None

    def initial_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
    ) -> State:
        """Return the state of ``batch`` sequences over ``source`` [batch, length, source_dim] (``source_valid``)."""
        return self.over(*checked_source(source, source_valid, batch, self.source_dim), device, dtype)

    def over(self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> State:
        """Return the state over ``source`` [batch, length, source_dim], zero where not ``valid``, in ``dtype``."""
        raise NotImplementedError
