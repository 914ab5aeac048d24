"""What generation and evaluation ask of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class LanguageModel(Protocol):
    """A causal model of token ids below ``vocab_size`` with a state (see ``kinformer.core.state``).

    ``max_length`` is how many tokens a sequence may have, None where its positions do not end.
    """

    training: bool

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int | None: ...

    def initial_state(self, batch: int) -> Any:
        """The state of ``batch`` new sequences."""
        ...

    def hidden(
        self,
        tokens: Tensor,
        state: Any = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Any, tuple[Tensor, ...]]:
        """Hidden states [batch, time, dim] of ``tokens`` [batch, time] int64, the state after them, and taps."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[batch, time, dim] -> [batch, time, vocab_size]."""
        ...


def device_of(model: Any) -> torch.device:
    """Where the model's weights are."""
    assert isinstance(model, nn.Module)
    return next(model.parameters()).device
