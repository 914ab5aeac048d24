"""Training images changed at random, in plain PyTorch: shifts, flips, RandAugment, erased boxes, two images in one.

Everything random comes from a generator, so that a step's images follow from the run's seed.

``crop``         shifted by up to an eighth of each side, zeros behind
``resized-crop``  a box of 8 to 100 % of the area and an aspect of 3/4 to 4/3, scaled to the whole (Szegedy et al. 2015)
``flip``         left and right exchanged in half of the images
``jitter``       brightness, contrast and saturation times 0.6 to 1.4 each, in that order
``randaugment``  two of fourteen changes (Cubuk et al. 2019, RandAugment), of magnitude 9 of 30 give or take a half
``erasing``      a box of 2 to 33 % becomes noise in a quarter of the images (Zhong et al. 2017)
``mixup``        a second image shines through, in the share of Beta(0.8, 0.8) (Zhang et al. 2017)
``cutmix``       a box is a second image's, of an area 1 - Beta(1, 1) (Yun et al. 2019); with mixup they take turns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional

from kinformer.tasks.shared.rand_augment import luminance, rand_augment

ERASED, LEAST_AREA, MOST_AREA, LEAST_ASPECT = 0.25, 0.02, 1 / 3, 0.3
MIXUP, CUTMIX = 0.8, 1.0
CROPPED, ASPECTS, JITTER = (0.08, 1.0), (3 / 4, 4 / 3), 0.4


class Augmented(NamedTuple):
    """``images`` [rows, channels, height, width] floats from 0 to 1 (or uint8) and ``labels`` [rows]; where two were
    mixed, the ``others``' labels and the ``shares`` [rows] of the first."""

    images: Tensor
    labels: Tensor
    others: Tensor | None = None
    shares: Tensor | None = None


def augment(batch: Augmented, names: Sequence[str], generator: Generator) -> Augmented:
    """Return ``batch``, whose images are floats, after the changes ``names``, in the order of this list."""
    images = batch.images
    for name, change in ALONE.items():
        if name in names:
            images = change(images, generator)
    batch = batch._replace(images=images)
    mixing = [name for name in MIXED if name in names]
    if not mixing:
        return batch
    turn = mixing[int(torch.randint(len(mixing), (), generator=generator))]
    return MIXED[turn](batch, generator)


