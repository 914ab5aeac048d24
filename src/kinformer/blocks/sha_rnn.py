"""The layer of SHA-RNN (Merity 2019, section 3): a recurrence, in some layers attention over it, and a boom layer.

    h = mixer(norm(x)),   h = attention(h) where there is one,   y = norm'(h) + boom(norm''(h))

The recurrence does not have a residual path around it, and a stream is normed before anything is added to it. Dropout
acts on the outputs of the recurrence and of the boom layer. If a decoder reads a source, h <- h + cross(norm(h))
follows the attention. In an encoder, whose attention does not contain a residual sum, h <- h + attention(norm(h)). The
paper has neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from kinformer.blocks.feed_forward import Boom
from kinformer.blocks.layer import LayerConfig, apply_mixer, causal, feed, tokenwise
from kinformer.blocks.residual import LayerNorm, NormConfig
from kinformer.core.config import Config
from kinformer.core.contract import CausalMixer, ChecksChunk, Chunk, MixerConfig, initial_states
from kinformer.core.encoder import (
    ChecksInput,
    EncoderLayerConfig,
    EncoderMixer,
    EncoderMixerConfig,
    SequenceContext,
    StateOptions,
)
from kinformer.core.parts import FeedForwardConfig
from kinformer.core.state import State
from kinformer.runtime.draws import Dropout


@dataclass(frozen=True, kw_only=True)
class ShaRnnConfig(Config):
    """The common fields of the configs of a decoder's and an encoder's layer: everything except the mixers."""

    attention: Config | None = None
    feed_forward: FeedForwardConfig = Boom.Config()
    norm: NormConfig = LayerNorm(eps=1e-12)
    dropout: float = 0.0

    @property
    def main_field(self) -> str:
        """Return the attention where there is one, else the recurrence."""
        return "mixer" if self.attention is None else "attention"


class ShaRnnParts(nn.Module):
    """The parts of either layer, and what stands behind its attention."""

    def __init__(self, config: ShaRnnLayer.Config | ShaRnnEncoderLayer.Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mixer: nn.Module = config.mixer.build(dim)
        self.attention: nn.Module | None = None if config.attention is None else config.attention.build(dim)
        self.feed_forward = tokenwise(config.feed_forward, dim)
        self.mixer_norm, self.stream_norm, self.feed_forward_norm = (config.norm.build(dim) for _ in range(3))
        self.dropout = Dropout(config.dropout) if config.dropout else nn.Identity()

    def left(self, h: Tensor, valid: Tensor | None) -> Tensor:
        """Return the stream h [batch, time, dim] after the feed-forward."""
        stream, x = self.stream_norm(h), self.feed_forward_norm(h)
        return stream + self.dropout(feed(self.feed_forward, x, valid))


class ShaRnnLayer(ChecksChunk, ShaRnnParts):
    """The layer of recurrence, attention, any ``further_mixers`` (such as cross-attention) and feed-forward. Its state
    is the tuple of the mixers'."""

    mixer: CausalMixer
    attention: CausalMixer | None

    @dataclass(frozen=True, kw_only=True)
    class Config(ShaRnnConfig, LayerConfig):
        kind = "sha_rnn"
        mixer: MixerConfig
        attention: MixerConfig | None = None
        further_mixers: tuple[MixerConfig, ...] = ()

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.further_mixers = nn.ModuleList(causal(mixer, dim) for mixer in config.further_mixers)
        self.further_norms = nn.ModuleList(config.norm.build(dim) for _ in config.further_mixers)

    @property
    def mixers(self) -> tuple[CausalMixer, ...]:
        attention = () if self.attention is None else (self.attention,)
        return (self.mixer, *attention, *self.further_mixers)

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        """Return the states of the mixers; ``options`` as of ``core.contract.initial_states``."""
        return initial_states(self.mixers, batch, **options)

    def forward(self, chunk: Chunk, state: tuple[State, ...]) -> tuple[Tensor, tuple[State, ...]]:
        h, recurrent = apply_mixer(self.mixer, chunk, state[0], self.mixer_norm)
        h, after = self.dropout(h), [recurrent]
        if self.attention is not None:
            h, remembered = self.attention(chunk._replace(x=h), state[1])
            after.append(remembered)
        further = zip(self.further_mixers, self.further_norms, state[len(after) :], strict=True)
        for mixer, norm, mixer_state in further:
            read, mixer_state = apply_mixer(mixer, chunk._replace(x=h), mixer_state, norm)  # type: ignore[arg-type]
            h = h + self.dropout(read)
            after.append(mixer_state)
        return self.left(h, chunk.valid), tuple(after)


class ShaRnnEncoderLayer(ChecksInput, ShaRnnParts):
    """The layer (x [batch, time, dim], text) -> y of a recurrence both ways, attention and feed-forward."""

    mixer: EncoderMixer
    attention: EncoderMixer | None

    @dataclass(frozen=True, kw_only=True)
    class Config(ShaRnnConfig, EncoderLayerConfig):
        kind = "sha_rnn"
        mixer: EncoderMixerConfig
        attention: EncoderMixerConfig | None = None

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.attention_norm = None if config.attention is None else config.norm.build(dim)

    def forward(self, x: Tensor, text: SequenceContext) -> Tensor:
        h = self.dropout(self.mixer(self.mixer_norm(x), text))
        if self.attention is not None and self.attention_norm is not None:
            h = h + self.dropout(self.attention(self.attention_norm(h), text))
        return self.left(h, text.valid)


PARTS = {"ShaRnnEncoderLayer": ShaRnnEncoderLayer.Config, "ShaRnnLayer": ShaRnnLayer.Config}
