from __future__ import annotations

import gzip
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from kinformer.lab.data.images import ImageData, decode, read_head, read_images
from kinformer.runtime.errors import KinformerError

RANDOM = np.random.default_rng(0)


def pixels(count: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (count, *shape), dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def in_idx(folder: Path, counts: dict[str, int], packed: bool = True) -> dict[str, np.ndarray]:
    """Files as MNIST's of 4 x 3 pixels; the label of an image is its first pixel modulo 3."""
    written = {}
    for prefix, count in counts.items():
        images = written[prefix] = pixels(count, 4, 3)
        for name, array in (("images-idx3", images), ("labels-idx1", images[:, 0, 0] % 3)):
            data = idx(array)
            path = folder / f"{prefix}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
    return written


def rows(array: np.ndarray) -> list[bytes]:
    return sorted(row.tobytes() for row in array)


@pytest.fixture
def read(tmp_path):
    def reading(data: object, **options: object) -> ImageData:
        return read_images(str(data), cache=tmp_path / "cache", **options)

    return reading


def test_digits_are_there_without_any_package(read):
    data = read("digits")
    assert data.identity["images"] == {"train": 1437, "validation": 180, "test": 180}
    assert (data.shape, data.classes) == ((8, 8, 1), tuple("0123456789"))
    assert {part.pixels.dtype.name for part in data.splits.values()} == {"uint8"}
    everything = np.concatenate([part.pixels for part in data.splits.values()])
    assert (len(np.unique(everything)), everything.min(), everything.max()) == (17, 0, 255)
    labels = np.concatenate([part.labels for part in data.splits.values()])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_and_their_labels(read, tmp_path, packed):
    folder = tmp_path / "mnist"
    folder.mkdir()
    written = in_idx(folder, {"train": 40, "t10k": 5}, packed)
    data = read(folder)
    np.testing.assert_array_equal(data.test.pixels[..., 0], written["t10k"])
    assert rows(np.concatenate([data.train.pixels, data.validation.pixels])) == rows(written["train"])
    assert (len(data.train), len(data.validation)) == (36, 4)
    for part in data.splits.values():
        names = [part.classes[label] for label in part.labels]
        assert names == [str(label) for label in part.pixels[:, 0, 0, 0] % 3]


def test_what_was_read_is_kept_and_mapped(read, tmp_path, monkeypatch):
    folder = tmp_path / "mnist"
    folder.mkdir()
    in_idx(folder, {"train": 20})
    first = read(folder)
    monkeypatch.setattr("kinformer.lab.data.images._find", None)
    again = read(folder)
    assert isinstance(again.train.pixels, np.memmap)
    assert not again.train.pixels.flags.writeable
    np.testing.assert_array_equal(first.train.pixels, again.train.pixels)
    assert first.identity == again.identity


def test_one_idx_file_with_its_labels(read, tmp_path):
    in_idx(tmp_path, {"train": 20, "t10k": 10})
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    data = read(path, holdout=0.2)
    assert data.identity["images"] == {"train": 8, "validation": 2, "test": 2}
    np.testing.assert_array_equal(data.validation.pixels, data.test.pixels)
    labels = path.with_name("t10k-labels-idx1-ubyte.gz")
    labels.write_bytes(gzip.compress(idx(np.full(10, 7, np.uint8))))
    assert read(path).classes == ("7",)
    labels.unlink()
    assert read(path).train.labels is None


def test_changed_files_are_other_data(read, tmp_path):
    in_idx(tmp_path, {"train": 20})
    first = read(tmp_path)
    in_idx(tmp_path, {"train": 20})
    assert read(tmp_path).fingerprint != first.fingerprint
    assert rows(read(tmp_path).train.pixels) != rows(first.train.pixels)


BAD_IDX = {
    "cut": (idx(pixels(9, 4, 3))[:-1], "has fewer bytes than the 9 x 4 x 3"),
    "long": (idx(pixels(9, 4, 3)) + b"\0", "has more bytes"),
    "other": (b"GIF89a" + bytes(40), "begins with 47 49 46 38"),
    "head": (bytes([0, 0, 8, 3, 0, 0]), "holds nothing"),
    "floats": (bytes([0, 0, 13, 3]) + bytes(12), "begins with 00 00 0d 03"),
    "hostile head": (bytes([0, 0, 8, 3]) + b"\xff" * 12, "has fewer bytes"),
    "cut gzip": (gzip.compress(idx(pixels(9, 4, 3)))[:-9], "cannot be unpacked"),
    "bomb": (gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 70, 1000, 1000) + bytes(70_000_000)), "times its"),
    "no images": (idx(pixels(0, 4, 3)), "holds nothing"),
}


