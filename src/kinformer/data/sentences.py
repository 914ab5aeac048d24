"""Sentences of a text, each with a token in an encoder's global input (Ainslie et al. 2020, ETC); here its lines."""

from __future__ import annotations

import numpy as np

from kinformer.runtime.errors import KinformerError


def line_sentences(tokens: np.ndarray, longest: int = 64, newline: int = 10) -> np.ndarray:
    """Return the sentence of every token, from 0 in each row: int64 [rows, time], for ``model(tokens, sentences=...)``.

    A sentence is as many lines as go into ``longest`` tokens, each with the ``newline`` that ends it; a longer line is
    cut. Sentences give away where lines end, so take them from a text in which ends of lines are not to be guessed.
    """
    if longest < 1:
        raise KinformerError(f"longest must be 1 token or more a sentence, but is {longest}.")
    sentences = np.zeros(tokens.shape, np.int64)
    for row, text in zip(sentences, tokens, strict=True):
        ends = np.append(np.flatnonzero(text == newline) + 1, len(text))
        start = 0
        while start < len(text):
            limit = min(start + longest, len(text))
            fitting = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, limit, side="right")]
            start = int(fitting[-1]) if len(fitting) else limit
            row[start:] += 1
    return sentences
