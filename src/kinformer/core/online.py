"""Parts that learn without gradients: what they gathered in a training step changes their buffers after it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Online(nn.Module):
    """A module that gathers sums in training mode, from which the trainer has it learn once a step."""

    def learn(self, total: Callable[[Tensor], Tensor]) -> None:
        """Change the buffers by what was gathered, and begin anew. ``total`` gives the sum over all processes, so
        that the buffers stay the same on each; it must be called alike on all of them."""
        raise NotImplementedError
