"""The sublayers of layers: a mixer or a feed-forward, each in a residual."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor, nn

from kinformer.blocks.norms import NormConfig
from kinformer.blocks.residual import Residual, ResidualConfig
from kinformer.core.contract import CausalMixer, Chunk, PartialOutput, RecomputesKV
from kinformer.core.encoder import EncoderMixer, SequenceContext
from kinformer.core.feed_forward import FeedForwardConfig, ReadsPadding
from kinformer.core.stack import Branch
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError

R = TypeVar("R")


class SublayersConfig(Protocol):
    """The fields of a layer's config that its sublayers read."""

    @property
    def norm(self) -> NormConfig: ...

    @property
    def residual(self) -> ResidualConfig: ...

    @property
    def feed_forward_residual(self) -> ResidualConfig | None: ...

    @property
    def dropout(self) -> float: ...


class Sublayers(nn.Module):
    """A mixer and a feed-forward, both built; ``config`` has norm, residuals and dropout."""

    def __init__(self, config: SublayersConfig, mixer: nn.Module, feed_forward: nn.Module, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mixer = mixer
        self.feed_forward = feed_forward
        self.mixer_residual: Residual = config.residual.build(dim, config.norm, config.dropout)
        residual = config.feed_forward_residual or config.residual
        if config.feed_forward_residual == config.residual:
            raise KinformerError(
                f"feed_forward_residual is {config.residual.kind!r}, which residual is already; leave it out (null)."
            )
        self.feed_forward_residual: Residual = residual.build(dim, config.norm, config.dropout)


def mixed(
    mixer: CausalMixer, chunk: Chunk, state: State, norm: nn.Module, output_mask: Tensor | None = None
) -> tuple[Tensor, State]:
    """Apply ``mixer`` to a chunk behind ``norm``: return outputs, at least those in
    ``output_mask``, and the state after."""
    if isinstance(mixer, RecomputesKV):
        return mixer(chunk, state, norm)
    chunk = chunk._replace(x=norm(chunk.x))
    return (
        mixer(chunk, state, output_mask)
        if output_mask is not None and isinstance(mixer, PartialOutput)
        else mixer(chunk, state)
    )


def fed(residual: Residual, feed_forward: nn.Module, x: Tensor, valid: Tensor | None, share: float = 1.0) -> Tensor:
    """Return the stream x [batch, time, dim] after ``feed_forward``, ``share`` of whose output is added."""
    return residual.leave(x, _fed(residual, feed_forward, x, valid), share)


def fed_output(residual: Residual, feed_forward: nn.Module, x: Tensor, valid: Tensor | None) -> Tensor:
    """Return what ``feed_forward`` adds to the stream x [batch, time, dim], in an additive residual."""
    return residual.added(_fed(residual, feed_forward, x, valid))


def _fed(residual: Residual, feed_forward: nn.Module, x: Tensor, valid: Tensor | None) -> Tensor:
    y = residual.enter(x)
    if isinstance(feed_forward, EncoderMixer):
        return feed_forward(y, SequenceContext(valid))
    return feed(feed_forward, y, valid)


def feed(feed_forward: nn.Module, x: Tensor, valid: Tensor | None) -> Tensor:
    """Return what a feed-forward makes of each token of x [batch, time, dim]."""
    return feed_forward(x, valid) if isinstance(feed_forward, ReadsPadding) else feed_forward(x)


def tokenwise(config: FeedForwardConfig, dim: int) -> nn.Module:
    """Return the feed-forward of ``config``; refuse one that looks at other tokens."""
    feed_forward = config.build(dim)
    if isinstance(feed_forward, EncoderMixer):
        raise KinformerError(
            f"the feed-forward {config.kind!r} looks at other tokens, for which this layer has no place; use the layer "
            "'decoder' or 'encoder', or another feed-forward (mlp)."
        )
    return feed_forward


def mixing(mixer: CausalMixer, residual: Residual) -> Branch:
    """Return the branch of a decoder's mixer."""

    def run(x: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        y, state = mixed(mixer, chunk._replace(x=x), state, residual)
        return residual.added(y), state

    return Branch(_additive(residual, run), mixes=True)


def encode_branch(mixer: nn.Module, residual: Residual) -> Branch:
    """Return the branch of an encoder's mixer."""

    def run(x: Tensor, text: SequenceContext, state: State) -> tuple[Tensor, State]:
        return residual.added(mixer(residual.enter(x), text)), state

    return Branch(_additive(residual, run), mixes=False)


def feed_forward_branch(residual: Residual, feed_forward: nn.Module, share: float = 1.0) -> Branch:
    """Return the branch of a feed-forward, ``share`` of whose output is added."""

    def run(x: Tensor, context: Chunk | SequenceContext, state: State) -> tuple[Tensor, State]:
        return residual.added(_fed(residual, feed_forward, x, context.valid), share), state

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
