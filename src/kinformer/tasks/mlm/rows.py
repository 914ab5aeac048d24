"""Rows of text with masked tokens for an encoder, and the objective of predicting them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core.model import WholeModel
from kinformer.core.model_config import ModelConfig
from kinformer.core.state import State
from kinformer.data import IGNORED, BosEos, Corpus, Rows, Tokenizer
from kinformer.data.masked_text import MaskedText
from kinformer.data.masking import Masking, Words, ordinary
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.classify.rows import scored
from kinformer.tasks.shared.options import MlmOptions
from kinformer.tasks.shared.text import ends_of, mask_token_of
from kinformer.training.batch import stretch_of_rows
from kinformer.training.data_module import DataModule
from kinformer.training.metric import ACCURACY, bits_per_masked
from kinformer.training.objective import ObjectiveOutput
from kinformer.training.settings import Settings


class MaskedBatch(NamedTuple):
    """``tokens`` [batch, time] int64, ``valid`` bool or None, and the ``labels`` [batch, n] of the tokens at
    ``positions`` [batch, n], IGNORED where there are fewer."""

    tokens: Tensor
    valid: Tensor | None
    labels: Tensor
    positions: Tensor

    @classmethod
    def of(cls, rows: Rows) -> MaskedBatch:
        """Make a batch of rows of tokens and their masks."""
        assert rows.positions is not None
        valid = None if rows.valid is None else torch.from_numpy(rows.valid)
        tokens, labels, positions = (torch.from_numpy(field) for field in (rows.tokens, rows.labels, rows.positions))
        return cls(tokens, valid, labels, positions)

    @property
    def size(self) -> int:
        """Return the number of tokens that are read."""
        return self.tokens.numel()

    def stretch(self, number: int, count: int) -> MaskedBatch:
        """Return stretch ``number`` of ``count`` of the rows' time, with the masked tokens in it."""
        tokens, valid = stretch_of_rows(self.tokens, self.valid, number, count)
        positions = self.positions - number * tokens.shape[1]
        here = (self.labels != IGNORED) & (positions >= 0) & (positions < tokens.shape[1])
        first = torch.argsort((~here).to(torch.int8), dim=1, stable=True)[:, : max(1, int(here.sum(1).max()))]
        labels, positions, here = (item.gather(1, first) for item in (self.labels, positions, here))
        return MaskedBatch(tokens, valid, labels.masked_fill(~here, IGNORED), positions.where(here, 0))


class MaskedTokens(DataModule):
    """Windows of text with masked tokens, other ones at every step, and the same ones in every validation."""

    sums = ("nats", "correct")
    by_time = True

    def __init__(self, corpus: Corpus, settings: Settings, masking: Masking, ends: BosEos) -> None:
        corpus.require_single("mlm")
        self.bits = bits_per_masked(unit_of(corpus))
        self.metrics = (self.bits, ACCURACY)
        train, splits = corpus.splits["train"], corpus.splits["validation"].take(settings.validation_tokens)
        self.text = MaskedText(train, settings.length, masking, ends, settings.seed)
        self.held_out = MaskedText(splits, settings.length, masking, ends, 0)
        self.sampler = self.text.sampler(settings.batch_size)
        self.batch_size = settings.batch_size

    @property
    def validations(self) -> int:
        return -(-len(self.held_out) // self.batch_size)

    def batch(self, step: int, rank: int, world: int) -> MaskedBatch:
        return MaskedBatch.of(self.text.batch(self.sampler, step, rank, world))

    def validation(self, rank: int, world: int) -> Iterator[MaskedBatch]:
        for shown in self.held_out.in_order(self.batch_size):
            yield MaskedBatch.of(shown.rows.share(rank, world))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {self.bits.name: means["nats"] / log(2), ACCURACY.name: means["correct"]}


class MaskedLanguage:
    """Mean cross-entropy of the tokens that stood at ``batch.positions`` (Devlin et al. 2019, section 3.1).

    The head computes logits of these positions alone.
    """

    reads_hidden = True
    by_token = True

    def __call__(self, model: WholeModel, batch: MaskedBatch, state: State, progress: float) -> ObjectiveOutput:
        return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid).long_input, batch)


def masked_tokens(model: WholeModel, hidden_states: Tensor, batch: MaskedBatch) -> ObjectiveOutput:
    """Return the score of the predictions from ``hidden_states`` [batch, time, dim] at ``batch.positions``."""
    return scored(masked_logits(model, hidden_states, batch), batch.labels)


def masked_logits(model: WholeModel, hidden_states: Tensor, batch: MaskedBatch) -> Tensor:
    """Return the logits [batch, n, vocab] of ``hidden_states`` [batch, time, dim] at ``batch.positions`` [batch, n]."""
    index = batch.positions[..., None].expand(-1, -1, hidden_states.shape[-1])
    return model.logits(hidden_states.gather(1, index))


def unit_of(corpus: Corpus) -> str:
    """Return what a token is: a byte, or a tokenizer's token."""
    return "byte" if corpus.splits["train"].encoded_from is None else "token"


def masking_of(config: ModelConfig, tokenizer: Tokenizer | None, options: MlmOptions) -> Masking:
    """Return how tokens are masked for an encoder."""
    mask = mask_token_of(config)
    if mask is None:
        raise KinformerError(
            "this model has no token that stands for a mask; give one, as in `set` input.mask_token=103."
        )
    assert tokenizer is not None
    special = {token for token in (mask, *ends_of(config)) if token is not None}
    usual = ordinary(tokenizer.vocab_size, special)
    return Masking(mask, usual, options.mask_share, Words.of(tokenizer) if options.whole_words else None)
