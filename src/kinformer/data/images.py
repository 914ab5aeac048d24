"""Images to train and to evaluate on: IDX files, a NumPy archive, a folder of pictures, or scikit-learn's digits.

They are decoded once, stored as bytes on disk and mapped into memory from there. A run stores the identity of its data,
since metrics on different data do not compare.

``digits.npz`` is the test set of Optical Recognition of Handwritten Digits (Alpaydin and Kaynak 1998, CC BY 4.0) as
scikit-learn ships it: 1,797 images of 8 x 8 pixels, whose 17 shades are here bytes from 0 to 255.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from pathlib import Path

import numpy as np

from kinformer.data.extents import fingerprint_of
from kinformer.data.files import SourceFile, folder_files, reading, single_file
from kinformer.data.formats import content_of
from kinformer.data.idx import is_images, labels_beside, read_idx_file, read_idx_folder
from kinformer.data.image_files import SUFFIXES, read_folder
from kinformer.data.image_npz import read_npz
from kinformer.data.image_source import ImageSet, Part, hash_order
from kinformer.data.stored import default_cache, stored
from kinformer.runtime.errors import KinformerError

DIGITS = "digits"
HELD_OUT, HELD_OUT_OF_FEW, FEW = 0.05, 0.1, 10_000
SCHEMA = 3
_SPLITS = ("train", "validation", "test")
_FORMATS = "a folder of PNG or JPEG pictures, IDX files as MNIST's, an .npz archive, or 'digits'"


@dataclass(frozen=True, eq=False)
class Images:
    """A split of images: ``pixels`` uint8 [count, height, width, channels], mapped into memory; ``labels`` int64
    [count], indices into ``classes``, or None; ``name`` is the split's."""

    pixels: np.ndarray
    labels: np.ndarray | None
    classes: tuple[str, ...]
    name: str

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return height, width and channels."""
        height, width, channels = self.pixels.shape[1:]
        return height, width, channels


@dataclass(frozen=True, eq=False)
class ImageData:
    """Named images in three splits, the same on every run; ``notes`` say what was changed of them or left out."""

    name: str
    version: str
    fingerprint: str
    splits: Mapping[str, Images]
    notes: tuple[str, ...]

    @property
    def train(self) -> Images:
        """Return the images to learn from."""
        return self.splits["train"]

    @property
    def validation(self) -> Images:
        """Return the images that decide between weights."""
        return self.splits["validation"]

    @property
    def test(self) -> Images:
        """Return the images of the reported metrics."""
        return self.splits["test"]

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, none where images have no labels."""
        return self.train.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return height, width and channels of every image."""
        return self.train.shape

    @property
    def identity(self) -> dict[str, object]:
        """Return the identity that a run folder stores as JSON; metrics compare only where identities are equal."""
        return {
            "name": self.name,
            "version": self.version,
            "fingerprint": self.fingerprint,
            "classes": list(self.classes),
            "shape": list(self.shape),
            "images": {name: len(split) for name, split in self.splits.items()},
        }


def read_images(
    data: str = DIGITS, *, cache: Path | None = None, holdout: float | None = None, size: int | None = None
) -> ImageData:
    """Return the images that ``data`` names: ``"digits"``, or the path of a folder or a file.

    Missing splits are held out of the training images by a hash, 5 % each (10 % of fewer than 10,000); ``holdout=0.1``
    holds out a tenth once instead, which is then validation and test. ``size`` scales pictures, of whatever sizes, and
    takes the middle square. ``cache`` is the folder for the bytes; ``~/.cache/kinformer`` if not given. Raises
    :class:`KinformerError` for a path that is missing and for images that are damaged or of unlike sizes.
    """
    if holdout is not None and not 0 < holdout < 1:
        raise KinformerError(f"holdout is {holdout} but must lie between 0 and 1; 0.1 holds out a tenth.")
    if size is not None and size < 1:
        raise KinformerError(f"size is {size} but must be 1 or more.")
    if data == DIGITS:
        with resources.as_file(resources.files("kinformer.data") / "digits.npz") as path:
            return _read_cached(path, DIGITS, cache, holdout, size)
    path = Path(data).expanduser()
    with reading(data):
        exists = path.exists()
    if not exists:
        raise KinformerError(f"{data} does not exist; give {_FORMATS}.")
    return _read_cached(path, path.resolve().name, cache, holdout, size)


def _read_cached(path: Path, name: str, cache: Path | None, holdout: float | None, size: int | None) -> ImageData:
    files = _files(path)
    fingerprint = fingerprint_of(files)
    key = sha256(
        f"{'' if path.is_dir() else path.name}:{fingerprint}{holdout}{size}".encode("utf-8", "surrogateescape")
    ).hexdigest()[:32]

    def fill(folder: Path) -> dict[str, object]:
        images = _find(path, files, size)
        classes = _ordered({label for part in images.parts.values() for label in part.labels or ()})
        for split, (part, order) in _held_out(images.parts, holdout, str(path)).items():
            _write(folder, split, part, order, images.shape, classes)
        return {"classes": classes, "notes": images.notes}

    about, arrays = stored((cache or default_cache()) / "images" / key, SCHEMA, fill)
    splits = {
        split: Images(arrays[f"{split}.pixels"], arrays.get(f"{split}.labels"), tuple(about["classes"]), split)
        for split in _SPLITS
    }
    return ImageData(name, fingerprint.split(":")[1][:12], fingerprint, splits, tuple(about["notes"]))


def _files(path: Path) -> list[SourceFile]:
    """Return the files that decide what is read of ``path``."""
    if path.is_dir():
        return folder_files(path, empty=True)
    labels = labels_beside(path) if is_images(path.name) else None
    return [single_file(path), *([] if labels is None else [single_file(labels)])]


def _find(path: Path, files: list[SourceFile], size: int | None) -> ImageSet:
    if path.is_dir() and any(Path(file.name).suffix.lower() in SUFFIXES for file in files):
        return read_folder(path, files, size)
    if size is not None:
        raise KinformerError(f"{path}: only pictures in a folder are scaled; leave the size {size} out.")
    if path.is_dir():
        named = [Path(file.path) for file in files if "/" not in file.name and is_images(file.name)]
        if not named:
            raise KinformerError(f"{path}: holds neither pictures nor IDX files of images; give {_FORMATS}.")
        return read_idx_folder(path, named)
    if is_images(path.name):
        return read_idx_file(path)
    if path.suffix.lower() == ".npz":
        return read_npz(path)
    what = content_of(path) or "no file of images that is known"
    raise KinformerError(f"{path}: is {what}; give {_FORMATS}, unpacked.")


def _write(
    folder: Path, split: str, part: Part, order: np.ndarray, shape: tuple[int, int, int], classes: list[str]
) -> None:
    mapped = np.lib.format.open_memmap(folder / f"{split}.pixels.npy", "w+", np.uint8, (len(order), *shape))
    for row, index in enumerate(order):
        mapped[row] = part.images[index].reshape(shape)
    mapped.flush()
    if part.labels is not None:
        numbers = {label: number for number, label in enumerate(classes)}
        np.save(folder / f"{split}.labels.npy", np.array([numbers[part.labels[index]] for index in order], np.int64))


def _ordered(labels: set[str]) -> list[str]:
    """Return labels by number where all are numbers, else by letter."""
    return sorted(labels, key=int if all(label.isdecimal() for label in labels) else str)


def _held_out(parts: Mapping[str, Part], holdout: float | None, place: str) -> dict[str, tuple[Part, np.ndarray]]:
    """Return of each split where its images stand, and which it has; missing splits come out of the training images."""
    train = hash_order(parts["train"].keys())
    usual = HELD_OUT if len(train) >= FEW else HELD_OUT_OF_FEW
    count = math.ceil((usual if holdout is None else holdout) * len(train))
    held_out: dict[str, tuple[Part, np.ndarray]] = {}
    for name in ("test", "validation"):
        if name in parts:
            held_out[name] = parts[name], np.arange(len(parts[name]))
        elif holdout is not None and name == "validation" and "test" not in parts:
            held_out[name] = held_out["test"]
        else:
            held_out[name], train = (parts["train"], train[:count]), train[count:]
    if not len(train):
        raise KinformerError(f"{place}: too few images ({len(parts['train'])}) to hold some out; give more.")
    return {"train": (parts["train"], train), **held_out}
