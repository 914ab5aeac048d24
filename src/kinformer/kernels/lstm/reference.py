"""The recurrence of an LSTM, token by token, in any dtype: W and U are ``w`` and ``u``, c_t is ``after``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def recurrence(
    x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], valid: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs and the final h and c, token by token; see :func:`kinformer.kernels.lstm.lstm`."""
    w, u, w_bias, u_bias = weights
    outputs = []
    for t in range(x.shape[1]):
        real = torch.ones_like(x[:, 0, :1], dtype=torch.bool) if valid is None else valid[:, t, None]
        if reset is not None:
            new = reset[:, t, None] & real
            h, c = (torch.where(new, tensor.new_zeros(()), tensor) for tensor in (h, c))
        token = torch.where(real, x[:, t], x.new_zeros(()))
        i, f, g, o = (token @ w.T + w_bias + h @ u.T + u_bias).chunk(4, dim=-1)
        # c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)
        after = f.sigmoid() * c + i.sigmoid() * g.tanh()
        y = o.sigmoid() * after.tanh()
        h, c = torch.where(real, y, h), torch.where(real, after, c)
        outputs.append(torch.where(real, y, y.new_zeros(())))
    return torch.stack(outputs, dim=1), h, c
