from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kinformer.lab.data import Corpus, open_corpus


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of some 50 kB in a language of forty words."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(draw.choices(words, k=10000)))
    return path


@pytest.fixture(scope="session")
def corpus(text: Path) -> Corpus:
    return open_corpus(str(text))
