"""Parts whose random numbers are drawn anew in training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class Redrawn(nn.Module):
    """A module with random buffers, of which the trainer wants new ones every ``redraw`` steps (0: never).

    They are kept with the weights, so that a model computes what it computed last.
    """

    redraw: int = 0

    def draw(self, seed: int) -> None:
        """Fill the buffers, as ``seed`` alone decides."""
        raise NotImplementedError


def due(model: nn.Module, step: int) -> Iterator[tuple[int, Redrawn]]:
    """Of the modules that are to be drawn anew before training step ``step``: number among their kind, and module."""
    every = (module for module in model.modules() if isinstance(module, Redrawn))
    for number, module in enumerate(every):
        if module.redraw and step % module.redraw == 0:
            yield number, module
