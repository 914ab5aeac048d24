from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinformer.lab.data import open_corpus
from kinformer.lab.data.corpus import CYCLE, MixedWindows, counts_of, mixture_of
from kinformer.lab.tasks.next_token import NextTokens
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two files of bytes that tell them apart, the second much shorter, mixed 3 to 1."""
    place = tmp_path_factory.mktemp("mixed")
    (place / "a.txt").write_bytes(bytes(range(97, 110)) * 4000)
    (place / "b.txt").write_bytes(bytes(range(65, 78)) * 300)
    return f"{place / 'a.txt'}=0.6,{place / 'b.txt'}=0.2"


def windows(spec: str, batch: int = 8) -> MixedWindows:
    corpus = open_corpus(spec)
    assert corpus.mixture is not None
    return MixedWindows(corpus.splits["train"], corpus.mixture, batch, 16, 7)


def test_rows_come_by_weight_and_are_windows_of_their_corpus(spec: str) -> None:
    sampler = windows(spec)
    of_b = [(sampler.batch(step) < 97).mean(axis=1) for step in range(CYCLE // 8)]
    assert set(np.unique(of_b)) == {0.0, 1.0}  # no row crosses from one corpus to the other
    assert sum(row.sum() for row in of_b) == CYCLE // 4  # exactly, in every thousand rows
    later = [(sampler.batch(step) < 97).mean(axis=1) for step in range(CYCLE // 8, CYCLE // 4)]
    assert sum(row.sum() for row in later) == CYCLE // 4 and not np.array_equal(of_b, later)


def test_every_corpus_has_epochs_of_its_own(spec: str) -> None:
    sampler = windows(spec)
    numbers = np.concatenate([sampler.corpora(step)[1][sampler.corpora(step)[0] == 1] for step in range(CYCLE // 4)])
    assert sorted(numbers.tolist()) == list(range(CYCLE // 2))  # each of its rows once, in the order of cycles
    assert len(np.unique(sampler._windows[1].at(np.arange(sampler._windows[1].windows)))) == sampler._windows[1].windows


def test_rows_do_not_depend_on_processes(spec: str) -> None:
    corpus = open_corpus(spec)
    rows = NextTokens(corpus, Settings(batch_size=8, length=16, validation_tokens=400, seed=7))
    whole = rows.batch(13, 0, 1).tokens
    for world in (2, 4, 8):
        assert np.concatenate([rows.batch(13, rank, world).tokens for rank in range(world)]).tolist() == whole.tolist()
    held_out = rows.stream.split.tokens(0, len(rows.stream.split))
    assert (held_out < 97).mean() == pytest.approx(1 / 4, abs=0.02)


def test_mixed_ids_stand_for_the_bytes_of_both(spec: str, tmp_path: Path) -> None:
    (first, _), (second, _) = mixture_of(spec) or []
    both, one, two = open_corpus(spec), open_corpus(first), open_corpus(second)
    for name, split in both.splits.items():
        parts = one.splits[name], two.splits[name]
        assert split.bytes == sum(part.bytes for part in parts)
        assert split.tokens(0, len(split)).tobytes() == b"".join(part.tokens(0, len(part)).tobytes() for part in parts)
    other = open_corpus(spec.replace("0.6", "0.7"))
    assert (
        other.fingerprint != both.fingerprint == open_corpus(spec.replace("0.6", "6").replace("0.2", "2")).fingerprint
    )


def test_weights_become_rows_of_a_thousand() -> None:
    assert counts_of([2, 1]) == (667, 333) and counts_of([0.7, 0.3]) == (700, 300) and sum(counts_of([1] * 7)) == CYCLE
    with pytest.raises(KinformerError, match="less than one row of 1,000"):
        counts_of([1, 1e-6])
    assert mixture_of("stdlib") is None and mixture_of("a,b") is None
    for text in ("a=0.7", "a=0.7,b", "a=0,b=1"):
        with pytest.raises(KinformerError, match="a mixture names two corpora or more with weights above 0"):
            mixture_of(text)


def test_segments_are_of_one_corpus(spec: str) -> None:
    with pytest.raises(KinformerError, match="`segments` cannot take rows by weights|segments cannot take rows"):
        NextTokens(open_corpus(spec), Settings(batch_size=2, length=16), segments=True)
