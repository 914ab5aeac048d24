"""What the rest of the library asks of a model: nothing but one of two protocols, which its config names.

``ModelConfig.protocol`` is :class:`CausalModel` or :class:`WholeModel`; what can be done with a model is asked of it,
never of the name of its kind. Free of PyTorch until a function is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class CausalModel(Protocol):
    """A model that absorbs a sequence chunk by chunk, with a state (see ``kinformer.core.state``).

    Inputs are [batch, time], or [batch, time, ...] where a position is more than one number. ``max_length`` is how long
    a sequence may get, None where its positions do not end.
    """

    training: bool

    @property
    def vocab_size(self) -> int:
        """How many ids a model of tokens knows."""
        ...

    @property
    def max_length(self) -> int | None: ...

    def initial_state(self, batch: int) -> Any:
        """The state of ``batch`` new sequences."""
        ...

    def __call__(
        self, inputs: Tensor, state: Any = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Logits [batch, time, ...], zero where not ``valid``, and the state after the chunk; None is a new state."""
        ...

    def hidden(
        self,
        inputs: Tensor,
        state: Any = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Any, tuple[Tensor, ...]]:
        """Hidden states [batch, time, dim], the state, and the outputs of the layers in ``taps``."""
        ...

    def head_inputs(
        self, inputs: Tensor, state: Any = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Any, Any]:
        """What :meth:`logits` needs of every position, and the state: a tensor or a NamedTuple of tensors [batch, time,
        ...]. These are the hidden states, unless the head looks things up by more than those."""
        ...

    def logits(self, inputs: Any) -> Tensor:
        """Head inputs [batch, time, ...] -> logits [batch, time, ...]."""
        ...


class WholeModel(Protocol):
    """A model that reads whole inputs [batch, time] or [batch, time, ...] at once and has no state: an encoder."""

    training: bool

    @property
    def max_length(self) -> int | None: ...

    def __call__(self, inputs: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Logits of every position or of every row."""
        ...

    def hidden(self, inputs: Tensor, *, valid: Tensor | None = None) -> Any:
        """The hidden states of every position, with what else the model made of the inputs."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head makes of hidden states [..., dim]."""
        ...


PROTOCOLS: dict[type, str] = {CausalModel: "causal", WholeModel: "an encoder"}
"""What a member of each protocol is called in messages."""


def device_of(model: Any) -> torch.device:
    """Where the model's weights are."""
    return next(model.parameters()).device
