"""An engine that continues many sequences as one batch, by turns: admit, absorb prompts, step.

A turn removes cancelled requests, admits new ones, absorbs one chunk of prompts, steps the batch, and reports every
token to its listener. Rows join and leave between steps: the functions of ``core.state`` select, join and reserve their
states. The copies of one prompt share one absorbed state. Every row draws from the random stream of its seed, as in
``generate``, so its tokens do not depend on the other rows.

A request is admitted if the states of all rows at their full lengths stay within a bound of bytes. The states of a
batch are right-aligned, so a growing state takes as many slots for every row as the longest row needs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.contract import CausalMixer
from kinformer.core.model import CausalModel, StackedModel, device_of
from kinformer.core.state import State
from kinformer.generation.recording import logits_after
from kinformer.generation.sampling import UniformStreams, draw, penalise_repetition
from kinformer.generation.session import Steps, require_continuing, require_ids
from kinformer.lab.serving.requests import Penalties, Request, TokenScore
from kinformer.runtime.errors import Checked, KinformerError, plural, require_finite
from kinformer.runtime.process import FEW, few_rows


class Row:
    """One copy of a continued request: its place in its random stream, its length, and the tokens of its penalties."""

    def __init__(self, request: Request, copy: int) -> None:
        self.request, self.copy = request, copy
        self.new_tokens = 0
        self.uniforms = UniformStreams(request.sampling.seed, [request.first_stream + copy])
        self.changes_logits = request.penalties != Penalties() or request.sampling.repetition_penalty != 1
        self._continuation: list[int] = []
        self._in_prompt: Tensor | None = None

    @property
    def remaining(self) -> int:
        """Return how many more tokens may be drawn."""
        return self.request.max_new_tokens - self.new_tokens

    def note(self, token: int) -> None:
        """Note the next token of the continuation."""
        self.new_tokens += 1
        if self.changes_logits:
            self._continuation.append(token)

    def changed(self, logits: Tensor) -> Tensor:
        """Return ``logits`` [vocab] with the bias and the penalties of this row."""
        if not self.changes_logits:
            return logits
        penalties, repetition = self.request.penalties, self.request.sampling.repetition_penalty
        if penalties.bias:
            tokens, bias = zip(*penalties.bias, strict=True)
            logits = logits.index_add(0, _indices(tokens, logits), logits.new_tensor(bias))
        continuation = _indices(self._continuation, logits)
        if repetition != 1:
            if self._in_prompt is None:
                absent = torch.zeros_like(logits, dtype=torch.bool)
                self._in_prompt = absent.index_fill_(0, _indices(self.request.tokens, logits), True)
            logits = penalise_repetition(logits, self._in_prompt.index_fill(0, continuation, True), repetition)
        counts = torch.zeros_like(logits).index_add_(0, continuation, logits.new_ones(()).expand(len(continuation)))
        return logits - penalties.frequency * counts - penalties.presence * (counts > 0)


# How many rows may be continued at a time, and how large their state may become.


@dataclass(frozen=True, kw_only=True)
class Limits(Checked):
    """The bounds of an engine.

    max_streams: rows at a time; a request of n copies has n rows.
    max_state_bytes: the most bytes of the state of all rows together; None for no bound.
    max_waiting: requests that wait for their turn; further requests are refused.
    chunk: tokens of prompts absorbed between two steps.
    """

    max_streams: int = 64
    max_state_bytes: int | None = None
    max_waiting: int = 64
    chunk: int = 256

    LEAST = {"max_streams": 1, "max_state_bytes": 1, "chunk": 1, "max_waiting": 0}


class BusyError(KinformerError):
    """The refusal of a request while all rows are taken and enough requests wait; the client may repeat it later."""


# The rows stepped as one batch, and their state.

ROOM = 256
"""Tokens for which a growing state has room; after that many steps it is laid out again."""
_FAR = 1 << 30  # a length beyond every window: a bounded state no longer grows there
_UNKNOWN = 0
"""The number of steps to expect: as rows may join at any step, a recording waits for as many as it costs."""


class ContinuedModel(CausalModel, StackedModel, Protocol):
    """A causal model of this library, whose stack says how its state grows."""


class Joining(NamedTuple):
    """Rows that join a batch, their ``state`` and the last token of each, ``tokens`` [rows] int64."""

    rows: Sequence[Row]
    state: State
    tokens: Tensor


class Batch:
    """Rows of ``model`` stepped together; rows leave and join between steps. The states of rows of unequal length are
    right-aligned. ``tokens`` [rows] int64 are the last token of each row, which the next step absorbs."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.rows: list[Row] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=device_of(model))
        self._state: State = None
        self._steps = 0
        self._stepping = Steps(model, _UNKNOWN, recorded=True)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that the state of all rows holds now."""
        return 0 if self._state is None else states.nbytes(self._state)

    def change(self, leaving: Sequence[Row], joining: Sequence[Joining]) -> None:
        """Remove the rows ``leaving`` and append the rows ``joining``; enlarge the state's buffers if they are full."""
        grown = self._steps >= ROOM and any(states.reserved_parts(self._state))
        if not (leaving or joining or grown):
            return
        gone = set(map(id, leaving))
        staying = [index for index, row in enumerate(self.rows) if id(row) not in gone]
        parts = []
        if staying:
            state = states.value(self._stepping.settled(self._state))
            parts.append(states.select_rows(state, torch.tensor(staying)) if leaving else state)
        self._state = None  # frees the old state before the new one is built, else memory holds both
        parts += [states.value(item.state) for item in joining]
        self.tokens = torch.cat([self.tokens[staying], *(item.tokens for item in joining)])
        self.rows = [self.rows[index] for index in staying] + [row for item in joining for row in item.rows]
        self._steps, self._stepping = 0, Steps(self.model, _UNKNOWN, recorded=True)
        if parts:
            state = states.renewed(states.join_rows(parts) if len(parts) > 1 else parts[0], derived=True)
            self._state = states.reserve(state, min(ROOM, max(row.remaining for row in self.rows)))

    def step(self) -> Tensor:
        """Return logits [rows, vocab] behind :attr:`tokens`, which the state absorbs."""
        self._steps += 1
        logits, self._state = self._stepping.step(self.tokens[:, None], self._state)
        return logits


