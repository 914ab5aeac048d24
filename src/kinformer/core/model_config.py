"""The configs of whole models and of the parts that only models have: embeddings and heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.core.input import Input, InputConfig
from kinformer.core.parts import PositionConfig
from kinformer.core.stack import StackConfig
from kinformer.runtime.errors import KinformerError


class EmbeddingConfig(Config):
    """The config; ``build(vocab_size, dim)`` returns a table (tokens, positions), both [batch, time] int64, -> [batch,
    time, dim].

    A tied head reads its ``weight`` [vocab_size, ...]. ``bounded_by_training``: as of positions (``core.parts``).
    ``by_vocabulary``: whether it is a look-up in ``weight`` alone, which may be cut by rows.
    """

    slot = "embedding"
    bounded_by_training: ClassVar[bool] = False
    by_vocabulary: ClassVar[bool] = False

    def build(self, vocab_size: int, dim: int) -> nn.Embedding:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The config; ``build()`` returns a whole model: ``input``, ``position``, the ``layers`` and the ``stack`` that
    applies them, and ``head``.

    ``protocol`` says what can be done with it: ``core.model.CausalModel``, ``WholeModel`` or ``SourceModel``.
    """

    slot = "model"
    protocol: ClassVar[type]

    input: InputConfig
    dim: int
    layers: tuple[Any, ...]
    stack: StackConfig
    position: PositionConfig
    head: HeadConfig

    def build(self) -> Any:
        raise NotImplementedError

    @property
    def uses(self) -> tuple[Config, ...]:
        """Return the config of the layer of every use, in order."""
        return tuple(self.layers[index] for index in self.stack.uses(len(self.layers)))

    @property
    def width(self) -> int:
        """Return the width of the hidden states that the head receives."""
        return self.stack.width(self.dim)


class HeadConfig(Config):
    """The config; ``build(dim, input)`` returns a module (hidden_states [batch, time, dim], input, valid or None) ->
    logits.

    ``input`` is the model's ``core.input.Input``; a tied head reads its table. Logits are of positions [batch, time,
    ...] or, with ``per_position`` False, of whole inputs [batch, ...], which a decoder must not have.
    """

    slot = "head"
    per_position: ClassVar[bool] = True

    def check(self, dim: int, input: Input) -> None:
        """Refuse a model of width ``dim`` whose ``input`` has a table that this head, where it is tied, cannot use."""

    def build(self, dim: int, input: Input) -> nn.Module:
        raise NotImplementedError


def check_table(head: HeadConfig, dim: int, input: Input) -> None:
    """Refuse an ``input`` whose table is no output matrix [vocab_size, dim] for the tied ``head``."""
    expected, table = [vocab_size_of(input, head), dim], input.table
    shape = list(table.shape) if isinstance(table, Tensor) else None
    if shape != expected:
        has = f"is {shape}" if shape else "is none" if table is None else "is in clusters"
        untied = "give the head a matrix of its own (tied = false), or" if hasattr(head, "tied") else "give"
        raise KinformerError(
            f"the head {head.kind!r} is tied to the input's table, which must be [vocab_size, width] = {expected} but "
            f"{has}; {untied} the input another embedding."
        )


def vocab_size_of(input: Input, head: HeadConfig) -> int:
    """Return how many token ids ``input`` takes, for a ``head`` that predicts them; refuse one that takes none."""
    if input.vocab_size is None:
        raise KinformerError(
            f"the head {head.kind!r} predicts token ids, which the input of this model does not know; use the input "
            "tokens, or another head."
        )
    return input.vocab_size
