"""The protocol of encoder mixers, which read a whole text at once: ``y = mixer(x, text)``.

What tokens are beside their vectors is a :class:`Text`: which of them are real, which are *global* (seen by all, seeing
all), and how many stand beside the document on its *side*. The model's edge makes it once from masks and kinds.

Shapes: ``x [batch, time, dim]``, the side's tokens before the document's; of either, a row's valid tokens are a prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.config import Config

DOCUMENT, GLOBAL = 0, 1
"""Kinds of a document's tokens, as ``model(tokens, kinds=...)`` takes them."""


class Text(NamedTuple):
    """What a mixer knows of the tokens [batch, time] beside their vectors.

    ``valid``    bool or None (all valid): False marks padding.
    ``globals``  [batch, n] int64 or None: the places (in the document) of each row's global tokens, -1 fills up.
    ``units``    [batch, time] int64 or None: the number of the unit (sentence) that a token belongs to, which is that
                 of a token of the side; -1 belongs to none.
    ``side``     how many tokens stand before the document: global, but not in its order.
    """

    valid: Tensor | None = None
    globals: Tensor | None = None
    units: Tensor | None = None
    side: int = 0

    @property
    def document(self) -> Tensor | None:
        """The valid tokens of the document, bool [batch, time - side] or None."""
        return None if self.valid is None else self.valid[:, self.side :]


class EncoderMixer(nn.Module):
    """What an encoder's layer mixes tokens with.

    Rules that the battery enforces: outputs at invalid positions are zero; what stands there reaches nobody (NaN is
    fine); a row's outputs depend on no other row and not on how far it was padded.
    """

    even_costs: bool = True
    """Operations are a quadratic of the length at multiples of 512, unlike those of an irregular pattern."""

    def check(self, global_tokens: bool, side: bool) -> None:
        """Refuse a model whose texts have global tokens, or a side, where this mixer cannot read such texts."""

    def forward(self, x: Tensor, text: Text = Text()) -> Tensor:  # noqa: B008 (an immutable value)
        """x [batch, time, dim] -> y [batch, time, dim]."""
        raise NotImplementedError


class EncoderMixerConfig(Config):
    """Base of the configs that build an encoder's mixer: ``build(dim) -> EncoderMixer``."""

    slot = "encoder_mixer"

    def build(self, dim: int) -> EncoderMixer:
        raise NotImplementedError


def global_places(kinds: Tensor, valid: Tensor | None) -> Tensor | None:
    """[batch, n] places of the tokens of kind GLOBAL in rising order, -1 behind them; None if there are none."""
    chosen = kinds == GLOBAL
    if valid is not None:
        chosen = chosen & valid
    count = chosen.sum(1)
    most = int(count.max())
    if most == 0:
        return None
    places = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[:, :most]
    return places.masked_fill(torch.arange(most, device=kinds.device) >= count[:, None], -1)
