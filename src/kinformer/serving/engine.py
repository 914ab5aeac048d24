"""An engine that continues many sequences as one batch, by turns: admit, absorb prompts, step."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from kinformer.generation.checks import require_continuing, require_ids, require_positions
from kinformer.generation.sampling import draw
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.words import plural
from kinformer.serving.admission import Admission, BusyError, Limits
from kinformer.serving.batch import Batch, ContinuedModel, Joining, row_bytes
from kinformer.serving.prefill import Prefill, scores
from kinformer.serving.request import DrawSettings, Request, Row


class Engine:
    """An engine for ``model``: :meth:`submit` and :meth:`cancel` may be called by any thread, :meth:`turn` by one.

    Rows join and leave the batch between steps. A prompt is absorbed in chunks between steps, once for all copies.
    What a row draws is what ``kinformer.generate`` draws for the same prompt, stream and seed, whatever its neighbours
    are (up to the rounding of products of other sizes).

    ``counts`` adds up prompt tokens (``prompt``), drawn ones (``drawn``), steps (``steps``), and copies by how they
    ended: ``stop``, ``length``, ``cancelled``, ``failed``; and requests that were ``refused``.
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
        self._admission = Admission(self.limits, lru_cache(4096)(lambda length: row_bytes(model, length)))
        self._changed = threading.Condition()
        self._closing = False

    @property
    def rows(self) -> int:
        """Return the number of rows that are admitted, prompts on their way included."""
        return self._admission.rows

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for rows or state to become free."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Accept a request; its listener is called from the next turn on.

        Errors: ``KinformerError`` where it can never be served; :class:`BusyError` where too many wait already.
        """
        self.check(request)
        with self._changed:
            if self._closing:
                raise BusyError("the server is shutting down; repeat the request when it is back.")
            if not self._waiting and self._admission.fits(request):
                self._admission.enter(request)
                self._entered.append(request)
            elif len(self._waiting) < self.limits.max_waiting:
                self._waiting.append(request)
            else:
                self.counts["refused"] += 1
                raise BusyError(
                    f"{plural(self.rows, 'sequence')} are being continued and {plural(self.waiting, 'request')} "
                    "wait, as many as this server takes; repeat the request later."
                )
            self._changed.notify()

    def check_rows(self, prompts: int, copies: int) -> None:
        """Raise where ``prompts`` of ``copies`` each can never be accepted at a time, before anything is built."""
        self._admission.require_rows(prompts, copies)

    def check(self, request: Request) -> None:
        """Raise where the request can never be served."""
        if len(request.tokens) == 0:
            raise KinformerError("the prompt is empty; give one token or more.")
        require_ids(self.model, int(request.tokens.min()), int(request.tokens.max()))
        require_positions(self.model, max(len(request.tokens), request.length - 1))
        self._admission.require_possible(request)

    def cancel(self, request: Request) -> None:
        """End a request whose listener has left; its rows are free from the next turn on."""
        with self._changed:
            self._cancelled.add(request)
            self._changed.notify()

    def run(self) -> None:
        """Take turns until :meth:`close`, waiting while there is nothing to do; requests that are open then fail."""
        while True:
            with self._changed:
                idle = not (self._prefills or self._batch.rows)
                while idle and not (self._entered or self._waiting or self._cancelled or self._closing):
                    self._changed.wait()
                if self._closing:
                    break
            self.turn()
        requests = [*self._entered, *self._waiting, *(prefill.request for prefill in self._prefills)]
        for request in dict.fromkeys([*requests, *(row.request for row in self._batch.rows)]):
            request.listener.failed(KinformerError("the server is shutting down; repeat the request when it is back."))

    def close(self) -> None:
        """Let :meth:`run` return after the present turn."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def turn(self) -> bool:
        """Admit what fits, absorb a chunk of prompts, and step the batch; return whether anything remains."""
        with torch.inference_mode():
            self._admit()
            leaving = self._drop_cancelled()
            joining = self._absorb()
            self._step(leaving, joining)
        self.state_bytes = self._batch.state_bytes + sum(prefill.state_bytes for prefill in self._prefills)
        return bool(self._batch.rows or self._prefills or self._entered or self._waiting)

    def _drop_cancelled(self) -> list[Row]:
        """Return the rows of the batch whose listeners have left; forget the others at once."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            for request in [item for item in self._waiting if item in cancelled]:
                self._waiting.remove(request)
                self.counts["cancelled"] += request.copies
        for prefill in [item for item in self._prefills if item.request in cancelled]:
            self._prefills.remove(prefill)
            self._leave(prefill.request, "cancelled", prefill.request.copies)
        rows = [row for row in self._batch.rows if row.request in cancelled]
        for row in rows:
            self._leave(row.request, "cancelled")
        return rows

    def _admit(self) -> None:
        with self._changed:
            while self._waiting and self._admission.fits(self._waiting[0]):
                self._admission.enter(self._waiting[0])
                self._entered.append(self._waiting.popleft())
            entered, self._entered = self._entered, []
        self._prefills.extend(Prefill(self.model, request) for request in entered)

    def _leave(self, request: Request, how: str, rows: int = 1) -> None:
        self.counts[how] += rows
        with self._changed:
            self._admission.leave(request, rows)

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
                prefill.request.listener.failed(_failure(error))
                self._leave(prefill.request, "failed", prefill.request.copies)
        return joining

    def _started(self, prefill: Prefill) -> Joining | None:
        """Return the copies of a complete prompt that go on behind their first token; None where there is none."""
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
        """Step the batch without ``leaving`` and with ``joining``; report what is drawn."""
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
            failed = [row for row in rows if row.request in broken]
            if failed:
                self._fail(failed, KinformerError(_NOT_FINITE))
            batch.change([*failed, *self._report(rows, logits, batch.tokens, broken)], ())
        except (KinformerError, RuntimeError) as error:
            self._batch = Batch(self.model)
            self._fail([row for row in rows if row.remaining], _failure(error))

    def _fail(self, rows: Sequence[Row], error: KinformerError) -> None:
        for row in rows:
            self._leave(row.request, "failed")
        for request in {row.request: None for row in rows}:
            request.listener.failed(error)

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Return the next token of ``rows`` by ``logits`` [rows, vocab], drawn together where the settings agree."""
        kinds: dict[DrawSettings, list[int]] = {}
        for index, row in enumerate(rows):
            kinds.setdefault(row.draw_settings, []).append(index)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        for indices in kinds.values():
            chosen = [rows[index] for index in indices]
            values = logits if len(kinds) == 1 else logits[indices]
            tokens[indices] = draw(values, chosen[0].request.sampling, partial(_uniforms, chosen, logits.device))
        return tokens

    def _report(
        self, rows: Sequence[Row], logits: Tensor, tokens: Tensor, broken: Collection[Request] = ()
    ) -> list[Row]:
        """Report what was drawn to the listeners but of ``broken`` requests; return the rows that end with it."""
        ended = []
        for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            request, score = row.request, None
            if request in broken:
                continue
            row.new_tokens += 1
            self.counts["drawn"] += 1
            if request.logprobs is not None:
                (score,) = scores(logits[index : index + 1], tokens[index : index + 1], request.logprobs)
            stopped = request.listener.drawn(row.copy, token, score)
            if stopped or row.remaining == 0:
                reason = "stop" if stopped else "length"
                request.listener.ended(row.copy, reason)
                self._leave(request, reason)
                ended.append(row)
        return ended


_NOT_FINITE = (
    "the model's predictions are not finite numbers; its weights are damaged or diverged, or need a wider type (fp32)."
)


def _uniforms(rows: Sequence[Row], device: torch.device) -> Tensor:
    return torch.cat([row.uniform(device) for row in rows])


def _failure(error: Exception) -> KinformerError:
    """Return ``error`` as a sentence for the listeners of what it ended."""
    if isinstance(error, KinformerError):
        return error
    reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    return KinformerError(f"the model could not be computed ({reason}); ask for fewer or shorter sequences at a time.")
