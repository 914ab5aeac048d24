"""Muon (Jordan et al. 2024): the momentum of a matrix, orthogonalised by five Newton-Schulz iterations, is its update.

    X_0 = B / |B|,   A = X X^T,   X <- a X + (b A + c A^2) X,   W <- (1 - lr decay) W - 0.2 sqrt(max(m, n)) lr X

PyTorch's optimiser, with the matrices of one shape in one product: those of small models are so small that an
operation takes longer to begin than to run: on two threads of an AMD EPYC those of four layers of dim 128 take six
tenths of the time (``benchmarks/small_operations.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from kinformer.runtime.sharding import is_sharded

SMALL = 1 << 18
"""Elements of a matrix up to which those of its shape are orthogonalised together; larger ones gain nothing by it."""


class StackedMuon(Muon):
    """The optimiser ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``:
    the same updates, state and settings."""

    def __init__(self, groups: list[dict], lr: float) -> None:
        super().__init__(groups, lr=lr, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update. Matrices that are sharded over processes are PyTorch's, one by one."""
        if any(is_sharded(item) for group in self.param_groups for item in group["params"]):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            matrices: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, matrices, gradients, momenta)
            if not matrices:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            moved = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            for alike in _alike(matrices):
                # In bfloat16, as PyTorch's: the iterations reach singular values near 1, not 1, so precision is not
                # needed.
                narrow = [moved[index].bfloat16() for index in alike]
                stack = torch.stack(narrow) if len(narrow) > 1 else narrow[0]
                directions = orthogonalised(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                # 0.2 sqrt(max(m, n)): the root mean square of AdamW's updates, so that one learning rate suits both.
                rate = 0.2 * max(narrow[0].shape) ** 0.5 * group["lr"]
                for index, direction in zip(alike, directions.reshape(-1, *narrow[0].shape), strict=True):
                    matrices[index].add_(direction, alpha=-rate)
        return loss


def _alike(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Yield indices of ``matrices``, those of one shape and device together where they are small."""
    groups: dict[Any, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alone = index if matrix.numel() > SMALL else None
        groups.setdefault((matrix.shape, matrix.device, alone), []).append(index)
    yield from groups.values()


def orthogonalised(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix, or each of a stack [n, rows, columns], with singular values of 0.5 to 1.5 instead of its own."""
    a, b, c = coefficients
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    # X X^T of the short side: fewer operations.
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        # X <- a X + (b A + c A^2) X
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