@pytest.mark.parametrize("name", BAD_IDX)
def test_bad_idx_files_are_refused(read, tmp_path, name):
    content, message = BAD_IDX[name]
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(KinformerError, match=message):
        read(tmp_path)


def test_idx_folders_that_say_too_little(read, tmp_path):
    in_idx(tmp_path, {"t10k": 9})
    with pytest.raises(KinformerError, match="not hold a file of training images"):
        read(tmp_path)
    in_idx(tmp_path, {"train": 9, "letters-train": 9})
    with pytest.raises(KinformerError, match="two files of images for train"):
        read(tmp_path)
    (tmp_path / "letters-train-images-idx3-ubyte.gz").unlink()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(8, np.uint8))))
    with pytest.raises(KinformerError, match="its labels of train are uint8, 8; expected are 9 whole numbers"):
        read(tmp_path)


@pytest.mark.parametrize("names", [("images", "labels"), ("x_train", "y_train"), ("train_images", "train_labels")])
def test_archives_of_arrays(read, tmp_path, names):
    images = pixels(30, 2, 5, 3)
    np.savez_compressed(tmp_path / "a.npz", **{names[0]: images, names[1]: images[:, 0, 0, :1] % 4 + 8})
    data = read(tmp_path / "a.npz")
    assert (data.shape, data.classes) == ((2, 5, 3), ("8", "9", "10", "11"))
    assert rows(np.concatenate([part.pixels for part in data.splits.values()])) == rows(images)
    assert (data.train.labels == data.train.pixels[:, 0, 0, 0] % 4).all()


def test_archives_with_splits_and_without_labels(read, tmp_path):
    train, test = pixels(30, 2, 5), pixels(4, 2, 5)
    np.savez(tmp_path / "a.npz", x_train=train, x_test=test)
    data = read(tmp_path / "a.npz")
    np.testing.assert_array_equal(data.test.pixels[..., 0], test)
    assert (data.test.labels, data.classes, len(data.train)) == (None, (), 27)


