"""An engine without a server: requests that arrive at turns, and what their listeners heard."""

from dataclasses import dataclass, field

import numpy as np

from kinformer.generation.sampling import Sampling
from kinformer.lab.serving.requests import Request


@dataclass
class Heard:
    """A listener that collects; ``stop`` ends a copy at that token, and ``leave`` after so many tokens calls back."""

    stop: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    prompt: list | None = None
    error: Exception | None = None

    def scored(self, scores):
        self.prompt = scores

    def drawn(self, copy, token, score):
        assert copy not in self.reasons and self.error is None
        self.tokens.setdefault(copy, []).append(token)
        self.logprobs.setdefault(copy, []).append(score)
        return token == self.stop

    def ended(self, copy, reason):
        assert copy not in self.reasons
        self.reasons[copy] = reason

    def failed(self, error):
        assert self.error is None
        self.error = error


def request(tokens, new, *, stop=None, seed=0, temperature=1.0, top_k=None, top_p=None, **options):
    sampling = Sampling(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)
    return Request(
        tokens=np.asarray(tokens, np.int64), listener=Heard(stop), sampling=sampling, max_new_tokens=new, **options
    )


def exhaust(engine, arrivals=(), most=10_000):
    """Make turns until nothing remains; ``arrivals`` are pairs of a turn and a request."""
    arrivals = sorted(arrivals, key=lambda pair: pair[0])
    for turn in range(most):
        while arrivals and arrivals[0][0] <= turn:
            engine.submit(arrivals.pop(0)[1])
        if not engine.turn() and not arrivals:
            return turn
    raise AssertionError("the engine does not end")
