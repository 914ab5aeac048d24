"""Baselines of images by counting, which a model of images must beat.

``histogram``: how often each intensity stands at a place, over the training images. ``neighbours``: how often it
stands behind its four neighbours that are known in raster order (left, upper left, upper, upper right, of the same
channel), in twelve steps each, nought beyond the edge; of later channels the one before at the same place instead of
the upper left. Where a smaller image is known, whose pixels are the means of blocks, that of the block stands in place
of the upper right. Counts begin with shares of the level above: those of a place with the shares of all places, those
of a context with the shares of its channel, and these with even ones.
"""

from __future__ import annotations

import numpy as np

LEVELS, STEPS = 256, 12
_AT_ONCE, _MOST_TRAINED = 512, 60_000
_WEIGHT = 32.0
"""How many counts the level above is worth."""


def floors(train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Return bits per dimension of ``held_out``, counted in the first 60,000 of ``train``; both uint8 [count, height,
    width, channels]. All values are scored."""
    train = train[:_MOST_TRAINED]
    return {"histogram": _histogram(train, held_out), "neighbours": _neighbours(train, held_out)}


def floor_over_source(train: np.ndarray, held_out: np.ndarray, factor: int) -> float:
    """Return bits per dimension of ``held_out`` as :func:`floors` counts ``neighbours``, where images that are
    ``factor`` times smaller, the means of blocks of pixels, are known."""
    return _neighbours(train[:_MOST_TRAINED], held_out, factor)


def reduced(images: np.ndarray, factor: int) -> np.ndarray:
    """Return ``images`` uint8 [count, height, width, channels] ``factor`` times smaller on each side: every pixel is
    the mean of a block, rounded."""
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
    """Return the number of every value's context, channel by channel, int64 of the shape of ``images``; with ``factor``
    the mean of its block is known."""
    steps = images.astype(np.int64) * STEPS // LEVELS
    padded = np.pad(steps, ((0, 0), (1, 0), (1, 1), (0, 0)))
    left, upper_left, upper, upper_right = (
        padded[:, 1:, :-2],
        padded[:, :-1, :-2],
        padded[:, :-1, 1:-1],
        padded[:, :-1, 2:],
    )
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
