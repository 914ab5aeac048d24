"""Images in a NumPy archive (.npz), as Keras's MNIST and MedMNIST come; nothing in it is ever unpickled."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kinformer.data.image_source import SPLITS, ImageSet, array_part
from kinformer.runtime.archives import read_arrays
from kinformer.runtime.errors import KinformerError

_IMAGES, _LABELS = ("images", "image", "pixels", "x"), ("labels", "label", "y")
_LIKE = "images and labels, x_train and y_train, or train_images and train_labels"


def read_npz(path: Path) -> ImageSet:
    """Return the images in the archive ``path``: uint8 [count, height, width] or [count, height, width, channels].

    Arrays are ``images`` (or ``x``) and, if there are any, ``labels`` (or ``y``), or these with a split before or
    behind (``x_test``, ``val_images``). Raises :class:`KinformerError` for other archives.
    """
    named, names = read_arrays(path, lambda name: _role(name) is not None)
    arrays = {role: array for name, array in named.items() if (role := _role(name)) is not None}
    if "train" not in {split for split, what in arrays if what == "images"}:
        raise KinformerError(f"{path}: holds {', '.join(sorted(names)) or 'nothing'}; name its arrays {_LIKE}.")
    parts = {}
    for (split, what), images in arrays.items():
        if what == "images":
            _check_images(path, images, arrays["train", "images"])
            parts[split] = array_part(images, _labels(path, split, arrays.get((split, "labels")), len(images)))
    height, width, *channels = arrays["train", "images"].shape[1:]
    return ImageSet(parts, (height, width, channels[0] if channels else 1))


def _role(name: str) -> tuple[str, str] | None:
    """Return the split and the kind of an array, None if it is neither images nor labels."""
    words = name.lower().split("_")
    split = next((SPLITS[word] for word in words if word in SPLITS), "train")
    rest = "_".join(word for word in words if word not in SPLITS)
    what = "images" if rest in _IMAGES else "labels" if rest in _LABELS else None
    return None if what is None else (split, what)


def _check_images(path: Path, images: np.ndarray, train: np.ndarray) -> None:
    shape = " x ".join(map(str, images.shape))
    if images.dtype != np.uint8:
        raise KinformerError(
            f"{path}: its images are {images.dtype}, bytes are expected; save them as "
            "(255 * images).round().astype('uint8') if they lie between 0 and 1."
        )
    if images.ndim not in (3, 4) or not images.size or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise KinformerError(
            f"{path}: its images are {shape}, expected are count x height x width, with x 1 or x 3 channels behind."
        )
    if images.shape[1:] != train.shape[1:]:
        raise KinformerError(f"{path}: has images of unlike sizes, {images.shape[1:]} and {train.shape[1:]}.")


def _labels(path: Path, split: str, labels: np.ndarray | None, count: int) -> np.ndarray | None:
    if labels is None:
        return None
    if labels.shape not in ((count,), (count, 1)) or labels.dtype.kind not in "iub":
        shape = " x ".join(map(str, labels.shape))
        raise KinformerError(
            f"{path}: its labels of {split} are {labels.dtype}, {shape}; expected are {count} whole numbers."
        )
    return labels.reshape(count).astype(np.int64)
