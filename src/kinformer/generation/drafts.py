"""Speculative decoding: drafts guess the next tokens, and a session checks several guesses in one chunk.

A pass absorbs the pending tokens and the guesses, and draws each token from the model's logits with the random number
that this token has without a draft. It accepts guesses until one differs. The guesses are deterministic, so this is the
accept-and-resample rule of Leviathan, Kalman and Matias 2023 and Chen et al. 2023, and the text equals the text without
a draft, token for token, for every sampling and seed.

After a wrong guess, a state of keys and values is cropped. Any other state returns to its mark, and the next pass
absorbs the accepted guesses again. Every pass has the same number of tokens (more pending tokens, fewer guesses), so it
can be recorded like a step of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor, nn

from kinformer.core.attention_state import cropped
from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State
from kinformer.generation.sampling import SamplingOptions
from kinformer.generation.session import Entry, Session, Steps, joined
from kinformer.runtime.compiling import trusted_arguments
from kinformer.runtime.errors import KinformerError, require
from kinformer.runtime.process import FEW, few_rows

# Drafts: guesses of the next tokens of a text. They decide only how many tokens one pass gives, so a draft guesses the
# token that it finds most probable, whatever the sampling.

LEAST_MATCH, MOST_MATCH = 3, 64
"""The least and the largest number of last tokens to look up in the earlier text."""


class Draft(Protocol):
    """A guesser of the next tokens of texts. Its guesses never change the drawn tokens."""

    reads_hidden: bool
    """Whether it needs the hidden states that the last tokens were drawn from."""

    def guess(self, texts: Sequence[str], limit: int, hidden: Tensor | None) -> Tensor | None:
        """Return guesses [batch, n] int64 of the next tokens of ``texts``, a character for each token
        (``chr(token)``), n at most ``limit``; None for none. ``hidden`` [batch, 1, dim] are the head inputs that the
        last tokens were drawn from."""

    def fork(self, copies: int) -> Draft:
        """Return a draft of each row ``copies`` times."""


class NgramDraft:
    """A draft by prompt look-up: it finds the longest end of the text that occurs earlier in the text, and guesses the
    tokens that followed its last occurrence."""

    reads_hidden = False

    def guess(self, texts: Sequence[str], limit: int, hidden: Tensor | None) -> Tensor | None:
        guesses = [_continued(text, limit) for text in texts]
        if not any(guesses):
            return None
        # A row without a guess gets the token 0, which every model has.
        return torch.tensor([list(map(ord, guess.ljust(limit, "\0"))) for guess in guesses])

    def fork(self, copies: int) -> NgramDraft:
        return self


def _continued(text: str, limit: int) -> str:
    """Return the characters that followed the last earlier occurrence of the end of ``text``."""
    place, length = -1, len(text)
    for size in range(LEAST_MATCH, min(MOST_MATCH, length - 1) + 1):
        start = text.rfind(text[-size:], 0, length - 1)
        if start < 0:
            break
        place = start + size
    if place < 0:
        return ""
    for index in range(place, place + limit):  # the guess itself may be copied: a text with a short period
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
    """Return the length of the common prefix of both texts, usually ``old`` without the last ``behind`` letters."""
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
        return self.model.ahead.guesses(hidden, last, limit, self.model.input, self.model.head)

    def fork(self, copies: int) -> AheadDraft:
        return self


# A session that checks guesses of the next tokens, several in one pass: speculative decoding.


class SessionOptions(SamplingOptions, total=False):
    """The keywords of :class:`~kinformer.generation.session.Session`."""

    stop: Sequence[Sequence[int]]
    chunk: int
    room: int
    recorded: bool
    rewind: int


class Drafting(NamedTuple):
    """The effect of drafts: the number of ``passes`` of the model that drew tokens, and for each row the numbers of
    tokens ``drawn`` by these passes, of tokens ``guessed``, and of guesses ``accepted``."""

    passes: int
    drawn: int
    guessed: int
    accepted: int

    @property
    def facts(self) -> dict[str, object]:
        """Return these numbers as data for JSON."""
        return self._asdict() | {"tokens_per_pass": self.drawn / max(1, self.passes)}

    @property
    def text(self) -> str:
        """Return these numbers as a sentence."""
        share = self.accepted / max(1, self.guessed)
        return (
            f"drafts: {self.drawn / max(1, self.passes):.2f} tokens a pass of the model; {self.accepted} of "
            f"{self.guessed} guesses right ({share:.0%})"
        )


class DraftedSession(Session):
    """A :class:`Session` that draws several tokens in one pass where ``draft`` guesses them; ``length`` is the largest
    number of guesses. Rows keep step: each takes as many tokens of a pass as the row with the fewest right ones."""

    def __init__(
        self, model: CausalModel, draft: Draft, batch: int = 1, *, length: int = 4, **options: Unpack[SessionOptions]
    ) -> None:
        require("draft_length", length, 1)
        self._bound = options.get("rewind", 0)
        options["rewind"], options["room"] = self._bound + length, options.get("room", 256) + length + 1
        super().__init__(model, batch, **options)
        self.draft, self._length = draft, length
        self._passes = Passes(model, self.room, self._stepping.recorded, length + 1)
        self._texts = [""] * batch
        self._queue: list[Tensor] = []
        self._drafting_counts = [0, 0, 0, 0]

    @property
    def drafting(self) -> Drafting:
        """Return the effect of the drafts so far."""
        return Drafting(*self._drafting_counts)

    @property
    def length(self) -> int:
        return super().length - len(self._queue)

    @property
    def finished(self) -> bool:
        return super().finished and not self._queue

    def require(self, draws: int, counts: Sequence[int] = ()) -> None:
        super().require(draws - len(self._queue), counts)

    def feed(self, tokens: Tensor, valid: Tensor | None = None) -> None:
        self._unread()
        super().feed(tokens, valid)

    def rewind(self, tokens: int | Sequence[int] = 1) -> None:
        self._unread()
        super().rewind(tokens)

    def step(self) -> Tensor:
        if not self._queue:
            self._round()
        return self._queue.pop(0).clone()

    def fork(self, copies: int = 1) -> DraftedSession:
        sampling = self._sampler.sampling
        forked = DraftedSession(
            self.model, self.draft.fork(copies), self.batch * copies, length=self._length, chunk=self.chunk,
            room=self.room, recorded=self._stepping.recorded, rewind=self._bound, seed=sampling.seed,
        )  # fmt: skip
        self._copy_into(forked, copies)
        forked._texts = [text for text in self._texts for _ in range(copies)]
        forked._queue = [tokens.repeat_interleave(copies) for tokens in self._queue]
        return forked

    def _unread(self) -> None:
        """Take back the tokens that no step has returned yet, and their random numbers."""
        ahead, self._queue = len(self._queue), []
        if ahead:
            self._take_back([ahead] * self.batch)
            self._sampler.undraw(ahead)

    def _limits(self) -> list[int]:
        return [min(self._bound, limit - len(self._queue)) for limit in super()._limits()]

    def _take_back(self, counts: Sequence[int]) -> None:
        super()._take_back(counts)
        self._texts = [text[: len(text) - count] for text, count in zip(self._texts, counts, strict=True)]

    def _note(self, entry: Entry) -> None:
        super()._note(entry)
        rows = zip(entry.tokens.tolist(), [None] * self.batch if entry.valid is None else entry.valid.tolist())
        for row, (tokens, valid) in enumerate(rows):
            real = tokens if valid is None else [token for token, counts in zip(tokens, valid, strict=True) if counts]
            self._texts[row] += "".join(map(chr, real))

    def _round(self) -> None:
        """Draw the next token, and further tokens as long as the guesses are right."""
        guesses = self._guesses()
        if guesses is not None:
            with torch.inference_mode():
                self._check(guesses)
            return
        if self._pending and self.draft.reads_hidden:
            with torch.inference_mode():
                self._absorb_pending()
        self._queue.append(super().step())
        self._count(1, 0)

    def _guesses(self) -> Tensor | None:
        """Return guesses [batch, n] of the tokens after the last drawn token, as many as the pass has room for beside
        the pending tokens; None where a step of one token is better."""
        last = self._pending[-1] if self._pending else None
        limit = self._length + 1 - sum(entry.tokens.shape[1] for entry in self._pending)
        if last is None or last.valid is not None or last.tokens.shape[1] > 1 or limit < 0:
            return None
        if self.model.max_length is not None:
            limit = min(limit, self.model.max_length - super().length)
        if limit < 1:
            return last.tokens[:, :0]
        with torch.inference_mode(), few_rows(self._device):
            ends = self._ends if self.draft.reads_hidden else None
            hidden = ends if isinstance(ends, Tensor) else getattr(ends, "hidden_states", None)
            guesses = self.draft.guess(self._texts, limit, hidden)
        if guesses is None:
            return None
        guesses = guesses.to(self._device)
        if any(self._stops.ended):
            ended = torch.tensor(self._stops.ended, device=self._device)
            guesses = torch.where(ended[:, None], last.tokens, guesses)
        return guesses

    def _check(self, guesses: Tensor) -> None:
        """Absorb the pending tokens and ``guesses`` [batch, n], draw the tokens after them, keep the right guesses."""
        self.mark()
        number = guesses.shape[1]
        tokens, valid = joined([*self._pending, Entry(guesses, None, [number] * self.batch, None)])
        self._pending = []
        logits, hidden, self._state = self._passes.go(tokens, valid, self._state)
        logits, hidden = logits[:, -number - 1 :], hidden[:, -number - 1 :]
        right = 0
        for right in range(number + 1):
            drawn = self._drawn(logits[:, right])
            self._queue.append(drawn)
            if right == number or super().finished or not torch.equal(drawn, guesses[:, right]):
                break
        state = cropped(self._state, number - right)
        if state is None:
            self._return()
        else:
            self._state, self._logits, self._pending = state, logits[:, right], self._pending[-1:]
        self._ends = hidden[:, right : right + 1]
        self._count(right + 1, number)

    def _count(self, drawn: int, guessed: int) -> None:
        added = (1, drawn, guessed, drawn - 1)
        self._drafting_counts = [old + new for old, new in zip(self._drafting_counts, added, strict=True)]


class Passes(Steps):
    """The passes of ``model`` over the ``time`` tokens that a session checks, recorded like steps."""

    def go(self, tokens: Tensor, valid: Tensor | None, state: State) -> tuple[Tensor, Tensor, State]:
        """Return the logits [batch, time, vocab] and the hidden states [batch, time, width] of ``tokens`` [batch,
        time], and the state after them. ``valid`` [batch, time] bool marks the real tokens (None: all)."""
        with few_rows(tokens.device, tokens.numel() < FEW), trusted_arguments():
            if valid is None and tokens.shape[1] == self.time:
                self.made += 1
                if (running := self._recorded(tokens, state)) is not None:
                    logits, hidden = running.outputs(tokens)
                    return logits, hidden, running.release()
            (logits, hidden), state = self.absorb(self.model, tokens, state, valid)
            return logits, hidden, state

    @staticmethod
    def absorb(
        model: CausalModel, tokens: Tensor, state: State, valid: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], State]:
        inputs, state = model.head_inputs(tokens, state, valid=valid)
        return (model.logits(inputs), getattr(inputs, "hidden_states", inputs)), state
