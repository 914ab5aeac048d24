"""Products of rows with the matrix of their group, as mixtures of experts need them: y_i = x_i W_(group of i)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from kinformer.kernels.grouped import reference
from kinformer.kernels.impls import GroupedImpl, names_of
from kinformer.runtime.autograd import autocast_together
from kinformer.runtime.errors import KinformerError

IMPLS = names_of(GroupedImpl)


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor, *, impl: GroupedImpl = "auto") -> Tensor:
    """Return y [rows, out] of x [rows, in], sorted by group, and the groups' matrices ``weight`` [groups, in, out].

    ends: [groups] int32, the row behind the last one of each group. impl: "native" is PyTorch's grouped product, which
    has no float64; "reference" gathers a matrix for every row; "auto" is "native" where that can be.

    Errors: ``KinformerError`` for an unknown impl.
    """
    if impl not in IMPLS:
        raise KinformerError(f"grouped products: impl is {impl!r}, expected one of {', '.join(IMPLS)}.")
    x, weight = autocast_together(x, weight)
    if x.is_meta or (isinstance(x, FakeTensor) and not torch.compiler.is_compiling()):
        return _stand_in(x, weight)
    if impl == "reference" or (impl == "auto" and x.dtype == torch.float64):
        return reference.products(x, weight, ends)
    return functional.grouped_mm(x, weight, offs=ends)


def _stand_in(x: Tensor, weight: Tensor) -> Tensor:
    """Return an output of the right shape where tensors have no numbers, at the cost of groups of one size, for the
    counter of FLOPs knows no grouped products."""
    groups, rows = len(weight), len(x)
    per_group = -(-rows // groups)
    padded = functional.pad(x, (0, 0, 0, groups * per_group - rows)) if groups * per_group > rows else x
    return torch.bmm(padded.view(groups, per_group, -1), weight).flatten(0, 1)[:rows]
