"""What the tokens of a whole text see of each other in an encoder, those of its side included: for pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kinformer.core.pattern import Pattern


@dataclass(frozen=True)
class WholeText(Pattern):
    """``inner`` between the tokens of a document; the first ``beside`` positions are tokens on its side.

    These, and the document's first ``globals``, see all and are seen by all. ``side`` is the config of a side or None.
    """

    inner: Pattern
    globals: int = 0
    side: Any = None
    beside: int = 0

    behind = None
    ahead = None

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return self.inner.num_heads

    def at(self, head: int) -> Pattern:
        return WholeText(self.inner.at(head), self.globals, self.side, self.beside)

    def sized(self, length: int) -> Pattern:
        """Of ``length`` tokens together: as many of a document as leave room for its side."""
        beside = 0
        if self.side is not None:
            side = self.side.build(1)
            counts = ((side.count(None, document), document) for document in range(length, 0, -1))
            beside = next((count for count, document in counts if count + document <= length), length)
        return WholeText(self.inner.sized(max(1, length - beside)), self.globals, self.side, beside)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        edge = self.beside + self.globals
        query, key = ((positions - self.beside).clamp_min(0) for positions in (q, k))
        return (q < edge) | (k < edge) | self.inner.allowed(query, key)


def in_text(pattern: Pattern, config: Any) -> Pattern:
    """``pattern`` with the global tokens of the model of ``config``, which may be a decoder's or a part's."""
    count, side = getattr(config, "global_tokens", 0), getattr(config, "side", None)
    return WholeText(pattern, count, side) if count or side is not None else pattern


def global_token_words(text: WholeText) -> str:
    """A text's global tokens in words."""
    count, side = text.globals, text.side
    words = [f"{count} global token{'s' if count > 1 else ''}"] if count else []
    if side is not None:
        extra = getattr(side, "count", None)
        words.append(f"{extra} tokens on the side" if extra else "units on the side")
    return ", ".join(words)
