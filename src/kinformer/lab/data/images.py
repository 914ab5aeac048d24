"""Images to train and to evaluate on: IDX files, a NumPy archive, a folder of pictures, or scikit-learn's digits.

They are decoded once, stored as bytes on disk and mapped into memory from there. A run stores the identity of its data,
since metrics on different data do not compare.

``digits.npz`` is the test set of Optical Recognition of Handwritten Digits (Alpaydin and Kaynak 1998, CC BY 4.0) as
scikit-learn ships it: 1,797 images of 8 x 8 pixels, whose 17 shades are here bytes from 0 to 255.
"""

import math
import re
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kinformer.lab.data.files import (
    Identified,
    SourceFile,
    atomic_write,
    content_of,
    existing_path,
    fingerprint_of,
    folder_files,
    single_file,
    stored,
)
from kinformer.lab.tables import read_arrays, read_unpacked
from kinformer.runtime.errors import KinformerError, plural, require, require_share
from kinformer.runtime.files import default_cache, reading, require_file
from kinformer.runtime.plugins import import_extra

# The result of a reader of images: the images of each split, of one shape, before some are held out and all stored.

SPLITS = dict.fromkeys(("validation", "valid", "val", "dev"), "validation") | {"train": "train", "test": "test"}
"""Names that people give to splits, and ours."""
PARTS = ("train", "validation", "test")
HELD_OUT = 0.05


class Part(NamedTuple):
    """The images of one split: ``image(i)`` is uint8 [height, width, channels] or, for grey images, [height, width].
    Hashes of ``keys``, which can be read once, give a random order; ``labels`` are names of classes."""

    size: int
    image: Callable[[int], np.ndarray]
    keys: Iterable[bytes]
    labels: Sequence[str] | None


@dataclass(frozen=True)
class ImageSet:
    """All images of a reader: ``shape`` is (height, width, channels), ``notes`` say what was changed or left out."""

    parts: Mapping[str, Part]
    shape: tuple[int, int, int]
    notes: list[str] = field(default_factory=list)


def check_splits(place: Path, names: Collection[str], stray: str) -> None:
    """Refuse data in splits called ``names`` ("" where none is named) beside ``stray`` data, or without "train"."""
    named = [name for name in names if name]
    if named and "" in names:
        raise KinformerError(f"{place}: holds {stray} beside the splits {', '.join(named)}; put every file into one.")
    if named and "train" not in named:
        raise KinformerError(f"{place}: does not hold a train split; add a folder, or a table, of that name.")


def hold_out(
    present: Collection[str],
    digests: Sequence[bytes] | np.ndarray,
    holdout: float | None,
    place: str | Path,
    what: str,
    share: float = HELD_OUT,
) -> dict[str, np.ndarray]:
    """Return the indices of the splits that are not ``present``, in the training data, and of the rest of these data.
    Each missing split takes the next ``share`` of the training data in the order of their ``digests``, the same shuffle
    on every machine. With ``holdout``, this share is both validation and test."""
    train, rows = np.argsort(np.asarray(digests), kind="stable"), dict[str, np.ndarray]()
    count = math.ceil((share if holdout is None else holdout) * len(train))
    for name in ("test", "validation"):
        if holdout is not None and name == "validation" and "test" not in present and name not in present:
            rows[name] = rows["test"]
        elif name not in present:
            rows[name], train = train[:count], train[count:]
    if not len(train):
        raise KinformerError(f"{place}: too few {what} ({len(digests)}) to hold some out; give more data.")
    return rows | {"train": train}


def ordered(labels: Collection[str]) -> list[str]:
    """Return labels by number where all are numbers, else by letter."""
    return sorted(labels, key=int if all(label.isdecimal() for label in labels) else str)


