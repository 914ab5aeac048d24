"""Drafts: guesses of the next tokens of a text, which a session checks many at a time (``generation.drafted``).

A guess is no sample. The model draws every token as it would without drafts, and a guess only decides how many tokens
one chunk gives. A guess is therefore the token that is most probable by the draft, whatever the sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel, device_of
from kinformer.generation.session import Session
from kinformer.runtime.errors import KinformerError

LEAST_MATCH, MOST_MATCH = 3, 64
"""Tokens of the text's end that must have been there before, and how many are compared."""


class Draft(Protocol):
    """A guesser of the next tokens of texts. Its guesses never change what is drawn."""

    reads_hidden: bool
    """Whether it needs the hidden states that the last tokens were drawn from."""

    def guess(self, texts: Sequence[str], limit: int, hidden: Tensor | None) -> Tensor | None:
        """Return guesses [batch, n] int64 of the next tokens of ``texts``, a character for each token
        (``chr(token)``), n at most ``limit``; None for none. ``hidden`` [batch, 1, dim] are the head inputs that the
        last tokens were drawn from."""
        ...

    def fork(self, copies: int) -> Draft:
        """Return a draft of each row ``copies`` times."""
        ...


class NgramDraft:
    """A draft that looks up the end of the text in the earlier text (prompt look-up) and guesses what followed the last
    occurrence of its longest part."""

    reads_hidden = False

    def guess(self, texts: Sequence[str], limit: int, hidden: Tensor | None) -> Tensor | None:
        guesses = [_continued(text, limit) for text in texts]
        if not any(guesses):
            return None
        # A row without a guess gets the token 0, which is one of every model.
        return torch.tensor([list(map(ord, guess.ljust(limit, "\0"))) for guess in guesses])

    def fork(self, copies: int) -> NgramDraft:
        return self


def _continued(text: str, limit: int) -> str:
    """Return what follows ``text`` if it goes on as after the last occurrence of its end."""
    place, length = -1, len(text)
    for size in range(LEAST_MATCH, min(MOST_MATCH, length - 1) + 1):
        start = text.rfind(text[-size:], 0, length - 1)
        if start < 0:
            break
        place = start + size
    if place < 0:
        return ""
    for index in range(place, place + limit):  # what is guessed may continue itself
        text += text[index]
    return text[length:]


class ModelDraft:
    """A draft by another causal model of the same tokens, which continues the text by its most probable tokens."""

    reads_hidden = False

    def __init__(self, model: CausalModel, batch: int, length: int, chunk: int = 1024) -> None:
        self.model, self.length, self.chunk = model, length, chunk
        self._texts = [""] * batch
        self._session = self._begin(batch)

    def guess(self, texts: Sequence[str], limit: int, hidden: Tensor | None) -> Tensor | None:
        longest = self.model.max_length
        if longest is not None and max(map(len, texts)) + limit - 1 > longest:
            return None
        self._follow(texts)
        self._session.mark()
        guesses = torch.stack([self._session.step() for _ in range(limit)], dim=1)
        self._texts = [text + "".join(map(chr, row)) for text, row in zip(texts, guesses.tolist(), strict=True)]
        return guesses

    def fork(self, copies: int) -> ModelDraft:
        forked = ModelDraft(self.model, len(self._texts) * copies, self.length, self.chunk)
        forked._texts = [text for text in self._texts for _ in range(copies)]
        forked._session = self._session.fork(copies)
        return forked

    def _begin(self, batch: int) -> Session:
        return Session(self.model, batch, temperature=0.0, seed=0, rewind=self.length, chunk=self.chunk)

    def _follow(self, texts: Sequence[str]) -> None:
        """Absorb ``texts``, after going back to where the session's text is theirs."""
        shared = [_shared(old, new, self.length) for old, new in zip(self._texts, texts, strict=True)]
        back = [len(old) - count for old, count in zip(self._texts, shared, strict=True)]
        if any(self._texts) and max(back) <= self._session.rewindable and all(shared):
            self._session.rewind(back)
        else:
            self._session, shared = self._begin(len(texts)), [0 for _ in texts]
        rest = [list(map(ord, text[count:])) for text, count in zip(texts, shared, strict=True)]
        counts = torch.tensor([len(row) for row in rest])
        longest = int(counts.max())
        if longest:
            tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rest])
            self._session.feed(tokens, torch.arange(longest) < counts[:, None])


def _shared(old: str, new: str, behind: int) -> int:
    """Return how many characters both texts begin with, which is all but the last ``behind`` of ``old`` or so."""
    start = max(0, min(len(old) - behind, len(new)))
    start = start if old[:start] == new[:start] else 0
    pairs = zip(old[start:], new[start:], strict=False)
    return next((start + n for n, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))


def draft_of(draft: object, model: CausalModel, batch: int, length: int) -> Draft:
    """Return the draft that ``draft`` names: "ngram", "mtp" (the model's own heads of further tokens), or a model.

    Errors: ``KinformerError`` for anything else, and for a model of other tokens.
    """
    if draft == "ngram":
        return NgramDraft()
    if draft == "mtp":
        return AheadDraft(model)
    if not isinstance(draft, nn.Module) or not hasattr(draft, "initial_state"):
        raise KinformerError(f"draft is {draft!r} but must be 'ngram', 'mtp' or a causal model.")
    other: Any = draft
    if other.vocab_size != model.vocab_size:
        raise KinformerError(
            f"the draft knows {other.vocab_size} tokens, but the model {model.vocab_size}; take a draft that was "
            "trained with the same tokenizer."
        )
    return ModelDraft(other, batch, length)


class AheadDraft:
    """A draft by the heads of further tokens that ``model`` was trained with (``ahead``)."""

    reads_hidden = True

    def __init__(self, model: Any) -> None:
        if getattr(model, "ahead", None) is None:
            raise KinformerError(
                "the draft 'mtp' needs a model that predicts further tokens; train one with `set` ahead=3, or take "
                "'ngram' or another model as the draft."
            )
        self.model = model

    def guess(self, texts: Sequence[str], limit: int, hidden: Tensor | None) -> Tensor | None:
        if hidden is None:
            return None
        last = torch.tensor([[ord(text[-1])] for text in texts], device=device_of(self.model))
        return self.model.guesses(hidden, last, limit)

    def fork(self, copies: int) -> AheadDraft:
        return self
