"""One HTTP request between the engine's thread and the server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kinformer.generation.sampling import ends_of_text
from kinformer.lab.data import Tokenizer
from kinformer.lab.data.tokenizer import NEIGHBOURS, as_bytes, prompt_ids
from kinformer.lab.serving.engine import Engine
from kinformer.lab.serving.fields import Body
from kinformer.lab.serving.requests import Piece, Request, TextListener
from kinformer.runtime.errors import KinformerError, plural

if TYPE_CHECKING:
    from starlette.types import Receive


MOST_VALUES = 1 << 18
"""The most tokens and log-probabilities of an answer: each takes some 20 bytes of JSON, which is built at once."""
MOST_BEHIND = 1 << 14
"""The most tokens and log-probabilities of a stream's row that may wait for a slow client."""


class ClientLeftError(Exception):
    """The error of a client that closed its connection before it had the full answer."""


class Job:
    """The choices of one HTTP request: ``body.n`` for each of ``prompts``, texts or ids. Choice number i equals row i
    of ``kinformer.generate`` for the prompts repeated ``n`` times each. A job may be built outside of the event loop;
    :meth:`submit` and :meth:`pieces` must run in it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        body: Body,
        prompts: Sequence[str | list[int] | np.ndarray],
        new: int | None,
    ) -> None:
        engine.check_rows(len(prompts), body.n)
        self.engine, self.body = engine, body
        self.prompt_tokens = self._values = self._sent = self._taken = 0
        self._overflowed = False
        self._queue: asyncio.Queue[Piece | KinformerError | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        starts = enumerate(prompts)
        self._requests = [self._request(tokenizer, prompt, number * body.n, new) for number, prompt in starts]

    @property
    def choices(self) -> int:
        """Return the number of choices of the answer."""
        return len(self._requests) * self.body.n

    @property
    def usage(self) -> dict[str, int]:
        """Return how many tokens were absorbed and drawn so far."""
        prompt, new = self.prompt_tokens, sum(request.listener.new_tokens for request in self._requests)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def submit(self) -> None:
        """Hand all requests to the engine, or none if the engine is busy."""
        self._loop = asyncio.get_running_loop()
        try:
            for request in self._requests:
                self.engine.submit(request)
        except KinformerError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End all open requests of the job."""
        for request in self._requests:
            self.engine.cancel(request)

    async def pieces(self, receive: Receive) -> AsyncIterator[Piece]:
        """Yield the pieces as they come, until all choices have ended.

        Errors: ``KinformerError`` if the engine fails; :class:`ClientLeftError` as soon as ``receive`` reports it.
        """
        watch = asyncio.create_task(self._watch(receive))
        left = self.choices
        try:
            while left:
                item = await self._queue.get()
                if item is None:
                    raise ClientLeftError
                self._taken += 1
                if isinstance(item, KinformerError):
                    raise item
                left -= item.reason is not None
                yield item
        finally:
            watch.cancel()
            if left:
                self.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(None)

    def _request(
        self, tokenizer: Tokenizer, prompt: str | list[int] | np.ndarray, first: int, new: int | None
    ) -> Request:
        body = self.body
        # An array: a list of millions of ids takes half a second in which no other thread runs.
        tokens = prompt_ids(tokenizer, prompt) if isinstance(prompt, str) else np.array(prompt, np.int64)
        ends = (*body.stop_tokens, *(() if body.ignore_eos else ends_of_text(self.engine.model)))
        listener = TextListener(self._send, tokenizer, body.stops, first, ends, tokens[-NEIGHBOURS:].tolist())
        self.prompt_tokens += len(tokens)
        limit = self.engine.model.max_length
        if body.max_tokens is not None:
            new = body.max_tokens
        elif limit is not None and new is not None:
            new = max(1, min(new, limit + 1 - len(tokens)))
        request = Request(
            tokens=tokens,
            listener=listener,
            sampling=body.sampling,
            penalties=body.penalties,
            max_new_tokens=new or 0,
            copies=body.n,
            first_stream=first,
            logprobs=body.logprobs,
            scores_prompt=body.echo and body.logprobs is not None,
        )
        self.engine.check(request)
        self._require_size(request)
        if body.echo:
            if isinstance(prompt, str):
                text = as_bytes(prompt).decode("utf-8", "replace")
                added = len(tokens) - len(tokenizer.encode(prompt))
            else:
                text, added = tokenizer.decode(tokens), 0
            listener.echo(text, tokens.tolist(), body.n, added)
        return request

    def _require_size(self, request: Request) -> None:
        """Raise if the answer with ``request`` may become too large; the new tokens of a stream do not count."""
        tokens = (len(request.tokens) if self.body.echo else 0) + (0 if self.body.stream else request.max_new_tokens)
        self._values += request.copies * tokens * (1 + (request.logprobs or 0))
        if self._values > MOST_VALUES:
            raise KinformerError(
                f"the answer may have {self._values:,} values (n x tokens x (1 + logprobs)), but must have at most "
                f"{MOST_VALUES:,}; lower n, max_tokens or logprobs, or send less of prompt."
            )

    @property
    def _most_behind(self) -> int:
        """Return how many pieces may wait for a client that reads a stream."""
        rows = min(self.choices, self.engine.limits.max_streams)
        return 2 * self.choices + rows * (MOST_BEHIND // (1 + (self.body.logprobs or 0)))

    def _send(self, item: Piece | KinformerError) -> None:
        """Pass a piece to the event loop, from any thread; end a stream whose client is too far behind."""
        if self._overflowed:
            return
        if self._loop is not None and self.body.stream and self._sent - self._taken >= self._most_behind:
            self._overflowed = True
            self.cancel()
            behind = plural(self._sent - self._taken, "piece")
            item = KinformerError(
                f"{behind} of the stream waited for its client, so the stream has ended; read it faster, or lower "
                "max_tokens or logprobs."
            )
        self._sent += 1
        if self._loop is None:
            self._queue.put_nowait(item)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
