"""Thresholds of every exit by random search (Depth-Adaptive Transformer, Elbayad et al. 2020, section 3.2.2).

The predictions of every exit for every token are recorded once, while all tokens go through all layers (as in aligned
training). A draw of thresholds then costs only comparisons. The search neglects one effect: after a token has left,
later layers absorb its last vector. So the result of a search must be measured with real early exits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.adaptive.rules import AtExit, ExitRule, ThresholdRule
from kinformer.lab.data import Split
from kinformer.lab.evaluation.bits import CHUNK, Windows, window_rows
from kinformer.lab.evaluation.depths import with_rule

_AT_ONCE = 1 << 22


class Draw(NamedTuple):
    """A draw: ``thresholds`` of every exit but the last, and the resulting mean ``nats`` and ``layers`` per token."""

    thresholds: tuple[float, ...]
    nats: float
    layers: float


@dataclass(frozen=True)
class Outlook:
    """Predictions of n tokens at exits behind ``layers`` layers: ``confidence`` [exits - 1, n], ``nats`` [exits, n]."""

    confidence: np.ndarray
    nats: np.ndarray
    layers: tuple[int, ...]

    def search(self, draws: int, seed: int) -> list[Draw]:
        """Draw thresholds ``draws`` times, and return the draws that no other draw beats in both nats and layers. The
        draw with the fewest layers comes first. The threshold of an exit is drawn uniformly between the lowest and the
        highest confidence at this exit."""
        generator = np.random.default_rng(seed)
        low, high = self.confidence.min(1), self.confidence.max(1)
        thresholds = generator.uniform(low, high, (draws, len(low)))
        measured = np.concatenate(list(self._measured(thresholds)))
        order = np.lexsort((measured[:, 0], measured[:, 1]))
        best, draws_in_front = np.inf, []
        for index in order:
            if measured[index, 0] < best:
                best = measured[index, 0]
                draws_in_front.append(Draw(tuple(thresholds[index].tolist()), *measured[index].tolist()))
        return draws_in_front

    def _measured(self, thresholds: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the mean nats and layers of groups of draws, [draws of the group, 2]."""
        layers, count = np.array(self.layers), self.nats.shape[1]
        for some in np.array_split(thresholds, max(1, len(thresholds) * count // _AT_ONCE)):
            exit = np.full((len(some), count), len(self.layers) - 1)
            for number in range(len(self.layers) - 2, -1, -1):
                # A token leaves at its first confident exit. Exits are visited from the last to the first, so the
                # first confident exit overwrites the others.
                exit[self.confidence[number] >= some[:, number, None]] = number
            nats = self.nats[exit, np.arange(count)].mean(1)
            yield np.stack([nats, layers[exit].mean(1)], axis=1)


def outlook(model: Any, split: Split, windows: Windows) -> Outlook:
    """Return the predictions of every exit for every token of ``split``; the stack has a threshold rule."""
    stack, last = model.stack, []
    recorder = _Recorder(stack.rule)
    with torch.inference_mode(), with_rule(stack, recorder):
        for tokens, _ in window_rows(split, windows, max(1, CHUNK // windows.context), model.input.device):
            recorder.targets = tokens[:, 1:].flatten()
            logits, _ = model(tokens[:, :-1])
            last.append(recorder.nats_of(logits.flatten(0, 1)))
    nats = [*(np.concatenate(item) for item in recorder.nats), np.concatenate(last)]
    confidence = np.stack([np.concatenate(item) for item in recorder.confidence])
    return Outlook(confidence, np.stack(nats), tuple(use + 1 for use in stack.exits))


class _Recorder(ExitRule):
    """A rule that keeps tokens in all layers, and records ``rule``'s confidence and the nats at every exit."""

    targets: Tensor

    def __init__(self, rule: ThresholdRule) -> None:
        super().__init__(rule.exits)
        self.rule = rule
        self.confidence: list[list[np.ndarray]] = [[] for _ in range(self.last)]
        self.nats: list[list[np.ndarray]] = [[] for _ in range(self.last)]

    def forward(self, at: AtExit) -> Tensor:
        self.confidence[at.number].append(self.rule.confidence(at).float().cpu().numpy())
        self.nats[at.number].append(self.nats_of(at.logits()))
        return torch.full(at.x.shape[:1], self.last, device=at.x.device)

    def nats_of(self, logits: Tensor) -> np.ndarray:
        """Return -ln p of the targets, [n]."""
        return functional.cross_entropy(logits.float(), self.targets, reduction="none").cpu().numpy()
