"""Shared by the tasks of images: pictures to predict from, random changes of training images, and features of frozen
encoders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from kinformer.core.model import WholeModel, device_of
from kinformer.core.parts import Input
from kinformer.core.stack import ModelConfig
from kinformer.lab.data import ImageData
from kinformer.lab.data.files import readable
from kinformer.lab.data.images import SUFFIXES, decode, read_head, read_images, require_pillow
from kinformer.lab.data.labelled import STDIN, Inputs
from kinformer.lab.tasks.evaluation import (
    Embedded,
    EmbeddingSettings,
    FileSource,
    ItemSettings,
    LoadedRun,
    TrainedRun,
    batched,
    input_of,
    track,
)
from kinformer.lab.tasks.options import PictureOptions
from kinformer.lab.tasks.task import Source
from kinformer.lab.tasks.texts import pooled, spec_of
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import reading, require_file

# RandAugment (Cubuk et al. 2019): changes drawn for each image, of one magnitude, in plain PyTorch.
#
# Images are floats from 0 to 1, [rows, channels, height, width]; each change takes ``strength`` [rows] from 0 to 1,
# which grows with the magnitude, and the images that it was drawn for.

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
        for number, change in enumerate(CHANGES.values()):
            chosen = drawn == number
            if bool(chosen.any()):
                changed[chosen] = change(images[chosen], strength[chosen], sign[chosen]).clamp(0, 1)
        images = changed
    return images


def _autocontrast(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-6), x)


def _equalise(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Replace each value by the share of darker pixels in its channel, among all but the brightest."""
    levels = (x * 255).round().long().flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones(levels.shape))
    darker = (counts.cumsum(2) - counts).gather(2, levels)
    rest = darker.amax(2, keepdim=True)
    return torch.where(rest > 0, darker / rest.clamp_min(1), x.flatten(2)).view_as(x)


def _rotate(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    angle = torch.deg2rad(30 * strength * sign)
    cos, sin = angle.cos(), angle.sin()
    ratio = x.shape[2] / x.shape[3]
    return _moved(x, (cos, -sin * ratio, 0.0), (sin / ratio, cos, 0.0))


def _posterise(x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Reduce the 8 bits of each value to as few as 4."""
    levels = 2.0 ** (8 - (4 * _wide(strength)).round())
    return (x * 255 / 256 * levels).floor() / levels * 256 / 255


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


def _wide(strength: Tensor) -> Tensor:
    return strength[:, None, None, None]


def _blended(base: Tensor, x: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Return ``base`` plus 0.1 to 1.9 times the difference of ``x`` from it."""
    return base + _wide(1 + 0.9 * strength * sign) * (x - base)


Place = tuple[Tensor | float, Tensor | float, Tensor | float]
ACROSS, DOWN = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
"""The rows of the affine map that leaves every pixel in its place."""


def _moved(x: Tensor, across: Place = ACROSS, down: Place = DOWN) -> Tensor:
    """Return each pixel from the place that two rows of an affine map, numbers or [rows], name; zeros from outside."""
    return _sampled(x, list(x.shape[2:]), across, down, "zeros")


def _sampled(x: Tensor, size: Sequence[int], across: Place, down: Place, outside: str) -> Tensor:
    maps = torch.stack([torch.stack([torch.zeros(len(x)) + item for item in row], 1) for row in (across, down)], 1)
    grid = functional.affine_grid(maps.to(x), [*x.shape[:2], *size], align_corners=False)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode=outside, align_corners=False)


CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "identity": lambda x, strength, sign: x,
    "autocontrast": _autocontrast,
    "equalise": _equalise,
    "rotate": _rotate,
    "solarise": lambda x, strength, sign: torch.where(x >= 1 - _wide(strength), 1 - x, x),
    "colour": lambda x, strength, sign: _blended(luminance(x), x, strength, sign),
    "posterise": _posterise,
    "contrast": lambda x, strength, sign: _blended(x.mean((1, 2, 3), keepdim=True), x, strength, sign),
    "brightness": lambda x, strength, sign: _blended(torch.zeros_like(x), x, strength, sign),
    "sharpness": _sharpness,
    "shear_x": lambda x, strength, sign: _moved(x, across=(1.0, 0.3 * strength * sign, 0.0)),
    "shear_y": lambda x, strength, sign: _moved(x, down=(0.3 * strength * sign, 1.0, 0.0)),
    "translate_x": lambda x, strength, sign: _moved(x, across=(1.0, 0.0, 0.9 * strength * sign)),
    "translate_y": lambda x, strength, sign: _moved(x, down=(0.0, 1.0, 0.9 * strength * sign)),
}


