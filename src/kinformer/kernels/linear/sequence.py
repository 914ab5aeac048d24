"""What the kernels of kernel attention share: their arguments and their implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.kernels import LinearImpl, names_of
from kinformer.runtime.autograd import transformed
from kinformer.runtime.compiling import has_triton
from kinformer.runtime.errors import KinformerError, plural

# The arguments of linear attention's kernels: the tokens of a chunk, and the state before it.


class LinearState(NamedTuple):
    """The sums over all tokens seen, in float32 or wider (the accumulators of the inputs' dtype).

    s: [batch, heads, features, head_dim], the sum of k v^T; z: [batch, heads, features], the sum of k.
    """

    s: Tensor
    z: Tensor


class LinearSequence(NamedTuple):
    """The arguments of ``linear_attention``, in its shapes; ``eps`` is the normaliser's."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    eps: float | None
    reset: Tensor | None

    def part(self, batch: slice, time: slice) -> LinearSequence:
        """Return the rows ``batch`` and the tokens ``time`` of the sequence."""
        at = batch, slice(None), time
        q, k, v = self.q[at], self.k[at], self.v[at]
        decay = None if self.log_decay is None else self.log_decay[at]
        return LinearSequence(q, k, v, decay, self.eps, None if self.reset is None else self.reset[batch, time])


class DeltaTokens(NamedTuple):
    """The arguments of the delta rule's kernels: the tokens of a chunk, in the shapes of ``delta_rule``.

    ``erase``: the keys under which the memory is read, and so erased, shaped like k; None: k itself. ``early``: whether
    it is read before it decays; the decay is then one number a token and head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    erase: Tensor | None = None
    log_decay: Tensor | None = None
    reset: Tensor | None = None
    early: bool = False

    def part(self, batch: slice, time: slice) -> DeltaTokens:
        """Return the rows ``batch`` and the tokens ``time`` of the chunk."""
        at = batch, slice(None), time
        q, k, v, beta, erase, decay = (None if x is None else x[at] for x in self[:6])
        reset = None if self.reset is None else self.reset[batch, time]
        return DeltaTokens(q, k, v, beta, erase, decay, reset, self.early)  # type: ignore[arg-type]


# The implementations of kernel attention, for the linear rule and the delta rule alike.
#
# reference   the recurrence, token by token
# chunked     blocks, in PyTorch
# triton      blocks, in Triton, on a GPU: float32 and bfloat16, up to 256 features

IMPLS = names_of(LinearImpl)
WIDEST = 256
"""Features, and values, of a head that the Triton kernels hold."""


def choose_impl(name: str, impl: LinearImpl, q: Tensor, v: Tensor) -> str:
    """Return the implementation that ``impl`` stands for in the function called ``name``, of q and v [batch, heads,
    time, features and head_dim].

    "auto" is "triton" for chunks on a GPU that Triton's kernels take, else "chunked". On an H200 they take 0.05 to 0.5
    of the time, also with a decay by channel (benchmarks/gpu.py, results/gpu.json, 2026-11-27). Within a transform of
    ``torch.func`` it is "reference".
    """
    if impl not in IMPLS:
        raise KinformerError(f"{name}: impl={impl!r} is unknown; use one of {', '.join(IMPLS)}.")
    if impl != "auto":
        return impl
    if transformed():
        return "reference"
    if q.device.type != "cuda" or q.shape[2] == 1 or not has_triton():
        return "chunked"
    fits = max(q.shape[-1], v.shape[-1]) <= WIDEST and torch.float64 not in (q.dtype, v.dtype)
    return "triton" if fits else "chunked"


def check_triton(name: str, features: int, head_dim: int) -> None:
    """Refuse heads of ``features`` and ``head_dim`` that the Triton kernels do not take, on behalf of ``name``."""
    use = f"{name}: impl='triton'"
    if not has_triton():
        raise KinformerError(f"{use} needs Triton; pip install 'kinformer[triton]' brings it, or use 'chunked'.")
    if max(features, head_dim) > WIDEST:
        raise KinformerError(
            f"{use} takes at most {plural(WIDEST, 'feature')} and values a head, but these have {features} and "
            f"{head_dim}; use more heads, or 'chunked'."
        )


def check_call(name: str, q: Tensor, v: Tensor) -> None:
    """Refuse tensors that the Triton kernels do not take, [batch, heads, time, features and head_dim]."""
    check_triton(name, q.shape[-1], v.shape[-1])
    if torch.float64 in (q.dtype, v.dtype):
        raise KinformerError(f"{name}: impl='triton' sums in float32, but was given float64; use 'chunked'.")


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of states and sums: the inputs' dtype, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