def crop(images: Tensor, generator: Generator) -> Tensor:
    """Shift each image along both axes by a random number of pixels."""
    for axis in (2, 3):
        side = images.shape[axis]
        largest = max(1, side // 8)
        shift = torch.randint(-largest, largest + 1, (len(images), 1), generator=generator)
        source = torch.arange(side) + shift
        shape = [len(images), 1, side, 1] if axis == 2 else [len(images), 1, 1, side]
        moved = images.gather(axis, source.clamp(0, side - 1).view(shape).expand_as(images))
        images = moved * ((source >= 0) & (source < side)).view(shape)
    return images


def resized_crop(images: Tensor, generator: Generator) -> Tensor:
    """Return a box of each image, of a share ``CROPPED`` of its area and an aspect ``ASPECTS``, scaled bilinearly to
    its size.

    A box longer than a side is cut to it; its centre is drawn where it fits.
    """
    height, width = images.shape[2:]
    low, high = (aspect * height / width for aspect in ASPECTS)  # of pixels
    return box(images, (height, width), CROPPED, (low, high), generator)


def box(
    images: Tensor,
    size: tuple[int, int],
    area: tuple[float, float],
    aspects: tuple[float, float],
    generator: Generator | None,
) -> Tensor:
    """Return a box of each image at a random place, brought to ``size`` bilinearly: of a random share ``area`` of its
    area and a random aspect among ``aspects``, across by down as shares of its sides."""
    count, (low, high) = len(images), map(log, aspects)
    share = area[0] + (area[1] - area[0]) * torch.rand(count, generator=generator)
    aspect = (low + (high - low) * torch.rand(count, generator=generator)).exp()
    down, across = (share / aspect).sqrt().clamp(max=1), (share * aspect).sqrt().clamp(max=1)
    at = [(1 - side) * (2 * torch.rand(count, generator=generator) - 1) for side in (across, down)]
    zero = torch.zeros(count)
    maps = torch.stack([torch.stack([across, zero, at[0]], 1), torch.stack([zero, down, at[1]], 1)], 1)
    grid = functional.affine_grid(maps.to(images), [count, images.shape[1], *size], align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def jitter(images: Tensor, generator: Generator) -> Tensor:
    """Multiply brightness, contrast and, of colours, saturation, each by its own random number about 1."""
    factors = 1 + JITTER * (2 * torch.rand(3, len(images), 1, 1, 1, generator=generator) - 1)
    images = (images * factors[0]).clamp(0, 1)
    grey = luminance(images)
    images = torch.lerp(grey.mean((1, 2, 3), keepdim=True), images, factors[1]).clamp(0, 1)
    return images if images.shape[1] != 3 else torch.lerp(luminance(images), images, factors[2]).clamp(0, 1)


def flip(images: Tensor, generator: Generator | None) -> Tensor:
    """Exchange left and right in a random half of the images."""
    turned = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(turned.to(images.device), images.flip(3), images)


def erase(images: Tensor, generator: Generator) -> Tensor:
    """Fill a box of random area and aspect with noise, in some of the images."""
    rows = len(images)
    chosen = torch.rand(rows, generator=generator) < ERASED
    area = LEAST_AREA + (MOST_AREA - LEAST_AREA) * torch.rand(rows, generator=generator)
    aspect = (log(LEAST_ASPECT) * (2 * torch.rand(rows, generator=generator) - 1)).exp()
    inside = _boxes(images, (area * aspect).sqrt(), (area / aspect).sqrt(), generator)
    noise = torch.rand(images.shape, generator=generator)
    return torch.where(inside & chosen[:, None, None, None], noise, images)


def mixup(batch: Augmented, generator: Generator) -> Augmented:
    """Mix each image with its neighbour, by one share for all."""
    share = _beta(MIXUP, generator).expand(len(batch.images))
    wide = share[:, None, None, None]
    mixed = wide * batch.images + (1 - wide) * batch.images.flip(0)
    return Augmented(mixed, batch.labels, batch.labels.flip(0), share)


def cutmix(batch: Augmented, generator: Generator) -> Augmented:
    """Replace a box of each image by its neighbour's; shares are those of the pixels."""
    rows = len(batch.images)
    side = (1 - _beta(CUTMIX, generator)).sqrt().expand(rows)
    inside = _boxes(batch.images, side, side, generator)
    mixed = torch.where(inside, batch.images.flip(0), batch.images)
    return Augmented(mixed, batch.labels, batch.labels.flip(0), 1 - inside.float().mean((1, 2, 3)))


def _boxes(images: Tensor, down: Tensor, across: Tensor, generator: Generator) -> Tensor:
    """Return boxes as [rows, 1, height, width] bool, of ``down`` and ``across`` [rows], shares of the sides, centred
    anywhere."""
    inside = []
    for axis, share in ((2, down), (3, across)):
        side = images.shape[axis]
        centre = torch.rand(len(images), 1, generator=generator) * side
        inside.append((torch.arange(side) + 0.5 - centre).abs() < share[:, None] * side / 2)
    return inside[0][:, None, :, None] & inside[1][:, None, None, :]


def _beta(alpha: float, generator: Generator) -> Tensor:
    """Draw once from Beta(alpha, alpha), as a quotient of gamma variables."""
    gammas = torch._standard_gamma(torch.full((2,), alpha), generator=generator)
    return gammas[0] / gammas.sum().clamp_min(1e-12)


ALONE: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "crop": crop,
    "resized-crop": resized_crop,
    "flip": flip,
    "jitter": jitter,
    "randaugment": rand_augment,
    "erasing": erase,
}
MIXED: dict[str, Callable[[Augmented, Generator], Augmented]] = {"mixup": mixup, "cutmix": cutmix}
