"""An LSTM by PyTorch's own, which runs over time in one call.

After a reset a sequence begins from zeros, whatever came before it; so all sequences of a chunk are independent, and
run side by side, packed by their lengths without padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kinformer.runtime.compiling import uncompiled


@uncompiled("PyTorch's own LSTM is one operation")
def whole(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Run rows that are one sequence of full length each, going on from h and c."""
    y, after, memory = torch._VF.lstm(  # type: ignore[attr-defined]
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


@uncompiled("PyTorch's own LSTM is one operation")
def ragged(
    x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], valid: Tensor, reset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run sequences that begin at the tokens marked by ``reset`` (valid ones), and where a row goes on from h and c."""
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
    y, *after = torch._VF.lstm(  # type: ignore[attr-defined]
        packed, steps, start, list(weights), True, 1, 0.0, torch.is_grad_enabled(), False
    )
    outputs = y.new_zeros(batch * time, y.shape[1]).index_copy(0, tokens[order], y).view(batch, time, -1)
    last = (tokens // time)[1:] != (tokens // time)[:-1]
    last = torch.cat([last, last.new_ones(1)]).nonzero()[:, 0]
    row = tokens[last] // time
    ends = (tensor.index_copy(0, row, before[0, rank[run[last]]]) for tensor, before in zip((h, c), after, strict=True))
    return outputs, *ends  # type: ignore[return-value]
