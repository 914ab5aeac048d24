"""Small corpora on disk."""

import random

import pytest

from kinformer.lab.data import Split
from kinformer.lab.data.files import Extent, Extents
from kinformer.runtime.progress import LOGGER


@pytest.fixture
def text_file(tmp_path):
    """A file of about 20,000 bytes of lines of words, with a few characters beyond ASCII."""
    words = ["wind", "tree", "naïve", "river", "stone", "€", "bird", "sings", "under", "and"]
    chosen = random.Random(0).choices(words, k=3600)
    lines = [" ".join(chosen[start : start + 9]) for start in range(0, len(chosen), 9)]
    path = tmp_path / "words.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder of 40 files of 100 to 490 bytes in two subfolders, each of one repeated byte of its own."""
    root = tmp_path / "folder"
    for number in range(40):
        path = root / ("odd" if number % 2 else "even") / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([33 + number]) * (100 + 10 * number))
    return root


@pytest.fixture(scope="session")
def make_split(tmp_path_factory):
    """A function from documents (bytes) to a split whose tokens are their bytes."""

    def make(*documents: bytes) -> Split:
        pieces = []
        root = tmp_path_factory.mktemp("split")
        for number, document in enumerate(documents):
            path = root / str(number)
            path.write_bytes(document)
            pieces.append(Extent(str(path), 0, len(document)))
        return Split.of_bytes("train", "documents", Extents(pieces))

    return make


@pytest.fixture
def notes(caplog):
    """What is noted, as pytest's ``caplog``."""
    LOGGER.setLevel("INFO")
    yield caplog
    LOGGER.setLevel("NOTSET")
