"""Pictures in a folder, PNG or JPEG, read by Pillow (the extra ``vision``): a folder per class, or none.

    pictures/cat/1.png      pictures/train/cat/1.png      pictures/1.png
    pictures/dog/2.jpg      pictures/test/cat/7.png       pictures/2.jpg

All become bytes of one shape. Grey stays grey where all are; a palette is looked up, CMYK becomes RGB, 16 bits become
8, transparent pixels are laid over white, and a camera's rotation is applied; a note says what was changed.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from kinformer.data.files import SourceFile, atomic_write
from kinformer.data.formats import content_of
from kinformer.data.image_source import SPLITS, ImageSet, Part
from kinformer.data.png import exif_of, require_rows
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import reading, require_file
from kinformer.runtime.words import plural

SUFFIXES = (".png", ".jpg", ".jpeg")
_PICTURES = ("a PNG picture", "a JPEG picture")
MOST_PIXELS = 1 << 26
_GREY, _COLOUR, _DEEP = (
    {"1", "L", "LA", "La"},
    {"RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr"},
    {"I;16", "I;16B"},
)
_ORIENTATION, _TURNED = 274, (5, 6, 7, 8)
_TURNS = dict(
    enumerate(
        ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"), 2
    )
)
"""How a picture of each orientation is made upright."""


class Head(NamedTuple):
    """The head of a picture's file: its size, mode, transparency and rotation, before its pixels."""

    width: int
    height: int
    mode: str
    transparent: bool
    turned: bool


def require_pillow(place: Path | str) -> ModuleType:
    """Return Pillow's module of images, or raise one sentence."""
    try:
        from PIL import Image
    except ImportError:
        raise KinformerError(
            f"{place}: needs Pillow to be read, which is not installed; pip install 'kinformer[vision]' gets it."
        ) from None
    return Image


def read_folder(folder: Path, files: Sequence[SourceFile], size: int | None) -> ImageSet:
    """Return the pictures among ``files``, which are all of ``folder``; with ``size`` each is scaled until its shorter
    side has this many pixels, and the middle square is taken.

    Raises :class:`KinformerError` for a picture that cannot be read, and for unlike sizes where ``size`` is None.
    """
    pictures = [file for file in files if Path(file.name).suffix.lower() in SUFFIXES]
    others = [file.name for file in files if Path(file.name).suffix.lower() not in SUFFIXES]
    heads = [read_head(Path(file.path)) for file in pictures]
    if size is None:
        _check_sizes(folder, pictures, heads)
    colour = any(head.mode in _COLOUR for head in heads)
    height, width = (size, size) if size else (heads[0].height, heads[0].width)
    shape = (height, width, 3 if colour else 1)
    groups: dict[str, list[int]] = defaultdict(list)
    labels = []
    for index, file in enumerate(pictures):
        split, label = _place(file.name)
        groups[split].append(index)
        labels.append(label)
    _check_groups(folder, pictures, groups, labels)
    parts = {}
    for split, members in groups.items():
        chosen = [pictures[index] for index in members]
        names = [name for index in members if (name := labels[index]) is not None] or None
        parts[split or "train"] = Part(Pictures(chosen, shape), names, lambda chosen=chosen: _keys(chosen))  # type: ignore[misc]
    return ImageSet(parts, shape, _notes(heads, others))


class Pictures(Sequence[np.ndarray]):
    """Pictures that are decoded on demand, uint8 of ``shape`` (height, width, channels)."""

    def __init__(self, files: Sequence[SourceFile], shape: tuple[int, int, int]) -> None:
        self.files, self.shape = files, shape

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return decode(Path(self.files[index].path), self.shape)


def read_head(path: Path) -> Head:
    """Return the head of ``path``, without its pixels; a file that is no picture is one sentence."""
    Image = require_pillow(path)
    require_file(path)
    with _decoding(path), Image.open(path, formats=("PNG", "JPEG")) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise KinformerError(
                f"{path}: has {width} x {height} pixels, more than {MOST_PIXELS}; scale it down, or leave it out."
            )
        if image.mode not in _GREY | _COLOUR | _DEEP:
            raise KinformerError(f"{path}: has pixels of the mode {image.mode}; save it as RGB or grey of 8 bits.")
        turned = _orientation(image, path) in _TURNED
        transparent = image.has_transparency_data
        return Head(*((height, width) if turned else (width, height)), image.mode, transparent, turned)


