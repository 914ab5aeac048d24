"""The temporary memory of operators, for runs on shapes only, which do not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._ops import OpOverloadPacket

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
