"""Tokens of a request on their way to a client: as text that never ends in half a character or in a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kinformer.data import Tokenizer
from kinformer.generation.stops import StoppedText
from kinformer.runtime.errors import KinformerError
from kinformer.serving.request import TokenScore


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, where its text begins in the choice's, and its score where one was requested."""

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


@dataclass(frozen=True)
class Failure:
    """The end of a request for which the model failed, or which the server ended."""

    error: KinformerError


class TextListener:
    """A listener that passes ``send`` the pieces of the choices of one request, the first of which has the number
    ``first``.

    A token is passed on with the text in which it begins, so that a stop string takes its tokens with it. ``ends``:
    the tokens that end a choice and are not passed on. ``before``: the prompt's tokens, which a choice continues.
    """

    def __init__(
        self,
        send: Callable[[Piece | Failure], None],
        tokenizer: Tokenizer,
        stops: Sequence[str],
        first: int,
        ends: Sequence[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        self._send, self._tokenizer, self._stops, self._first, self._ends = send, tokenizer, stops, first, ends
        self._before = before
        self._echo: tuple[str, list[int], int, int] = "", [], 0, 0
        self._choices: dict[int, _Choice] = {}

    def echo(self, prompt: str, tokens: list[int], copies: int, added: int = 0) -> None:
        """Begin each of ``copies`` choices with ``prompt``, whose ``tokens`` follow when they are scored; the first
        ``added`` tokens stand in front of the prompt's text."""
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
        """Pass on what the token completes; return whether it or a stop string ends the copy."""
        choice = self._choice(copy)
        choice.waiting.append(ScoredToken(token, choice.begins + choice.text.decoded, score))
        if text := choice.text.feed(token):
            self._send(Piece(self._first + copy, text, choice.show(text)))
        return choice.text.stopped

    def ended(self, copy: int, reason: str) -> None:
        """Pass on what was waiting, and why the copy ends."""
        choice = self._choice(copy)
        text = choice.text.finish()
        reason = "stop" if choice.text.stopped else reason
        tokens = choice.show(text) if reason == "stop" else choice.waiting
        self._send(Piece(self._first + copy, text, tokens, reason))

    def failed(self, error: KinformerError) -> None:
        """Pass on that nothing more comes of the request."""
        self._send(Failure(error))

    def _choice(self, copy: int) -> _Choice:
        if copy not in self._choices:
            text = StoppedText(self._tokenizer.stream(self._before), self._stops, self._ends)
            self._choices[copy] = _Choice(text, len(self._echo[0]))
        return self._choices[copy]


class _Choice:
    """One choice in the making: its text, which ``begins`` behind what is echoed, and tokens that wait for theirs."""

    def __init__(self, text: StoppedText, begins: int) -> None:
        self.text, self.begins, self.shown = text, begins, begins
        self.waiting: list[ScoredToken] = []

    def show(self, text: str) -> list[ScoredToken]:
        """Return the tokens that begin in what is shown, ``text`` included."""
        self.shown += len(text)
        ready = [item for item in self.waiting if item.offset < self.shown]
        self.waiting = self.waiting[len(ready) :]
        return ready
