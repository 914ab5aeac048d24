"""Long short-term memory (Hochreiter and Schmidhuber 1997; with forget gates, Gers et al. 2000) over a chunk.

[i, f, g, o] = W x_t + b + U h_(t-1) + u        (W, U, b, u: ``weights``)
c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g),   h_t = sigmoid(o) tanh(c_t)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear

from kinformer.kernels import LstmImpl, names_of
from kinformer.runtime.autograd import Context, transformed
from kinformer.runtime.compiling import substitute, uncompiled
from kinformer.runtime.errors import KinformerError

# The recurrence of an LSTM, token by token, in any dtype: W and U are ``w`` and ``u``, c_t is ``after``.


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


LSTM_IMPLS = names_of(LstmImpl)


class Weights(NamedTuple):
    """The weights: ``w`` [4 width, dim], ``u`` [4 width, width] and biases [4 width], gates in the order i, f, g, o."""

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
    """
    if impl not in LSTM_IMPLS:
        raise KinformerError(f"lstm: impl={impl!r} is unknown; use one of {', '.join(LSTM_IMPLS)}.")
    if (operator := substitute("lstm")) is not None and valid is None and reset is None:
        y, after, memory = operator(x, h, c, *weights)
        return y, after, memory
    if impl == "reference" or (impl == "auto" and transformed()):
        return recurrence(x, h, c, weights, valid, reset)
    if x.is_meta or (isinstance(x, FakeTensor) and not torch.compiler.is_compiling()):
        return _stand_in(x, h, weights)
    if valid is None and reset is None:
        return _native_whole(x, h, c, weights)
    if valid is None:
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return _native_ragged(x, h, c, weights, valid, torch.zeros_like(valid) if reset is None else reset & valid)


_NUMBERS = 31
"""Kept per token and two units."""
_WIDER = 7
"""Kept per token and feature by which x is wider than h."""
_PAGES = 7 * 4096 // 2
"""Bytes that whole pages add on average."""


def _stand_in(x: Tensor, h: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs of the right shapes for meta and fake tensors: all h_t [batch, time, width], h and c.

    The stand-in has the cost of the real call, which PyTorch passes to libraries that FLOP counters cannot see: 2 * 4
    width (dim + width) FLOPs for a token forward, twice as many backward, and the memory saved for the backward. This
    memory was measured for oneDNN (torch 2.13): 15.5 numbers per token and unit, 7 per token and feature of x beyond
    the units, in some regions of whole pages.
    """
    w, u, w_bias, u_bias = weights
    before = h[:, None] + x[..., :1]
    y = _Work.apply(linear(x, w, w_bias), linear(before, u, u_bias), max(0, w.shape[1] - u.shape[1]))
    return y, y[:, -1], y[:, -1]


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, left: Tensor, right: Tensor, wider: int) -> Tensor:
        batch, time, gates = left.shape
        y = left.new_empty(batch, time, gates // 4)
        bytes_needed = batch * time * (gates // 4 * _NUMBERS // 2 + _WIDER * wider) + _PAGES // left.itemsize
        ctx.save_for_backward(y, left.new_empty(bytes_needed))
        return y

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        batch, time, width = gradients[0].shape
        left, right = (gradients[0].new_empty(batch, time, 4 * width) for _ in range(2))
        return left, right, None


@uncompiled("PyTorch's own LSTM is one operation")
def _native_whole(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Run rows of one full sequence each, from the initial h and c."""
    with _as_products(x.device):
        y, after, memory = torch._VF.lstm(
            x,
            (h[None].contiguous(), c[None].contiguous()),
            list(weights),
            True,
            1,
            0.0,
            torch.is_grad_enabled(),
            False,
            True,
        )
    return y, after[0], memory[0]


@contextmanager
def _as_products(device: torch.device) -> Iterator[None]:
    """Compute on a GPU as precisely as products do: cuDNN's usual TensorFloat-32 is off by 3e-4 of the norm. The
    warning that weights are not contiguous is ignored: they are separate parameters."""
    if device.type != "cuda":
        yield
        return
    precise = torch.get_float32_matmul_precision() == "highest"
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=True, allow_tf32=not precise):
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


@uncompiled("PyTorch's own LSTM is one operation")
def _native_ragged(
    x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], valid: Tensor, reset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the sequences that begin at valid tokens with ``reset``, and the sequences that continue from h and c. A
    sequence begins from zeros, whatever came before it, so all sequences of a chunk are independent. They run side by
    side, packed by their lengths without padding."""
    batch, time, _ = x.shape
    tokens = valid.flatten().nonzero()[:, 0]
    if not len(tokens):
        return x.new_zeros(batch, time, h.shape[1]), h, c
    begins = reset.clone()
    begins[:, 0] |= valid[:, 0]
    begins = begins.flatten()[tokens]
    run = begins.cumsum(0) - 1
    starts = begins.nonzero()[:, 0]
    offset = torch.arange(len(tokens), device=x.device) - starts[run]
    # ``PackedSequence`` wants the longest sequence first: step t then holds the first steps[t] sequences.
    longest_first = torch.bincount(run).argsort(descending=True, stable=True)
    rank = longest_first.argsort()
    order = (offset * len(starts) + rank[run]).argsort()
    first = tokens[starts[longest_first]]
    rows, new = first // time, reset.flatten()[first][:, None]
    start = [torch.where(new, tensor.new_zeros(()), tensor[rows])[None] for tensor in (h, c)]
    steps = torch.bincount(offset).cpu()
    packed = x.flatten(0, 1)[tokens[order]]
    with _as_products(x.device):
        y, *after = torch._VF.lstm(packed, steps, start, list(weights), True, 1, 0.0, torch.is_grad_enabled(), False)
    outputs = y.new_zeros(batch * time, y.shape[1]).index_copy(0, tokens[order], y).view(batch, time, -1)
    last = (tokens // time)[1:] != (tokens // time)[:-1]
    last = torch.cat([last, last.new_ones(1)]).nonzero()[:, 0]
    row = tokens[last] // time
    ends = (tensor.index_copy(0, row, before[0, rank[run[last]]]) for tensor, before in zip((h, c), after, strict=True))
    return outputs, *ends  # type: ignore[return-value]
