"""Masked tokens, and masked sentences that their global tokens predict (Ainslie et al. 2020, ETC; contrastive
predictive coding after van den Oord et al. 2018).

Of some sentences of the long input all tokens are masked. What the global token of such a sentence becomes is compared
with what one becomes where that sentence is the whole long input: of all sentences masked in the batch, its own should
be the nearest.

    loss = 0.8 * (nats of masked tokens) + 0.2 * (-log softmax_s(g_i . h_s / sqrt(dim))[i])

g are the global tokens' outputs in their texts, h those of the sentences alone, both standardised feature by feature
over the batch: what all of them have in common, at first nearly everything, distinguishes none. Tokens of masked
sentences are not predicted one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.model import StackedWholeModel
from kinformer.core.state import State
from kinformer.data import IGNORED
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.classify.rows import scored
from kinformer.tasks.mlm.rows import MaskedBatch, masked_tokens
from kinformer.tasks.shared.text import ends_of, mask_token_of
from kinformer.tasks.shared.views import part_of
from kinformer.training.objective import ObjectiveOutput

SHARE, WEIGHT, EPS = 0.1, 0.2, 1e-5


class GlobalInputModel(StackedWholeModel, Protocol):
    """An encoder with a global input, whose tokens each stand for a sentence of the long input."""

    @property
    def global_input(self) -> nn.Module: ...

    def hidden(self, values: Tensor, *, valid: Tensor | None = None, sentences: Tensor | None = None) -> Any:
        """Return the hidden states of the ``long_input`` and of the ``global_input``; ``sentences`` are of tokens."""
        ...


class MaskedSentences(NamedTuple):
    """``sentences`` int64 [batch, n] to mask, of which those count that are ``real``; ``positions`` [batch, n, length]
    of their tokens."""

    sentences: Tensor
    real: Tensor
    positions: Tensor


class MaskedLanguageCpc:
    """Masked language modelling with contrastive predictive coding, for an encoder whose global input has a token for
    every sentence of ``length`` tokens.

    A tenth of the sentences is masked, one at least; such are whole and hold none of the tokens ``ends``. In eval mode
    the choice is always the same. Further metrics: ``cpc_nats``, ``cpc_predicted``, ``cpc_correct``, and
    ``cpc_by_chance``, how many would be right by chance.
    """

    reads_hidden = True

    def __init__(self, length: int, mask_token: int, ends: tuple[int, ...] = ()) -> None:
        self.length, self.mask_token, self.ends = length, mask_token, ends

    @classmethod
    def of(cls, model: nn.Module | GlobalInputModel) -> MaskedLanguageCpc:
        """Make the objective for ``model``, from which it takes the length of sentences and the mask token;
        KinformerError if the model lacks one of them."""
        length = getattr(getattr(model, "global_input", None), "length", None)
        if length is None or (mask := mask_token_of(part_of(model, "config"))) is None:
            raise KinformerError(
                f"the objective 'mlm-cpc' needs an encoder with a mask token and a global token for every sentence, "
                f"which this {type(model).__name__} is not; train the member etc, or with masked-language."
            )
        ends = tuple(token for token in ends_of(part_of(model, "config")) if token is not None)
        return cls(length, mask, ends)

    def __call__(self, model: GlobalInputModel, batch: MaskedBatch, state: State, progress: float) -> ObjectiveOutput:
        chosen = self.choose(batch, fresh=model.training)
        if chosen is None:
            return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid).long_input, batch)
        encoded = model.hidden(self.mask(batch.tokens, chosen), valid=batch.valid)
        loss, metrics, _ = masked_tokens(model, encoded.long_input, self.left(batch, chosen))
        index = chosen.sentences[..., None].expand(-1, -1, encoded.global_input.shape[-1])
        alone = restored(batch).gather(1, chosen.positions.flatten(1)).view(-1, self.length)
        contexts = encoded.global_input.gather(1, index).flatten(0, 1)
        cpc, cpc_metrics, _ = contrasted(contexts, model.hidden(alone).global_input[:, 0], chosen.real.flatten())
        metrics |= {f"cpc_{name}": value for name, value in cpc_metrics.items()}
        metrics["cpc_by_chance"] = (cpc_metrics["predicted"] > 0).to(torch.int64)
        return (1 - WEIGHT) * loss + WEIGHT * cpc, metrics, None

    def choose(self, batch: MaskedBatch, fresh: bool) -> MaskedSentences | None:
        """Choose sentences to mask, by a ``fresh`` draw or always the same; None if the rows are too short to hold
        one."""
        tokens = batch.tokens
        count = tokens.shape[1] // self.length
        if not count:
            return None
        usable = torch.ones_like(tokens, dtype=torch.bool) if batch.valid is None else batch.valid.clone()
        for end in self.ends:
            usable &= tokens != end
        fit = usable[:, : count * self.length].unflatten(1, (count, self.length)).all(2)
        fit &= (batch.labels != IGNORED).any(1, keepdim=True)
        generator = None if fresh else torch.Generator(tokens.device).manual_seed(0)
        draws = torch.rand(fit.shape, generator=generator, device=tokens.device).masked_fill(~fit, -1)
        sentences = draws.topk(max(1, round(SHARE * count)), dim=1).indices
        positions = sentences[..., None] * self.length + torch.arange(self.length, device=tokens.device)
        return MaskedSentences(sentences, fit.gather(1, sentences), positions)

    def mask(self, tokens: Tensor, chosen: MaskedSentences) -> Tensor:
        """Return ``tokens`` with every token of the chosen sentences masked."""
        return tokens.masked_fill(_within(tokens, chosen), self.mask_token)

    def left(self, batch: MaskedBatch, chosen: MaskedSentences) -> MaskedBatch:
        """Return ``batch`` without the labels in the chosen sentences."""
        inside = _within(batch.tokens, chosen).gather(1, batch.positions)
        return batch._replace(labels=batch.labels.masked_fill(inside, IGNORED))


def contrasted(contexts: Tensor, alone: Tensor, real: Tensor) -> ObjectiveOutput:
    """Score how well every context identifies its sentence among all: both [n, dim], of which the ``real`` ones
    count."""
    contexts, alone = (_standardised(x.float(), real) for x in (contexts, alone))
    logits = (contexts @ alone.mT * contexts.shape[-1] ** -0.5).masked_fill(~real, torch.finfo(torch.float32).min)
    labels = torch.arange(len(real), device=real.device).masked_fill(~real, IGNORED)
    return scored(logits, labels)


def _standardised(x: Tensor, real: Tensor) -> Tensor:
    """Return x [n, dim] with mean 0 and variance 1 of every feature over the ``real`` rows."""
    count = real.sum().clamp_min(1)
    x = torch.where(real[:, None], x, 0)
    centred = torch.where(real[:, None], x - x.sum(0) / count, 0)
    return centred * (centred.square().sum(0) / count + EPS).rsqrt()


def restored(batch: MaskedBatch) -> Tensor:
    """Return the tokens of ``batch`` before some were masked."""
    counted = batch.labels != IGNORED
    # Positions that do not count would overwrite others: let them write behind the row.
    positions = batch.positions.masked_fill(~counted, batch.tokens.shape[1])
    return functional.pad(batch.tokens, (0, 1)).scatter(1, positions, batch.labels)[:, :-1]


def _within(tokens: Tensor, chosen: MaskedSentences) -> Tensor:
    """Return whether each token is of a chosen sentence, [batch, time] bool."""
    real = chosen.real[..., None].expand_as(chosen.positions).flatten(1)
    inside = torch.zeros_like(tokens, dtype=torch.bool)
    return inside.scatter(1, chosen.positions.flatten(1), real)
