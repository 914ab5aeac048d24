"""The encoder: full sequences in, a prediction for every token or every sequence out; no state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinformer.blocks.initialise import Initialisation
from kinformer.core.contract import select_valid
from kinformer.core.encoder import EncoderLayerConfig
from kinformer.core.model import WholeModel
from kinformer.models.base import CommonConfig, CommonModel
from kinformer.models.reader import Reader, ReaderConfig


class Encoder(Reader, CommonModel):
    """An encoder: input -> stack -> head; ``logits = model(tokens)`` with tokens [batch, time] int64.

    ``valid`` [batch, time] bool marks padding, ``kinds`` (``core.encoder``: LOCAL, GLOBAL) global tokens, ``types``
    segments as BERT's, ``sentences`` [batch, time] int64 the sentence that each token belongs to. Without ``kinds`` the
    first ``global_tokens`` tokens are global. ``global_input`` puts global tokens of its own before the caller's.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(CommonConfig, ReaderConfig):
        kind = "encoder"
        protocol = WholeModel
        layers: tuple[EncoderLayerConfig, ...]
        initialisation: Initialisation = Initialisation(residual="plain")

        def __post_init__(self) -> None:
            CommonConfig.__post_init__(self)
            ReaderConfig.__post_init__(self)

        def build(self) -> Encoder:
            return Encoder(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._check_mixers()

    def forward(
        self,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        kinds: Tensor | None = None,
        types: Tensor | None = None,
        sentences: Tensor | None = None,
    ) -> Tensor:
        """Return logits of tokens [batch, time, ...] (zero where not ``valid``) or of sequences [batch, classes]."""
        encoded = self.hidden(values, valid=valid, kinds=kinds, types=types, sentences=sentences)
        hidden_states = encoded.long_input
        if self.crossing is not None and not self.config.head.per_position:  # the head reads the whole row
            hidden_states, valid = self.crossing.row(hidden_states, 1), self.crossing.valid_row(valid)
        logits = self.logits(hidden_states, valid)
        return select_valid(logits, valid) if logits.dim() == 3 else logits

    def logits(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the head's logits of hidden states; a head per position takes any shape [..., dim]."""
        return self.head(hidden_states, self.input, valid)
