"""Products of rows with the matrix of their group, as mixtures of experts need them: y_i = x_i W_(group of i)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from kinformer.kernels import GroupedImpl, names_of
from kinformer.runtime.autograd import Context, autocast_together, differentiated_again
from kinformer.runtime.compiling import spare_operators
from kinformer.runtime.errors import KinformerError

# The reference of grouped products: a matrix is gathered for every row.


def products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return y [rows, out] of x [rows, in] and ``weight`` [groups, in, out]; ``ends`` [groups] are the rows behind the
    last one of each group."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, rows, right=True)
    return torch.bmm(x[:, None], weight[group])[:, 0]


IMPLS = names_of(GroupedImpl)


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor, *, impl: GroupedImpl = "auto") -> Tensor:
    """Return y [rows, out] of x [rows, in], sorted by group, and the groups' matrices ``weight`` [groups, in, out].

    ends: [groups] int32, the end of each group's rows. impl: "native" is PyTorch's grouped product, which does not take
    float64; "reference" gathers a matrix for every row; "auto" is "native" except in float64, and in forward mode and
    second derivatives of ``torch.func``.

    Errors: ``KinformerError`` for an unknown impl.
    """
    if impl not in IMPLS:
        raise KinformerError(f"grouped products: impl is {impl!r}, expected one of {', '.join(IMPLS)}.")
    x, weight = autocast_together(x, weight)
    if x.is_meta or (isinstance(x, FakeTensor) and not torch.compiler.is_compiling()):
        return _stand_in(x, weight)
    if impl == "reference" or (impl == "auto" and (x.dtype == torch.float64 or differentiated_again())):
        return products(x, weight, ends)
    multiple, (_, rows, columns) = 16 // x.element_size(), weight.shape
    more_rows, more_columns = -rows % multiple, -columns % multiple
    if not more_rows and not more_columns:
        return _native(x, weight, ends)
    # PyTorch's product takes rows of a multiple of 16 bytes alone.
    x, weight = functional.pad(x, (0, more_rows)), functional.pad(weight, (0, more_columns, 0, more_rows))
    return _native(x, weight, ends)[:, :columns]


def _native(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    # PyTorch's compiler knows the shapes of grouped products of bfloat16 alone; the operator has shapes for all types.
    if torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
        return _product(x, weight, ends)
    return functional.grouped_mm(x, weight, offs=ends)


@torch.library.custom_op("kinformer::grouped_product", mutates_args=())
def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(x, weight, offs=ends)


@torch.library.custom_op("kinformer::grouped_gradient", mutates_args=())
def _gradient(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient [groups, in, out] of the weight: x^T gradient over the rows of each group."""
    return functional.grouped_mm(x.mT, gradient, offs=ends)


@_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_gradient.register_fake
def _(x: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], gradient.shape[1])


def _save(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    return _product(gradient, weight.mT, ends), _gradient(x, gradient, ends), None


_product.register_autograd(_differentiate, setup_context=_save)
spare_operators(_product, _gradient)


def _stand_in(x: Tensor, weight: Tensor) -> Tensor:
    """Return an output of the right shape for meta and fake tensors, at the cost of groups of equal size: the FLOP
    counter does not know grouped products."""
    groups, rows = len(weight), len(x)
    per_group = -(-rows // groups)
    padded = functional.pad(x, (0, 0, 0, groups * per_group - rows)) if groups * per_group > rows else x
    return torch.bmm(padded.view(groups, per_group, -1), weight).flatten(0, 1)[:rows]
