"""Layers of sequence mixers and a feed-forward: the standard layer of decoders and encoders, and its variants."""

from __future__ import annotations

from typing import TypeVar, Unpack

import torch
from torch import Tensor, nn

from kinformer.blocks.feed_forward import MLP, Boom
from kinformer.blocks.residual import LayerNorm, NoNorm, NormConfig, PostNorm, PreNorm, Residual, ResidualConfig
from kinformer.core.config import Config
from kinformer.core.contract import (
    CausalMixer,
    ChecksChunk,
    Chunk,
    MixerConfig,
    PartialOutput,
    RecomputesKV,
    StateOptions,
    initial_states,
)
from kinformer.core.encoder import ChecksInput, EncoderLayerConfig, EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.parts import FeedForwardConfig, ReadsPadding
from kinformer.core.stack import Branch
from kinformer.core.state import State
from kinformer.runtime.compiling import is_empty_mask
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError

# The sublayers of layers: a mixer or a feed-forward, each in a residual.

R = TypeVar("R")


class Sublayers(nn.Module):
    """A mixer and a feed-forward, both built; ``config`` has norm, residuals and dropout."""

    def __init__(
        self, config: DecoderLayer.Config | EncoderLayer.Config, mixer: nn.Module, feed_forward: nn.Module, dim: int
    ) -> None:
        super().__init__()
        self.dim, self.mixer, self.feed_forward = dim, mixer, feed_forward
        self.mixer_residual: Residual = config.residual.build(dim, config.norm, config.dropout)
        residual = config.feed_forward_residual or config.residual
        if config.feed_forward_residual == config.residual:
            raise KinformerError(
                f"feed_forward_residual is {config.residual.kind!r}, which residual is already; leave it out (null)."
            )
        self.feed_forward_residual: Residual = residual.build(dim, config.norm, config.dropout)


def apply_mixer(
    mixer: CausalMixer, chunk: Chunk, state: State, norm: nn.Module, output_mask: Tensor | None = None
) -> tuple[Tensor, State]:
    """Apply ``mixer`` to a chunk behind ``norm``: return outputs, at least in ``output_mask``, and the state after."""
    if isinstance(mixer, RecomputesKV):
        return mixer(chunk, state, norm)
    chunk = chunk._replace(x=norm(chunk.x))
    if output_mask is not None and isinstance(mixer, PartialOutput):
        return mixer(chunk, state, output_mask)
    return mixer(chunk, state)


def add_feed_forward(
    residual: Residual, feed_forward: nn.Module, x: Tensor, valid: Tensor | None, share: float = 1.0
) -> Tensor:
    """Return the stream x [batch, time, dim] after ``feed_forward``, ``share`` of whose output is added."""
    return residual.leave(x, _run_feed_forward(residual, feed_forward, x, valid), share)


def feed_forward_output(residual: Residual, feed_forward: nn.Module, x: Tensor, valid: Tensor | None) -> Tensor:
    """Return what ``feed_forward`` adds to the stream x [batch, time, dim], in an additive residual."""
    return residual.added(_run_feed_forward(residual, feed_forward, x, valid))


def _run_feed_forward(residual: Residual, feed_forward: nn.Module, x: Tensor, valid: Tensor | None) -> Tensor:
    y = residual.enter(x)
    if isinstance(feed_forward, EncoderMixer):
        return feed_forward(y, SequenceContext(valid))
    return feed(feed_forward, y, valid)


def feed(feed_forward: nn.Module, x: Tensor, valid: Tensor | None) -> Tensor:
    """Return a feed-forward's output for each token of x [batch, time, dim]."""
    return feed_forward(x, valid) if isinstance(feed_forward, ReadsPadding) else feed_forward(x)


def tokenwise(config: FeedForwardConfig, dim: int) -> nn.Module:
    """Return the feed-forward of ``config``; refuse one that looks at other tokens."""
    feed_forward = config.build(dim)
    if isinstance(feed_forward, EncoderMixer):
        raise KinformerError(
            f"the feed-forward {config.kind!r} reads other tokens, which this layer does not support; use the layer "
            "'decoder' or 'encoder', or another feed-forward (mlp)."
        )
    return feed_forward