BAD_ARRAYS = {
    "floats": ({"images": np.zeros((9, 2, 2))}, "its images are float64"),
    "flat": ({"images": pixels(9, 4)}, "its images are 9 x 4"),
    "channels": ({"images": pixels(9, 4, 4, 4)}, "its images are 9 x 4 x 4 x 4"),
    "names": ({"arr_0": pixels(9, 4, 4)}, "holds arr_0"),
    "labels": ({"x": pixels(9, 4, 4), "y": np.zeros((9, 14), np.uint8)}, "its labels of train are uint8, 9 x 14"),
    "sizes": ({"x": pixels(9, 4, 4), "x_test": pixels(9, 4, 5)}, "unlike sizes"),
    "pickle": ({"images": np.array([{}] * 9, object)}, "only a pickle can hold"),
    "few": ({"images": pixels(2, 4, 4)}, "too few images"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_archives_are_refused(read, tmp_path, name):
    arrays, message = BAD_ARRAYS[name]
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(KinformerError, match=message):
        read(tmp_path / "a.npz")


def test_archives_that_lie_are_refused(read, tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 no more")
    with pytest.raises(KinformerError, match="is truncated or no NumPy archive"):
        read(path)
    head = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999, 999, 999), }"
    for content, message in (
        (head.ljust(127) + b"\n", "shorter than its head announces"),
        (bytes(1 << 27), "times its"),
    ):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("images.npy", content)
        with pytest.raises(KinformerError, match=message):
            read(path)


# Pictures in folders


def save(path: Path, image: np.ndarray, mode: str | None = None, **options: object) -> Path:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(image)
    (picture.convert(mode) if mode else picture).save(path, **options)
    return path


def in_folder(folder: Path, count: int = 30, *shape: int) -> dict[str, np.ndarray]:
    """PNGs in the folders of two classes, by name."""
    images = dict(enumerate(pixels(count, *(shape or (4, 6)))))
    names = {f"{'cat' if index % 3 else 'dog'}/{index}.png": image for index, image in images.items()}
    for name, image in names.items():
        save(folder / name, image)
    return names


def test_a_folder_per_class(read, tmp_path):
    written = in_folder(tmp_path / "pets", 30, 4, 6, 3)
    data = read(tmp_path / "pets")
    assert (data.shape, data.classes, data.notes) == ((4, 6, 3), ("cat", "dog"), ())
    assert data.identity["images"] == {"train": 24, "validation": 3, "test": 3}
    classes = {image.tobytes(): name.split("/")[0] for name, image in written.items()}
    for part in data.splits.values():
        assert [classes.pop(row.tobytes()) for row in part.pixels] == [part.classes[each] for each in part.labels]
    assert not classes


def test_a_folder_without_classes_has_no_labels(read, tmp_path):
    for index, image in enumerate(pixels(10, 4, 6)):
        save(tmp_path / "pets" / f"{index}.png", image)
    data = read(tmp_path / "pets")
    assert (data.shape, data.classes, data.train.labels) == ((4, 6, 1), (), None)


def test_splits_as_folders(read, tmp_path):
    written = in_folder(tmp_path / "pets" / "train")
    held = in_folder(tmp_path / "pets" / "val", 6)
    data = read(tmp_path / "pets")
    assert data.identity["images"] == {"train": 27, "validation": 6, "test": 3}
    assert rows(data.validation.pixels) == rows(np.stack(list(held.values())))
    assert rows(np.concatenate([data.train.pixels, data.test.pixels])) == rows(np.stack(list(written.values())))


def changed(folder: Path) -> Path:
    in_folder(folder)
    return folder / "cat" / "1.png"


def single(data: ImageData, image: np.ndarray) -> bool:
    return any((row == image).all() for part in data.splits.values() for row in part.pixels)


def test_transparent_pixels_are_laid_over_white(read, tmp_path):
    image = pixels(1, 4, 6, 4)[0]
    image[..., 3] = 255
    image[0, :, 3] = 0
    save(changed(tmp_path / "pets"), image)
    data = read(tmp_path / "pets")
    expected = image[..., :3].copy()
    expected[0] = 255
    assert single(data, expected)
    assert data.notes == (
        "1 picture with transparency, laid over white",
        "29 pictures grey among coloured ones, made RGB",
    )


def test_the_upper_bits_of_sixteen_are_kept(read, tmp_path):
    image = RANDOM.integers(0, 1 << 16, (4, 6), dtype=np.uint16)
    save(changed(tmp_path / "pets"), image)
    data = read(tmp_path / "pets")
    assert single(data, (image >> 8).astype(np.uint8)[..., None])
    assert data.notes == ("1 picture of 16 bits, cut to the upper 8",)


def test_palettes_and_bits_are_looked_up(read, tmp_path):
    image = np.where(pixels(1, 4, 6) > 127, 255, 0).astype(np.uint8)[0]
    path = changed(tmp_path / "pets")
    save(path, np.stack([image, image, image], -1), "P")
    save(path.with_name("2.png"), 255 - image, "1")
    data = read(tmp_path / "pets")
    assert data.shape == (4, 6, 3)
    assert single(data, image[..., None])
    assert single(data, 255 - image[..., None])
    assert data.notes[0] == "1 picture with a palette, looked up"


def test_cmyk_becomes_rgb_and_cameras_are_turned(read, tmp_path):
    from PIL import Image

    folder = tmp_path / "pets"
    for index in range(8):
        save(folder / f"{index}.jpg", np.full((8, 16, 3), 30 * index, np.uint8), quality=95)
    save(folder / "a.jpg", np.full((8, 16, 3), 250, np.uint8), "CMYK", quality=95)
    exif = Image.Exif()
    exif[0x0112] = 6
    tall = np.zeros((16, 8, 3), np.uint8)
    tall[:8] = 255  # above; turned clockwise, at the right
    save(folder / "b.jpg", tall, exif=exif, quality=95)
    data = read(folder)
    assert data.shape == (8, 16, 3)
    assert data.notes == ("1 picture in CMYK, made RGB", "1 picture turned as their camera says")
    every = np.concatenate([part.pixels for part in data.splits.values()]).astype(int)
    assert any((row > 240).all() for row in every)
    assert any((row[:, 9:] > 240).all() and (row[:, :7] < 15).all() for row in every)


@pytest.mark.parametrize("form", ["MPO", "PNG", "PNG, behind the rows"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_pictures_of_phones_are_turned_whatever_their_form(tmp_path, form, orientation):
    """A phone's .jpg may hold several pictures (MPO), and PNG has EXIF, too."""
    from PIL import Image, ImageOps

    stored = np.zeros((16, 24, 3), np.uint8)
    stored[:, :12], stored[:4, 12:] = (255, 0, 0), (0, 255, 0)
    picture, exif = Image.fromarray(stored), Image.Exif()
    exif[0x0112] = orientation
    options = {"save_all": True, "append_images": [picture], "quality": 95} if form == "MPO" else {}
    path = tmp_path / ("phone.jpg" if form == "MPO" else "phone.png")
    picture.save(path, form[:3], exif=exif, **options)
    if "behind" in form:
        data = path.read_bytes()
        begin = data.index(b"eXIf") - 4
        end = begin + 12 + int.from_bytes(data[begin : begin + 4], "big")
        path.write_bytes(data[:begin] + data[end:-12] + data[begin:end] + data[-12:])
    with Image.open(path) as opened:
        upright = np.asarray(ImageOps.exif_transpose(opened)).astype(int)
    head = read_head(path)
    assert (head.height, head.width, head.turned) == (*upright.shape[:2], orientation > 4)
    assert np.abs(decode(path, upright.shape).astype(int) - upright).max() < 3


def png(width: int, height: int, rows: bytes = b"\0", interlaced: bool = False) -> bytes:
    """A PNG that announces a size and holds ``rows``, next to nothing."""
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, interlaced)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


BAD_PICTURES = {
    "empty": (b"", "1.png: is empty, not a picture; give a PNG or JPEG"),
    "text": (b"no picture at all", "1.png: is text, not a picture; give a PNG or JPEG"),
    "bmp": (b"BM" + bytes(60), "1.png: is no PNG or JPEG that can be read"),
    "bomb": (png(60_000, 60_000), "1.png: .*(60000 x 60000 pixels|decompression bomb)"),
    "large": (png(9000, 9000), "1.png: has 9000 x 9000 pixels, more than 67108864"),
    "unlike": (png(6, 5), "cat/1.png has 6 x 5 pixels, 29 of 30 pictures have 6 x 4"),
    "one row of four": (png(6, 4, bytes(19)), "1.png: holds 19 of the 76 bytes of its rows"),
    "all but a row": (png(6, 4, bytes(57)), "1.png: holds 57 of the 76 bytes"),
    "one pass of seven": (png(6, 4, bytes(4), interlaced=True), "1.png: holds 4 of the 80 bytes"),
    "nothing in it": (png(6, 4), "1.png: is no PNG or JPEG that can be read .*truncated"),
}


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_bad_pictures_are_one_sentence(read, tmp_path, name):
    content, message = BAD_PICTURES[name]
    changed(tmp_path / "pets").write_bytes(content)
    with pytest.raises(KinformerError, match=message):
        read(tmp_path / "pets")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (9, 17)])
