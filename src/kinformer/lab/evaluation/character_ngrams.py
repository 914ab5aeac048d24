"""A bag of character n-grams with logistic regression: the baseline of classified texts, by scikit-learn.

The features of a text are the counts of its runs of one to four characters, with tf-idf weights. Frequencies of short
runs tell authors, languages and topics apart (Cavnar and Trenkle 1994, N-gram-based text categorization).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from kinformer.lab.data.labelled import Examples

LONGEST = 4
FEATURES = 1 << 17
"""The number of hashed n-grams. Fewer collide in texts of a few thousand different n-grams."""
TEXT_TOKENS = 2000
"""The most tokens of a text."""
TRAIN_TOKENS, ITERATIONS, PRODUCTS = 2_000_000, 50, 1_000_000_000
"""The bounds of the work: the tokens to learn from, and the iterations and the products of the regression. On one core
reading takes a microsecond a character, and both together take at most some seconds."""
MOST_MEASURED = 4000


def accuracy(train: Examples, measured: Examples, decode: Callable[[Any], str]) -> float:
    """Return the accuracy on ``measured`` of n-grams learnt from ``train``; ``decode`` makes a text of tokens.
    Of large data, a part in even steps is learnt from and measured."""
    numbers, environment = random.getstate(), dict(os.environ)
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    random.setstate(numbers)  # the import draws a number and sets variables of OpenMP
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]

    tokens = float(np.minimum(train.lengths, TEXT_TOKENS).mean())
    classes = len(np.unique(train.labels))
    products = LONGEST * tokens * ITERATIONS * (1 if classes == 2 else classes)
    most = max(classes, int(min(TRAIN_TOKENS / tokens, PRODUCTS / products)))
    features = make_pipeline(
        HashingVectorizer(analyzer="char", ngram_range=(1, LONGEST), lowercase=False, n_features=FEATURES, norm=None,
                          alternate_sign=False),
        TfidfTransformer(sublinear_tf=True),
    )  # fmt: skip
    texts, labels = _some(train, most, decode)
    if len(set(labels.tolist())) < 2:
        return float((_some(measured, MOST_MEASURED, decode)[1] == labels[0]).mean())
    regression = LogisticRegression(C=10.0, max_iter=ITERATIONS, tol=1e-3)
    regression.fit(features.fit_transform(texts), labels)
    texts, labels = _some(measured, MOST_MEASURED, decode)
    return float(regression.score(features.transform(texts), labels))


def _some(examples: Examples, most: int, decode: Callable[[Any], str]) -> tuple[list[str], np.ndarray]:
    """Return at most ``most`` texts in even steps, cut to ``TEXT_TOKENS`` tokens, and their labels."""
    count = len(examples)
    index = np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)
    texts = [decode(examples.tokens(number)[:TEXT_TOKENS]) for number in index.tolist()]
    return texts, np.asarray(examples.labels)[index]
