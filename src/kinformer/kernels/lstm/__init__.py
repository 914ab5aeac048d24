"""Long short-term memory (Hochreiter and Schmidhuber 1997; with forget gates, Gers et al. 2000) over a chunk.

[i, f, g, o] = W x_t + b + U h_(t-1) + u        (W, U, b, u: ``weights``)
c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g),   h_t = sigmoid(o) tanh(c_t)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kinformer.kernels.impls import LstmImpl, names_of
from kinformer.kernels.lstm import native, reference, shapes
from kinformer.runtime.errors import KinformerError

IMPLS = names_of(LstmImpl)


class Weights(NamedTuple):
    """The weights: ``w`` [4 width, dim], ``u`` [4 width, width] and their biases [4
    width], gates in the order i, f, g, o."""

    w: Tensor
    u: Tensor
    w_bias: Tensor
    u_bias: Tensor


def lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Weights,
    *,
    valid: Tensor | None = None,
    reset: Tensor | None = None,
    impl: LstmImpl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorb a chunk: x [batch, time, dim] after h, c [batch, width]; returns all h_t [batch, time, width], h and c.

    valid: [batch, time] bool, a prefix of each row; outputs elsewhere are zero. reset: [batch, time] bool; a marked
    valid token begins a new sequence from zeros. All tensors are of one dtype, float32 or float64.
    impl: "native" is PyTorch's own, one call for any masks; "reference" is a loop over tokens; "auto" is "native".

    Errors: ``KinformerError`` for an unknown impl.
    """
    if impl not in IMPLS:
        raise KinformerError(f"lstm: impl={impl!r} is unknown; use one of {', '.join(IMPLS)}.")
    if impl == "reference":
        return reference.recurrence(x, h, c, weights, valid, reset)
    if x.is_meta or isinstance(x, FakeTensor):
        return shapes.stand_in(x, h, weights)
    if valid is None and reset is None:
        return native.whole(x, h, c, weights)
    if valid is None:
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return native.ragged(x, h, c, weights, valid, torch.zeros_like(valid) if reset is None else reset & valid)
