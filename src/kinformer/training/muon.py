"""Muon (Jordan et al. 2024): the momentum of a matrix, orthogonalised by five Newton-Schulz iterations, is its update.

    X_0 = B / |B|,   A = X X^T,   X <- a X + (b A + c A^2) X,   W <- (1 - lr decay) W - 0.2 sqrt(max(m, n)) lr X

PyTorch's optimiser, with the matrices of one shape in one product: those of small models are so small that an
operation takes longer to begin than to run: on two threads of an AMD EPYC those of four layers of dim 128 take six
tenths of the time (``benchmarks/small_operations.py``). The iterations reach singular values near 1, not 1, so they
need no precision: they compute in the type in which the processor is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from kinformer.runtime.processor import processor_class
from kinformer.runtime.sharding import gathered, replicated
from kinformer.training.per_parameter import ParameterGroup

SMALL = 1 << 18
"""Elements of a matrix up to which those of its shape are orthogonalised together; larger ones gain nothing by it."""

PRECISION = {"AMX": torch.bfloat16, "AVX-512 and bfloat16": torch.bfloat16, "other": torch.float32}
"""The type of the iterations by class of processor. Where bfloat16 is emulated, PyTorch's update, which uses it, takes
3.7 times as long as this one (Intel Xeon with AVX-512 alone, one thread, ``small_operations_other.json``)."""


class StackedMuon(Muon):
    """The optimiser ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``:
    the same updates, state and settings."""

    def __init__(self, groups: list[ParameterGroup], lr: float) -> None:
        super().__init__(groups, lr=lr, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one update. Matrices that are sharded over processes are gathered, a shape at a time."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            matrices: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, matrices, gradients, momenta)
            if not matrices:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            moved = momenta
            if group["nesterov"]:  # one by one: PyTorch 2.11 has no _foreach_lerp of sharded tensors
                moved = [torch.lerp(*pair, group["momentum"]) for pair in zip(gradients, momenta, strict=True)]
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            for alike in _alike(matrices):
                cast = [gathered(moved[index]).to(_precision(moved[index].device)) for index in alike]
                stack = torch.stack(cast) if len(cast) > 1 else cast[0]
                directions = orthogonalised(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                # 0.2 sqrt(max(m, n)): the root mean square of AdamW's updates, so that one learning rate suits both.
                rate = 0.2 * max(cast[0].shape) ** 0.5 * group["lr"]
                for index, direction in zip(alike, directions.reshape(-1, *cast[0].shape), strict=True):
                    matrices[index].add_(replicated(matrices[index], direction), alpha=-rate)
        return loss


def _alike(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Yield indices of ``matrices``, those of one shape and device together where they are small."""
    groups: dict[tuple[torch.Size, torch.device, int | None], list[int]] = {}
    for index, matrix in enumerate(matrices):
        alone = index if matrix.numel() > SMALL else None
        groups.setdefault((matrix.shape, matrix.device, alone), []).append(index)
    yield from groups.values()


def _precision(device: torch.device) -> torch.dtype:
    """Return the type of the iterations on ``device``; bfloat16, as PyTorch's, on any but a CPU."""
    return PRECISION[processor_class()] if device.type == "cpu" else torch.bfloat16


def orthogonalised(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix, or each of a stack [n, rows, columns], with singular values of 0.5 to 1.5 instead of its own."""
    a, b, c = coefficients
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    # X X^T of the short side: fewer operations.
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    if x.dtype == torch.float32 and x.shape[-1] >= 2 * x.shape[-2]:
        x = _factor(x @ x.mT, coefficients, steps) @ x
        return x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        # X <- a X + (b A + c A^2) X
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _factor(gram: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Return Q with X_steps = Q X_0, given A = X_0 X_0^T: every product is one of the short side alone.

    Each step multiplies X by P = a + b A + c A^2, a symmetric matrix that commutes with A, so A <- P A P and Q <- P Q.
    Squared singular values need float32.
    """
    a, b, c = coefficients
    add = torch.addmm if gram.dim() == 2 else torch.baddbmm
    factor: Tensor | None = None
    for step in range(steps):
        polynomial = add(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        factor = polynomial if factor is None else polynomial @ factor
        if step < steps - 1:
            gram = polynomial @ (gram @ polynomial)
    assert factor is not None
    return factor