def row_bytes(model: ContinuedModel, length: int) -> int:
    """Return the most bytes that the state of a row of up to ``length`` tokens holds in a :class:`Batch` in which no
    row is longer, room included. A growing state has a slot for each token and :data:`ROOM` more. The buffer of a
    window has twice the retained slots and 64 more, so that the window seldom has to be moved to the front of its
    buffer."""
    units = [model.stack.units[index] for index in model.stack.order]
    mixers = [module for unit in units for module in unit.modules() if isinstance(module, CausalMixer)]
    dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    total = states.nbytes(model.initial_state(1))
    for mixer in mixers:
        declared = partial(mixer.state_bytes, dtype=dtype)
        slot, limit = declared(2) - declared(1), declared(_FAR)
        unlimited = slot == 0 or limit > declared(_FAR // 2)
        total += (declared(length + ROOM) if unlimited else 2 * limit + 64 * slot) - declared(0)
    return total


# Prompts absorbed in chunks, between the steps of other requests.

_LEAST = -9999.0
"""The log-probability of an impossible token: JSON cannot write -infinity."""


class Prefill:
    """The prompt of one request while it is absorbed into a state, which all copies share."""

    def __init__(self, model: CausalModel, request: Request) -> None:
        self.model, self.request = model, request
        self.absorbed = 0
        self.scores: list[TokenScore | None] = [None]
        self._logits: Tensor | None = None
        self._state: State = None

    @property
    def done(self) -> bool:
        """Return whether the state holds the full prompt."""
        return self.absorbed == len(self.request.tokens)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that the state holds now."""
        return 0 if self._state is None else states.nbytes(self._state)

    def absorb(self, limit: int) -> int:
        """Absorb the next chunk, of at most ``limit`` tokens; return how many it has."""
        if self._state is None:
            length = len(self.request.tokens) + min(ROOM, self.request.max_new_tokens)
            self._state = states.reserve(self.model.initial_state(1), length)
        tokens = self.request.tokens[self.absorbed : self.absorbed + limit]
        chunk = torch.from_numpy(tokens)[None].to(device_of(self.model))
        with few_rows(chunk.device, chunk.numel() < FEW):
            if self.request.scores_prompt:
                self._score(chunk)
            else:
                self._logits, self._state = logits_after(self.model, chunk, self._state)
        self.absorbed += chunk.shape[1]
        return chunk.shape[1]

    def logits(self) -> Tensor:
        """Return the logits [copies, vocab] behind the prompt."""
        assert self._logits is not None
        return self._logits.expand(self.request.copies, -1)

    def joining(self, rows: list[Row], tokens: Tensor) -> Joining:
        """Return the copies ``rows`` of this prompt, each with its first of ``tokens`` [rows], for a batch to take."""
        state, self._state = states.value(self._state), None
        return Joining(rows, states.repeat_rows(state, len(rows)) if len(rows) > 1 else state, tokens)

    def _score(self, chunk: Tensor) -> None:
        logits, self._state = self.model(chunk, self._state)
        before = logits[:, :-1] if self._logits is None else torch.cat([self._logits[:, None], logits[:, :-1]], dim=1)
        targets = chunk[0, chunk.shape[1] - before.shape[1] :]
        self.scores += scores(before[0], targets, self.request.logprobs or 0)
        self._logits = logits[:, -1]


def scores(logits: Tensor, tokens: Tensor, top: int) -> list[TokenScore]:
    """Return the scores of ``tokens`` [rows] under ``logits`` [rows, vocab], each with the ``top`` most probable."""
    logprobs = logits.log_softmax(dim=-1).clamp_min(_LEAST)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenScore(score, list(zip(*pair, strict=True))) for score, pair in zip(chosen, pairs, strict=True)]


class Engine:
    """An engine for ``model``: :meth:`submit` and :meth:`cancel` may be called by any thread, :meth:`turn` by one.

    Rows join and leave the batch between steps. A prompt is absorbed in chunks between steps, once for all copies.
    A row draws the same tokens as ``kinformer.generate`` for the same prompt, stream and seed, whatever the other rows
    are (up to the rounding of products of other sizes).

    ``counts`` counts prompt tokens (``prompt``), drawn tokens (``drawn``), steps (``steps``), copies by the reason of
    their end (``stop``, ``length``, ``cancelled``, ``failed``), and ``refused`` requests.
    """

    def __init__(self, model: ContinuedModel, limits: Limits | None = None) -> None:
        require_continuing(model)
        self.model, self.limits = model, limits or Limits()
        self.counts: Counter[str] = Counter()
        self.state_bytes = 0
        self._batch = Batch(model)
        self._prefills: deque[Prefill] = deque()
        self._entered: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._cancelled: set[Request] = set()
        self._row_bytes = lru_cache(4096)(lambda length: row_bytes(model, length))
        self._admitted: Counter[Request] = Counter()  # requests, and how many rows each still has
        self._changed = threading.Condition()
        self._closing = False

    @property
    def rows(self) -> int:
        """Return the number of admitted rows, rows of unfinished prompts included."""
        return self._admitted.total()

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for rows or state to become free."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Accept a request; its listener is called from the next turn on.

        Errors: ``KinformerError`` if it can never be served; :class:`BusyError` if too many requests already wait.
        """
        self.check(request)
        with self._changed:
            if self._closing:
                raise BusyError(_SHUTTING_DOWN)
            if not self._waiting and self._fits(request):
                self._enter(request)
            elif len(self._waiting) < self.limits.max_waiting:
                self._waiting.append(request)
            else:
                self.counts["refused"] += 1
                rows, waiting = plural(self.rows, "sequence"), plural(self.waiting, "request")
                raise BusyError(
                    f"{rows} are being continued and {waiting} wait, as many as this server takes; repeat the request "
                    "later."
                )
            self._changed.notify()

    def check_rows(self, prompts: int, copies: int) -> None:
        """Raise, before they are built, if so many prompts with ``copies`` copies can never be accepted."""
        limits = self.limits
        if copies > limits.max_streams:
            most = plural(limits.max_streams, "sequence")
            raise KinformerError(f"n is {copies:,}, but this server continues at most {most} at a time; lower n.")
        if prompts > (accepted := limits.max_streams + limits.max_waiting):
            raise KinformerError(
                f"prompt holds {plural(prompts, 'text')}, but this server accepts at most {accepted:,} at a time (its "
                "max_streams and max_waiting); send fewer in a request."
            )

    def check(self, request: Request) -> None:
        """Raise if the request can never be served, also without other requests."""
        if len(request.tokens) == 0:
            raise KinformerError("the prompt is empty; give one token or more.")
        require_ids(self.model, int(request.tokens.min()), int(request.tokens.max()))
        for token, _ in request.penalties.bias:
            if token >= self.model.vocab_size:
                raise KinformerError(f"logit_bias names token {token}, but tokens end at {self.model.vocab_size - 1}.")
        needed, limit = max(len(request.tokens), request.length - 1), self.model.max_length
        if limit is not None and needed > limit:
            raise KinformerError(
                f"prompt and max_tokens need {plural(needed, 'position')}, but this model's positions end at "
                f"max_length = {limit}; shorten the prompt, or lower max_tokens."
            )
        self.check_rows(1, request.copies)
        needed, most = request.copies * self._row_bytes(request.length), self.limits.max_state_bytes
        if most is not None and needed > most:
            raise KinformerError(
                f"{plural(request.copies, 'continuation')} of up to {plural(request.length, 'token')} need a state of "
                f"up to {plural(needed, 'byte')}, but this server holds at most {most:,} "
                "(its max_state_bytes); lower max_tokens or n, or shorten the prompt."
            )

    def cancel(self, request: Request) -> None:
        """End a request whose listener has left; its rows are free from the next turn on."""
        with self._changed:
            self._cancelled.add(request)
            self._changed.notify()

    def run(self) -> None:
        """Take turns until :meth:`close`, and wait while there is nothing to do. At the end, also after an error, open
        requests fail."""
        try:
            while True:
                with self._changed:
                    idle = not (self._prefills or self._batch.rows)
                    while idle and not (self._entered or self._waiting or self._cancelled or self._closing):
                        self._changed.wait()
                    if self._closing:
                        break
                self.turn()
        finally:
            self.close()
            for request in [*self._admitted, *self._waiting]:
                request.listener.failed(KinformerError(_SHUTTING_DOWN))

    def close(self) -> None:
        """Let :meth:`run` return after the present turn."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def turn(self) -> bool:
        """Admit the requests that fit, absorb a chunk of prompts, and step the batch; return whether work remains."""
        with torch.inference_mode():
            self._admit()
            leaving = self._drop_cancelled()
            joining = self._absorb()
            self._step(leaving, joining)
        self.state_bytes = self._batch.state_bytes + sum(prefill.state_bytes for prefill in self._prefills)
        return bool(self._batch.rows or self._prefills or self._entered or self._waiting)

    def _drop_cancelled(self) -> list[Row]:
        """Return the batch's rows of cancelled requests; remove all other cancelled requests at once."""
        with self._changed:
            cancelled = self._cancelled.difference(self._entered)  # who entered a moment ago waits for the next turn
            self._cancelled -= cancelled
            for request in [item for item in self._waiting if item in cancelled]:
                self._waiting.remove(request)
                self.counts["cancelled"] += request.copies
        for request in cancelled:
            self._leave(request, "cancelled")
        self._prefills = deque(item for item in self._prefills if item.request not in cancelled)
        return [row for row in self._batch.rows if row.request in cancelled]

    def _fits(self, request: Request) -> bool:
        """Return whether the request fits beside the admitted requests; the longest row decides the size of all."""
        rows, most = self.rows + request.copies, self.limits.max_state_bytes
        if most is None or rows > self.limits.max_streams:
            return rows <= self.limits.max_streams
        return rows * self._row_bytes(max(item.length for item in (request, *self._admitted))) <= most

    def _enter(self, request: Request) -> None:
        self._admitted[request] = request.copies
        self._entered.append(request)

    def _admit(self) -> None:
        with self._changed:
            while self._waiting and self._fits(self._waiting[0]):
                self._enter(self._waiting.popleft())
            entered, self._entered = self._entered, []
        self._prefills.extend(Prefill(self.model, request) for request in entered)

    def _leave(self, request: Request, how: str, rows: int | None = None) -> None:
        """Release some open rows of the request, by default all, and count the reason."""
        with self._changed:
            rows = self._admitted[request] if rows is None else rows
            self.counts[how] += rows
            self._admitted[request] -= rows
            self._admitted += Counter()  # forget requests without rows

    def _absorb(self) -> list[Joining]:
        """Absorb prompts in turns, up to a chunk of tokens together; return the rows whose prompts are complete."""
        budget, joining = self.limits.chunk, []
        while budget > 0 and self._prefills:
            prefill = self._prefills.popleft()
            try:
                absorbed = prefill.absorb(budget)
                budget -= absorbed
                self.counts["prompt"] += absorbed
                if not prefill.done:
                    self._prefills.append(prefill)
                elif (item := self._started(prefill)) is not None:
                    joining.append(item)
            except (KinformerError, RuntimeError) as error:
                self._fail([prefill.request], error)
        return joining

    def _started(self, prefill: Prefill) -> Joining | None:
        """Return the copies of a complete prompt that continue after their first token; None if none continues."""
        request = prefill.request
        logits = prefill.logits()
        require_finite(bool(logits[:1].isfinite().all()))
        if request.scores_prompt:
            request.listener.scored(prefill.scores)
        if request.max_new_tokens == 0:
            for copy in range(request.copies):
                request.listener.ended(copy, "length")
            self._leave(request, "length")
            return None
        rows = [Row(request, copy) for copy in range(request.copies)]
        tokens = self._draw(rows, logits)
        ended = self._report(rows, logits, tokens)
        if len(ended) == len(rows):
            return None
        staying = [index for index, row in enumerate(rows) if row not in ended]
        return prefill.joining([rows[index] for index in staying], tokens[staying])

    def _step(self, leaving: Sequence[Row], joining: Sequence[Joining]) -> None:
        """Step the batch without ``leaving`` and with ``joining``; report the drawn tokens."""
        batch = self._batch
        rows = [row for row in batch.rows if row not in leaving] + [row for item in joining for row in item.rows]
        try:
            batch.change(leaving, joining)
            if not rows:
                return
            logits = batch.step()
            self.counts["steps"] += 1
            batch.tokens = self._draw(rows, logits)
            broken = {row.request for row, finite in zip(rows, logits.isfinite().all(-1).tolist()) if not finite}
            self._fail(broken, KinformerError(_NOT_FINITE))
            failed = [row for row in rows if row.request in broken]
            batch.change([*failed, *self._report(rows, logits, batch.tokens, broken)], ())
        except (KinformerError, RuntimeError) as error:
            self._batch = Batch(self.model)
            self._fail([row.request for row in rows], error)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        """Fail every request with open rows, and release its rows."""
        for request in requests:
            if self._admitted[request]:
                self._leave(request, "failed")
                if not isinstance(error, KinformerError):
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
                    remedy = "ask for fewer or shorter sequences at a time"
                    error = KinformerError(f"the model could not be computed ({reason}); {remedy}.")
                request.listener.failed(error)

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Return the next token of ``rows`` by ``logits`` [rows, vocab], drawn together where the settings agree."""
        if any(row.changes_logits for row in rows):
            logits = torch.stack([row.changed(values) for row, values in zip(rows, logits, strict=True)])
        kinds: dict[tuple[object, ...], list[int]] = {}
        for index, row in enumerate(rows):
            sampling = row.request.sampling
            settings = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            kinds.setdefault(settings, []).append(index)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        for indices in kinds.values():
            chosen = [rows[index] for index in indices]
            values = logits if len(kinds) == 1 else logits[indices]
            tokens[indices] = draw(values, chosen[0].request.sampling, partial(_uniforms, chosen, logits.device))
        return tokens

    def _report(
        self, rows: Sequence[Row], logits: Tensor, tokens: Tensor, broken: Collection[Request] = ()
    ) -> list[Row]:
        """Report the drawn tokens to the listeners, except for ``broken`` requests; return the rows that end here."""
        ended = []
        for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            request, score = row.request, None
            if request in broken:
                continue
            row.note(token)
            self.counts["drawn"] += 1
            if request.logprobs is not None:
                (score,) = scores(logits[index : index + 1], tokens[index : index + 1], request.logprobs)
            stopped = request.listener.drawn(row.copy, token, score)
            if stopped or row.remaining == 0:
                reason = "stop" if stopped else "length"
                request.listener.ended(row.copy, reason)
                self._leave(request, reason, rows=1)
                ended.append(row)
        return ended


_SHUTTING_DOWN = "the server is shutting down; repeat the request when it is back."
_NOT_FINITE = "the model's predictions are not finite numbers; its weights are damaged, diverged, or need fp32."


def _indices(tokens: Sequence[int] | np.ndarray, logits: Tensor) -> Tensor:
    return torch.as_tensor(tokens, dtype=torch.int64, device=logits.device)


def _uniforms(rows: Sequence[Row], device: torch.device) -> Tensor:
    return torch.cat([row.uniforms.next(device) for row in rows])
