"""Layer-wise decay of the learning rate (Howard and Ruder 2018, ULMFiT, section 3.2; Bao et al. 2022, BEiT; He et al.
2022, MAE): lower layers, whose features are the most general, move the least.

    rate of layer l = rate * decay^(L + 1 - l),   l = 1 .. L;     of what stands before them rate * decay^(L + 1)

The head, the last norm and what layers share move at the full rate, as in BEiT's code. What merges patches between two
stages belongs to the layer before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.core.stack import Stack


def rate_factors(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """Return the factor of the learning rate of each parameter of ``model`` whose factor is not 1.

    Where a model has several stacks (an encoder below a decoder), each counts from its own last layer. A parameter that
    is used twice (a tied table) moves as its lowest use.
    """
    if decay == 1:
        return {}
    depths: dict[nn.Parameter, int] = {}
    for trunk, stack in _trunks(model):
        for part, depth in _below(trunk, stack):
            for parameter in part.parameters():
                depths[parameter] = max(depth, depths.get(parameter, 0))
    if not depths:
        raise KinformerError(
            f"`layer_decay` {decay:g}: lowers the learning rate layer by layer, but {type(model).__name__} has no "
            "stack of layers; leave it out."
        )
    return {parameter: decay**depth for parameter, depth in depths.items()}


def _trunks(model: nn.Module) -> Iterator[tuple[nn.Module, Stack]]:
    """Yield the modules that have a stack, with it, except encoders within an input, which all stand before the first
    layer."""
    from kinformer.core.stack import Stack

    if isinstance(stack := getattr(model, "stack", None), Stack):
        yield model, stack
    yield from (trunk for name, child in model.named_children() if name != "input" for trunk in _trunks(child))


def _below(trunk: nn.Module, stack: Stack) -> Iterator[tuple[nn.Module, int]]:
    """Yield the parts of ``trunk`` that the head reads through layers, and the number of them from the head's side."""
    count = len(stack.layers)
    for number, layer in enumerate(stack.layers):
        yield layer, count - number
    ends, merges = list(getattr(stack.config, "depths", ())), getattr(stack, "merges", ())
    for stage, merge in enumerate(merges):
        yield merge, count - sum(ends[: stage + 1]) + 1
    for name in ("input", "position", "global_input", "embedding_norm"):
        if isinstance(part := getattr(trunk, name, None), nn.Module):
            yield part, count + 1