def mixing(mixer: CausalMixer, residual: Residual) -> Branch:
    def run(x: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        y, state = apply_mixer(mixer, chunk._replace(x=x), state, residual)
        return residual.added(y), state

    return Branch(_additive(residual, run), mixes=True)


def feed_forward_branch(residual: Residual, feed_forward: nn.Module, share: float = 1.0) -> Branch:
    """Return the branch of a feed-forward, ``share`` of whose output is added."""

    def run(x: Tensor, context: Chunk | SequenceContext, state: State) -> tuple[Tensor, State]:
        return residual.added(_run_feed_forward(residual, feed_forward, x, context.valid), share), state

    return Branch(_additive(residual, run), mixes=False)


def _additive(residual: Residual, run: R) -> R:
    """Return ``run``, a sublayer; refuse a ``residual`` behind which its output cannot be taken away again."""
    if residual.additive:
        return run
    raise KinformerError(
        "the layer's residual changes the sum of stream and sublayer (by a norm or a gate behind it), so that no "
        "sublayer can be taken away again; use the residual 'pre' (`set` layers.*.residual=pre), or the stack "
        "'sequential'."
    )


class LayerConfig(Config):
    """The config; ``build(dim)`` returns a layer (chunk, state) -> (y, state) with a tuple of its mixers' states."""

    slot = "layer"

    @property
    def main_field(self) -> str:
        """Return the name of the field with the mixer that the layer is known for."""
        return "mixer"

    def build(self, dim: int) -> nn.Module:
        return self.builds(self, dim)


class DecoderLayer(ChecksChunk, PartialOutput, Sublayers):
    """The layer: ``mixer``, then any ``further_mixers`` (such as cross-attention), then the feed-forward, each in a
    residual.

    A feed-forward that looks at earlier tokens is the last of the ``mixers``, whose states are the layer's. The
    feed-forward's residual is ``feed_forward_residual`` (None: as the mixers').
    """

    class Config(LayerConfig):
        kind = "decoder"
        mixer: MixerConfig
        further_mixers: tuple[MixerConfig, ...] = ()
        feed_forward: FeedForwardConfig = MLP.Config()
        norm: NormConfig = LayerNorm()
        residual: ResidualConfig = PreNorm.Config()
        feed_forward_residual: ResidualConfig | None = None
        dropout: float = 0.0

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
        x, after = self._mix(chunk, state)
        return self._run_feed_forward(x, chunk.valid), after

    def _run_feed_forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return the stream after the feed-forward, unless the feed-forward is one of the mixers."""
        return x if self._transition else add_feed_forward(self.feed_forward_residual, self.feed_forward, x, valid)

    def _answered(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Return outputs where ``output_mask`` only, and the states after the chunk."""
        if len(self.mixers) > 1:  # they read the first mixer's output for every token
            x, after = self._mix(chunk, state)
            if is_empty_mask(output_mask):
                return chunk.x, after
            x = x[output_mask]
        else:
            y, mixer_state = apply_mixer(self.mixer, chunk, state[0], self.mixer_residual, output_mask)  # type: ignore[arg-type]
            if is_empty_mask(output_mask):
                return chunk.x, (mixer_state,)
            x, after = self.mixer_residual.leave(chunk.x[output_mask], y[output_mask]), (mixer_state,)
        x = self._run_feed_forward(x, None)
        return chunk.x.to(x.dtype).index_put((output_mask,), x), after

    def branches(self) -> tuple[Branch, ...]:
        """Return the sublayers without their residual sums, in order."""
        mixers = tuple(mixing(*pair) for pair in zip(self.mixers, self._residuals, strict=True))
        if self._transition:
            return mixers
        return (*mixers, feed_forward_branch(self.feed_forward_residual, self.feed_forward))

    @property
    def _residuals(self) -> tuple[Residual, ...]:
        residuals = (self.mixer_residual, *self.further_residuals)
        return (*residuals, self.feed_forward_residual) if self._transition else residuals

    def _mix(self, chunk: Chunk, state: tuple[State, ...]) -> tuple[Tensor, tuple[State, ...]]:
        """Return the stream after all mixers, and their states."""
        x, after = chunk.x, []
        for mixer, residual, mixer_state in zip(self.mixers, self._residuals, state, strict=True):
            y, mixer_state = apply_mixer(mixer, chunk._replace(x=x), mixer_state, residual)
            x = residual.leave(x, y)
            after.append(mixer_state)
        return x, tuple(after)


def causal(config: MixerConfig, dim: int) -> CausalMixer:
    """Return the mixer of ``config``; refuse a mixer that is not causal."""
    mixer = config.build(dim)
    if not isinstance(mixer, CausalMixer):
        raise KinformerError(
            f"the mixer {config.kind!r} reads the whole sequence at once, but a decoder's layer needs a causal one; "
            "use it in an encoder."
        )
    return mixer


class EncoderLayer(ChecksInput, PartialOutput, Sublayers):
    """The layer of an encoder: a mixer over the full sequence, then a feed-forward, post-norm unless set otherwise
    (Devlin et al. 2018).

    ``mixer_norm``: whether the mixer's residual has a norm. The first layer of ModernBERT (Warner et al. 2024) has
    none there, as its input has one. ``feed_forward_residual`` is the feed-forward's (None: as the mixer's).
    """

    class Config(EncoderLayerConfig):
        kind = "encoder"
        mixer: EncoderMixerConfig
        feed_forward: FeedForwardConfig = MLP.Config()
        norm: NormConfig = LayerNorm()
        mixer_norm: bool = True
        residual: ResidualConfig = PostNorm.Config()
        feed_forward_residual: ResidualConfig | None = None
        dropout: float = 0.0

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, config.mixer.build(dim), config.feed_forward.build(dim), dim)
        if not config.mixer_norm:
            self.mixer_residual = config.residual.build(dim, NoNorm(), config.dropout)

    def branches(self) -> tuple[Branch, ...]:
        """Return the sublayers without their residual sums, in order."""
        residual = self.mixer_residual

        def run(x: Tensor, context: SequenceContext, state: State) -> tuple[Tensor, State]:
            return residual.added(self.mixer(residual.enter(x), context)), state

        mixing = Branch(_additive(residual, run), mixes=False)
        return mixing, feed_forward_branch(self.feed_forward_residual, self.feed_forward)

    def _mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """Return the stream x after the mixer."""
        return self.mixer_residual.leave(x, self.mixer(self.mixer_residual.enter(x), context))

    def forward(self, x: Tensor, context: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        if output_mask is None or isinstance(self.feed_forward, EncoderMixer):  # which needs every token
            y = add_feed_forward(self.feed_forward_residual, self.feed_forward, self._mix(x, context), context.valid)
            return y if output_mask is None else torch.where(output_mask[..., None], y, x)
        y = self.mixer(self.mixer_residual.enter(x), context)
        some = self.mixer_residual.leave(x[output_mask], y[output_mask])
        some = add_feed_forward(self.feed_forward_residual, self.feed_forward, some, None)
        return x.to(some.dtype).index_put((output_mask,), some)


# Layers of mixers alone, without a residual and without a feed-forward (Guo et al. 2019).


class BareLayer(ChecksInput, nn.Module):
    """The layer (x [batch, time, dim], context) -> dropout(mixer(x, context))."""

    class Config(EncoderLayerConfig):
        kind = "bare"
        mixer: EncoderMixerConfig
        dropout: float = 0.0

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mixer = config.mixer.build(dim)
        self.dropout = Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        return self.dropout(self.mixer(x, context))


class BareDecoderLayer(ChecksChunk, nn.Module):
    """The layer (chunk, state) -> dropout(mixer(chunk)), then any ``further_mixers`` alike; its state is theirs."""

    class Config(LayerConfig):
        kind = "bare"
        mixer: MixerConfig
        further_mixers: tuple[MixerConfig, ...] = ()
        dropout: float = 0.0

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


# Layers whose mixer and feed-forward read the same stream (Wang and Komatsuzaki 2021, GPT-J; GPT-NeoX).
#
#     x + mixer(norm(x)) + F(norm'(x))
#
# Neither waits for the other. Each has its own norm, as in GPT-NeoX.


class ParallelLayer(DecoderLayer):
    """The decoder's layer of a mixer and a feed-forward side by side, whose outputs are added to the stream."""

    class Config(DecoderLayer.Config):
        kind = "parallel"

        def __post_init__(self) -> None:
            if self.further_mixers:
                raise KinformerError(
                    "the layer 'parallel' does not take further_mixers, which read the output of the first; use the "
                    "layer 'decoder'."
                )

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        if self._transition:
            tokenwise(config.feed_forward, dim)
        _require_sums(self, config)

    def branches(self) -> tuple[Branch, ...]:
        raise _one_step("decoder")

    def forward(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        x, after = self._mix(chunk, state)
        x = x + feed_forward_output(self.feed_forward_residual, self.feed_forward, chunk.x, chunk.valid)
        return x if output_mask is None else torch.where(output_mask[..., None], x, chunk.x), after


class ParallelEncoderLayer(EncoderLayer):
    """The encoder's layer of a mixer and a feed-forward side by side, whose outputs are added to the stream."""

    class Config(EncoderLayer.Config):
        kind = "parallel"
        residual: ResidualConfig = PreNorm.Config()

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        _require_sums(self, config)

    def branches(self) -> tuple[Branch, ...]:
        raise _one_step("encoder")

    def forward(self, x: Tensor, context: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        y = self._mix(x, context) + feed_forward_output(self.feed_forward_residual, self.feed_forward, x, context.valid)
        return y if output_mask is None else torch.where(output_mask[..., None], y, x)


def _require_sums(layer: Sublayers, config: DecoderLayer.Config | EncoderLayer.Config) -> None:
    """Refuse residuals after which the stream is not a sum."""
    kinds = config.residual.kind, (config.feed_forward_residual or config.residual).kind
    for residual, kind in zip((layer.mixer_residual, layer.feed_forward_residual), kinds, strict=True):
        if not residual.additive:
            raise KinformerError(
                f"the layer 'parallel' adds its sublayers to one stream, which the residual {kind!r} changes; "
                "use pre, res_post, sandwich or reordered."
            )


def _one_step(standard: str) -> KinformerError:
    return KinformerError(
        "the layer 'parallel' has one step, where a reversible stack needs two that take turns; use the layer "
        f"{standard!r}, or the stack 'sequential'."
    )


# The Macaron layers (Lu et al. 2019, section 4): the mixer between two half steps of feed-forwards.
#
#     x + F1(x) / 2,   then x + mixer(x),   then x + F2(x) / 2
#
# A layer is one step of a differential equation of particles that move (F) and meet (the mixer). Transport,
# interaction, transport with halves outside (Strang splitting) is exact to one order more than one after the other.
# Every sublayer has its own norm, before it or after its residual sum. With F1 = 0 and F2 twice as large it is the
# standard layer.

HALF = 0.5


class MacaronLayer(DecoderLayer):
    """The decoder's layer of feed-forward, mixer and feed-forward. ``feed_forward`` describes each of the two: at half
    the usual ``hidden_dim`` the layer has as many weights as the standard one."""

    class Config(DecoderLayer.Config):
        kind = "macaron"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.first_feed_forward = tokenwise(config.feed_forward, dim)
        residual = config.feed_forward_residual or config.residual
        self.first_residual = residual.build(dim, config.norm, config.dropout)

    def branches(self) -> tuple[Branch, ...]:
        first = feed_forward_branch(self.first_residual, self.first_feed_forward, HALF)
        *mixers, _ = super().branches()
        return (first, *mixers, feed_forward_branch(self.feed_forward_residual, self.feed_forward, HALF))

    def forward(
        self, chunk: Chunk, state: tuple[State, ...], output_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        x = add_feed_forward(self.first_residual, self.first_feed_forward, chunk.x, chunk.valid, HALF)
        x, after = self._mix(chunk._replace(x=x), state)
        x = add_feed_forward(self.feed_forward_residual, self.feed_forward, x, chunk.valid, HALF)
        return x if output_mask is None else torch.where(output_mask[..., None], x, chunk.x), after


class MacaronEncoderLayer(EncoderLayer):
    """The encoder's layer of feed-forward, mixer and feed-forward; ``feed_forward`` describes each of the two."""

    class Config(EncoderLayer.Config):
        kind = "macaron"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.first_feed_forward = config.feed_forward.build(dim)
        residual = config.feed_forward_residual or config.residual
        self.first_residual = residual.build(dim, config.norm, config.dropout)

    def branches(self) -> tuple[Branch, ...]:
        first = feed_forward_branch(self.first_residual, self.first_feed_forward, HALF)
        mixer, _ = super().branches()
        return (first, mixer, feed_forward_branch(self.feed_forward_residual, self.feed_forward, HALF))

    def forward(self, x: Tensor, context: SequenceContext, output_mask: Tensor | None = None) -> Tensor:
        y = add_feed_forward(self.first_residual, self.first_feed_forward, x, context.valid, HALF)
        y = add_feed_forward(self.feed_forward_residual, self.feed_forward, self._mix(y, context), context.valid, HALF)
        return y if output_mask is None else torch.where(output_mask[..., None], y, x)


# The layer of SHA-RNN (Merity 2019, section 3): a recurrence, in some layers attention over it, and a boom layer.
#
#     h = mixer(norm(x)),   h = attention(h) where there is one,   y = norm'(h) + boom(norm''(h))
#
# The recurrence does not have a residual path around it, and a stream is normed before anything is added to it. Dropout
# acts on the outputs of the recurrence and of the boom layer. If a decoder reads a source, h <- h + cross(norm(h))
# follows the attention. In an encoder, whose attention does not contain a residual sum, h <- h + attention(norm(h)).
# The paper has neither.


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
    """The layer of recurrence, attention, ``further_mixers`` and feed-forward; its state is the tuple of theirs."""

    mixer: CausalMixer
    attention: CausalMixer | None

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
    """The layer (x [batch, time, dim], context) -> y of a recurrence both ways, attention and feed-forward."""

    mixer: EncoderMixer
    attention: EncoderMixer | None

    class Config(ShaRnnConfig, EncoderLayerConfig):
        kind = "sha_rnn"
        mixer: EncoderMixerConfig
        attention: EncoderMixerConfig | None = None

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__(config, dim)
        self.attention_norm = None if config.attention is None else config.norm.build(dim)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        h = self.dropout(self.mixer(self.mixer_norm(x), context))
        if self.attention is not None and self.attention_norm is not None:
            h = h + self.dropout(self.attention(self.attention_norm(h), context))
        return self.left(h, context.valid)


PARTS = {
    "EncoderLayer": EncoderLayer.Config,
    "MacaronEncoderLayer": MacaronEncoderLayer.Config,
    "ParallelEncoderLayer": ParallelEncoderLayer.Config,
    "BareLayer": BareLayer.Config,
    "DecoderLayer": DecoderLayer.Config,
    "MacaronLayer": MacaronLayer.Config,
    "ParallelLayer": ParallelLayer.Config,
    "BareDecoderLayer": BareDecoderLayer.Config,
    "ShaRnnEncoderLayer": ShaRnnEncoderLayer.Config,
    "ShaRnnLayer": ShaRnnLayer.Config,
}
