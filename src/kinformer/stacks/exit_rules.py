"""Exit rules: by which exit of a stack a token leaves for the head, decided from its own past alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from kinformer.core.config import Config


class AtExit(NamedTuple):
    """The n tokens that are still running at exit ``number``, counted from 0.

    ``x`` [n, dim]: the outputs of the layer before the exit. ``earlier`` [n, dim]: those at the exit before, at the
    first exit the inputs of the stack. ``positions`` [n] int64: of the tokens in their sequences. ``logits()``: [n,
    vocab], of the exit's head for ``x``. ``source`` [n, dim]: the mean vector of each token's source, where the rule
    reads it.
    """

    number: int
    x: Tensor
    earlier: Tensor
    positions: Tensor
    logits: Callable[[], Tensor]
    source: Tensor | None = None


class AllExits(NamedTuple):
    """The outputs of all exits in a training step, the last included, where ``valid`` [batch, time] bool.

    ``hidden``: [batch, time, dim] of each. ``nats`` [exits, batch, time]: -ln p of the next token there. ``best``
    [exits, batch, time] int64: the most probable one; ``targets`` [batch, time]: the right one. ``sequence`` [batch,
    time] int64: tokens of unlike numbers in a row belong to unlike sequences. ``source`` [batch, dim]: the mean vector
    of each row's source, where the rule reads it.
    """

    hidden: tuple[Tensor, ...]
    nats: Tensor
    best: Tensor
    targets: Tensor
    valid: Tensor
    sequence: Tensor
    source: Tensor | None = None


class ExitRule(nn.Module):
    """An exit rule; ``rule(at)`` returns the exit by which each token is to leave, [n] int64: ``at.number`` or a later
    one.

    It is called at every exit but the last, for the tokens that are not to leave by an earlier one. ``exits`` is their
    number, the last included.
    """

    reads_source: ClassVar[bool] = False
    """Whether it decides by the source of a sequence."""

    def __init__(self, exits: int) -> None:
        super().__init__()
        self.exits = exits

    @property
    def last(self) -> int:
        return self.exits - 1

    @property
    def off(self) -> bool:
        """Return whether the rule lets no token leave early, whatever the token."""
        return False

    def asks(self, number: int) -> bool:
        """Return whether the rule decides again at this exit."""
        return True

    def cost(self, seen: AllExits, progress: float) -> Tensor | None:
        """Return the rule's training loss, a mean over tokens; None where it learns nothing."""
        return None

    def forward(self, at: AtExit) -> Tensor:
        raise NotImplementedError


class ExitRuleConfig(Config):
    """The config of an exit rule; ``build(dim, exits)`` returns the rule of a stack of width ``dim`` with
    that many exits."""

    slot = "exit_rule"
    learns: ClassVar[bool] = False
    """Whether it has weights, which learn from all exits."""

    def build(self, dim: int, exits: int) -> ExitRule:
        raise NotImplementedError
