"""The next token where the head is given what followed the neighbours of every token (SPALM, Yogatama et al. 2021)."""

from __future__ import annotations

from typing import Any

from kinformer.tasks.next_token.rows import RetrievedBatch, next_token_nats, predicted
from kinformer.training.objective import ObjectiveOutput


class RetrievedNextToken:
    """Cross-entropy of each next token where the head is given the neighbours of every token."""

    reads_hidden = True

    def __call__(self, model: Any, batch: RetrievedBatch, state: Any, progress: float) -> ObjectiveOutput:
        hidden_states, state, _ = model.hidden(batch.tokens[:, :-1], state, valid=batch.valid, reset=batch.reset)
        logits = model.head(hidden_states, model.input, neighbours=batch.neighbours)
        loss, nats = next_token_nats(logits, batch.tokens[:, 1:], batch.valid)
        return loss, {"nats": nats, "predicted": predicted(batch)}, state
