"""Context parallelism on paper: a model computes the last stretch of a row, and what it would receive is counted.

The last stretch sees most of the past, so every process waits for the one that has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk
from kinformer.core.crossing import Crosses, Crossing, Summary, sent_by_neighbours
from kinformer.core.model import StackedModel
from kinformer.runtime.errors import KinformerError

FLOAT = 4


class PaperStretches(Crossing):
    """The last of ``count`` stretches. What earlier ones send has the right shape and no meaning.

    ``sent``: the bytes that each process sends in both passes, where slots travel in ``narrow`` bytes a number: on a
    ring that gathers, each sends everyone's but its own; neighbours send what they have of a window; keys and values
    that go round are counted where they arrive.
    """

    def __init__(self, count: int, ring: bool, narrow: int) -> None:
        self.number, self.count, self.ring = count - 1, count, ring
        self.sent, self._slot, self._itemsize = 0, narrow, narrow

    def enter(self, mixer: nn.Module, inputs: tuple[Chunk, *tuple[object, ...]]) -> None:
        """Count tokens where the ``inputs`` of a mixer are: on the meta device, or imitated."""
        x = inputs[0].x
        self.seen = x.new_zeros(len(x), dtype=torch.int64)

    def row(self, stretch: Tensor, dim: int) -> Tensor:
        self.before = stretch.new_zeros(len(stretch), dtype=torch.int64)
        return super().row(stretch, dim)

    def composed(self, summary: Summary, state: Tensor) -> tuple[Tensor, Tensor]:
        self._itemsize = FLOAT  # sums stay in float32
        result = super().composed(summary, state)
        self._itemsize = self._slot
        return result

    def gathered(self, local: Tensor, tied: Tensor) -> tuple[Tensor, Tensor]:
        self.sent += 2 * (self.count - 1) * local.numel() * self._itemsize  # an all-gather and a reduce-scatter
        return local.repeat(self.count, *(1 for _ in local.shape)), tied

    def from_neighbours(self, slots: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        time = slots.shape[2]
        widths = sent_by_neighbours(time, limit, self.count)
        received = torch.cat([slots[:, :, time - width :] for width in reversed(widths)], dim=2)
        self.sent += 2 * received.numel() * self._itemsize
        return received, slots

    def last(self, slots: Tensor, count: int | None = None) -> Tensor:
        return slots

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> bool:
        arrives = received is not None and 0 <= source < self.count
        if arrives:
            assert received is not None
            self.sent += received.numel() * self._itemsize
        return arrives


def rings(model: StackedModel) -> bool:
    """Return whether keys and values of ``model`` could go round, so that a ring differs from gathering them."""
    if model.config.kind != "decoder":  # an encoder sees both ways
        return False
    return any(isinstance(item, Crosses) and item.rings and item.growth == "linear" for item in model.modules())


def share_on_paper(model: Any, stretches: PaperStretches) -> None:
    """Let ``model`` compute the last of the ``stretches``, in place.

    Errors: ``KinformerError`` for a model whose rows cannot be shared by time, and for mixers that wait for the state
    of the process before: what such a state holds is known only after it has been made.
    """
    from kinformer.training.context_parallel import check_time, crosses, mixers_of, readers_of

    check_time(model, stretches.ring)
    for reader in readers_of(model):
        reader.crossing = stretches
    for mixer in mixers_of(model.stack):
        if not crosses(mixer):
            raise KinformerError(
                f"the mixer {type(mixer).__name__} waits for the state of the stretch before, which is not estimated; "
                "leave `parallel` cp out."
            )
        mixer.crossing = stretches  # type: ignore[assignment]
        mixer.register_forward_pre_hook(stretches.enter)
