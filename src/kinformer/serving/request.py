"""A request for continuations of one prompt, and the listener that receives their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kinformer.generation.sampling import Sampling, UniformStreams
from kinformer.runtime.errors import KinformerError

DrawSettings: TypeAlias = tuple[float, int | None, float | None, float | None]
"""The temperature, top_k, top_p and min_p of a draw."""


class TokenScore(NamedTuple):
    """The log-probability of a token by the model, before temperature and cuts, and the most probable tokens with
    theirs, best first."""

    logprob: float
    top: list[tuple[int, float]]


class Listener(Protocol):
    """A listener to one request. The engine's thread calls it between steps, so that it must not wait."""

    def scored(self, scores: list[TokenScore | None]) -> None:
        """Take the score of every token of the prompt; the first has none."""
        ...

    def drawn(self, copy: int, token: int, score: TokenScore | None) -> bool:
        """Take the next token of a copy; return whether the copy ends with it."""
        ...

    def ended(self, copy: int, reason: str) -> None:
        """Take the end of a copy: "stop" where the listener ended it, or "length"."""
        ...

    def failed(self, error: KinformerError) -> None:
        """Take the end of what remained of the request, for which the model failed."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A request for ``copies`` continuations of ``tokens`` [length] int64, of at most ``max_new_tokens`` each.

    Copy j draws from stream ``first_stream + j`` of the seed of ``sampling``, as row ``first_stream + j`` does in
    ``kinformer.generate``. ``logprobs``: how many of the most probable tokens a score holds; None gives no scores.
    ``scores_prompt``: also score the tokens of the prompt.
    """

    tokens: np.ndarray
    listener: Listener
    sampling: Sampling
    max_new_tokens: int
    copies: int = 1
    first_stream: int = 0
    logprobs: int | None = None
    scores_prompt: bool = False

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest sequence that the request may become."""
        return len(self.tokens) + self.max_new_tokens


class Row:
    """One copy of a request while it is continued: its place in its stream of random numbers, and its length."""

    def __init__(self, request: Request, copy: int) -> None:
        self.request, self.copy = request, copy
        self.new_tokens = 0
        self._uniforms = UniformStreams(request.sampling.seed, [request.first_stream + copy])

    @property
    def remaining(self) -> int:
        """Return how many more tokens may be drawn."""
        return self.request.max_new_tokens - self.new_tokens

    @property
    def draw_settings(self) -> DrawSettings:
        """Return the settings of sampling that rows must share to draw in one operation."""
        sampling = self.request.sampling
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p

    def uniform(self, device: torch.device) -> Tensor:
        """Return the next random number [1, 1] of this row."""
        return self._uniforms.next(device)
