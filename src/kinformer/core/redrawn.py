"""Parts whose random numbers are drawn anew in training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


class Redrawn(nn.Module):
    """A module with random buffers, of which the trainer wants new ones every ``redraw`` steps (0: never).

    They are kept with the weights, so that a model computes what it computed last.
    """

    redraw: int = 0

    def draw(self, seed: int) -> None:
        """Fill the buffers, as ``seed`` alone decides."""
        raise NotImplementedError


def due(modules: Iterable[Redrawn], step: int) -> Iterator[tuple[int, Redrawn]]:
    """Of ``modules`` those to draw anew before training step ``step``, with their numbers."""
    for number, module in enumerate(modules):
        if module.redraw and step % module.redraw == 0:
            yield number, module
