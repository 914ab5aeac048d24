"""Requests for continuations of prompts, and the listeners that pass a request's tokens on to its client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kinformer.generation.sampling import Sampling, StoppedText
from kinformer.lab.data import Tokenizer
from kinformer.runtime.errors import KinformerError


class Penalties(NamedTuple):
    """Changes of the logits before a draw, as OpenAI defines them: ``bias`` is added to the logits of its tokens, and
    from each token of the continuation ``presence`` is subtracted once, and ``frequency`` as often as the token
    occurs."""

    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


class TokenScore(NamedTuple):
    """The log-probability of a token, before temperature and cuts, and the most probable tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, the offset of its text in the text of the choice, and its score if scores were requested."""

    token: int
    offset: int
    score: TokenScore | None


@dataclass(slots=True)
class Piece:
    """The next part of a choice: its ``text``, the ``tokens`` that begin in it, and at the end the ``reason``."""

    choice: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    reason: str | None = None


class TextListener:
    """A listener that passes the pieces of one request's choices to ``send``; the first choice has the number
    ``first``. A token is passed on with the text in which it begins, so that a stop string removes its tokens, too.
    ``ends``: the tokens that end a choice and are not passed on. ``before``: the prompt's tokens, which a choice
    continues."""

    def __init__(
        self,
        send: Callable[[Piece | KinformerError], None],
        tokenizer: Tokenizer,
        stops: Sequence[str],
        first: int,
        ends: Sequence[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        self._send, self._tokenizer, self._stops, self._first = send, tokenizer, stops, first
        self._ends, self._before = ends, before
        self.new_tokens = 0
        self._echo: tuple[str, list[int], int, int] = "", [], 0, 0
        self._choices: dict[int, _Choice] = {}

    def echo(self, prompt: str, tokens: list[int], copies: int, added: int = 0) -> None:
        """Begin ``copies`` choices with ``prompt``, whose scored ``tokens`` follow, after ``added`` other tokens."""
        self._echo = prompt, tokens, copies, added
        for copy in range(copies):
            self._send(Piece(self._first + copy, prompt))

    def scored(self, scores: list[TokenScore | None]) -> None:
        """Pass on the scored tokens of the prompt."""
        decoder = StoppedText(self._tokenizer.stream(), ())
        tokens = []
        for place, (token, score) in enumerate(zip(self._echo[1], scores, strict=True)):
            tokens.append(ScoredToken(token, decoder.decoded, score))
            if place >= self._echo[3]:
                decoder.feed(token)
        for copy in range(self._echo[2]):
            self._send(Piece(self._first + copy, tokens=tokens))

    def drawn(self, copy: int, token: int, score: TokenScore | None) -> bool:
        """Pass on the text that the token completes; return whether the token or a stop string ends the copy."""
        self.new_tokens += 1
        choice = self._choice(copy)
        if token not in self._ends:
            choice.waiting.append(ScoredToken(token, choice.begins + choice.text.decoded, score))
        if text := choice.text.feed(token):
            self._send(Piece(self._first + copy, text, choice.show(text)))
        return choice.text.stopped

    def ended(self, copy: int, reason: str) -> None:
        """Pass on the text and the tokens that were waiting, and the reason for the end of the copy."""
        choice = self._choice(copy)
        text = choice.text.finish()
        reason = "stop" if choice.text.stopped else reason
        tokens = choice.show(text) if reason == "stop" else choice.waiting
        self._send(Piece(self._first + copy, text, tokens, reason))

    def failed(self, error: KinformerError) -> None:
        """Pass on the failure of the request."""
        self._send(error)

    def _choice(self, copy: int) -> _Choice:
        if copy not in self._choices:
            text = StoppedText(self._tokenizer.stream(self._before), self._stops, self._ends)
            self._choices[copy] = _Choice(text, len(self._echo[0]))
        return self._choices[copy]


class _Choice:
    """One unfinished choice: its text, which ``begins`` after the echoed prompt, and its waiting tokens."""

    def __init__(self, text: StoppedText, begins: int) -> None:
        self.text, self.begins, self.shown = text, begins, begins
        self.waiting: list[ScoredToken] = []

    def show(self, text: str) -> list[ScoredToken]:
        """Return the waiting tokens that begin in the text shown so far, ``text`` included."""
        self.shown += len(text)
        ready = [item for item in self.waiting if item.offset < self.shown]
        self.waiting = self.waiting[len(ready) :]
        return ready


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A request for ``copies`` continuations of ``tokens`` [length] int64, of at most ``max_new_tokens`` each.

    Copy j draws from stream ``first_stream + j`` of the seed of ``sampling``, as row ``first_stream + j`` does in
    ``kinformer.generate``. ``logprobs``: how many of the most probable tokens a score holds; None gives no scores.
    ``scores_prompt``: also score the tokens of the prompt.
    """

    tokens: np.ndarray
    listener: TextListener
    """The listener to the tokens. The engine's thread calls it between steps, so it must not wait."""
    sampling: Sampling
    max_new_tokens: int
    penalties: Penalties = Penalties()
    copies: int = 1
    first_stream: int = 0
    logprobs: int | None = None
    scores_prompt: bool = False

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest sequence that the request may become."""
        return len(self.tokens) + self.max_new_tokens
