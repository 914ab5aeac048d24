"""Stochastic depth (Huang et al. 2016): in training a sublayer adds nothing to some sequences, redrawn each time.

    x + b F(x) / (1 - p),   b ~ Bernoulli(1 - p) for each sequence;     p_l = p l / (L - 1),   l = 0 .. L - 1

So the expectation of what is added is F(x), which is what is added outside of training. The probability rises linearly
with depth from 0 in the first layer to p in the last, as in the code of DeiT and Swin (Huang et al. count from the
input, p l / L), and every sublayer of a layer draws for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.runtime.errors import KinformerError


class Droppable(nn.Module):
    """A sublayer's way into the stream, which can drop what the sublayer gives.

    ``drop_rate``: with which probability, per sequence, set by the stack; ``undroppable``: why it cannot, if so.
    """

    drop_rate: float = 0.0
    undroppable: str | None = None

    def dropped(self, y: Tensor) -> Tensor:
        """Return the sublayer's output ``y`` [batch, time, dim], zero for the sequences that drop it."""
        if not (self.training and self.drop_rate):
            return y
        assert y.dim() == 3, "some tokens of a sequence alone"
        remain = torch.rand(len(y), 1, 1, device=y.device) >= self.drop_rate
        # Not a product: the scale would be rounded to the type of y.
        return torch.where(remain, y / (1 - self.drop_rate), y.new_zeros(()))


def drop_rates(peak: float, layers: int) -> tuple[float, ...]:
    """Return the probability of each of ``layers`` layers, rising to ``peak`` in the last."""
    return tuple(peak if layers == 1 else peak * layer / (layers - 1) for layer in range(layers))


def drop_sublayers(layers: nn.ModuleList, peak: float) -> None:
    """Let the sublayers of ``layers`` be dropped with a probability that rises with depth up to ``peak``."""
    for layer, rate in zip(layers, drop_rates(peak, len(layers)), strict=True):
        droppable = [module for module in layer.modules() if isinstance(module, Droppable)]
        if not droppable:
            raise KinformerError(
                f"stack.stochastic_depth is {peak:g}, but {type(layer).__name__} has no residual sum past which its "
                "sublayers could be dropped; use the layer 'decoder' or 'encoder', or stack.stochastic_depth = 0."
            )
        for sublayer in droppable:
            if sublayer.undroppable is not None:
                raise KinformerError(
                    f"stack.stochastic_depth is {peak:g}, but {sublayer.undroppable}; use another residual (pre), or "
                    "stack.stochastic_depth = 0."
                )
            sublayer.drop_rate = rate
