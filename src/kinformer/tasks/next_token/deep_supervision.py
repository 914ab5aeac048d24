"""Next tokens by losses at all layers and of two tokens ahead (Al-Rfou et al. 2018, section 3)."""

from __future__ import annotations

from torch import Tensor, nn

from kinformer.core.model import CausalModel
from kinformer.core.model_config import ModelConfig
from kinformer.core.stack import units_of
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.next_token.rows import NextTokenLoss, TokenBatch, next_token_nats, predicted
from kinformer.tasks.shared.text import vocab_size_of
from kinformer.tasks.shared.views import part_of
from kinformer.training.objective import ObjectiveOutput


class DeepSupervision(nn.Module):
    """Losses at all layers and of two tokens ahead, which make deep stacks trainable (Al-Rfou et al. 2018, section 3).

        loss = L_n + sum of L_l over the layers l = 1 ... n - 1 that have not stopped yet
        L_l = next token's cross-entropy + AHEAD * that of the token after it

    Layer l of n stops when the share l / (2 n) of training is done: half-way only the last is left. All predictions but
    the last layer's of the next token are made by ``readers`` that nothing else needs. They are trained and kept in
    checkpoints, but are no part of the model. In eval mode this is :class:`NextTokenLoss`.
    """

    AHEAD = 0.5
    reads_hidden = True

    def __init__(self, dim: int, vocab_size: int, depth: int) -> None:
        super().__init__()
        self.readers = nn.ModuleList(_Reader(dim, vocab_size, targets=2) for _ in range(depth - 1))
        self.readers.append(_Reader(dim, vocab_size, targets=1))

    @classmethod
    def of(cls, model: nn.Module) -> DeepSupervision:
        """Make the objective for the sizes of ``model``, which must show its layers' outputs by ``hidden(tokens, state,
        taps=...)``; KinformerError if it does not."""
        if not (hasattr(model, "hidden") and units_of(model)):
            raise KinformerError(
                f"the objective 'deep-supervision' reads the layers of a model, but {type(model).__name__} shows none; "
                "train it with next-token."
            )
        config: ModelConfig = part_of(model, "config")
        return cls(config.width, vocab_size_of(config), len(config.uses))

    def active(self, progress: float) -> list[int]:
        """Return the indices (from 0) of the layers below the last that still have a loss at ``progress``."""
        depth = len(self.readers)
        return [layer - 1 for layer in range(1, depth) if 2 * depth * progress < layer]

    def forward(self, model: CausalModel, batch: TokenBatch, state: State, progress: float) -> ObjectiveOutput:
        if not self.training:
            return NextTokenLoss()(model, batch, state, progress)
        taps = self.active(progress)
        hidden, state, tapped = model.hidden(
            batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset, taps=tuple(taps)
        )
        loss, nats = next_token_nats(model.logits(hidden), batch.tokens[:, 1:], batch.valid)
        loss = loss + self._layer(batch, None, *self.readers[-1](hidden))
        for index, x in zip(taps, tapped, strict=True):
            loss = loss + self._layer(batch, *self.readers[index](x))
        return loss + self._nothing(taps), {"nats": nats, "predicted": predicted(batch)}, state

    def _layer(self, batch: TokenBatch, following: Tensor | None, ahead: Tensor) -> Tensor:
        """Return a layer's loss from its logits of the next token, if it has some, and of the one after it."""
        valid = None if batch.valid is None else batch.valid[:, 1:] & batch.valid[:, :-1]
        loss = self.AHEAD * next_token_nats(ahead[:, :-1], batch.tokens[:, 2:], valid)[0]
        return loss if following is None else loss + next_token_nats(following, batch.tokens[:, 1:], batch.valid)[0]

    def _nothing(self, taps: list[int]) -> Tensor | float:
        """Return 0 with a graph to the readers that have stopped, as engines expect a gradient of every parameter."""
        idle = [reader for index, reader in enumerate(self.readers[:-1]) if index not in taps]
        return sum((0.0 * parameter.sum() for reader in idle for parameter in reader.parameters()), 0.0)


class _Reader(nn.Module):
    """A layer hidden [batch, time, dim], normed first, -> logits [batch, time, vocab] of each of ``targets``, a
    tuple."""

    def __init__(self, dim: int, vocab_size: int, targets: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, targets * vocab_size, bias=False)
        self.targets = targets
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.output(self.norm(hidden)).chunk(self.targets, dim=-1)