def test_whole_pictures_of_any_kind_hold_all_their_rows(tmp_path, mode, size):
    from PIL import Image

    from kinformer.lab.data.images import require_rows

    Image.new(mode, size).save(tmp_path / "a.png")
    require_rows(tmp_path / "a.png")


def test_heads_are_read_without_rows(tmp_path):
    (tmp_path / "a.png").write_bytes(png(6, 4))
    head = read_head(tmp_path / "a.png")
    assert (head.width, head.height, head.turned) == (6, 4, False)


def test_pictures_damaged_anywhere_are_read_or_refused(tmp_path):
    shape = (5, 7, 3)
    for suffix in ("png", "jpg"):
        path = save(tmp_path / f"a.{suffix}", np.random.default_rng(0).integers(0, 256, shape, np.uint8))
        data = path.read_bytes()
        damaged = [data[:size] for size in range(len(data))]
        damaged += [data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :] for place in range(len(data))]
        for content in damaged:
            path.write_bytes(content)
            try:
                assert decode(path, shape).shape == shape
            except KinformerError as error:
                assert path.name in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_truncated_pictures_are_refused(read, tmp_path, suffix):
    path = save(changed(tmp_path / "pets").with_name(f"cut.{suffix}"), pixels(1, 4, 6)[0])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(KinformerError, match=f"cut.{suffix}: is no PNG or JPEG that can be read"):
        read(tmp_path / "pets")


