"""A softmax pattern as a small picture in text: row i is a query, column j a key, a filled cell one that it sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import nn

from kinformer.core.pattern import Pattern
from kinformer.figures.encoder_pattern import FullSequence, global_token_words, in_text

CELLS = 16
MOST_TOKENS = 256
SEEN, UNSEEN = "■", "·"


class TextPicture(TypedDict):
    """The picture of a ``pattern``, by its name: ``rows`` of cells, of which each stands for ``tokens_per_cell``."""

    pattern: str
    tokens_per_cell: int
    rows: list[str]


def draw(pattern: Pattern, tokens_per_cell: int = 1, cells: int = CELLS) -> list[str]:
    """Return ``cells`` lines: whether the last query of each cell's tokens sees any key of the other cell."""
    index = torch.arange(cells * tokens_per_cell)
    pattern = pattern.sized(len(index))
    last = index[tokens_per_cell - 1 :: tokens_per_cell]
    seen = pattern.allowed(last[:, None], index[None]).view(cells, cells, tokens_per_cell).any(dim=-1)
    return [" ".join(SEEN if cell else UNSEEN for cell in row) for row in seen.tolist()]


def scale(pattern: Pattern, cells: int = CELLS) -> int:
    """Return the tokens per cell at which the window of ``pattern`` fills about a third
    of the picture, or something is unseen."""
    if pattern.behind is not None:
        return max(1, 3 * pattern.behind // cells)
    powers = (2**power for power in range(MOST_TOKENS.bit_length()))
    return next((tokens for tokens in powers if any(UNSEEN in row for row in draw(pattern, tokens, cells))), 1)


def pictures(model: nn.Module) -> list[TextPicture]:
    """Return each different pattern of the model's mixers and their heads, in order: its name, scale and lines."""
    pictures_by_name: dict[tuple[str, ...], TextPicture] = {}
    for pattern in _patterns(model):
        cell = scale(pattern)
        rows = draw(pattern, cell)
        name = _name(pattern)
        pictures_by_name.setdefault((name, str(cell), *rows), {"pattern": name, "tokens_per_cell": cell, "rows": rows})
    return list(pictures_by_name.values())


def _patterns(model: nn.Module) -> Iterator[Pattern]:
    for module in model.modules():
        pattern = getattr(module, "pattern", None)
        if isinstance(pattern, Pattern):
            in_model = in_text(pattern, getattr(model, "config", None))
            yield from (in_model.at(head) for head in range(in_model.num_heads or 1))


def _name(pattern: Pattern) -> str:
    if isinstance(pattern, FullSequence):
        return f"{_name(pattern.inner)}, {global_token_words(pattern)}"
    return getattr(pattern, "name", type(pattern).__name__.lower())
