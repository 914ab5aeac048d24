"""The encoder-decoder (Vaswani et al. 2017): an encoder reads a source once, and a decoder continues from it.

    state = model.begin(source, valid)            the encoder reads the source, whose vectors every layer projects once
    logits, state = model(tokens, state)          from here on the decoder's contract: chunks of any length

The encoder is made of any encoder mixers, the decoder of any causal ones, each layer with cross-attention among its
``further_mixers``. An encoder without ``input`` uses the decoder's input: with a tied head, one table is used three
times (section 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.blocks.residual import NormConfig
from kinformer.core.contract import ReadsSource
from kinformer.core.encoder import EncoderLayerConfig
from kinformer.core.model import SourceModel
from kinformer.core.parts import Input, InputConfig, PositionConfig
from kinformer.core.stack import StackConfig
from kinformer.models.decoder import Decoder, DecoderState
from kinformer.models.encoder import Reader, ReaderConfig
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.sequential import Sequential


class SourceEncoder(Reader):
    """The encoder of the source: values [batch, length, ...] -> hidden states [batch,
    length, dim], zero where not ``valid``."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ReaderConfig):
        """The config; ``input`` None shares the decoder's input. ``dropout`` acts on the first layer's input."""

        position: PositionConfig
        input: InputConfig | None = None
        stack: StackConfig = Sequential.Config()
        embedding_norm: NormConfig | None = None
        norm: NormConfig | None = None
        dropout: float = 0.0

        def __post_init__(self) -> None:
            if not self.layers:
                raise KinformerError("encoder.layers must hold at least one layer, but is empty.")

        @property
        def uses(self) -> tuple[EncoderLayerConfig, ...]:
            """Return the config of the layer of every use, in order."""
            return tuple(self.layers[index] for index in self.stack.uses(len(self.layers)))

    config: Config

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        if config.input is not None:
            input = config.input.build(dim)
        super().__init__(config, dim, input, owns=config.input is not None)
        self._check_mixers()

    def forward(self, values: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.hidden(values, valid=valid).long_input


class EncoderDecoder(Decoder):
    """A :class:`Decoder` whose new sequences begin over a source; its config has the decoder's fields and
    ``encoder``."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Decoder.Config):
        kind = "encoder_decoder"
        protocol = SourceModel
        encoder: SourceEncoder.Config

        def build(self) -> EncoderDecoder:
            return self.stack.model_class(EncoderDecoder)(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not any(isinstance(module, ReadsSource) for module in self.stack.modules()):
            raise KinformerError(
                "no layer of the decoder looks at the source; give its layers cross-attention, as "
                '`set` \'layers.*.further_mixers=[{"kind": "cross"}]\', or train a decoder alone.'
            )

    def _build_entrance(self, dim: int) -> None:
        super()._build_entrance(dim)
        self.encoder = SourceEncoder(self.config.encoder, dim, self.input)

    @property
    def source_input(self) -> Input:
        """Return the input that encodes the source's values."""
        return self.encoder.input

    @property
    def max_source_length(self) -> int | None:
        """Return how long a source may be, None for any length."""
        return self.encoder.max_length

    def begin(self, source: Tensor, valid: Tensor | None = None) -> DecoderState:
        """Return the state of new sequences over ``source`` [batch, length] (or another shape that its input takes);
        ``valid`` [batch, length] bool marks real tokens (None: all)."""
        hidden, crossing = self.encoder(source, valid), self.encoder.crossing
        if crossing is None:
            return self.initial_state(len(hidden), device=hidden.device, source=hidden, source_valid=valid)
        hidden, valid = crossing.row(hidden, 1), crossing.valid_row(valid)
        state = self.initial_state(len(hidden), device=hidden.device, source=hidden, source_valid=valid)
        return state._replace(seen=crossing.before)

    def initial_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
    ) -> DecoderState:
        """Return the state of ``batch`` new sequences over an encoded ``source`` [batch, length, width]."""
        if source is None:
            raise KinformerError("this model continues a source; begin with state = model.begin(source, valid).")
        return super().initial_state(batch, device=device, dtype=dtype, source=source, source_valid=source_valid)


PARTS = {"EncoderDecoderModel": EncoderDecoder.Config}
