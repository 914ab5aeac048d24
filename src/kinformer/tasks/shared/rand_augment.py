"""RandAugment (Cubuk et al. 2019): changes drawn for each image, of one magnitude, in plain PyTorch.

Images are floats from 0 to 1, [rows, channels, height, width]; each change takes ``strength`` [rows] from 0 to 1, which
grows with the magnitude, and the images that it was drawn for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional

COUNT, MAGNITUDE, SPREAD, MOST = 2, 9.0, 0.5, 30.0
GREY = (0.299, 0.587, 0.114)


def luminance(images: Tensor) -> Tensor:
    """Return images [rows, channels, height, width] without colour, [rows, 1, height, width]."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * torch.tensor(GREY, device=images.device)[:, None, None]).sum(1, keepdim=True)


def rand_augment(images: Tensor, generator: Generator) -> Tensor:
    """Apply ``COUNT`` random changes to each image, one after the other."""
    rows = len(images)
    for _ in range(COUNT):
        drawn = torch.randint(len(CHANGES), (rows,), generator=generator)
        noise = SPREAD * torch.randn(rows, generator=generator)
        strength = ((MAGNITUDE + noise) / MOST).clamp(0, 1)
        sign = torch.where(torch.rand(rows, generator=generator) < 0.5, -1.0, 1.0)
        changed = images.clone()
        for number, change in enumerate(CHANGES):
            chosen = drawn == number
            if bool(chosen.any()):
                changed[chosen] = change(images[chosen], strength[chosen], sign[chosen]).clamp(0, 1)
        images = changed
    return images


def _identity(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return x


def _autocontrast(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-6), x)


def _equalise(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Replace each value by the share of its channel's pixels that are darker, among all but the brightest."""
    levels = (x * 255).round().long().flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones(levels.shape))
    darker = (counts.cumsum(2) - counts).gather(2, levels)
    rest = darker.amax(2, keepdim=True)
    return torch.where(rest > 0, darker / rest.clamp_min(1), x.flatten(2)).view_as(x)


def _rotate(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    angle = torch.deg2rad(30 * strength * sign)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros(len(x))
    ratio = x.shape[2] / x.shape[3]
    return _moved(x, [cos, -sin * ratio, zero], [sin / ratio, cos, zero])


def _solarise(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return torch.where(x >= 1 - _wide(strength), 1 - x, x)


def _colour(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blended(luminance(x), x, strength, sign)


def _posterise(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Reduce the 8 bits of each value to as few as 4."""
    levels = 2.0 ** (8 - (4 * _wide(strength)).round())
    return (x * 255 / 256 * levels).floor() / levels * 256 / 255


def _contrast(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blended(x.mean((1, 2, 3), keepdim=True), x, strength, sign)


def _brightness(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blended(torch.zeros_like(x), x, strength, sign)


def _sharpness(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Move the inner pixels away from, or towards, a blurred image."""
    if min(x.shape[2:]) < 3:
        return x
    kernel = torch.ones(3, 3)
    kernel[1, 1] = 5
    kernel = (kernel / 13).expand(x.shape[1], 1, 3, 3)
    blurred = x.clone()
    blurred[:, :, 1:-1, 1:-1] = functional.conv2d(x, kernel, groups=x.shape[1])
    return _blended(blurred, x, strength, sign)


def _shear_x(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    zero, one = torch.zeros(len(x)), torch.ones(len(x))
    return _moved(x, [one, 0.3 * strength * sign, zero], [zero, one, zero])


def _shear_y(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    zero, one = torch.zeros(len(x)), torch.ones(len(x))
    return _moved(x, [one, zero, zero], [0.3 * strength * sign, one, zero])


def _translate_x(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    zero, one = torch.zeros(len(x)), torch.ones(len(x))
    return _moved(x, [one, zero, 0.9 * strength * sign], [zero, one, zero])


def _translate_y(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    zero, one = torch.zeros(len(x)), torch.ones(len(x))
    return _moved(x, [one, zero, zero], [zero, one, 0.9 * strength * sign])


CHANGES: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    _identity, _autocontrast, _equalise, _rotate, _solarise, _colour, _posterise, _contrast, _brightness, _sharpness,
    _shear_x, _shear_y, _translate_x, _translate_y,
)  # fmt: skip


def _wide(strength: Tensor) -> Tensor:
    return strength[:, None, None, None]


def _blended(base: Tensor, x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Return ``base`` plus 0.1 to 1.9 times the difference of ``x`` from it."""
    return base + _wide(1 + 0.9 * strength * sign) * (x - base)


def _moved(x: Tensor, across: list[Tensor], down: list[Tensor]) -> Tensor:
    """Return each pixel from the place that two rows of an affine map [rows] name, zeros from outside."""
    maps = torch.stack([torch.stack(across, 1), torch.stack(down, 1)], 1)
    grid = functional.affine_grid(maps, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
