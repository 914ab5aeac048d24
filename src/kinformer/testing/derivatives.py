"""The check that derivatives are the numerical ones. Second ones and those of forward mode, which a custom kernel
easily drops, may be an error instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError

from kinformer.runtime.errors import KinformerError
from kinformer.testing.errors import BrokenLawError, require

Function = Callable[..., tuple[Tensor, ...]]

_STEP = 1e-5
_CLOSE = 1e-4
"""Allowed error of a derivative along a direction, relative to its norm, by central differences in float64."""
_MISSING = (RuntimeError, KinformerError)
"""What stands for a derivative that there is not."""


def dense_gradients(loss: Tensor, points: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Return the gradients of ``loss`` by ``points``, zeros where it does not
    depend on one; sparse ones are made dense."""
    gradients = torch.autograd.grad(
        loss, list(points), create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]


def agree_gradients(function: Function, points: Sequence[Tensor], module: nn.Module, inputs: str, where: str) -> None:
    """Check the gradients of ``function`` at ``points`` (float64 leaves: the
    ``inputs``, then the weights of ``module``)."""
    try:
        torch.autograd.gradcheck(function, points, fast_mode=True, atol=1e-6, rtol=1e-4)
    except GradcheckError as error:
        names = ", ".join([inputs, *(name for name, _ in module.named_parameters())])
        raise BrokenLawError(f"gradients by [{names}]{where}: {error}") from error


def agree_derivatives(place: str, function: Function, points: Sequence[Tensor]) -> None:
    """Check the derivatives of ``function`` at ``points`` (float64 leaves) along a random direction."""
    generator = torch.Generator("cpu").manual_seed(81)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").to(x.device)

    direction = [like(point) for point in points]
    upstream = [like(item) for item in function(*points)]

    def gradient(at: Sequence[Tensor], further: bool = False) -> tuple[Tensor, ...]:
        loss = sum(((y * u).sum() for y, u in zip(function(*at), upstream, strict=True)), torch.zeros(()))
        return tuple(dense_gradients(loss, at, create_graph=further))

    def curvature() -> tuple[Tensor, ...]:
        slopes = gradient(points, further=True)
        along = sum(((g * u).sum() for g, u in zip(slopes, direction, strict=True)), torch.zeros(()))
        if not along.requires_grad:
            return tuple(torch.zeros_like(point) for point in points)
        return torch.autograd.grad(along, list(points), allow_unused=True, materialize_grads=True)

    def with_tangents() -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p.detach(), u) for p, u in zip(points, direction, strict=True)]
            pairs = [forward_ad.unpack_dual(item) for item in function(*duals)]
            return tuple(torch.zeros_like(y) if tangent is None else tangent for y, tangent in pairs)

    def by_func() -> tuple[Tensor, ...]:
        plain = tuple(point.detach() for point in points)
        return torch.func.jvp(function, plain, tuple(direction))[1]

    slopes = _difference(lambda *at: gradient([item.requires_grad_() for item in at]), points, direction)
    _agree(f"{place}, the second derivative", curvature, slopes)
    rates = _difference(function, points, direction)
    for name, forward in (("torch.autograd.forward_ad", with_tangents), ("torch.func.jvp", by_func)):
        _agree(f"{place}, forward mode ({name})", forward, rates)


def _difference(function: Function, points: Sequence[Tensor], direction: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivative along ``direction`` by central differences."""
    ahead, behind = (
        function(*(p.detach() + step * u for p, u in zip(points, direction, strict=True))) for step in (_STEP, -_STEP)
    )
    return [((a - b) / (2 * _STEP)).detach() for a, b in zip(ahead, behind, strict=True)]


def _agree(place: str, derivative: Callable[[], tuple[Tensor, ...]], want: Sequence[Tensor]) -> None:
    try:
        got = derivative()
    except _MISSING:
        return
    gap, size = (
        float(torch.stack([x.square().sum() for x in item]).sum().sqrt())
        for item in ([g.detach() - w for g, w in zip(got, want, strict=True)], want)
    )
    require(
        gap <= _CLOSE * max(1.0, size),
        f"{place} is off by {gap:.3g} where its norm is {size:.3g}; it must be right or raise (see core.derivatives).",
    )
