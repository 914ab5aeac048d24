"""The growth of a text by a tokenizer.json, before it splits the text or after it has joined it again.

Replacements that follow one another multiply: forty times ``a -> aa`` make a terabyte of a letter, and the library ends
the process when its memory does. So the bound is computed from the replacements before any text is encoded.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_GROWTH, MOST_STEPS = 64, 500
_COPIES = 8
"""How often the text of a replacement is repeated, so that later ones meet matches that span two copies."""


class _Replacement(NamedTuple):
    """A replacement: ``pattern`` (None: a regular expression, which may match any
    character, or nothing) becomes ``content``."""

    pattern: str | None
    content: str


def require_bounded(path: Path | str, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer of the library ``tokenizers`` whose normaliser or decoder may make a text more than
    ``MOST_GROWTH`` times as long."""
    for name, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        steps = [] if part is None else list(_replacements(json.loads(part.__getstate__())))
        if len(steps) > MOST_STEPS or not _are_bounded(steps):
            raise KinformerError(
                f"{path}: its {name} may make a text more than "
                f"{MOST_GROWTH} times as long; give a tokenizer whose replacements are short."
            )


def _replacements(part: JsonObject) -> Iterator[_Replacement]:
    for inner in (*part.get("normalizers", ()), *part.get("decoders", ())):
        yield from _replacements(inner)
    if part["type"] == "Replace":
        yield _Replacement(part["pattern"].get("String"), part["content"])
    elif part["type"] == "Prepend":
        yield _Replacement(None, part["prepend"])
    elif part["type"] == "Precompiled":  # a table of replacements, its texts one after the other
        table = b64decode(part["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].decode("utf-8", "replace").split("\0")
        yield _Replacement(None, max(texts, key=len))


def _are_bounded(steps: list[_Replacement]) -> bool:
    """Return whether nothing that a replacement writes grows long, by itself or by all later ones."""
    alone = all(len(content) <= MOST_GROWTH * len(pattern or ".") for pattern, content in steps)
    return alone and all(_is_bounded(steps, first) for first in range(len(steps)))


def _is_bounded(steps: list[_Replacement], first: int) -> bool:
    """Return whether the text that the replacement ``first`` writes stays short in all later ones."""
    text, factor = steps[first].content * _COPIES, 1
    limit = _COPIES * MOST_GROWTH * len(steps[first].pattern or ".")
    for pattern, content in steps[first + 1 :]:
        if len(text) * factor > limit:
            return False
        if pattern is None:
            factor *= 1 + len(content)
        else:
            text = text.replace(pattern, content)
    return len(text) * factor <= limit
