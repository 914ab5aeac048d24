"""Costs of operators that PyTorch does not count: FLOPs of products in place, and temporary memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

if TYPE_CHECKING:
    from torch._ops import OpOverloadPacket


# Formulas that PyTorch's ``FlopCounterMode`` lacks: it counts ``bmm`` and ``baddbmm``, but not ``baddbmm_`` and int8.
#
# Importing this module registers them; kernels that multiply so import it.

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


# The temporary memory of operators, for runs on shapes only, which do not see it.

Rule = Callable[..., int]
_RULES: dict[object, Rule] = {}


def scratch(operator: OpOverloadPacket) -> Callable[[Rule], Rule]:
    """Register a function of the arguments of ``operator`` (such as ``torch.ops.kinformer.name``) that returns the
    bytes which a call allocates and frees before it returns. The arguments have shapes only."""

    def register(rule: Rule) -> Rule:
        _RULES[operator.default] = rule
        return rule

    return register


def scratch_bytes(operator: object, arguments: Iterable[object]) -> int:
    """Return the temporary bytes of a call; 0 for an operator without a registered function."""
    rule = _RULES.get(operator)
    return rule(*arguments) if rule else 0
