"""Pseudo-random order without memory: hashes and permutations that are pure functions of integers."""

from __future__ import annotations

import numpy as np

_ROUNDS = 6


def mix(*words: np.ndarray | int) -> np.ndarray:
    """Hash integers (or arrays of them, broadcast) to uint64, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = state + _unsigned(word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permute(index: np.ndarray, count: int, key: np.ndarray | int) -> np.ndarray:
    """Return where a permutation of range(``count``), chosen by ``key``, sends each of ``index``; int64, the same
    shape.

    A Feistel network permutes the next power of four; walking its cycles until the result lies below ``count``
    keeps it a bijection (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Takes no memory beyond
    the answer, whatever ``count``. ``key`` may hold one key per index.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    image = np.array(index, np.uint64)
    keys = np.broadcast_to(_unsigned(key), image.shape)
    outside = np.ones(image.shape, bool)
    # Cycle walking: the range is less than four times ``count``, so few steps are needed on average.
    while outside.any():
        image[outside] = _feistel(image[outside], half, keys[outside])
        outside = image >= count
    return image.astype(np.int64)


def in_epochs(place: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return which of ``count`` examples stands at each ``place`` of an order without end, in which every epoch has
    each once, in an order of its own; ``key`` chooses them."""
    epoch, index = np.divmod(place, count)
    return permute(index, count, mix(*key, epoch))


def _feistel(value: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for turn in range(_ROUNDS):
        # A Feistel round is invertible whatever the round function is.
        left, right = right, left ^ (mix(keys, turn, right) & mask)
    return (left << shift) | right


def _unsigned(word: np.ndarray | int) -> np.ndarray:
    if isinstance(word, np.ndarray):
        return word.astype(np.uint64)
    return np.array([int(word) & 0xFFFFFFFFFFFFFFFF], np.uint64)
