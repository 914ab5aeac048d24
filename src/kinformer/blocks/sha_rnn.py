"""The layer of SHA-RNN (Merity 2019, section 3): a recurrence, in some layers attention over it, and a boom layer.

    h = mixer(norm(x)),   h = attention(h) where there is one,   y = norm'(h) + boom(norm''(h))

There is no residual path around the recurrence, and every stream that something is added to is normed first. Dropout
falls on what the recurrence and the boom layer give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kinformer.blocks.feed_forward import Boom
from kinformer.blocks.layer import LayerConfig
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.blocks.sublayers import mixed, tokenwise
from kinformer.core.contract import CausalMixer, ChecksChunk, Chunk, MixerConfig, initial_states
from kinformer.core.feed_forward import FeedForwardConfig
from kinformer.core.state import State
from kinformer.runtime.dropout import Dropout


class ShaRnnLayer(ChecksChunk, nn.Module):
    """The layer of recurrence, attention and feed-forward. Its state is the tuple of the first one's or two's."""

    @dataclass(frozen=True, kw_only=True)
    class Config(LayerConfig):
        kind = "sha_rnn"
        mixer: MixerConfig
        attention: MixerConfig | None = None
        feed_forward: FeedForwardConfig = Boom.Config()
        norm: NormConfig = LayerNorm(eps=1e-12)
        dropout: float = 0.0

        @property
        def main_field(self) -> str:
            """Return the attention where there is one, else the recurrence."""
            return "mixer" if self.attention is None else "attention"

        def build(self, dim: int) -> ShaRnnLayer:
            return ShaRnnLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mixer = config.mixer.build(dim)
        self.attention = None if config.attention is None else config.attention.build(dim)
        self.feed_forward = tokenwise(config.feed_forward, dim)
        self.mixer_norm, self.stream_norm, self.feed_forward_norm = (config.norm.build(dim) for _ in range(3))
        self.dropout = Dropout(config.dropout) if config.dropout else nn.Identity()

    @property
    def mixers(self) -> tuple[CausalMixer, ...]:
        return (self.mixer,) if self.attention is None else (self.mixer, self.attention)

    def initial_state(self, batch: int, **options: Any) -> tuple[Any, ...]:
        """Return the states of the mixers; ``options`` as of ``core.contract.initial_states``."""
        return initial_states(self.mixers, batch, **options)

    def forward(self, chunk: Chunk, state: tuple[State, ...]) -> tuple[Tensor, tuple[State, ...]]:
        h, recurrent = mixed(self.mixer, chunk, state[0], self.mixer_norm)
        h, after = self.dropout(h), [recurrent]
        if self.attention is not None:
            h, remembered = self.attention(chunk._replace(x=h), state[1])
            after.append(remembered)
        stream, x = self.stream_norm(h), self.feed_forward_norm(h)
        return stream + self.dropout(self.feed_forward(x)), tuple(after)