def _in_memory(place: Path, images: Mapping[str, np.ndarray], labels: Mapping[str, np.ndarray]) -> ImageSet:
    """Return ``images`` [count, height, width] or [count, height, width, channels], and ``labels``, of every split."""
    parts = {}
    for split, some in images.items():
        count, shape, numbers = len(some), " x ".join(map(str, some.shape)), labels.get(split)
        if some.dtype != np.uint8:
            raise KinformerError(
                f"{place}: its images are {some.dtype}, bytes are expected; save them as "
                "(255 * images).round().astype('uint8') if they lie between 0 and 1."
            )
        if some.ndim not in (3, 4) or not some.size or (some.ndim == 4 and some.shape[3] not in (1, 3)):
            raise KinformerError(
                f"{place}: its images are {shape}, expected are count x height x width, with 1 or 3 channels behind."
            )
        if some.shape[1:] != images["train"].shape[1:]:
            raise KinformerError(
                f"{place}: has images of unlike sizes, {some.shape[1:]} and {images['train'].shape[1:]}; give one size."
            )
        if numbers is not None and (numbers.shape not in ((count,), (count, 1)) or numbers.dtype.kind not in "iub"):
            shape = " x ".join(map(str, numbers.shape))
            raise KinformerError(
                f"{place}: its labels of {split} are {numbers.dtype}, {shape}; expected are {count} whole numbers."
            )
        names = None if numbers is None else list(map(str, numbers.reshape(count).astype(np.int64).tolist()))
        parts[split] = Part(count, some.__getitem__, map(np.ndarray.tobytes, some), names)
    height, width, *channels = images["train"].shape[1:]
    return ImageSet(parts, (height, width, channels[0] if channels else 1))


# Files in the IDX format, in which MNIST and its relatives come, plain or compressed by gzip.
#
# Four bytes (0, 0, the type of the elements, the number of dimensions), the size of each dimension as a big-endian
# int32, and the elements. Images are bytes [count, height, width] or [count, height, width, channels], labels bytes
# [count].

_BYTES = 8
"""The type of unsigned bytes."""
_NAME = re.compile(r"images?[-.]idx\d[-.]ubyte(\.gz)?$")


def is_images(name: str) -> bool:
    """Return whether this is the name of a file of images in the IDX format (``train-images-idx3-ubyte.gz``)."""
    return _NAME.search(name.lower()) is not None