# Training images changed at random, in plain PyTorch: shifts, flips, RandAugment, erased boxes, two images in one.
#
# Everything random comes from a generator, so that a step's images follow from the run's seed.
#
#     crop           shifted by up to an eighth of each side, zeros behind
#     resized-crop   a box of 8 to 100 % of the area and an aspect of 3/4 to 4/3, scaled to the whole (Szegedy et al.
#                    2015)
#     flip           left and right exchanged in half of the images
#     jitter         brightness, contrast and saturation times 0.6 to 1.4 each, in that order
#     randaugment    two of fourteen changes (Cubuk et al. 2019, RandAugment), of magnitude 9 of 30 give or take a half
#     erasing        a box of 2 to 33 % becomes noise in a quarter of the images (Zhong et al. 2017)
#     mixup          a second image shines through, in the share of Beta(0.8, 0.8) (Zhang et al. 2017)
#     cutmix         a box is a second image's, of an area 1 - Beta(1, 1) (Yun et al. 2019); takes turns with mixup

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
    batch, mixing = batch._replace(images=images), [mix for name, mix in MIXED.items() if name in names]
    if not mixing:
        return batch
    return mixing[int(torch.randint(len(mixing), (), generator=generator))](batch, generator)


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
    A box longer than a side is cut to it; its centre is drawn where it fits."""
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
    return _sampled(images, size, (across, 0.0, at[0]), (0.0, down, at[1]), "border")


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
    """Replace a box of each image by its neighbour's; the shares count pixels."""
    rows = len(batch.images)
    side = (1 - _beta(CUTMIX, generator)).sqrt().expand(rows)
    inside = _boxes(batch.images, side, side, generator)
    mixed = torch.where(inside, batch.images.flip(0), batch.images)
    return Augmented(mixed, batch.labels, batch.labels.flip(0), 1 - inside.float().mean((1, 2, 3)))


def _boxes(images: Tensor, down: Tensor, across: Tensor, generator: Generator) -> Tensor:
    """Return boxes [rows, 1, height, width] bool of ``down`` and ``across`` [rows], shares of the sides, anywhere."""
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


# The features that frozen encoders compute of images: once for each image, as they never change.


class CachedFeatures:
    """Maps of ``features``, as the tiles of ``input`` are read, in the memory of this process."""

    def __init__(self, input: Input, features: Callable[[Tensor], Tensor]) -> None:
        self.input, self.features = input, features
        self.cache: dict[tuple[str, int], Tensor] = {}

    def of(self, images: Tensor, split: str, index: np.ndarray) -> Tensor:
        """Return maps [rows, width, rows of tiles, columns of tiles] of ``images`` [rows, channels, height, width],
        which have the numbers ``index`` in their ``split``. Each is read by itself, so that it is the same in any
        batch."""
        for row, number in enumerate(index.tolist()):
            if (split, number) not in self.cache:
                with torch.no_grad():
                    features = self.features(images[row : row + 1].to(self.input.device))
                self.cache[split, number] = features[0].float().cpu()
        return torch.stack([self.cache[split, number] for number in index.tolist()])


def keep_features(input: Input, changed: bool) -> CachedFeatures | None:
    """Return a cache for an ``input`` of tiles with a frozen encoder and unchanged images; None for others."""
    features = getattr(input, "features", None)
    if features is None or not input.lower or changed:
        return None
    learns = any(parameter.requires_grad for parameter in input.lower[-1].parameters())
    return None if learns else CachedFeatures(input, features)


# Pictures to predict from and to make vectors of: files, the files of a folder, or the test images of data.


class Picture(NamedTuple):
    """``pixels`` uint8 [height, width, channels]; ``label`` where the data say which class it is of."""

    name: str
    pixels: np.ndarray
    label: str | None = None


