"""The reconstruction cost of a compression of memories, which trains it and
nothing else (Rae et al. 2019, section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kinformer.core.contract import state_dtype
from kinformer.kernels.attention import Scoring, Visibility, attention


def content_loss(old: Tensor, rebuilt: Tensor) -> Tensor:
    """Return the mean square of old - rebuilt [batch, n, dim], as [batch]."""
    return (rebuilt - old).to(state_dtype(old.dtype)).square().mean(dim=(1, 2))


def attention_loss(projection: nn.Module, tokens: Tensor, old: Tensor, compressed: Tensor, scale: float) -> Tensor:
    """Return the mean square [batch] of the difference between attention of ``tokens`` [batch, time, dim] to ``old``
    [batch, n, dim] and to ``compressed`` [batch, n / rate, dim], by content alone.

    ``projection`` makes q, k, v of each, a norm before it included. Its weights are constants here, and so are
    ``tokens`` and ``old``.
    """
    with torch.no_grad():
        q = projection(tokens)[0]
        _, k, v = projection(old)
        expected = _read(q, k, v, scale)
    weights = {name: weight.detach() for name, weight in projection.named_parameters()}
    _, k, v = functional_call(projection, weights, (compressed,))
    error = (_read(q, k, v, scale) - expected).to(state_dtype(old.dtype))
    return error.square().mean(dim=(1, 2, 3))


def no_loss(*parts: nn.Module | None) -> Tensor | float:
    """Return 0, with a graph to the ``parts`` where no segment ended: engines expect a gradient of every parameter."""
    weights = (weight for part in parts if part is not None for weight in part.parameters())
    return sum((0.0 * weight.sum() for weight in weights), 0.0)


def _read(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention of every query to every key."""
    return attention(q, k, v, Visibility(), Scoring(scale), impl="chunked").out
