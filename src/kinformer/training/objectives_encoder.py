"""What an encoder is trained to minimise: nats of hidden tokens, or of the labels of texts or tokens.

Both tell as metrics ``nats``, ``predicted`` (how many) and ``correct`` (how many of them were the most probable).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from kinformer.data import IGNORED
from kinformer.training.batch import Batch

Outcome = tuple[Tensor, dict[str, Tensor], Any]


class MaskedLanguage:
    """Mean cross-entropy of the tokens that stood at ``batch.places`` (Devlin et al. 2019, section 3.1).

    The head is asked for these places alone.
    """

    reads_hidden = True

    def __call__(self, model: Any, batch: Batch, state: Any, progress: float) -> Outcome:
        return hidden_tokens(model, model.hidden(batch.tokens, valid=batch.valid).document, batch)


class Classification:
    """Mean cross-entropy of the label of every row, or of every token where the model tells classes of those."""

    def __call__(self, model: nn.Module, batch: Batch, state: Any, progress: float) -> Outcome:
        assert batch.labels is not None
        return scored(model(batch.tokens, valid=batch.valid), batch.labels)


def hidden_tokens(model: Any, document: Tensor, batch: Batch) -> Outcome:
    """What ``model``'s head makes of its hidden states ``document`` at ``batch.places``, scored."""
    assert batch.labels is not None and batch.places is not None
    index = batch.places[..., None].expand(-1, -1, document.shape[-1])
    return scored(model.logits(document.gather(1, index)), batch.labels)


def scored(logits: Tensor, labels: Tensor) -> Outcome:
    """Loss, metrics and no state from logits [..., classes] and labels [...]."""
    logits, labels = logits.float().flatten(0, -2), labels.flatten()
    nats = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    predicted = (labels != IGNORED).sum()
    correct = (logits.detach().argmax(-1) == labels).sum()
    return nats / predicted.clamp_min(1), {"nats": nats.detach(), "predicted": predicted, "correct": correct}, None
