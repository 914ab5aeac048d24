"""Masking some tokens of a text for a model to predict (Devlin et al. 2019, BERT, section 3.1).

The share ``share`` of the tokens of every row is chosen. 80 % of the chosen tokens become the mask token, 10 % become
a token drawn at random, and 10 % stay unchanged. With whole words, the tokens of one word are chosen together.

All draws are hashes of a key that the caller gives for each row: they do not depend on the other rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kinformer.lab.data import IGNORED, BosEos, RandomWindows, Rows, Tokenizer
from kinformer.lab.data.buckets import lay
from kinformer.lab.data.ngram import find_sorted, merge_counts
from kinformer.lab.data.sampling import Split, mix, permute
from kinformer.runtime.errors import KinformerError

MASKED, SWAPPED = 0.8, 0.1
_CHOICE, _FATE, _TOKEN = 1, 2, 3
WORD, BLANK = 1, 2


@dataclass(frozen=True, eq=False)
class Words:
    """The beginnings and ends of tokens, by id: WORD (letters, digits), BLANK or 0 (all else), uint8 [vocab_size]. A
    token continues the word of the previous token where that token ends with the kind that this token begins with."""

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
        """Return whether each of ``tokens`` [n] belongs to the word of the previous token; bool [n]."""
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
        """Return the positions of the chosen tokens, rising, then -1: int64 [rows, most]. ``tokens`` int64 [rows,
        time]; the first ``lengths`` [rows] tokens of each row count; ``keys`` uint64 [rows]."""
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
        """Return masked ``tokens``, the masked positions, and their labels, padded with 0 and IGNORED."""
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
    """Return the tokens of whole words in random order, without the words that would exceed ``count`` tokens."""
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


# Masked language modelling: windows of a text, between BOS and EOS, with some of their tokens masked.

_TRAINING, _EVALUATION = 6, 7


class MaskedRows(NamedTuple):
    """The rows as a model sees them, and for each masked token the token before it, -1 if none: [rows, n]."""

    rows: Rows
    before: np.ndarray


class MaskedText:
    """The windows of ``split``, ``length`` tokens long with BOS and EOS; all draws follow from ``seed``. Training masks
    other tokens in every step. In order, for measuring, the masks of a window depend on its position in the split
    alone."""

    def __init__(self, split: Split, length: int, masking: Masking, ends: BosEos, seed: int) -> None:
        self.room = length - ends.size
        if self.room < 1:
            raise KinformerError(f"`length` {length}: leaves no room beside BOS and EOS; give more.")
        self.split, self.length, self.masking, self.ends, self.seed = split, length, masking, ends, seed

    def __len__(self) -> int:
        """Return how many windows cover the split; the last window may be short."""
        return -(-len(self.split) // self.room)

    def sampler(self, batch_size: int) -> RandomWindows:
        """Return the order in which training sees windows."""
        return RandomWindows(self.split, batch_size, self.room, self.seed)

    def batch(self, sampler: RandomWindows, step: int, rank: int = 0, world: int = 1) -> Rows:
        """Return a process's rows of a step."""
        starts = sampler.starts(step)
        share = slice(rank * (len(starts) // world), (rank + 1) * (len(starts) // world))
        keys = mix(self.seed, _TRAINING, step, np.arange(len(starts)))
        return self.show(starts[share], keys[share]).rows

    def in_order(self, rows: int, shuffled: bool = False) -> Iterator[MaskedRows]:
        """Yield all windows, ``rows`` at a time: as they follow each other, or from all over the split."""
        starts = np.arange(0, len(self.split), self.room)
        if shuffled:
            starts = starts[permute(np.arange(len(starts)), len(starts), mix(self.seed, _EVALUATION))]
        for first in range(0, len(starts), rows):
            some = starts[first : first + rows]
            yield self.show(some, mix(self.seed, _EVALUATION, some))

    def show(self, starts: np.ndarray, keys: np.ndarray) -> MaskedRows:
        """Return the windows that begin at ``starts`` with tokens masked by ``keys``."""
        lengths = np.minimum(self.room, len(self.split) - starts)
        texts = [
            self.split.tokens(start, length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        width = int(lengths.max())
        plain, _ = lay(texts, BosEos(), width)
        masked, positions, labels = self.masking(plain, keys, lengths)
        shown = [row[:length] for row, length in zip(masked, lengths.tolist(), strict=True)]
        tokens, valid = lay(shown, self.ends, width + self.ends.size)
        before = np.where(positions > 0, np.take_along_axis(plain, np.maximum(positions - 1, 0), 1), -1)
        return MaskedRows(Rows(tokens, valid, labels, positions + self.ends.before), before)


_BLOCK = 1 << 22


class Bigrams:
    """Frequencies of tokens and of pairs of tokens: the baseline of guessing a masked token.

    P(w) = (c(w) + 1) / (N + V), P(w | h) = (c(h w) + T(h) P(w)) / (c(h) + T(h)), T(h) being how many tokens come
    after h, each counted once (Witten and Bell 1991); P(w) where h was never seen, or is masked.

    The counts of a split's tokens and neighbouring pairs, of bytes or of a tokenizer's ids.
    """

    def __init__(self, split: Split) -> None:
        self.size = split.vocab_size
        counts = np.zeros(self.size, np.int64)
        pairs, times = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start in range(0, len(split), _BLOCK):
            tokens = split.tokens(start, min(_BLOCK + 1, len(split) - start)).astype(np.int64)
            counts += np.bincount(tokens[:_BLOCK], minlength=self.size)
            if len(tokens) > 1:
                fresh, seen = np.unique(tokens[:-1] * self.size + tokens[1:], return_counts=True)
                pairs, times = merge_counts(np.append(pairs, fresh), np.append(times, seen))
        self.single = (counts + 1) / (counts.sum() + self.size)
        self.pairs, self.times = pairs, times
        self.followed = np.bincount(pairs // self.size, times, self.size)
        self.followers = np.bincount(pairs // self.size, minlength=self.size)

    def probabilities(self, tokens: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return P of each of ``tokens`` [n] alone, and after the one ``before`` it [n] (-1: masked); float64."""
        single = self.single[tokens]
        seen = np.flatnonzero((before >= 0) & (self.followed[before] > 0))
        double = single.copy()
        if len(seen):
            first = before[seen]
            index = find_sorted(self.pairs, first * self.size + tokens[seen])
            count = np.where(index >= 0, self.times[index], 0)
            follow = self.followers[first]
            # (c(h w) + T(h) P(w)) / (c(h) + T(h))
            double[seen] = (count + follow * single[seen]) / (self.followed[first] + follow)
        return single, double