def pictures_in(
    run: TrainedRun, source: FileSource, limit: int | None, classes: Sequence[str] = (), skip_bad: bool = False
) -> Inputs[Picture]:
    """Return the pictures of ``source`` at the size of the model of ``run``, at most ``limit``: a picture, all in a
    folder and its folders, the test images of data, or a list of paths. A folder named as one of ``classes`` labels its
    own. ``skip_bad``: note the files that cannot be read, and leave them out.
    The heads of all files are looked at before the first is decoded."""
    if source == STDIN:
        raise KinformerError(
            "-: images are not read from standard input; give a picture, a folder of pictures, or the name of a data "
            "set, such as digits."
        )
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        with reading(path):
            inside = sorted(path.rglob("*")) if path.is_dir() else [path] if path.suffix.lower() in SUFFIXES else None
        if inside is None:
            return Inputs(pictures(run, str(source), sys.maxsize if limit is None else limit), limit)
        files = [file for file in inside if file.suffix.lower() in SUFFIXES and not file.is_dir()]
    else:
        files = [Path(file) for file in source]
    files = files[:limit]
    if not files:
        raise KinformerError(f"{source}: does not hold pictures; give a PNG or JPEG, a folder of pictures, or data.")
    files = [file for file, _ in readable(files, read_head, skip_bad)]
    input = input_of(run.config)
    shape = (*input.size, input.channels)
    items = (
        Picture(str(file), pixels, file.parent.name if file.parent.name in classes else None)
        for file, pixels in readable(files, lambda file: decode(file, shape), skip_bad)
    )
    return Inputs(items, len(files))


def laid(batch: Sequence[Picture], model: WholeModel) -> Tensor:
    """Return uint8 [images, channels, height, width] of pictures of one size, on the device of ``model``."""
    pixels = np.stack([picture.pixels for picture in batch]).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(pixels)).to(device_of(model))


def pictures(run: TrainedRun, spec: str, count: int) -> Iterator[Picture]:
    """Yield a PNG or JPEG, or the pictures of a folder, scaled and cropped to the size that the model of ``run`` was
    made for; or the first ``count`` test images of the data ``spec``."""
    if files := files_in(Path(spec).expanduser()):
        if count > 1:
            raise KinformerError(
                f"`samples` {count}: says how many test images of data are taken, but all pictures of {spec} are; "
                "leave it out."
            )
        yield from pictures_in(run, files, None).items
        return
    images = read_images(spec_of(run, spec), holdout=run.data.get("holdout"), size=run.options.resize)
    require_channels(images, run.config, str(run.folder))
    test = images.test
    for index in range(min(count, len(test))):
        label = None if test.labels is None else test.classes[int(test.labels[index])]
        yield Picture(f"test image {index + 1} of {images.name}", np.asarray(test.pixels[index]), label)


def require_channels(images: ImageData, config: ModelConfig, reader: str, remedy: str = "others") -> None:
    """Refuse images of other channels than a model of ``config``, called ``reader``, reads."""
    reads, channels = input_of(config).channels, images.shape[2]
    if channels != reads:
        raise KinformerError(
            f"{images.name}: its images have {plural(channels, 'channel')}, but {reader} reads {reads}; give {remedy}."
        )


def png_of(run: TrainedRun, out: str | None, usual: str) -> Path:
    """Return the PNG to write: ``out``, or ``usual`` in the folder of ``run``."""
    path = Path(out) if out is not None else run.folder / usual
    if path.suffix.lower() != ".png":
        raise KinformerError(f"`out` {path}: is not a name of a PNG; end it with .png.")
    return path


def files_in(path: Path) -> list[Path]:
    """Return the picture ``path``, or the pictures of a folder without subfolders; an empty list for other data."""
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        require_file(path)
        return [path]
    with reading(path):
        inside = sorted(path.iterdir()) if path.is_dir() else []
    if any(item.is_dir() for item in inside):
        return []
    return [item for item in inside if item.suffix.lower() in SUFFIXES]


def picture_batches(taken: Inputs[Picture], settings: ItemSettings, doing: str) -> Iterator[list[Picture]]:
    """Yield the pictures ``taken`` in batches; ``doing`` is the text of the progress bar, as of :func:`track`."""
    return track(batched(taken.items, settings.batch_size), taken.total, settings.quiet, doing, len)


def embed_pictures(subject: LoadedRun, source: FileSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
    """Yield the vectors of the pictures of ``source``, in order: the last hidden states of an encoder, pooled."""
    model: WholeModel = subject.model
    pictures = pictures_in(subject.run, source, settings.first, skip_bad=settings.skip_bad)
    for batch in picture_batches(pictures, settings, "embedding"):
        with torch.inference_mode():
            states = model.hidden(laid(batch, model)).long_input
            vectors = pooled(states, states.new_ones(states.shape[:2], dtype=torch.bool), settings.pooling)
        for picture, vector in zip(batch, vectors.numpy(), strict=True):
            yield Embedded("image", picture.name, vector)


# What the records of tasks of images share.


def open_images(source: Source, options: PictureOptions, cache: Path | None = None) -> ImageData:
    """Return the images that ``source`` names."""
    return read_images(source.spec, cache=cache, holdout=source.holdout, size=options.resize)


def check_png(run: TrainedRun) -> None:
    """Refuse to begin where no picture can be written."""
    require_pillow(f"generate {run.folder}")