def read_idx(path: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    """Return the array in the IDX file ``path``, uint8; it must have one of these numbers of dimensions."""
    content = read_unpacked(path)
    head = content[:4]
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _BYTES or head[3] not in dimensions:
        kinds = " or ".join(map(str, dimensions))
        raise KinformerError(
            f"{path}: begins with {head.hex(' ') or 'nothing'}, so it is no IDX file of bytes in {kinds} dimensions "
            f"(00 00 08 and their number); give one as MNIST's are."
        )
    start = 4 + 4 * head[3]
    shape = struct.unpack(f">{head[3]}I", content[4:start]) if len(content) >= start else (0,)
    if not math.prod(shape):
        raise KinformerError(f"{path}: holds nothing (its sizes are {shape}); fetch it again.")
    if len(content) - start != math.prod(shape):
        amount = "more" if len(content) - start > math.prod(shape) else "fewer"
        shown = " x ".join(map(str, shape))
        raise KinformerError(f"{path}: has {amount} bytes than the {shown} that its head announces; fetch it again.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_idx_folder(folder: Path, files: list[Path]) -> ImageSet:
    """Return the images of ``folder`` from the IDX files ``files``, one file a split, recognised by their names."""
    by_split: dict[str, Path] = {}
    for path in files:
        name = path.name.lower()
        split = "test" if "t10k" in name or "test" in name else "validation" if "valid" in name else "train"
        other = by_split.setdefault(split, path)
        if other != path and other.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
            raise KinformerError(
                f"{folder}: holds two files of images for {split}, {other.name} and {path.name}; give one of them."
            )
    if "train" not in by_split:
        raise KinformerError(f"{folder}: does not hold a file of training images; name it train-images-idx3-ubyte.gz.")
    return _of_idx(folder, by_split)


def _of_idx(place: Path, paths: Mapping[str, Path]) -> ImageSet:
    images = {split: read_idx(path, (3, 4)) for split, path in paths.items()}
    beside = {split: labels for split, path in paths.items() if (labels := labels_beside(path)) is not None}
    return _in_memory(place, images, {split: read_idx(path, (1,)) for split, path in beside.items()})


def labels_beside(path: Path) -> Path | None:
    """Return the labels' file of the images ``path``, such as ``train-labels-idx1-ubyte.gz``; None if missing."""
    start = path.name.lower().rindex("image")
    rest = re.sub("(?i)idx[0-9]", "idx1", re.sub("(?i)^image", "label", path.name[start:])).removesuffix(".gz")
    names = (f"{path.name[:start]}{rest}", f"{path.name[:start]}{rest}.gz")
    return next((item for name in names if (item := path.with_name(name)).is_file()), None)


# Images in a NumPy archive (.npz), as Keras's MNIST and MedMNIST come; nothing in it is ever unpickled.

_IMAGES, _LABELS = ("images", "image", "pixels", "x"), ("labels", "label", "y")
_LIKE = "images and labels, x_train and y_train, or train_images and train_labels"


def read_npz(path: Path) -> ImageSet:
    """Return the images in the archive ``path``: uint8 [count, height, width] or [count, height, width, channels].
    Arrays are ``images`` (or ``x``) and, if there are any, ``labels`` (or ``y``), or these with a split before or
    behind (``x_test``, ``val_images``)."""
    named, names = read_arrays(path, lambda name: _role(name) is not None)
    roles = [(_role(name), array) for name, array in named.items()]
    images, labels = (
        {role[0]: array for role, array in roles if role is not None and role[1] == what}
        for what in ("images", "labels")
    )
    if "train" not in images:
        raise KinformerError(f"{path}: holds {', '.join(sorted(names)) or 'nothing'}; name its arrays {_LIKE}.")
    return _in_memory(path, images, labels)


def _role(name: str) -> tuple[str, str] | None:
    """Return the split and the kind of an array, None if it is neither images nor labels."""
    words = name.lower().split("_")
    split = next((SPLITS[word] for word in words if word in SPLITS), "train")
    rest = "_".join(word for word in words if word not in SPLITS)
    what = "images" if rest in _IMAGES else "labels" if rest in _LABELS else None
    return None if what is None else (split, what)


# The chunks of a PNG: a check that it holds all of its rows, since Pillow decodes one whose data end early as if the
# rest were black, and its EXIF, which may stand behind the rows.

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""The channels of each type of colour."""
_WHOLE = ((0, 0, 1, 1),)
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row of each pass of an interlaced picture, and the steps to the next."""


def _chunks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the names and contents of the chunks of a PNG; none of other files."""
    data, at = path.read_bytes(), len(SIGNATURE)
    while data.startswith(SIGNATURE) and len(head := data[at : at + 8]) == 8:
        length, name = struct.unpack(">I4s", head)
        yield name, data[at + 8 : at + 8 + length]
        at += length + 12


def require_rows(path: Path) -> None:
    """Refuse a PNG whose data unpack to fewer bytes than its size needs; other files pass. Errors: ``ValueError`` or
    ``zlib.error`` where the file breaks the PNG format after its head."""
    chunks = list(_chunks(path))
    expected = next((_bytes(*struct.unpack(">IIBBBBB", chunk[:13])) for name, chunk in chunks if name == b"IHDR"), 0)
    rows = b"".join(chunk for name, chunk in chunks if name == b"IDAT")
    present = len(zlib.decompressobj().decompress(rows, expected)) if expected else 0
    if present < expected:
        raise KinformerError(f"{path}: holds {present} of the {plural(expected, 'byte')} of its rows; replace it.")


def _bytes(width: int, height: int, depth: int, colour: int, _method: int, _filter: int, interlaced: int) -> int:
    """Return the bytes that all rows take, each with the byte that says how it is filtered."""
    if colour not in _CHANNELS:
        raise ValueError(f"its colours are of the type {colour}")
    total = 0
    for left, top, across, down in _ADAM7 if interlaced else _WHOLE:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * depth * _CHANNELS[colour] // 8))
    return total


# Pictures in a folder, PNG or JPEG, read by Pillow (the extra ``vision``): a folder per class, or none.
#
#     pictures/cat/1.png      pictures/train/cat/1.png      pictures/1.png
#     pictures/dog/2.jpg      pictures/test/cat/7.png       pictures/2.jpg
#
# All become bytes of one shape. Grey stays grey where all are; a palette is looked up, CMYK becomes RGB, 16 bits
# become 8, transparent pixels are laid over white, and a camera's rotation is applied; a note says what was changed.

SUFFIXES = (".png", ".jpg", ".jpeg")
_PICTURES = ("a PNG picture", "a JPEG picture")
MOST_PIXELS = 1 << 26
_GREY, _DEEP = {"1", "L", "LA", "La"}, {"I;16", "I;16B"}
_COLOUR = {"RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr"}
_ORIENTATION, _TURNED = 274, (5, 6, 7, 8)
_TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"}
_TURNS |= {6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}
"""How a picture of each orientation is made upright."""


class Head(NamedTuple):
    """The head of a picture's file: its size, mode, transparency and rotation, before its pixels."""

    width: int
    height: int
    mode: str
    transparent: bool
    turned: bool


def require_pillow(place: Path | str) -> Any:
    """Return Pillow's module of images, or raise one sentence."""
    return import_extra("PIL.Image", f"{place}:", "Pillow", "'kinformer[vision]'")


def read_folder(folder: Path, files: Sequence[SourceFile], size: int | None) -> ImageSet:
    """Return the pictures among ``files``, which are all of ``folder``; with ``size`` each is scaled until its shorter
    side has this many pixels, and the middle square is taken."""
    pictures = [file for file in files if Path(file.name).suffix.lower() in SUFFIXES]
    others = [file.name for file in files if Path(file.name).suffix.lower() not in SUFFIXES]
    heads = [read_head(Path(file.path)) for file in pictures]
    sizes = Counter((head.width, head.height) for head in heads)
    if size is None and len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        odd, head = next(pair for pair in zip(pictures, heads, strict=True) if pair[1][:2] != usual)
        raise KinformerError(
            f"{folder}: {odd.name} has {head.width} x {head.height} pixels, {sizes[usual]} of "
            f"{plural(len(pictures), 'picture')} have {usual[0]} x {usual[1]}; give one size, or a size that all "
            "are scaled to."
        )
    colour = any(head.mode in _COLOUR for head in heads)
    height, width = (size, size) if size else (heads[0].height, heads[0].width)
    shape = (height, width, 3 if colour else 1)
    by_split: dict[str, list[tuple[SourceFile, str | None]]] = {}
    for file in pictures:
        *folders, _ = file.name.split("/")
        split = SPLITS[folders.pop(0)] if folders and folders[0] in SPLITS else ""
        by_split.setdefault(split, []).append((file, folders[0] if folders else None))
    check_splits(folder, by_split, by_split[""][0][0].name if "" in by_split else "")
    loose = [file.name for some in by_split.values() for file, label in some if label is None]
    if loose and len(loose) < len(pictures):
        raise KinformerError(f"{folder}: {loose[0]} stands in no class's folder, others do; move it into one.")
    parts = {split or "train": _pictures(some, shape, labelled=not loose) for split, some in by_split.items()}
    return ImageSet(parts, shape, _notes(heads, others))


def _pictures(some: Sequence[tuple[SourceFile, str | None]], shape: tuple[int, int, int], labelled: bool) -> Part:
    """Return files as the images of a split, which are decoded on demand."""
    keys = (file.name.encode("utf-8", "surrogateescape") for file, _ in some)
    labels = [str(label) for _, label in some] if labelled else None
    return Part(len(some), lambda index: decode(Path(some[index][0].path), shape), keys, labels)


def read_head(path: Path) -> Head:
    """Return the head of ``path``, without its pixels. Errors: ``KinformerError`` for a file without a picture."""
    Image = require_pillow(path)
    require_file(path)
    with _decoding(path), Image.open(path, formats=("PNG", "JPEG")) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise KinformerError(f"{path}: has {width} x {height} pixels, more than {MOST_PIXELS}; scale it down.")
        if image.mode not in _GREY | _COLOUR | _DEEP:
            raise KinformerError(f"{path}: has pixels of the mode {image.mode}; save it as RGB or grey of 8 bits.")
        turned = _orientation(image, path) in _TURNED
        transparent = image.has_transparency_data
        return Head(*((height, width) if turned else (width, height)), image.mode, transparent, turned)


def decode(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the picture ``path`` as uint8 of ``shape`` (height, width, channels), scaled and cropped if it must."""
    Image = require_pillow(path)
    height, width, channels = shape
    with _decoding(path), Image.open(path, formats=("PNG", "JPEG")) as file:
        turn = _TURNS.get(_orientation(file, path))
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


def _orientation(image: Any, path: Path) -> Any:
    """Return how a camera held the picture, by its EXIF, without decoding rows, as PNG's own method does first."""
    exif = [chunk for name, chunk in _chunks(path) if name == b"eXIf"] if image.format == "PNG" else []
    if exif:
        image.info["exif"] = b"Exif\0\0" + exif[0]
    return require_pillow(path).Image.getexif(image).get(_ORIENTATION, 1)


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write ``pixels``, uint8 [height, width, 1 or 3], as a PNG."""
    Image = require_pillow(path)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    with atomic_write(path) as file:
        picture.save(file, "PNG")


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Report Pillow's errors and warnings of size as one sentence, or name the content of a file without a picture."""
    from PIL import UnidentifiedImageError

    with reading(path, "is no PNG or JPEG that can be read", "mend, replace or remove it"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*decompression bomb.*")
        try:
            yield
        except UnidentifiedImageError:
            if (what := content_of(path)) in (None, *_PICTURES):
                raise
            raise KinformerError(f"{path}: is {what}, not a picture; give a PNG or JPEG.") from None


def _notes(heads: Sequence[Head], others: Sequence[str]) -> list[str]:
    """Return notes on changed and omitted pictures, as parts of sentences."""
    grey = sum(head.mode in _GREY | _DEEP for head in heads)
    counted = {
        "with transparency, laid over white": sum(head.transparent for head in heads),
        "of 16 bits, cut to the upper 8": sum(head.mode in _DEEP for head in heads),
        "with a palette, looked up": sum(head.mode in ("P", "PA") for head in heads),
        "in CMYK, made RGB": sum(head.mode == "CMYK" for head in heads),
        "turned as their camera says": sum(head.turned for head in heads),
        "grey among coloured ones, made RGB": grey if grey < len(heads) else 0,
    }
    notes = [f"{plural(count, 'picture')} {what}" for what, count in counted.items() if count]
    if others:
        notes.append(f"{plural(len(others), 'file')} left out, which must be PNG or JPEG, {others[0]} among them")
    return notes


# Baselines of images by counting, which a model of images must beat.
#
# ``histogram``: how often each intensity occurs at a place, over the training images. ``neighbours``: how often it
# occurs after its four neighbours that raster order knows (left, upper left, upper, upper right, of the same channel),
# each in twelve steps, 0 beyond the edge. In later channels, the previous channel at the same place replaces the upper
# left. Where a smaller image is known, whose pixels are the means of blocks, the mean of the block replaces the upper
# right. Counts begin with the shares of the level above: counts of a place with the shares of all places, counts of a
# context with the shares of its channel, and counts of a channel with equal shares.

LEVELS, STEPS = 256, 12
_AT_ONCE, _MOST_TRAINED = 512, 60_000
_WEIGHT = 32.0
"""How many counts the level above is worth."""


def floors(train: np.ndarray, held_out: np.ndarray, factor: int | None = None) -> dict[str, float]:
    """Return bits per dimension of ``held_out``, counted in the first 60,000 of ``train``; both uint8 [count, height,
    width, channels]. All values are scored. With ``factor``, ``source`` replaces ``histogram``: it is ``neighbours``
    where images so many times smaller (means of blocks of pixels) are known."""
    train = train[:_MOST_TRAINED]
    other = {"source": _neighbours(train, held_out, factor)} if factor else {"histogram": _histogram(train, held_out)}
    return other | {"neighbours": _neighbours(train, held_out)}


def reduced(images: np.ndarray, factor: int) -> np.ndarray:
    """Return ``images`` uint8 [count, height, width, channels] with rounded means of blocks of ``factor`` pixels."""
    count, height, width, channels = images.shape
    blocks = images.reshape(count, height // factor, factor, width // factor, factor, channels)
    return np.rint(blocks.mean((2, 4), dtype=np.float64)).astype(np.uint8)


def _histogram(train: np.ndarray, held_out: np.ndarray) -> float:
    places = int(np.prod(train.shape[1:]))
    counts = np.zeros((places, LEVELS))
    for part in _parts(train):
        index = np.arange(places) * LEVELS + part.reshape(len(part), places)
        counts += np.bincount(index.ravel(), minlength=places * LEVELS).reshape(places, LEVELS)
    bits = -np.log2(_shares(counts, _shares(counts.sum(0), np.full(LEVELS, 1 / LEVELS))))
    sums = [bits[np.arange(places), part.reshape(len(part), places)].sum() for part in _parts(held_out)]
    return float(sum(sums) / held_out.size)


def _neighbours(train: np.ndarray, held_out: np.ndarray, factor: int | None = None) -> float:
    channels = train.shape[3]
    counts = np.zeros((channels, STEPS**4, LEVELS))
    for part in _parts(train):
        index = _contexts(part, factor) * LEVELS + part
        counts += np.bincount(index.ravel(), minlength=counts.size).reshape(counts.shape)
    whole = _shares(counts.sum(1), np.full(LEVELS, 1 / LEVELS))
    bits = -np.log2(_shares(counts, whole[:, None])).ravel()
    sums = [bits[_contexts(part, factor) * LEVELS + part].sum() for part in _parts(held_out)]
    return float(sum(sums) / held_out.size)


def _contexts(images: np.ndarray, factor: int | None = None) -> np.ndarray:
    """Return the number of each value's context, int64 like ``images``; with ``factor``, its block's mean is known."""
    steps = images.astype(np.int64) * STEPS // LEVELS
    padded = np.pad(steps, ((0, 0), (1, 0), (1, 1), (0, 0)))
    left, upper_left = padded[:, 1:, :-2], padded[:, :-1, :-2]
    upper, upper_right = padded[:, :-1, 1:-1], padded[:, :-1, 2:]
    if factor is not None:
        means = reduced(images, factor).astype(np.int64) * STEPS // LEVELS
        upper_right = means.repeat(factor, 1).repeat(factor, 2)
    second = np.concatenate([upper_left[..., :1], steps[..., :-1]], axis=-1)
    number = ((left * STEPS + second) * STEPS + upper) * STEPS + upper_right
    return number + np.arange(images.shape[3]) * STEPS**4


def _shares(counts: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return shares [..., LEVELS] of ``counts``, to which ``above`` adds its weight."""
    # A Dirichlet prior: the level above counts as ``_WEIGHT`` observations.
    return (counts + _WEIGHT * above) / (counts.sum(-1, keepdims=True) + _WEIGHT)


def _parts(images: np.ndarray) -> list[np.ndarray]:
    return [images[start : start + _AT_ONCE] for start in range(0, len(images), _AT_ONCE)]


DIGITS = "digits"
HELD_OUT_OF_FEW, FEW = 0.1, 10_000
SCHEMA = 3
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
class ImageData(Identified):
    """Named images in three splits, the same on every run; ``notes`` describe changed and omitted images."""

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
        """Return the names of the classes; empty for images without labels."""
        return self.train.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return height, width and channels of every image."""
        return self.train.shape

    @property
    def identity(self) -> dict[str, object]:
        return super().identity | {
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
    takes the middle square. ``cache`` is the folder for the bytes; ``~/.cache/kinformer`` if not given.
    """
    require_share("holdout", holdout)
    require("size", size, 1)
    digits = resources.as_file(resources.files("kinformer.lab.data") / "digits.npz")
    with digits if data == DIGITS else nullcontext(existing_path(data, f"give {_FORMATS}")) as path:
        labels = labels_beside(path) if path.is_file() and is_images(path.name) else None
        single = [file for file in (path, labels) if file is not None]
        files = folder_files(path, empty=True) if path.is_dir() else list(map(single_file, single))
        fingerprint = fingerprint_of(files)
        key = f"{'' if path.is_dir() else path.name}:{fingerprint}{holdout}{size}".encode("utf-8", "surrogateescape")

        def fill(folder: Path) -> dict[str, object]:
            images = _find(path, files, size)
            classes = ordered({label for part in images.parts.values() for label in part.labels or ()})
            train = images.parts["train"]
            digests = [blake2b(key, digest_size=16).digest() for key in train.keys]
            share = HELD_OUT_OF_FEW if train.size < FEW else HELD_OUT
            rows = hold_out(images.parts, digests, holdout, path, "images", share)
            whole = {name: (part, np.arange(part.size)) for name, part in images.parts.items()}
            for split, (part, order) in (whole | {name: (train, some) for name, some in rows.items()}).items():
                _write(folder, split, part, order, images.shape, classes)
            return {"classes": classes, "notes": images.notes}

        about, arrays = stored((cache or default_cache()) / "images" / sha256(key).hexdigest()[:32], SCHEMA, fill)
        name = DIGITS if data == DIGITS else path.resolve().name
    splits = {
        split: Images(arrays[f"{split}.pixels"], arrays.get(f"{split}.labels"), tuple(about["classes"]), split)
        for split in PARTS
    }
    return ImageData(name, fingerprint.split(":")[1][:12], fingerprint, splits, tuple(about["notes"]))


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
        return _of_idx(path, {"train": path})
    if path.suffix.lower() == ".npz":
        return read_npz(path)
    what = content_of(path) or "not a known file of images"
    raise KinformerError(f"{path}: is {what}; give {_FORMATS}, unpacked.")


def _write(
    folder: Path, split: str, part: Part, order: np.ndarray, shape: tuple[int, int, int], classes: list[str]
) -> None:
    mapped = np.lib.format.open_memmap(folder / f"{split}.pixels.npy", "w+", np.uint8, (len(order), *shape))
    for row, index in enumerate(order):
        mapped[row] = part.image(index).reshape(shape)
    mapped.flush()
    if part.labels is not None:
        numbers = {label: number for number, label in enumerate(classes)}
        np.save(folder / f"{split}.labels.npy", np.array([numbers[part.labels[index]] for index in order], np.int64))