def decode(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the picture ``path`` as uint8 of ``shape`` (height, width, channels),
    scaled and cropped where it has another."""
    Image = require_pillow(path)
    height, width, channels = shape
    with _decoding(path), Image.open(path, formats=("PNG", "JPEG")) as file:
        turn = _TURNS.get(_orientation(file, path) or 1)
        image = file if turn is None else file.transpose(Image.Transpose[turn])
        if image.mode in _DEEP:
            image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if channels == 3 else "L")
        require_rows(path)
        if image.size != (width, height):
            scale = min(image.width / width, image.height / height)
            across, down = round(scale * width), round(scale * height)
            left, top = (image.width - across) // 2, (image.height - down) // 2
            middle = image.crop((left, top, left + across, top + down))
            image = middle.resize((width, height), Image.Resampling.BICUBIC)
        return np.array(image, np.uint8).reshape(shape)


def _orientation(image: Any, path: Path) -> int | None:
    """Return how a camera held the picture, by its EXIF; of JPEG, also with several pictures (MPO), and of PNG."""
    from PIL.Image import Image

    if image.format == "PNG" and "exif" not in image.info and (exif := exif_of(path)):
        image.info["exif"] = exif
    orientation: int | None = Image.getexif(image).get(_ORIENTATION)  # PNG's own method decodes the rows first
    return orientation


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write ``pixels``, uint8 [height, width, 1 or 3], as a PNG."""
    Image = require_pillow(path)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    with atomic_write(path) as file:
        picture.save(file, "PNG")


class _decoding:  # noqa: N801 (used as a function)
    """Report Pillow's errors about a damaged file, or what a file is instead of a picture, as one sentence; its
    warnings of size are errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reading = reading(path, "is no PNG or JPEG that can be read", "mend, replace or remove it")
        self.caught = warnings.catch_warnings()

    def __enter__(self) -> None:
        self.reading.__enter__()
        self.caught.__enter__()
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*decompression bomb.*")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        from PIL import UnidentifiedImageError

        self.caught.__exit__(kind, error, trace)
        if isinstance(error, UnidentifiedImageError) and (what := content_of(self.path)) not in (None, *_PICTURES):
            raise KinformerError(f"{self.path}: is {what}, not a picture; give a PNG or JPEG.") from None
        return self.reading.__exit__(kind, error, trace)


def _keys(files: Sequence[SourceFile]) -> list[bytes]:
    return [file.name.encode("utf-8", "surrogateescape") for file in files]


def _place(name: str) -> tuple[str, str | None]:
    """Return the split ("" if none is named) and the class (None if there is none) of a file of this name."""
    *folders, _ = name.split("/")
    split = SPLITS[folders.pop(0)] if folders and folders[0] in SPLITS else ""
    return split, folders[0] if folders else None


def _check_groups(
    folder: Path, files: Sequence[SourceFile], groups: dict[str, list[int]], labels: Sequence[str | None]
) -> None:
    if "" in groups and len(groups) > 1:
        named = ", ".join(name for name in groups if name)
        raise KinformerError(
            f"{folder}: holds {files[groups[''][0]].name} beside the splits {named}; move it into one."
        )
    if "train" not in groups and "" not in groups:
        raise KinformerError(f"{folder}: holds no training pictures; add a folder called train.")
    if None in labels and any(label is not None for label in labels):
        raise KinformerError(
            f"{folder}: {files[labels.index(None)].name} stands in no class's folder, others do; move it into one."
        )


def _check_sizes(folder: Path, files: Sequence[SourceFile], heads: Sequence[Head]) -> None:
    sizes = Counter((head.width, head.height) for head in heads)
    if len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        index = next(index for index, head in enumerate(heads) if (head.width, head.height) != usual)
        odd = f"{heads[index].width} x {heads[index].height}"
        raise KinformerError(
            f"{folder}: {files[index].name} has {odd} pixels, {sizes[usual]} of {plural(len(files), 'picture')} have "
            f"{usual[0]} x {usual[1]}; give pictures of one size, or a size that all are scaled to."
        )


def _notes(heads: Sequence[Head], others: Sequence[str]) -> list[str]:
    """Return what is changed or left out, as parts of sentences."""
    grey = sum(head.mode in _GREY | _DEEP for head in heads)
    counted = {
        "with transparency, laid over white": sum(head.transparent for head in heads),
        "of 16 bits, of which the upper 8 are kept": sum(head.mode in _DEEP for head in heads),
        "with a palette, looked up": sum(head.mode in ("P", "PA") for head in heads),
        "in CMYK, made RGB": sum(head.mode == "CMYK" for head in heads),
        "turned as their camera says": sum(head.turned for head in heads),
        "grey among coloured ones, made RGB": grey if grey < len(heads) else 0,
    }
    notes = [f"{plural(count, 'picture')} {what}" for what, count in counted.items() if count]
    if others:
        notes.append(f"{plural(len(others), 'file')} left out, which must be PNG or JPEG, {others[0]} among them")
    return notes
