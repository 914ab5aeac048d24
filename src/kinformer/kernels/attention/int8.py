"""Attention of one query over keys and values of the past in 8 bits, multiplied as they are.

Keys are k_j ~ a_j K_j and values v_j ~ b_j V_j, K and V of int8 with a scale each (``core.int8``). A query is two int8
vectors, q ~ s (Q + R / 254), off by s / 508 at most, and so are the weights that meet the values:

    S_j = s (Q + R / 254) . K_j a_j,    w_j = exp(S_j - top) b_j ~ t (W_j + X_j / 254),
    out = (t sum_j (W_j + X_j / 254) V_j + exp(S_new - top) v_new) / sum exp

The token itself is read as it is. Four products of int8 numbers read a quarter of float32's bytes, and nothing is
converted but their results.

``benchmarks/int8_cache.py`` keeps it (``int8_cache.json``): a step is several times as fast as after converting the
past. Delete it when a step of 4,096 tokens is no longer 1.5 times as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from kinformer.core.int8 import SCALE, Quantized, scales
from kinformer.core.pattern import Band
from kinformer.kernels.band.tiles import interval
from kinformer.kernels.softmax.request import Attended, Scoring, Visibility
from kinformer.runtime.processor import multiplies_int8

LEAST = 1024
"""Slots from which on products of int8 win (4 heads of 64, one thread of an Intel Xeon with AVX-512 and VNNI)."""
MOST = 1 << 17
"""Products of 127 x 127 that int32 can sum."""
_INT8, _SECOND = 127, 254


def fits(q: Tensor, k: Quantized, visibility: Visibility, scoring: Scoring, lse: bool) -> bool:
    """Return whether the call is one query over a band, with scores that are products alone, and int8 pays here."""
    more = (scoring.vector, scoring.relative, scoring.bias, scoring.dropout, scoring.decay, visibility.key_padding_mask)
    if lse or scoring.form != "dot" or not isinstance(visibility.pattern, Band) or any(x is not None for x in more):
        return False
    learns = torch.is_grad_enabled() and q.requires_grad
    if learns or q.shape[2] != 1 or q.dtype == torch.float64 or torch.compiler.is_compiling() or is_fake(q):
        return False
    return LEAST <= k.slots.shape[2] < MOST and multiplies_int8(q.device.type)


def attend(q: Tensor, k: Quantized, v: Quantized, visibility: Visibility, scoring: Scoring) -> Attended:
    """Return the output [batch, q_heads, 1, head_dim] of q, over the past and the token itself, as ``attention``."""
    batch, heads, _, width = q.shape
    rows, slots = batch * k.slots.shape[1], k.slots.shape[2] + 1
    first, _ = interval(visibility, 1, slots)
    keys, values = (x.slots[:, :, first:].flatten(0, 1) for x in (k, v))
    q = q.reshape(rows, -1, width).float() * scoring.scale
    scores = _products(q, keys[..., :-SCALE].mT).mul_(scales(keys)[..., 0].unsqueeze(1))
    itself = (q * k.new.reshape(rows, 1, width)).sum(-1, keepdim=True)
    if not visibility.whole and visibility.positions is not None:
        distance = torch.arange(slots - 1 - first, 0, -1, device=q.device)
        hidden = (distance > visibility.positions).repeat_interleave(k.slots.shape[1], 0).unsqueeze(1)
        scores.masked_fill_(hidden, -torch.inf)
    top = torch.maximum(scores.amax(-1, keepdim=True), itself)
    weights, alone = scores.sub_(top).exp_(), (itself - top).exp_()
    total = weights.sum(-1, keepdim=True).add_(alone)
    if scoring.sink is not None:
        total.add_((scoring.sink.float().view(1, -1, 1).expand(batch, -1, -1).reshape(itself.shape) - top).exp_())
    weights.mul_(scales(values)[..., 0].unsqueeze(1))
    out = _products(weights, values[..., :-SCALE]).addcmul_(alone, v.new.reshape(rows, 1, -1).float()).div_(total)
    return Attended(out.view(batch, heads, 1, -1).to(v.new.dtype))


def _products(x: Tensor, numbers: Tensor) -> Tensor:
    """Return x [rows, group, n] times ``numbers`` [rows, n, m] of int8, in float32."""
    scale = (x.abs().amax(-1, keepdim=True) / _INT8).clamp_min_(torch.finfo(x.dtype).tiny)
    x = x / scale
    first = x.round()
    second = x.sub_(first).mul_(_SECOND).round_()
    halves = torch.cat([first, second], 1).to(torch.int8)
    made = torch.stack([torch._int_mm(half, matrix) for half, matrix in zip(halves, numbers, strict=True)])
    first, second = made.float().chunk(2, 1)
    return torch.add(first, second, alpha=1 / _SECOND).mul_(scale)
