"""Layers that are their mixers and nothing else: no residual, no feed-forward (Guo et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from kinformer.blocks.layer import LayerConfig, causal
from kinformer.core.contract import CausalMixer, ChecksChunk, Chunk, MixerConfig, initial_states
from kinformer.core.encoder import ChecksInput, EncoderLayerConfig, EncoderMixerConfig, SequenceContext
from kinformer.core.source import StateOptions
from kinformer.core.state import State
from kinformer.runtime.dropout import Dropout


class BareLayer(ChecksInput, nn.Module):
    """The layer (x [batch, time, dim], text) -> dropout(mixer(x, text))."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderLayerConfig):
        kind = "bare"
        mixer: EncoderMixerConfig
        dropout: float = 0.0

        def build(self, dim: int) -> BareLayer:
            return BareLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mixer = config.mixer.build(dim)
        self.dropout = Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor, text: SequenceContext) -> Tensor:
        return self.dropout(self.mixer(x, text))


class BareDecoderLayer(ChecksChunk, nn.Module):
    """The layer (chunk, state) -> dropout(mixer(chunk)), then the same of any ``further_mixers``, such as
    cross-attention. Its state is the tuple of theirs."""

    @dataclass(frozen=True, kw_only=True)
    class Config(LayerConfig):
        kind = "bare"
        mixer: MixerConfig
        further_mixers: tuple[MixerConfig, ...] = ()
        dropout: float = 0.0

        def build(self, dim: int) -> BareDecoderLayer:
            return BareDecoderLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mixer = causal(config.mixer, dim)
        self.further_mixers = nn.ModuleList(causal(mixer, dim) for mixer in config.further_mixers)
        self.dropout = Dropout(config.dropout) if config.dropout else nn.Identity()

    @property
    def mixers(self) -> tuple[CausalMixer, ...]:
        return (self.mixer, *self.further_mixers)

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        """Return the states of the mixers; ``options`` as of ``core.contract.initial_states``."""
        return initial_states(self.mixers, batch, **options)

    def forward(self, chunk: Chunk, state: tuple[State, ...]) -> tuple[Tensor, tuple[State, ...]]:
        after = []
        for mixer, mixer_state in zip(self.mixers, state, strict=True):
            y, mixer_state = mixer(chunk, mixer_state)
            chunk = chunk._replace(x=self.dropout(y))
            after.append(mixer_state)
        return chunk.x, tuple(after)
