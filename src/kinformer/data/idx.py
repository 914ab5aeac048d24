"""Files in the IDX format, in which MNIST and its relatives come, plain or compressed by gzip.

Four bytes (0, 0, the type of the elements, the number of dimensions), the size of each dimension as a big-endian int32,
and the elements. Images are bytes [count, height, width] or [count, height, width, channels], labels bytes [count].
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kinformer.data.files import reading
from kinformer.data.image_source import ImageSet, Part, array_part
from kinformer.runtime.archives import GZIP, check_ratio
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

_BYTES = 8
"""The type of unsigned bytes."""
_NAME = re.compile(r"images?[-.]idx\d[-.]ubyte(\.gz)?$")


def is_images(name: str) -> bool:
    """Return whether a file of this name is one of images in the IDX format (``train-images-idx3-ubyte.gz``)."""
    return _NAME.search(name.lower()) is not None


def read_idx(path: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    """Return the array in the IDX file ``path``, uint8; it must have one of these numbers of dimensions."""
    with reading(path), path.open("rb") as raw:
        packed = raw.read(2) == GZIP
        raw.seek(0)
        try:
            return _read(path, gzip.GzipFile(fileobj=raw) if packed else raw, dimensions, packed)  # type: ignore[arg-type]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise KinformerError(f"{path}: is truncated or damaged ({error}); fetch it again.") from None


def _read(path: Path, file: BinaryIO, dimensions: tuple[int, ...], packed: bool) -> np.ndarray:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _BYTES or head[3] not in dimensions:
        kinds = " or ".join(map(str, dimensions))
        raise KinformerError(
            f"{path}: begins with {head.hex(' ') or 'nothing'}, so it is no IDX file of bytes in {kinds} dimensions "
            f"(00 00 08 and their number); give one as MNIST's are."
        )
    sizes = file.read(4 * head[3])
    shape = struct.unpack(f">{head[3]}I", sizes) if len(sizes) == 4 * head[3] else (0,)
    expected, size = math.prod(shape), path.stat().st_size
    if not expected:
        raise KinformerError(f"{path}: holds nothing (its sizes are {shape}); fetch it again.")
    check_ratio(path, expected, size if packed else expected)
    content = file.read(expected + 1) if packed or expected <= size else b""
    if len(content) != expected:
        amount = "more" if len(content) > expected else "fewer"
        shown = " x ".join(map(str, shape))
        raise KinformerError(f"{path}: has {amount} bytes than the {shown} that its head announces; fetch it again.")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_idx_file(path: Path) -> ImageSet:
    """Return the images in the IDX file ``path``, and their labels if the file of labels stands beside it."""
    return _image_set({"train": path})


def read_idx_folder(folder: Path, files: list[Path]) -> ImageSet:
    """Return the images in a folder that has the IDX files ``files``, a file a split, recognised by their names."""
    by_split: dict[str, Path] = {}
    for path in files:
        split = _split_of(path.name.lower())
        other = by_split.setdefault(split, path)
        if other != path and other.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
            raise KinformerError(
                f"{folder}: holds two files of images for {split}, {other.name} and {path.name}; give a folder with "
                "one of them, or a file."
            )
    if "train" not in by_split:
        raise KinformerError(f"{folder}: holds no file of training images; name it train-images-idx3-ubyte.gz.")
    return _image_set(by_split)


def _split_of(name: str) -> str:
    if "t10k" in name or "test" in name:
        return "test"
    return "validation" if "valid" in name else "train"


def _image_set(paths: dict[str, Path]) -> ImageSet:
    parts = {split: _part(path) for split, path in paths.items()}
    shapes = {np.asarray(part.images).shape[1:]: split for split, part in parts.items()}
    if len(shapes) > 1:
        shown = " and ".join(f"{' x '.join(map(str, shape))} ({split})" for shape, split in shapes.items())
        raise KinformerError(f"{paths['train'].parent}: has images of unlike sizes, {shown}; give one set of images.")
    (shape,) = shapes
    height, width, *channels = shape
    if channels not in ([], [1], [3]):
        raise KinformerError(f"{paths['train']}: has images of {plural(channels[0], 'channel')}; 1 and 3 are known.")
    return ImageSet(parts, (height, width, channels[0] if channels else 1))


def _part(path: Path) -> Part:
    images = read_idx(path, (3, 4))
    labels = labels_beside(path)
    if labels is None:
        return array_part(images, None)
    numbers = read_idx(labels, (1,))
    if len(numbers) != len(images):
        raise KinformerError(
            f"{labels}: has {plural(len(numbers), 'label')} for the {plural(len(images), 'image')} of {path.name}."
        )
    return array_part(images, numbers)


def labels_beside(path: Path) -> Path | None:
    """Return the file of labels that belongs to the images ``path``:
    ``train-labels-idx1-ubyte.gz`` for those of MNIST."""
    start = path.name.lower().rindex("image")
    rest = re.sub("(?i)idx[0-9]", "idx1", re.sub("(?i)^image", "label", path.name[start:])).removesuffix(".gz")
    names = (f"{path.name[:start]}{rest}", f"{path.name[:start]}{rest}.gz")
    return next((item for name in names if (item := path.with_name(name)).is_file()), None)
