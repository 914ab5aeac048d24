"""Masking some tokens of a text for a model to predict (Devlin et al. 2019, BERT, section 3.1).

Of every row the share ``share`` of the tokens is chosen. Of these 80 % become the mask token, 10 % another token drawn
at random, and 10 % stay as they are. With whole words, what belongs to one word is chosen together.

All draws are hashes of a key that the caller gives for each row: they do not depend on the other rows of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kinformer.data import IGNORED, Tokenizer
from kinformer.data.permutation import mix
from kinformer.runtime.errors import KinformerError

MASKED, SWAPPED = 0.8, 0.1
_CHOICE, _FATE, _TOKEN = 1, 2, 3
WORD, BLANK = 1, 2


@dataclass(frozen=True, eq=False)
class Words:
    """The beginnings and ends of tokens, by id: WORD (letters, digits), BLANK or 0 (all else), uint8 [vocab_size].

    A token continues the word of the one before it where that ends with what it begins with.
    """

    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words:
        """Return the words of a tokenizer: of bytes, letters of any script are WORD and runs of blanks are words too;
        of pieces of a tokenizer.json, its spelling says where words begin (``##`` in WordPiece, a blank elsewhere)."""
        spelled = getattr(tokenizer, "spelled", None)
        if spelled is None:
            kinds = np.array(
                [_kind(bytes([byte]).decode("latin-1")) or (WORD if byte > 127 else 0) for byte in range(256)]
            )
            return cls(kinds.astype(np.uint8), kinds.astype(np.uint8))
        pieces, marked = spelled()
        if marked:
            first = np.array([WORD if piece.startswith("##") else 0 for piece in pieces], np.uint8)
            return cls(first, np.full(len(pieces), WORD, np.uint8))
        first = np.array([_kind(piece[:1]) & WORD for piece in pieces], np.uint8)
        return cls(first, np.array([_kind(piece[-1:]) & WORD for piece in pieces], np.uint8))

    def joined(self, tokens: np.ndarray) -> np.ndarray:
        """Return whether each of ``tokens`` [n] belongs to the word of the one before it; bool [n]."""
        together = self.last[tokens[:-1]] & self.first[tokens[1:]]
        return np.concatenate([[False], together != 0])


@dataclass(frozen=True, eq=False)
class Masking:
    """The masking of tokens: ``mask_token`` replaces them, ``ordinary`` are the ids that may be drawn instead."""

    mask_token: int
    ordinary: np.ndarray
    share: float = 0.15
    words: Words | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise KinformerError(f"`mask_share` is {self.share:g} but must lie between 0 and 1.")

    def most(self, length: int) -> int:
        """Return how many tokens are chosen of a row of ``length``, with whole words at most."""
        return max(1, round(self.share * length))

    def choose(self, tokens: np.ndarray, keys: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the positions of the chosen tokens, rising, then -1: int64 [rows, most].

        ``tokens`` int64 [rows, time], of which the first ``lengths`` [rows] count; ``keys`` uint64 [rows].
        """
        draws = mix(keys[:, None], _CHOICE, np.arange(tokens.shape[1]))
        draws[np.arange(tokens.shape[1]) >= lengths[:, None]] = np.iinfo(np.uint64).max
        positions = np.full((len(tokens), self.most(tokens.shape[1])), -1)
        for row, text, draw, length in zip(positions, tokens, draws, lengths.tolist(), strict=True):
            count = min(self.most(length), length)
            if self.words is None:
                chosen = np.argpartition(draw, count - 1)[:count] if count < len(draw) else np.arange(length)
            else:
                chosen = _whole(self.words.joined(text[:length]), draw[:length], count)
            row[: len(chosen)] = np.sort(chosen)
        return positions

    def __call__(
        self, tokens: np.ndarray, keys: np.ndarray, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ``tokens`` with some masked, the positions of these and their
        labels; 0 and IGNORED where they are fewer."""
        lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
        positions = self.choose(tokens, keys, lengths)
        chosen = positions >= 0
        positions = np.maximum(positions, 0)
        truth = np.take_along_axis(tokens, positions, 1)
        # Uniform in [0, 1): below 0.8 the mask, below 0.9 another token, else the token itself.
        fate = mix(keys[:, None], _FATE, positions) / 2.0**64
        drawn = self.ordinary[mix(keys[:, None], _TOKEN, positions) % np.uint64(len(self.ordinary))]
        shown = np.where(fate < MASKED, self.mask_token, np.where(fate < MASKED + SWAPPED, drawn, truth))
        masked = tokens.copy()
        rows = np.broadcast_to(np.arange(len(tokens))[:, None], positions.shape)
        masked[rows[chosen], positions[chosen]] = shown[chosen]
        return masked, positions, np.where(chosen, truth, IGNORED)


def ordinary(vocab_size: int, special: set[int]) -> np.ndarray:
    """Return the ids of a tokenizer of ``vocab_size`` that stand for text, without ``special`` ones."""
    return np.array([token for token in range(vocab_size) if token not in special], np.int64)


def _whole(joined: np.ndarray, draw: np.ndarray, count: int) -> np.ndarray:
    """Return tokens of words in random order, without those that would make it more than ``count``."""
    starts = np.flatnonzero(~joined)
    sizes = np.diff(np.append(starts, len(joined)))
    order = np.argsort(draw[starts], kind="stable")
    taken, groups = 0, []
    for start, size in zip(starts[order].tolist(), sizes[order].tolist(), strict=True):
        if taken + size <= count:
            taken += size
            groups.append(np.arange(start, start + size))
        if taken == count:
            break
    return np.concatenate(groups) if groups else starts[order[:1]]


def _kind(character: str) -> int:
    if character.isalnum() or character == "_":
        return WORD
    return BLANK if character.isspace() else 0
