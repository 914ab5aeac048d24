"""One module for every slice of a token, such as the real and the imaginary half of complex numbers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from kinformer.runtime.errors import KinformerError


class PerSlice(nn.Module):
    """The map [..., count * width] -> [..., count * out]: ``inner`` [..., width] ->
    [..., out] on each of ``count`` slices."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner, self.count = inner, count

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unflatten(-1, (self.count, -1))).flatten(-2)


def per_slice(build: Callable[[int], nn.Module], dim: int, count: int) -> nn.Module:
    """Return ``build(dim)``, or with ``count`` above 1 one ``build(dim / count)`` for all slices of a token."""
    if count < 1 or dim % count:
        raise KinformerError(f"slices = {count} does not divide dim = {dim}; choose a divisor.")
    return build(dim) if count == 1 else PerSlice(build(dim // count), count)
