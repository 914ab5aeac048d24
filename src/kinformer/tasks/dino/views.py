"""Views of an image for self-distillation (Caron et al. 2021, DINO, section 3.1; Chen et al. 2022, HIPT, section 3.3).

Of pixels, views are crops of any scale that are resized, and changed in brightness, contrast and colour, blurred and
solarised as in BYOL (Grill et al. 2020, appendix B). Of a map of features they are boxes of it. Two views are *global*,
7/8 of the patches along each side; the *local* ones have 3/8. Everything random comes from the generator that is given;
None is PyTorch's own.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional

from kinformer.tasks.shared.augmentation import ASPECTS, box, flip
from kinformer.tasks.shared.rand_augment import luminance

GLOBAL, LOCAL = (7, 8), (3, 8)
LEAST_AREA = 0.05
BLURRED, SOLARISED = ((1.0, 0.1), 0.5), (0.0, 0.2)
"""The shares of blurred views (the first and second global one, the local ones) and of solarised global ones."""
SHARPEST, SOFTEST, OF_SIDE = 0.1, 2.0, 224
"""The least and the largest deviation of the blur in pixels, for an image of that side."""

Grid = tuple[int, int]


def grids(grid: Grid) -> tuple[Grid, Grid]:
    """Return the rows and columns of patches of a global and of a local view, of an image with ``grid``."""
    (wide, of), (narrow, _) = GLOBAL, LOCAL
    large = tuple(max(side * wide // of, min(side, 2)) for side in grid)
    small = tuple(max(round(side * narrow / of), 1) for side in grid)
    return (large[0], large[1]), (small[0], small[1])


def views_of_features(features: Tensor, local: int, flips: bool, generator: Generator | None) -> list[Tensor]:
    """Return two global and ``local`` local views of maps [rows, width, height, width of the grid], boxes drawn row by
    row."""
    large, small = grids((features.shape[2], features.shape[3]))
    boxes = [_box(features, size, generator) for size in (large,) * 2 + (small,) * local]
    return [flip(box, generator) if flips else box for box in boxes]


def views_of_pixels(
    images: Tensor, patch: int, local: int, flips: bool, generator: Generator | None, area: float = 0.4
) -> list[Tensor]:
    """Return two global and ``local`` local views of ``images`` [rows, channels, height, width], floats from 0 to 1; of
    the share ``area`` or more, and of 5 % up to it."""
    large, small = grids((-(-images.shape[2] // patch), -(-images.shape[3] // patch)))
    views = []
    for number in range(2 + local):
        rows, columns = large if number < 2 else small
        shares = (area, 1) if number < 2 else (LEAST_AREA, area)
        x = box(images, (rows * patch, columns * patch), shares, ASPECTS, generator)
        x = flip(x, generator) if flips else x
        x = _recoloured(x, generator)
        x = _blurred(x, BLURRED[0][number] if number < 2 else BLURRED[1], generator)
        chosen = _chosen(x, SOLARISED[number] if number < 2 else 0.0, generator)
        views.append(torch.where(chosen & (x >= 0.5), 1 - x, x))
    return views


def _box(features: Tensor, size: Grid, generator: Generator | None) -> Tensor:
    """Return boxes [rows, width, *size] of ``features``, each at a random place."""
    places = []
    for axis, side in enumerate(size):
        places_left = features.shape[2 + axis] - side + 1
        first = torch.randint(places_left, (len(features), 1), generator=generator)
        places.append((first + torch.arange(side)).to(features.device))
    rows = torch.arange(len(features), device=features.device)[:, None, None]
    return features[rows, :, places[0][:, :, None], places[1][:, None]].permute(0, 3, 1, 2)


def _recoloured(x: Tensor, generator: Generator | None) -> Tensor:
    """Change brightness and contrast by up to 40 %, saturation by 20 %, in four of five images; drop the colour in one
    of five."""
    changed = (x * _factor(x, 0.4, generator)).clamp(0, 1)
    mean = changed.mean((1, 2, 3), keepdim=True)
    changed = (mean + _factor(x, 0.4, generator) * (changed - mean)).clamp(0, 1)
    if x.shape[1] == 3:
        changed = (luminance(changed) + _factor(x, 0.2, generator) * (changed - luminance(changed))).clamp(0, 1)
    x = torch.where(_chosen(x, 0.8, generator), changed, x)
    return torch.where(_chosen(x, 0.2, generator), luminance(x), x) if x.shape[1] == 3 else x


def _blurred(x: Tensor, share: float, generator: Generator | None) -> Tensor:
    """Blur a ``share`` of the images of ``x`` [rows, channels, height, width], each by a Gaussian of its own width."""
    scale = max(x.shape[2:]) / OF_SIDE
    deviation = scale * (SHARPEST + (SOFTEST - SHARPEST) * torch.rand(len(x), generator=generator))
    reach = min(int(3 * SOFTEST * scale) + 1, min(x.shape[2:]) - 1)
    if not reach:
        return x
    kernel = (-0.5 * (torch.arange(-reach, reach + 1) / deviation[:, None]).square()).softmax(-1).to(x)
    kernel = kernel.repeat_interleave(x.shape[1], 0)[:, None]  # [rows * channels, 1, taps]
    flat = functional.pad(x, (reach,) * 4, mode="reflect").flatten(0, 1)[None]
    flat = functional.conv2d(flat, kernel[..., None], groups=len(kernel))
    flat = functional.conv2d(flat, kernel[:, :, None], groups=len(kernel))
    return torch.where(_chosen(x, share, generator), flat[0].view_as(x), x)


def _factor(x: Tensor, spread: float, generator: Generator | None) -> Tensor:
    return (1 + spread * (2 * torch.rand(len(x), 1, 1, 1, generator=generator) - 1)).to(x)


def _chosen(x: Tensor, share: float, generator: Generator | None) -> Tensor:
    return (torch.rand(len(x), 1, 1, 1, generator=generator) < share).to(x.device)
