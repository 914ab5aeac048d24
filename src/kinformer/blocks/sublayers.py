"""What layers are made of: sublayers (a mixer, a feed-forward), each in a residual of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kinformer.blocks.residual import Residual
from kinformer.core.contract import CausalMixer, Chunk


class Sublayers(nn.Module):
    """A mixer and a feed-forward. ``config`` has feed_forward, norm, residual and dropout; ``mixer`` is built."""

    def __init__(self, config: Any, mixer: nn.Module, dim: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.feed_forward = config.feed_forward.build(dim)
        self.mixer_residual: Residual = config.residual.build(dim, config.norm, config.dropout)
        self.feed_forward_residual: Residual = config.residual.build(dim, config.norm, config.dropout)


def mixed(mixer: CausalMixer, chunk: Chunk, state: Any, norm: nn.Module) -> tuple[Tensor, Any]:
    """What ``mixer`` makes of a chunk that ``norm`` stands before, and its state after."""
    if mixer.remembers_inputs:
        return mixer(chunk, state, norm)
    return mixer(chunk._replace(x=norm(chunk.x)), state)


def fed(residual: Residual, feed_forward: nn.Module, x: Tensor, valid: Tensor | None, share: float = 1.0) -> Tensor:
    """The stream x [batch, time, dim] after ``feed_forward``, ``share`` of whose output is added."""
    y = residual.enter(x)
    y = feed_forward(y, valid) if getattr(feed_forward, "masked", False) else feed_forward(y)
    return residual.leave(x, y, share)
