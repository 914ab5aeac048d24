"""The implementations of kernel attention, for the linear rule and the delta rule alike.

reference   the recurrence, token by token
chunked     blocks, in PyTorch
triton      blocks, in Triton, on a GPU: float32 and bfloat16, up to 256 features
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.kernels.impls import LinearImpl, names_of
from kinformer.runtime.compiling import has_triton
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

IMPLS = names_of(LinearImpl)
WIDEST = 256
"""Features, and values, of a head that the Triton kernels hold."""


def choose_impl(name: str, impl: LinearImpl, q: Tensor, v: Tensor) -> str:
    """Return the implementation that ``impl`` stands for in the function called ``name``, of q and v [batch, heads,
    time, features and head_dim].

    "auto" is "triton" for chunks on a GPU that Triton's kernels take, else "chunked". On an H200 they take 0.05 to 0.5
    of the time, also with a decay by channel (benchmarks/gpu.py, results/gpu.json, 2026-11-27).
    """
    if impl not in IMPLS:
        raise KinformerError(f"{name}: impl={impl!r} is unknown; use one of {', '.join(IMPLS)}.")
    if impl != "auto":
        return impl
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