def test_a_size_scales_and_crops_the_middle(read, tmp_path):
    image = np.zeros((4, 12), np.uint8)
    image[:, 4:8] = 200
    save(changed(tmp_path / "pets"), image)
    data = read(tmp_path / "pets", size=2)
    assert data.shape == (2, 2, 1)
    assert single(data, np.full((2, 2, 1), 200, np.uint8))


def test_other_files_are_left_out_and_told(read, tmp_path):
    in_folder(tmp_path / "pets")
    (tmp_path / "pets" / "about.txt").write_text("pets")
    assert read(tmp_path / "pets").notes == ("1 file left out, which must be PNG or JPEG, about.txt among them",)


def test_folders_that_say_too_little(read, tmp_path):
    folder = tmp_path / "pets"
    in_folder(folder)
    loose = save(folder / "1.png", pixels(1, 4, 6)[0])
    with pytest.raises(KinformerError, match="1.png stands in no class's folder"):
        read(folder)
    loose.unlink()
    save(folder / "test" / "cat" / "1.png", pixels(1, 4, 6)[0])
    with pytest.raises(KinformerError, match="beside the splits test"):
        read(folder)
    save(tmp_path / "other" / "test" / "cat" / "1.png", pixels(1, 4, 6)[0])
    with pytest.raises(KinformerError, match="does not hold a train split"):
        read(tmp_path / "other")


def test_what_is_no_data_is_refused(read, tmp_path):
    with pytest.raises(KinformerError, match="does not exist; give a folder"):
        read(tmp_path / "nothing")
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(KinformerError, match="a.tar.gz: is gzip-compressed; give a folder .+, unpacked"):
        read(tmp_path / "a.tar.gz")
    with pytest.raises(KinformerError, match="neither pictures nor IDX files"):
        read(tmp_path)
    with pytest.raises(KinformerError, match="holdout is 1.5"):
        read("digits", holdout=1.5)
    with pytest.raises(KinformerError, match="leave the size 4 out"):
        read("digits", size=4)


def test_pictures_need_pillow(read, tmp_path, monkeypatch):
    in_folder(tmp_path / "pets")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(KinformerError, match=r"pip install 'kinformer\[vision\]'"):
        read(tmp_path / "pets")
