"""The texts that are nearest to a query, by the vectors of a trained run and cosine similarity (faiss).

python examples/nearest_texts.py runs/book lines.txt "It was a cold night."
"""

from __future__ import annotations

import sys
from pathlib import Path

import faiss

import kinformer


def nearest(run: str, texts: list[str], query: str, count: int = 5) -> list[tuple[float, str]]:
    """The ``count`` texts with the highest cosine similarity to ``query``, the nearest first."""
    vectors, wanted = kinformer.embed(run, texts), kinformer.embed(run, [query])
    for array in (vectors, wanted):
        faiss.normalize_L2(array)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    similarities, numbers = index.search(wanted, min(count, len(texts)))
    return [(float(similarity), texts[number]) for similarity, number in zip(similarities[0], numbers[0], strict=True)]


if __name__ == "__main__":
    run, file, query = sys.argv[1:]
    lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    for similarity, text in nearest(run, lines, query):
        print(f"{similarity:.3f}  {text}")
