"""The JSON of answers, in the form that OpenAI's clients read."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence

from kinformer.lab.data import Tokenizer
from kinformer.lab.serving.fields import Body
from kinformer.lab.serving.requests import Piece, ScoredToken
from kinformer.runtime.parsing import dump_json, with_finite_numbers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def encoded(data: object) -> bytes:
    """Return ``data`` as JSON in UTF-8. Halves of surrogate pairs stay escaped: UTF-8 cannot encode them."""
    return dump_json(data, compact=True).encode("utf-8", "backslashreplace")


def encoded_by_parts(data: object) -> bytes:
    """Return the same as :func:`encoded`, without blocking other threads while a large answer is written."""
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
    return "".join(encoder.iterencode(with_finite_numbers(data))).encode("utf-8", "backslashreplace")


def event(data: object, encode: Callable[[object], bytes] = encoded) -> bytes:
    """Return ``data`` as one server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Answer:
    """The answers to one request: :meth:`chunk` for a part of a choice, :meth:`full` for all choices."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, body: Body, tokenizer: Tokenizer, choices: int) -> None:
        self.body, self.tokenizer = body, tokenizer
        self.created, self.id = int(time.time()), self.prefix + secrets.token_hex(12)
        self.texts: list[list[str]] = [[] for _ in range(choices)]
        self.tokens: list[list[ScoredToken]] = [[] for _ in range(choices)]
        self.reasons: list[str | None] = [None] * choices
        self._spellings: dict[int, tuple[str, bool]] = {}

    def take(self, piece: Piece) -> None:
        """Add a piece to the choice that it belongs to."""
        self.texts[piece.choice].append(piece.text)
        self.tokens[piece.choice] += piece.tokens
        self.reasons[piece.choice] = piece.reason

    def chunk(self, piece: Piece) -> dict[str, object]:
        """Return the event of a piece."""
        choice = {"index": piece.choice} | self._delta(piece)
        return self._frame(self.chunk_kind, [self._choice(choice, piece.tokens, piece.reason)])

    def full(self, usage: dict[str, int]) -> dict[str, object]:
        """Return the answer with all choices and the ``usage``."""
        choices = []
        for number, (texts, tokens, reason) in enumerate(zip(self.texts, self.tokens, self.reasons, strict=True)):
            choice = {"index": number} | self._text("".join(texts))
            choices.append(self._choice(choice, tokens, reason))
        return self._frame(self.kind, choices) | {"usage": usage}

    def _choice(self, choice: dict[str, object], tokens: list[ScoredToken], reason: str | None) -> dict[str, object]:
        """Return a choice with the scores of its tokens, and their ids if the request asks for the ids."""
        ids = {"token_ids": [item.token for item in tokens]} if self.body.return_token_ids else {}
        return choice | {"logprobs": self._scores(tokens), "finish_reason": reason} | ids

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, object]:
        """Return the last event of a stream whose usage was requested."""
        return self._frame(self.chunk_kind, []) | {"usage": usage}

    def opening(self) -> list[dict[str, object]]:
        """Return the events before the first piece."""
        return []

    def _frame(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        frame = {"id": self.id, "object": kind, "created": self.created, "model": self.body.model, "choices": choices}
        return frame | ({"usage": None} if self.body.include_usage else {})

    def _text(self, text: str) -> dict[str, object]:
        return {"text": text}

    def _delta(self, piece: Piece) -> dict[str, object]:
        return self._text(piece.text)

    def _scores(self, tokens: Sequence[ScoredToken]) -> dict[str, object] | None:
        if self.body.logprobs is None:
            return None
        scores = [item.score for item in tokens]
        return {
            "tokens": [self.spelled(item.token) for item in tokens],
            "token_logprobs": [None if score is None else score.logprob for score in scores],
            "top_logprobs": [None if score is None else self._top(score.top) for score in scores],
            "text_offset": [item.offset for item in tokens],
        }

    def _top(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the scores of tokens by spelling; the less likely of two tokens of one spelling is named by its id."""
        scores: dict[str, float] = {}
        for token, value in top:
            text = self.spelled(token)
            scores[f"token_id:{token}" if text in scores else text] = value
        return scores

    def spelled(self, token: int) -> str:
        """Return the text of a token, or ``token_id:N`` for a token without text, such as half of a character."""
        return self._spelling(token)[0]

    def _spelling(self, token: int) -> tuple[str, bool]:
        """Return how a token is spelled, and whether the spelling is its text. Each token is decoded once."""
        if token not in self._spellings:
            text = self.tokenizer.spell(token)
            complete = bool(text) and _REPLACEMENT not in text
            self._spellings[token] = (text if complete else f"token_id:{token}", complete)
        return self._spellings[token]


class ChatAnswer(Answer):
    """An answer to a chat: messages in place of texts."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self) -> list[dict[str, object]]:
        delta = {"role": "assistant", "content": ""}
        empty: dict[str, object] = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._frame(self.chunk_kind, [{"index": number} | empty]) for number in range(len(self.texts))]

    def _text(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, piece: Piece) -> dict[str, object]:
        return {"delta": {"content": piece.text} if piece.text else {}}

    def _scores(self, tokens: Sequence[ScoredToken]) -> dict[str, object] | None:
        if self.body.logprobs is None:
            return None
        content = []
        for item in tokens:
            assert item.score is not None
            top = [self._entry(token, logprob) for token, logprob in item.score.top]
            content.append(self._entry(item.token, item.score.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        text, complete = self._spelling(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if complete else None}
