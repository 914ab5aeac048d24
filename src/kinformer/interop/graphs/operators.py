"""Operators of ONNX's opset 27 in place of kernels: ``LinearAttention``, ``CausalConvWithState`` and ``LSTM``.

All are written down, not computed. Shapes are those of the kernels that they stand in for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kinformer.runtime.substitutes import Operator

OPSET = 27
"""The version of ONNX's operators that has all three."""


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, log_decay: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs and the sums s, z behind a chunk (see ``kernels.linear``).

    The operator has no normaliser. A column of ones beside the values makes one: its column of s is z.
    """
    rule = "linear" if log_decay is None else "gated"
    if eps is None:
        y, s = _attend(rule, q, k, v, s, log_decay)
        return y, s, z
    ones, sums = torch.ones_like(v[..., :1]), torch.cat([s, z.unsqueeze(-1)], dim=-1)
    y, sums = _attend(rule, q, k, torch.cat([v, ones], dim=-1), sums, log_decay)
    return y[..., :-1] / (y[..., -1:] + eps), sums[..., :-1], sums[..., -1]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs and the memory behind a chunk (see ``kernels.delta``)."""
    rule = "delta" if log_decay is None else "gated_delta"
    return _attend(rule, q, k, v, state, log_decay, beta)


def short_convolution(x: Tensor, recent: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the convolved chunk, with SiLU, and the tokens before the next (see ``projections.short_convolution``)."""
    batch, heads, time, channels = x.shape
    taps = weight.flip(0).permute(1, 2, 0).reshape(heads * channels, 1, -1)  # the last one is that of the token itself
    context = taps.shape[2] - 1
    mixed, after = _emit(
        "CausalConvWithState",
        (_by_channel(x), taps, None, _by_channel(recent.to(x.dtype))),
        {"activation": "silu"},
        ([batch, heads * channels, time], [batch, heads * channels, context]),
        (x.dtype, x.dtype),
    )
    return (
        mixed.reshape(batch, heads, channels, time).mT,
        after.reshape(batch, heads, channels, context).mT.to(recent.dtype),
    )


def lstm(
    x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, w_bias: Tensor, u_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, h and c behind a chunk (see ``kernels.lstm``): ``LSTM``, whose gates are in the order i, o, f,
    g."""
    batch, time, width = *x.shape[:2], h.shape[1]
    w, u, w_bias, u_bias = (
        torch.cat([tensor.chunk(4)[gate] for gate in (0, 3, 1, 2)]) for tensor in (w, u, w_bias, u_bias)
    )
    y, after, memory = _emit(
        "LSTM",
        (x.transpose(0, 1), w[None], u[None], torch.cat([w_bias, u_bias])[None], None, h[None], c[None]),
        {"hidden_size": width},
        ([time, 1, batch, width], [1, batch, width], [1, batch, width]),
        (x.dtype, x.dtype, x.dtype),
    )
    return y[:, 0].transpose(0, 1), after[0], memory[0]


SUBSTITUTES: dict[str, Operator] = {
    "linear_attention": linear_attention,
    "delta_rule": delta_rule,
    "short_convolution": short_convolution,
    "lstm": lstm,
}
"""The operators by the names of the kernels that they stand in for."""


def _attend(
    rule: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [batch, heads, time, value_dim] and the present state of ``LinearAttention``."""
    batch, heads, time, columns = v.shape
    decay = None if log_decay is None else _packed(log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1))
    y, after = _emit(
        "LinearAttention",
        (_packed(q), _packed(k), _packed(v), state, decay, None if beta is None else beta.mT),
        {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": 1.0},
        ([batch, time, heads * columns], state.shape),
        (v.dtype, state.dtype),
    )
    return y.reshape(batch, time, heads, columns).transpose(1, 2), after


def _packed(x: Tensor) -> Tensor:
    """Return x [batch, heads, time, width] as ONNX packs heads, [batch, time, heads * width]."""
    return x.transpose(1, 2).flatten(2)


def _by_channel(x: Tensor) -> Tensor:
    """Return x [batch, heads, time, channels] as [batch, heads * channels, time]."""
    return x.mT.flatten(1, 2)


def _emit(
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, int | float | str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
) -> Sequence[Tensor]:
    """Return the outputs, of these ``shapes`` and ``dtypes``, of the ONNX operator ``name``."""
    return torch.onnx.ops.symbolic_multi_out(name, inputs, {**attributes}, dtypes=dtypes, shapes=shapes)
