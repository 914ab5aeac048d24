"""How good the weights are now, on a fixed piece of the validation split."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import torch
from torch import nn

from kinformer.data import EvaluationStream, Segment, Split
from kinformer.training.distributed import Group
from kinformer.training.objectives import Batch
from kinformer.training.settings import Settings


class Validation:
    """Nats per token on the first ``validation_tokens`` tokens of a split, in windows as training has them.

    Each window begins a new sequence; with ``segments`` the state is carried from one to the next. The rows of a window
    are spread over the processes, and the result does not depend on how many there are.
    """

    def __init__(self, split: Split, settings: Settings, group: Group) -> None:
        kept = split.take(settings.validation_tokens)
        streams = max(1, min(settings.batch_size, (len(kept) - 1) // settings.length))
        self.stream = EvaluationStream(kept, settings.length, streams, reset_documents=settings.segments)
        self.carry, self.group = settings.segments, group

    def __call__(self, engine: nn.Module) -> float:
        """Mean nats per predicted token; ``engine`` is a wrapped ``Step``, left in training mode."""
        engine.eval()
        nats = torch.zeros((), dtype=torch.float64, device=self.group.device)
        state: Any = None
        with torch.no_grad():
            for segment in self.stream:
                batch = self._share(segment)
                _, metrics, after = engine(batch, state, 1.0)
                state = after if self.carry else None
                nats += metrics["nats"]
        engine.train()
        return float(self.group.sum(nats)) / self.stream.predictions

    def _share(self, segment: Segment) -> Batch:
        """This process's rows; rows that fill up the last share are invalid."""
        tokens, reset, valid = (self._rows(field) for field in (segment.tokens, segment.reset, segment.valid))
        place = self.group.device
        return Batch(
            torch.from_numpy(tokens).to(place),
            None if reset is None else torch.from_numpy(reset).to(place),
            None if valid is None or valid.all() else torch.from_numpy(valid).to(place),
        )

    def _rows(self, field: np.ndarray | None) -> np.ndarray | None:
        if field is None:
            return None
        size = -(-len(field) // self.group.world)
        padded = np.zeros((size * self.group.world, *field.shape[1:]), field.dtype)
        padded[: len(field)] = field
        return padded[self.group.rank * size : (self.group.rank + 1) * size]


def bits_per_byte(nats_per_token: float, split: Split) -> float:
    """Nats per token as bits per byte of the text that the split's tokens stand for."""
    return nats_per_token / log(2) * len(split) / split.bytes
