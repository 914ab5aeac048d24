"""Softmaxes over disjoint keys become one by their log-sum-exps (Milakov and Gimelshein 2018, section 3).

The paper's running maximum m is ``top`` here, its normaliser d e^-m: each part brings lse = m + log d, its output is
already divided by its d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.softmax.request import Attended


def merge(one: Attended, two: Attended) -> Attended:
    """Return the softmax over the keys of both, which must be disjoint:

    out = (e^lse1 out1 + e^lse2 out2) / (e^lse1 + e^lse2),   lse = log(e^lse1 + e^lse2)

    Differentiable, also where a query sees no key of one or of both (lse = -inf).
    """
    assert one.lse is not None and two.lse is not None
    top = torch.maximum(one.lse, two.lse).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    # e^(lse - top) is at most 1; the maximum cancels in the quotient, so that it takes no gradient.
    first, second = (one.lse - top).exp(), (two.lse - top).exp()
    total = first + second
    blind = total == 0
    # Neither side saw a key: both weights are 0, and 0 / 1 keeps output and gradient finite.
    safe = total.masked_fill(blind, 1)
    first, second = ((weight / safe)[..., None].to(one.out.dtype) for weight in (first, second))
    return Attended(one.out * first + two.out * second, (safe.log() + top).masked_fill(blind, -torch.inf))


def with_sink(part: Attended, sink: Tensor | None) -> Attended:
    """Return the softmax over the keys of ``part`` and one of value 0 with the score z = ``sink`` [heads] (None: none):

    out sigmoid(lse - z),   lse = log(e^lse + e^z)

    which is :func:`merge` with a part whose output is 0 and whose log-sum-exp is z.
    """
    if sink is None:
        return part
    assert part.lse is not None
    z = sink.to(part.lse.dtype)[:, None]
    share = torch.sigmoid(part.lse - z)[..., None]
    return Attended(part.out * share.to(part.out.dtype), torch.logaddexp(part.lse, z))
