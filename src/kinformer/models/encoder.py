"""The encoder: whole texts in, a prediction for every token or every text out; no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.blocks.encoder_layer import EncoderLayerConfig
from kinformer.blocks.initialise import Initialisation
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.blocks.side import SideConfig
from kinformer.core.contract import Alignment, left_align, select_valid
from kinformer.core.encoder import EncoderMixer, Text, global_places
from kinformer.core.errors import KinformerError
from kinformer.core.model import WholeModel
from kinformer.models.base import Common, CommonConfig


class Encoded(NamedTuple):
    """Hidden states: ``document`` [batch, time, dim] in the caller's order, ``side`` [batch, n, dim] with its ``units``
    [batch, n] bool (which of them stand for a unit), and the document's at the outputs of the tapped layers."""

    document: Tensor
    side: Tensor | None
    units: Tensor | None
    tapped: tuple[Tensor, ...]


class Encoder(Common):
    """input -> stack -> head: ``logits = model(tokens)`` with tokens [batch, time] int64.

    ``valid`` [batch, time] bool marks padding, ``kinds`` (``core.encoder``: DOCUMENT, GLOBAL) global tokens, ``types``
    segments as BERT's, ``units`` the sentence that each token belongs to. Without ``kinds`` the first ``global_tokens``
    tokens are global. ``side`` adds tokens beside the document.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(CommonConfig):
        kind = "encoder"
        protocol = WholeModel
        layers: tuple[EncoderLayerConfig, ...]
        global_tokens: int = 0
        side: SideConfig | None = None
        embedding_norm: NormConfig | None = LayerNorm()
        initialisation: Initialisation = Initialisation(scale_residual=False)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.global_tokens < 0:
                raise KinformerError(f"global_tokens must be 0 or more, but is {self.global_tokens}.")

        def build(self) -> Encoder:
            return Encoder(self)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for mixer in self.modules():
            if isinstance(mixer, EncoderMixer):
                mixer.check(config.global_tokens > 0, config.side is not None)

    def _build_entrance(self, config: Any) -> None:
        self.global_tokens = config.global_tokens
        self.side = config.side.build(config.dim) if config.side else None
        self.embedding_norm = config.embedding_norm.build(config.dim) if config.embedding_norm else nn.Identity()

    def forward(
        self,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        kinds: Tensor | None = None,
        types: Tensor | None = None,
        units: Tensor | None = None,
    ) -> Tensor:
        """Logits of tokens [batch, time, ...] (zero where not ``valid``) or of texts [batch, classes]."""
        encoded = self.hidden(values, valid=valid, kinds=kinds, types=types, units=units)
        logits = self.logits(encoded.document, valid)
        return select_valid(logits, valid) if logits.dim() == 3 else logits

    def logits(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        """What the head makes of hidden states; one that reads tokens takes any of them, [..., dim]."""
        return self.head(hidden_states, self.input, valid)

    def hidden(
        self,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        kinds: Tensor | None = None,
        types: Tensor | None = None,
        units: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Encoded:
        """The last hidden states, and the outputs of the layers in ``taps``."""
        self._check(values, {"valid": valid}, {"kinds": kinds, "types": types, "units": units})
        order = None if valid is None or bool(valid.all()) else left_align(valid)
        valid = None if order is None else order.valid
        if order is not None:
            values = order.align(values)
            kinds, types, units = (None if each is None else order.align(each) for each in (kinds, types, units))
        x, text = self._enter(values, valid, types, units, self._globals(values, kinds, valid))
        x, tapped = self.stack.read(x, text, lambda x, _: x, taps)
        outputs = [_restored(each[:, text.side :], order) for each in (self.norm(x), *tapped)]
        side = None if not text.side else x[:, : text.side]
        seen = None if text.valid is None else text.valid[:, : text.side]
        return Encoded(outputs[0], side, seen if text.side else None, tuple(outputs[1:]))

    def _globals(self, values: Tensor, kinds: Tensor | None, valid: Tensor | None) -> Tensor | None:
        if kinds is not None:
            return global_places(kinds, valid)
        count = min(self.global_tokens, values.shape[1])
        if not count:
            return None
        places = torch.arange(count, device=values.device).expand(len(values), -1)
        return places if valid is None else torch.where(valid[:, :count], places, -1)

    def _enter(
        self, values: Tensor, valid: Tensor | None, types: Tensor | None, units: Tensor | None, places: Tensor | None
    ) -> tuple[Tensor, Text]:
        """Vectors of the tokens, those of the side first, and what else is known of them."""
        batch, time = values.shape[:2]
        positions = torch.arange(time, device=values.device).expand(batch, -1)
        x = self._embedded(values, positions, valid, **({} if types is None else {"types": types}))
        text = Text(valid, places)
        if self.side is not None:
            told = units is not None
            units = self.side.units(batch, time, values.device) if units is None else units
            units = units if units is None or valid is None else units.masked_fill(~valid, -1)
            count = self.side.count(units if told else None, time)
            x = torch.cat([self.side.embed(batch, count).to(x.dtype), x], dim=1)
            text = _beside(text, units, count, positions, told)
        return self._entered(self.embedding_norm(x), text.valid), text


def _beside(text: Text, units: Tensor | None, count: int, positions: Tensor, told: bool) -> Text:
    """``text`` with ``count`` tokens before it; of those that stand for units, the ones with a unit are valid."""
    batch, time = positions.shape
    valid = text.valid if text.valid is not None else torch.ones(batch, time, dtype=torch.bool, device=positions.device)
    if units is None:
        own = torch.ones(batch, count, dtype=torch.bool, device=positions.device)
        return Text(None if text.valid is None else torch.cat([own, valid], 1), text.globals, None, count)
    numbers = torch.arange(count, device=positions.device).expand(batch, -1)
    own = numbers <= units.amax(1, keepdim=True)
    everyone = torch.cat([own, valid], 1)
    whole = text.valid is None and not (told and not bool(own.all()))
    return Text(None if whole else everyone, text.globals, torch.cat([numbers, units], 1), count)


def _restored(x: Tensor, order: Alignment | None) -> Tensor:
    """In the caller's order, zero where not valid."""
    return x if order is None else order.restore(x)
