"""Heads that predict ordered values by a distribution of their own, instead of a logit for each."""

from __future__ import annotations

from torch import Tensor, nn


class Likelihood(nn.Module):
    """A head whose logits [batch, time, parameters] are the parameters of a distribution of values.

    ``draws``: how many uniform numbers a position takes to be drawn.
    """

    draws: int

    def nats(self, logits: Tensor, values: Tensor) -> Tensor:
        """-ln p(values), float32 at least: [...] of ``logits`` [..., parameters] and ``values`` int64 [...], or
        [..., channels] where a position holds several, which are then scored together."""
        raise NotImplementedError

    def draw(self, logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
        """Values int64 like those of :meth:`nats`, by ``uniform`` [..., draws] from [0, 1); ``temperature`` 1 draws as
        the head predicts, 0 takes what is most probable, or near it."""
        raise NotImplementedError
