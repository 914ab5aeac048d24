"""The standard layer of a decoder: sequence mixers, most often one, and a feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.blocks.residual import PreNorm, Residual, ResidualConfig
from kinformer.blocks.sublayers import Sublayers, fed, feed_forward_branch, mixed, mixing
from kinformer.core.config import Config
from kinformer.core.contract import CausalMixer, ChecksChunk, Chunk, MixerConfig, PartialOutput, initial_states
from kinformer.core.feed_forward import FeedForwardConfig
from kinformer.core.source import StateOptions
from kinformer.core.stack import Branch
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import is_empty_mask


class LayerConfig(Config):
    """The config; ``build(dim)`` returns a layer (chunk, state) -> (y, state), whose state
    is a tuple of those of its sublayers."""

    slot = "layer"

    @property
    def main_field(self) -> str:
        """Return the name of the field with the mixer that the layer is known for."""
        return "mixer"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError


class DecoderLayer(ChecksChunk, PartialOutput, Sublayers):
    """The layer: ``mixer``, then any ``further_mixers`` (such as cross-attention), then the feed-forward, each in a
    residual.

    A feed-forward that looks at earlier tokens is the last of the ``mixers``, whose states are the layer's. The
    feed-forward's residual is ``feed_forward_residual`` (None: as the mixers').
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(LayerConfig):
        kind = "decoder"
        mixer: MixerConfig
        further_mixers: tuple[MixerConfig, ...] = ()
        feed_forward: FeedForwardConfig = MLP.Config()
        norm: NormConfig = LayerNorm()
        residual: ResidualConfig = PreNorm.Config()
        feed_forward_residual: ResidualConfig | None = None
        dropout: float = 0.0

        def build(self, dim: int) -> DecoderLayer:
            return DecoderLayer(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, causal(config.mixer, dim), config.feed_forward.build_causal(dim), dim)
        self.further_mixers = nn.ModuleList(causal(mixer, dim) for mixer in config.further_mixers)
        self.further_residuals = nn.ModuleList(
            config.residual.build(dim, config.norm, config.dropout) for _ in config.further_mixers
        )

    @property
    def mixers(self) -> tuple[CausalMixer, ...]:
        return (self.mixer, *self.further_mixers, *self._transition)

    @property
    def _transition(self) -> tuple[CausalMixer, ...]:
        """Return the feed-forward, where it is a mixer."""
        return (self.feed_forward,) if isinstance(self.feed_forward, CausalMixer) else ()

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        """Return the states of the mixers; ``options`` as of ``core.contract.initial_states``."""
        return initial_states(self.mixers, batch, **options)

    def forward(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        if output_mask is not None:
            return self._answered(chunk, state, output_mask)
        x, after = self._mixed(chunk, state)
        return self._fed(x, chunk.valid), after

    def _fed(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return the stream after the mixers and the feed-forward, unless that was one of them."""
        return x if self._transition else fed(self.feed_forward_residual, self.feed_forward, x, valid)

    def _answered(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Return outputs where ``output_mask`` only, and the states after the chunk."""
        if len(self.mixers) > 1:  # they read what the first made of every token
            x, after = self._mixed(chunk, state)
            if is_empty_mask(output_mask):
                return chunk.x, after
            x = x[output_mask]
        else:
            y, mixer_state = mixed(self.mixer, chunk, state[0], self.mixer_residual, output_mask)  # type: ignore[arg-type]
            if is_empty_mask(output_mask):
                return chunk.x, (mixer_state,)
            x, after = self.mixer_residual.leave(chunk.x[output_mask], y[output_mask]), (mixer_state,)
        x = self._fed(x, None)
        return chunk.x.to(x.dtype).index_put((output_mask,), x), after

    def branches(self) -> tuple[Branch, ...]:
        """Return the sublayers without their residual sums, in order."""
        mixers = (mixing(*pair) for pair in zip(self.mixers, self._residuals, strict=True))
        return (
            tuple(mixers)
            if self._transition
            else (*mixers, feed_forward_branch(self.feed_forward_residual, self.feed_forward))
        )

    @property
    def _residuals(self) -> tuple[Residual, ...]:
        """Return the residuals of the mixers."""
        residuals = (self.mixer_residual, *self.further_residuals)
        return (*residuals, self.feed_forward_residual) if self._transition else residuals

    def _mixed(self, chunk: Chunk, state: tuple[State, ...]) -> tuple[Tensor, tuple[State, ...]]:
        """Return the stream after all mixers, and their states."""
        x, after = chunk.x, []
        for mixer, residual, mixer_state in zip(self.mixers, self._residuals, state, strict=True):
            y, mixer_state = mixed(mixer, chunk._replace(x=x), mixer_state, residual)
            x = residual.leave(x, y)
            after.append(mixer_state)
        return x, tuple(after)


def causal(config: MixerConfig, dim: int) -> CausalMixer:
    """Return the mixer of ``config``; refuse one that is not causal."""
    mixer = config.build(dim)
    if not isinstance(mixer, CausalMixer):
        raise KinformerError(
            f"the mixer {config.kind!r} reads the whole sequence at once, but a decoder's layer needs a causal one; "
            "use it in an encoder."
        )
    return mixer
