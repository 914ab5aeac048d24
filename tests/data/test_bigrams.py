from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kinformer.lab.data import masking as bigrams
from kinformer.lab.data import open_corpus, train_tokenizer
from kinformer.lab.data.masking import Bigrams


@pytest.mark.parametrize("tokens", ["bytes", "pieces"])
def test_counts(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: str) -> None:
    monkeypatch.setattr(bigrams, "_BLOCK", 1000)
    split = open_corpus(str(text_file)).splits["train"]
    if tokens == "pieces":
        pytest.importorskip("tokenizers")
        tokenizer = train_tokenizer(split, 300, tmp_path / "tokenizer.json")
        split = open_corpus(str(text_file), tokenizer=tokenizer, cache=tmp_path).splits["train"]
    data, size = split.tokens(0, len(split)).tolist(), split.vocab_size
    single, double = Counter(data), Counter(pairwise(data))
    followed = Counter(data[:-1])
    followers = Counter(first for first, _ in double)
    asked = [(data[index + 1], data[index]) for index in range(0, 500, 7)] + [(data[3], -1), (size - 1, data[0])]
    unseen = next(token for token in range(size) if token not in followed)
    asked.append((data[0], unseen))
    ours = Bigrams(split).probabilities(*(np.array(column) for column in zip(*asked, strict=True)))
    for (token, before), one, two in zip(asked, *ours, strict=True):
        alone = (single[token] + 1) / (len(data) + size)
        assert one == pytest.approx(alone)
        kinds = followers[before]
        want = (double[before, token] + kinds * alone) / (followed[before] + kinds) if kinds else alone
        assert two == pytest.approx(want)


def test_each_token_has_a_share_of_one(text_file: Path) -> None:
    counts = Bigrams(open_corpus(str(text_file)).splits["train"])
    for before in (-1, 0, 32, 97):
        single, double = counts.probabilities(np.arange(256), np.full(256, before))
        assert single.sum() == pytest.approx(1) and double.sum() == pytest.approx(1)
