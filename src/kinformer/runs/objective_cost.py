"""What an objective has beside the model: its own weights, and what its losses keep until they are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kinformer.estimation.checkpoint import Live
from kinformer.estimation.estimate import optimizer_bytes
from kinformer.estimation.parts import without_data
from kinformer.tasks.next_token.rows import NextTokenLoss, TokenBatch
from kinformer.tasks.table import TASKS

PLAIN = "next-token"


def objective_cost(config: Any, name: str, *, length: int, batch: int, optimizer: str) -> dict[str, int] | None:
    """Bytes of ``weights`` (with gradients and optimiser state) and ``activations`` of a training step with the causal
    objective ``name`` beyond those with the plain one, which has none: None."""
    if name == PLAIN:
        return None
    task = next(task for task in TASKS.values() if name in task.objectives)
    model = without_data(config)
    with torch.device("meta"):
        objective: Any = task.objective(name, model)
    module = objective if isinstance(objective, nn.Module) else nn.Module()
    trained = sum(parameter.numel() for parameter in module.parameters())
    return {
        "weights": 8 * trained + optimizer_bytes(module, optimizer),
        "activations": _held(model, objective, length, batch) - _held(model, NextTokenLoss(), length, batch),
    }


def _held(model: nn.Module, objective: Any, length: int, batch: int) -> int:
    """Bytes at most until the loss is known."""
    rows: Any = TokenBatch(torch.zeros(batch, length + 1, dtype=torch.int64, device="meta"))
    counted = [*model.parameters(), *model.buffers(), *getattr(objective, "parameters", list)()]
    with Live([*counted, rows.tokens]) as live:
        loss, _, _ = objective(model, rows, None, 0.0)
    del loss
    return live.most
