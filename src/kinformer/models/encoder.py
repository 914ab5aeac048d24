"""The encoder: whole texts in, a prediction for every token or every text out; no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinformer.blocks.embedding import Lookup
from kinformer.blocks.encoder_layer import EncoderLayerConfig
from kinformer.blocks.initialise import Initialisation
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.blocks.sharing import share
from kinformer.blocks.side import SideConfig
from kinformer.core.contract import Alignment, left_align, select_valid
from kinformer.core.encoder import Text, global_places
from kinformer.core.errors import KinformerError
from kinformer.core.model import WholeModel
from kinformer.core.parts import EmbeddingConfig, EncoderHeadConfig, ModelConfig, PositionConfig


class Encoded(NamedTuple):
    """Hidden states: ``document`` [batch, time, dim] in the caller's order, ``side`` [batch, n, dim] with its ``units``
    [batch, n] bool (which of them stand for a unit), and the document's at the outputs of the tapped layers."""

    document: Tensor
    side: Tensor | None
    units: Tensor | None
    tapped: tuple[Tensor, ...]


class Encoder(nn.Module):
    """embedding -> layers -> head: ``logits = model(tokens)`` with tokens [batch, time] int64.

    ``valid`` [batch, time] bool marks padding, ``kinds`` (``core.encoder``: DOCUMENT, GLOBAL) global tokens, ``types``
    (``token_types`` of them) segments as BERT's, ``units`` the sentence that each token belongs to. Without ``kinds``
    the first ``global_tokens`` tokens are global. ``side`` adds tokens beside the document.

    ``mask_token``, ``first_token`` ([CLS]) and ``last_token`` ([SEP]) say which ids stand for a mask and for a text's
    ends; data is prepared with them, the model treats them as any other.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        kind = "encoder"
        protocol = WholeModel
        vocab_size: int
        dim: int
        layers: tuple[EncoderLayerConfig, ...]
        position: PositionConfig
        head: EncoderHeadConfig
        mask_token: int | None = None
        first_token: int | None = None
        last_token: int | None = None
        token_types: int = 0
        global_tokens: int = 0
        side: SideConfig | None = None
        embedding: EmbeddingConfig = Lookup.Config()
        embedding_norm: NormConfig | None = LayerNorm()
        norm: NormConfig | None = None
        dropout: float = 0.0
        initialisation: Initialisation = Initialisation(scale_residual=False)
        checkpoint: bool = False

        def __post_init__(self) -> None:
            for name in ("vocab_size", "dim"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")
            for name in ("token_types", "global_tokens"):
                if getattr(self, name) < 0:
                    raise KinformerError(f"{name} must be 0 or more, but is {getattr(self, name)}.")
            for name in ("mask_token", "first_token", "last_token"):
                token = getattr(self, name)
                if token is not None and not 0 <= token < self.vocab_size:
                    raise KinformerError(f"{name} must be an id below vocab_size = {self.vocab_size}, but is {token}.")
            if not self.layers:
                raise KinformerError("layers must hold at least one layer, but is empty.")

        def build(self) -> Encoder:
            return Encoder(self)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.embedding.build(config.vocab_size, config.dim)
        self.types = nn.Embedding(config.token_types, config.dim) if config.token_types else None
        self.position = config.position.build_model(config.dim, len(config.layers))
        self.side = config.side.build(config.dim) if config.side else None
        self.embedding_norm = config.embedding_norm.build(config.dim) if config.embedding_norm else nn.Identity()
        self.layers = nn.ModuleList(layer.build(config.dim) for layer in config.layers)
        self.shared = share(self.layers)
        self.norm = config.norm.build(config.dim) if config.norm else nn.Identity()
        self.head = config.head.build(config.dim, config.vocab_size)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        config.initialisation.apply(self)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """How long a text can get (a learned position's limit), or None."""
        return self.position.max_length

    def forward(
        self,
        tokens: Tensor,
        *,
        valid: Tensor | None = None,
        kinds: Tensor | None = None,
        types: Tensor | None = None,
        units: Tensor | None = None,
    ) -> Tensor:
        """Logits of tokens [batch, time, ...] (zero where not ``valid``) or of texts [batch, classes]."""
        encoded = self.hidden(tokens, valid=valid, kinds=kinds, types=types, units=units)
        logits = self.logits(encoded.document, valid)
        return select_valid(logits, valid) if logits.dim() == 3 else logits

    def logits(self, hidden: Tensor, valid: Tensor | None = None) -> Tensor:
        """What the head makes of hidden states; one that reads tokens takes any of them, [..., dim]."""
        return self.head(hidden, self.embedding.weight, valid)

    def hidden(
        self,
        tokens: Tensor,
        *,
        valid: Tensor | None = None,
        kinds: Tensor | None = None,
        types: Tensor | None = None,
        units: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Encoded:
        """The last hidden states, and the outputs of the layers in ``taps``."""
        self._check(tokens)
        order = None if valid is None or bool(valid.all()) else left_align(valid)
        valid = None if order is None else order.valid
        if order is not None:
            tokens = tokens.gather(1, order.order)
            kinds, types, units = (_aligned(x, order) for x in (kinds, types, units))
        x, text = self._enter(tokens, valid, types, units, self._globals(tokens, kinds, valid))
        tapped = []
        for index, layer in enumerate(self.layers):
            x = self._layer(layer, x, text)
            if index in taps:
                tapped.append(x)
        outputs = [_back(each[:, text.side :], order) for each in (self.norm(x), *tapped)]
        side = None if not text.side else x[:, : text.side]
        seen = None if text.valid is None else text.valid[:, : text.side]
        return Encoded(outputs[0], side, seen if text.side else None, tuple(outputs[1:]))

    def _globals(self, tokens: Tensor, kinds: Tensor | None, valid: Tensor | None) -> Tensor | None:
        if kinds is not None:
            return global_places(kinds, valid)
        count = min(self.config.global_tokens, tokens.shape[1])
        if not count:
            return None
        places = torch.arange(count, device=tokens.device).expand(len(tokens), -1)
        return places if valid is None else torch.where(valid[:, :count], places, -1)

    def _enter(
        self, tokens: Tensor, valid: Tensor | None, types: Tensor | None, units: Tensor | None, places: Tensor | None
    ) -> tuple[Tensor, Text]:
        """Embedded tokens, those of the side first, and what else is known of them."""
        batch, time = tokens.shape
        positions = torch.arange(time, device=tokens.device).expand(batch, -1)
        x = self.embedding(tokens if valid is None else tokens.masked_fill(~valid, 0), positions)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        encoded = self.position.embed(positions)
        x = x if encoded is None else x + encoded.to(x.dtype)
        text = Text(valid, places)
        if self.side is not None:
            told = units is not None
            units = self.side.units(batch, time, tokens.device) if units is None else units
            units = units if units is None or valid is None else units.masked_fill(~valid, -1)
            count = self.side.count(units if told else None, time)
            x = torch.cat([self.side.embed(batch, count).to(x.dtype), x], dim=1)
            text = _beside(text, units, count, positions, told)
        x = self.embedding_norm(x)
        return select_valid(x if self.dropout is None else self.dropout(x), text.valid), text

    def _layer(self, layer: nn.Module, x: Tensor, text: Text) -> Tensor:
        if self.config.checkpoint and self.training and torch.is_grad_enabled():
            return checkpoint(layer, x, text, use_reentrant=False)
        return layer(x, text)

    def _check(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise KinformerError(
                f"tokens must be [batch, time] with time >= 1, but have the shape {tuple(tokens.shape)}."
            )


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


def _aligned(x: Tensor | None, order: Alignment) -> Tensor | None:
    return None if x is None else x.gather(1, order.order)


def _back(x: Tensor, order: Alignment | None) -> Tensor:
    """In the caller's order, zero where not valid."""
    if order is None:
        return x
    x = select_valid(x, order.valid)
    return x.gather(1, order.inverse[..., None].expand(-1, -1, x.shape[-1]))
