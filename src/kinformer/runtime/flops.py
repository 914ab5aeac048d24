"""Formulas that PyTorch's ``FlopCounterMode`` lacks: it counts ``bmm`` and ``baddbmm``, but not ``baddbmm_`` and int8.

Importing this module registers them; kernels that multiply so import it.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = tuple[int, int, int]


def batched_product(total: Shape, left: Shape, right: Shape, *_: object, **__: object) -> int:
    """Return the operations of total + left @ right for shapes [batch, m, k] and [batch, k, n]: 2 batch m k n."""
    batch, rows, inner = left
    return 2 * batch * rows * inner * right[2]


def int8_product(left: tuple[int, int], right: tuple[int, int], *_: object, **__: object) -> int:
    """Return the operations of left @ right for shapes [m, k] and [k, n]: 2 m k n."""
    return 2 * left[0] * left[1] * right[1]


if torch.ops.aten.baddbmm_ not in flop_registry:
    register_flop_formula(torch.ops.aten.baddbmm_)(batched_product)
if torch.ops.aten._int_mm not in flop_registry:
    register_flop_formula(torch.ops.aten._int_mm)(int8_product)
