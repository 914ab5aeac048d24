"""What later layers read of the first: a channel between the layers of one token, which a stack opens for each pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from kinformer.runtime.errors import KinformerError


class FirstValues:
    """The values [batch, kv_heads, time, head_dim] of the first mixer that shares its own."""

    def __init__(self) -> None:
        self._values: Tensor | None = None

    def of(self, v: Tensor) -> Tensor:
        """Return the first values, which are ``v`` in the first call. A recomputed layer reads those of its forward."""
        if self._values is None:
            self._values = v
        return self._values


class SharesValues:
    """Mixin of modules that read the first values; ``value_shape`` (kv_heads, head_dim) is that of their own."""

    value_shape: tuple[int, int]


def shares_values(layers: Iterable[nn.Module], kind: str, opens: bool) -> bool:
    """Return whether modules in ``layers`` read first values; refuse it in a stack ``kind`` that has no channel for
    them (``opens`` False), and layers whose values differ in shape."""
    shapes = {module.value_shape for layer in layers for module in layer.modules() if isinstance(module, SharesValues)}
    if shapes and not opens:
        raise KinformerError(
            f"value_residual reads the values of the first layer, which the stack {kind!r} does not hand on; use the "
            "stack 'sequential', or leave it out."
        )
    if len(shapes) > 1:
        shown = " and ".join(f"{heads} x {width}" for heads, width in sorted(shapes))
        raise KinformerError(
            f"value_residual mixes the values of all layers, which are {shown} (heads x width) here; give every such "
            "layer the same number of key heads and the same head_dim."
        )
    return bool(shapes)
