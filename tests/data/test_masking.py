from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kinformer.lab.data import IGNORED, ByteTokenizer
from kinformer.lab.data.masking import Masking, Words, ordinary
from kinformer.lab.data.sampling import mix
from kinformer.runtime.errors import KinformerError

MASK = 256
PLAIN = Masking(MASK, ordinary(256, set()))
WHOLE = replace(PLAIN, words=Words.of(ByteTokenizer()))
TEXT = "It was naïve — they_said 42 times (or more), wasn't it?   So   went the river under the trees. " * 6


def rows(count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64)
    tokens = np.stack([data[7 * row : 7 * row + length] for row in range(count)])
    return tokens, mix(5, np.arange(count))


def test_fifteen_of_a_hundred_are_chosen_and_most_of_them_masked() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (400, 200))
    masked, positions, truth = PLAIN(tokens, mix(0, np.arange(400)))
    assert positions.shape == (400, 30) and (truth >= 0).all()
    assert np.array_equal(truth, np.take_along_axis(tokens, positions, 1))
    shown = np.take_along_axis(masked, positions, 1)
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (shown == truth).mean() == pytest.approx(0.1 + 0.1 / 256, abs=0.015)
    drawn = shown[(shown != MASK) & (shown != truth)]
    assert len(drawn) / truth.size == pytest.approx(0.1, abs=0.015)
    assert drawn.max() < 256 and len(set(drawn.tolist())) > 200
    untouched = np.ones(tokens.shape, bool)
    np.put_along_axis(untouched, positions, False, 1)
    assert untouched.sum(1).tolist() == [170] * 400 and np.array_equal(masked[untouched], tokens[untouched])
    chosen = (~untouched).mean(0)
    assert chosen.min() > 0.07 and chosen.max() < 0.24, "no place is preferred"


def test_what_is_drawn_instead_is_ordinary() -> None:
    masking = Masking(3, ordinary(10, {3, 0, 9}), share=0.9)
    masked, _, _ = masking(np.full((50, 40), 5), mix(1, np.arange(50)))
    assert set(masked.ravel().tolist()) == {1, 2, 3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("masking", [PLAIN, WHOLE], ids=["tokens", "whole words"])
def test_a_row_does_not_depend_on_its_neighbours_or_on_padding(masking: Masking) -> None:
    tokens, keys = rows(6, 80)
    lengths = np.array([80, 11, 80, 40, 1, 79])
    together = masking(tokens, keys, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = masking(tokens[row : row + 1, :length], keys[row : row + 1])
        count = (alone[2] != IGNORED).sum()
        assert count >= 1
        assert np.array_equal(together[0][row, :length], alone[0][0])
        for mine, its in zip(together[1:], alone[1:], strict=True):
            assert np.array_equal(mine[row, :count], its[0, :count])
        assert (together[2][row, count:] == IGNORED).all()


def test_whole_words_are_masked_together() -> None:
    tokens, keys = rows(30, 90)
    positions = WHOLE.choose(tokens, keys, np.full(30, 90))
    counts = (positions >= 0).sum(1)
    assert counts.max() <= WHOLE.most(90) and counts.mean() > 0.9 * WHOLE.most(90)
    words = set()
    for text, row in zip(tokens, positions, strict=True):
        chosen = np.isin(np.arange(90), row)
        number = np.cumsum(~WHOLE.words.joined(text)) if WHOLE.words else np.zeros(90)
        for word in set(number[chosen].tolist()):
            assert chosen[number == word].all()
            words.add(bytes(text[number == word].tolist()).decode("utf-8", "replace"))
    assert {"naïve", "they_said", "river", "   "} <= words and not any(" " in word.strip() for word in words)


def test_a_word_too_long_to_be_masked() -> None:
    masked, positions, truth = WHOLE(np.full((3, 50), 97), mix(2, np.arange(3)))
    assert (truth != IGNORED).sum(1).tolist() == [1, 1, 1] and positions[:, 0].tolist() == [0, 0, 0]
    assert (masked[:, 1:] == 97).all()


def test_words_of_tokenizers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from kinformer.lab.data.tokenizer import FileTokenizer

    vocabulary = {word: index for index, word in enumerate(["[UNK]", "play", "##ing", ".", "##s"])}
    pieces = FileTokenizer.__new__(FileTokenizer)
    pieces._tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.vocab_size = 5
    assert Words.of(pieces).joined(np.array([1, 2, 4, 3, 1, 1])).tolist() == [False, True, True, False, False, False]

    spelled = ["play", "ing", "Ġplay", ".", "Ċ", "ĠĠ"]
    pieces._tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: index for index, piece in enumerate(spelled)}, [])
    )
    pieces.vocab_size = 6
    joined = Words.of(pieces).joined(np.array([0, 1, 2, 1, 3, 4, 5, 2]))
    assert joined.tolist() == [False, True, False, True, False, False, False, False]


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_shares_that_make_no_sense(share: float) -> None:
    with pytest.raises(KinformerError, match="mask_share"):
        replace(PLAIN, share=share)
