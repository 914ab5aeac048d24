from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinformer.lab.data import IGNORED, BosEos, Split, open_corpus
from kinformer.lab.data.masking import MaskedText, Masking, ordinary
from kinformer.runtime.errors import KinformerError

MASKING = Masking(256, ordinary(256, set()))
ENDS = BosEos(257, 258)


@pytest.fixture(scope="module")
def split(text_file: Path) -> Split:
    return open_corpus(str(text_file)).splits["test"]


def restored(text: MaskedText, rows: int) -> tuple[list[list[int]], int]:
    """Every row's tokens, what was masked put back, and the number of masked ones."""
    found, masked = [], 0
    for shown in text.in_order(rows):
        tokens = shown.rows.tokens.copy()
        for row, (positions, labels) in enumerate(zip(shown.rows.positions, shown.rows.labels, strict=True)):
            for place, label in zip(positions.tolist(), labels.tolist(), strict=True):
                if label != IGNORED:
                    tokens[row, place] = label
                    masked += 1
        valid = np.ones(tokens.shape, bool) if shown.rows.valid is None else shown.rows.valid
        found += [row[state_tensors].tolist() for row, state_tensors in zip(tokens, valid, strict=True)]
    return found, masked


def test_windows_hold_every_token_once_between_bos_and_eos(split: Split) -> None:
    text = MaskedText(split, 32, MASKING, ENDS, seed=0)
    rows, masked = restored(text, 7)
    assert len(rows) == len(text) == -(-len(split) // 30)
    assert {row[0] for row in rows} == {257} and {row[-1] for row in rows} == {258}
    assert [token for row in rows for token in row[1:-1]] == split.tokens(0, len(split)).tolist()
    assert 1 < len(rows[-1]) < 32 and all(len(row) == 32 for row in rows[:-1])
    assert masked == sum(max(1, round(0.15 * (len(row) - 2))) for row in rows)


def test_what_is_masked_follows_from_the_position_alone(split: Split) -> None:
    text = MaskedText(split, 32, MASKING, ENDS, seed=0)
    alone = list(text.in_order(1))
    for batch in (3, 64):
        at = 0
        for shown in text.in_order(batch):
            for row in range(len(shown.rows.tokens)):
                width = alone[at].rows.tokens.shape[1]
                count = alone[at].rows.labels.shape[1]
                assert np.array_equal(shown.rows.tokens[row, :width], alone[at].rows.tokens[0])
                assert np.array_equal(shown.rows.labels[row, :count], alone[at].rows.labels[0])
                assert np.array_equal(shown.before[row, :count], alone[at].before[0])
                at += 1
    piece = MaskedText(split.take(300), 32, MASKING, ENDS, seed=0)
    first, also = next(iter(piece.in_order(1))), alone[0]
    assert np.array_equal(first.rows.tokens, also.rows.tokens)
    other = next(iter(MaskedText(split, 32, MASKING, ENDS, seed=1).in_order(1)))
    assert not np.array_equal(other.rows.positions, also.rows.positions)


def test_the_token_before_is_the_true_one(split: Split) -> None:
    text = MaskedText(split, 40, MASKING, BosEos(257, None), seed=2)
    data = split.tokens(0, len(split))
    begun = 0
    for index, shown in enumerate(text.in_order(1)):
        for place, before, label in zip(*(each[0].tolist() for each in _fields(shown)), strict=True):
            at = index * 39 + place - 1
            if label != IGNORED:
                assert data[at] == label
                assert before == (data[at - 1] if place > 1 else -1)
                begun += place == 1
    assert begun


def _fields(shown):
    return shown.rows.positions, shown.before, shown.rows.labels


def test_training_hides_others_at_every_step_and_processes_share_a_batch(split: Split) -> None:
    text = MaskedText(split, 32, MASKING, ENDS, seed=0)
    sampler = text.sampler(4)
    whole = text.batch(sampler, 5)
    assert whole.tokens.shape == (4, 32) and whole.valid is None
    halves = [text.batch(sampler, 5, rank, 2) for rank in (0, 1)]
    for name in ("tokens", "labels", "positions"):
        assert np.array_equal(np.concatenate([getattr(half, name) for half in halves]), getattr(whole, name))
    assert np.array_equal(text.batch(text.sampler(4), 5).positions, whole.positions)
    positions = {text.batch(sampler, step).positions.tobytes() for step in range(8)}
    assert len(positions) == 8
    assert {row.tobytes() for row in whole.positions} != {whole.positions[0].tobytes()}


def test_no_room(split: Split) -> None:
    with pytest.raises(KinformerError, match="length 2"):
        MaskedText(split, 2, MASKING, ENDS, seed=0)
