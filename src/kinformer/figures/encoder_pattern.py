"""The pattern of a full sequence in an encoder, its global input included: for pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kinformer.core.pattern import Pattern
from kinformer.runtime.words import plural


class CountedTokens(Protocol):
    """A global input that was built."""

    def count(self, sentences: Tensor | None, time: int) -> int:
        """Return how many tokens it has over a long input of ``time`` tokens."""
        ...


class GlobalInput(Protocol):
    """The config of a global input (``blocks.global_input``)."""

    def build(self, dim: int) -> CountedTokens: ...


@dataclass(frozen=True)
class FullSequence(Pattern):
    """A pattern of the global and the long input, with ``inner`` between the tokens of the long one; the first
    ``num_global`` positions are the global input.

    These, and the first ``global_tokens`` of the long input, see all and are seen by all. ``global_input`` is its
    config or None.
    """

    inner: Pattern
    global_tokens: int = 0
    global_input: GlobalInput | None = None
    num_global: int = 0

    behind = None
    ahead = None

    @property
    def num_heads(self) -> int | None:  # type: ignore[override]
        return self.inner.num_heads

    def at(self, head: int) -> Pattern:
        return FullSequence(self.inner.at(head), self.global_tokens, self.global_input, self.num_global)

    def sized(self, length: int) -> Pattern:
        """Return the pattern of ``length`` tokens together: as many of the long
        input as leave room for the global one."""
        num_global = 0
        if self.global_input is not None:
            built = self.global_input.build(1)
            counts = ((built.count(None, time), time) for time in range(length, 0, -1))
            num_global = next((count for count, time in counts if count + time <= length), length)
        inner = self.inner.sized(max(1, length - num_global))
        return FullSequence(inner, self.global_tokens, self.global_input, num_global)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        edge = self.num_global + self.global_tokens
        query, key = ((positions - self.num_global).clamp_min(0) for positions in (q, k))
        return (q < edge) | (k < edge) | self.inner.allowed(query, key)


def in_text(pattern: Pattern, config: object) -> Pattern:
    """Return ``pattern`` with the global tokens of the model of ``config``, which may be a decoder's or a part's."""
    count, global_input = getattr(config, "global_tokens", 0), getattr(config, "global_input", None)
    return FullSequence(pattern, count, global_input) if count or global_input is not None else pattern


def global_token_words(text: FullSequence) -> str:
    """Return a sequence's global tokens in words."""
    count, global_input = text.global_tokens, text.global_input
    words = [plural(count, "global token")] if count else []
    if global_input is not None:
        extra = getattr(global_input, "count", None)
        words.append(f"global input of {plural(extra, 'token')}" if extra else "global input of sentences")
    return ", ".join(words)
