"""Prompts that are absorbed in chunks, between the steps of others."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State
from kinformer.generation.recorded import logits_after
from kinformer.runtime.matmul import FEW, few_rows
from kinformer.serving.batch import ROOM, Joining
from kinformer.serving.request import Request, Row, TokenScore

_LEAST = -9999.0
"""The log-probability of what is impossible, as JSON has no infinite number."""


class Prefill:
    """The prompt of one request on its way into a state; copies share it."""

    def __init__(self, model: CausalModel, request: Request) -> None:
        self.model, self.request = model, request
        self.absorbed = 0
        self.scores: list[TokenScore | None] = [None]
        self._tokens = torch.from_numpy(request.tokens)[None].to(device_of(model))
        self._logits: Tensor | None = None
        room = min(ROOM, request.max_new_tokens)
        self._state: State = states.reserve(model.initial_state(1), len(request.tokens) + room)

    @property
    def done(self) -> bool:
        """Return whether the state holds the full prompt."""
        return self.absorbed == len(self.request.tokens)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that the state holds now."""
        return states.nbytes(self._state)

    def absorb(self, limit: int) -> int:
        """Absorb the next chunk, of at most ``limit`` tokens; return how many it has."""
        chunk = self._tokens[:, self.absorbed : self.absorbed + limit]
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
