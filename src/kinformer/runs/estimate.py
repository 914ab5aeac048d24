"""The estimate of a member's costs, before anything is run: of the model, its objective, and the process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kinformer.core.model_config import ModelConfig
from kinformer.estimation.checkpoint import Live
from kinformer.estimation.estimate import Estimate, estimate
from kinformer.estimation.optimizer_state import optimizer_bytes
from kinformer.estimation.options import EstimateOptions
from kinformer.estimation.parts import without_data
from kinformer.estimation.peak import interpreter_bytes, peak
from kinformer.estimation.rules import RulesOfThumb, rules_of_thumb
from kinformer.runs.cluster import ClusterEstimate, cluster_of
from kinformer.runs.description import subject_of
from kinformer.runtime.unallocated import unallocated
from kinformer.tasks.next_token.rows import NextTokenLoss, TokenBatch
from kinformer.tasks.table import TASKS
from kinformer.training.objective import Objective

LENGTH = 1024
PLAIN = "next-token"
RULE_BYTES = {"adamw": 8, "adamw-8bit": 2, "radam": 8, "lamb": 8, "muon": 4, "adafactor": 0, "adagrad": 4, "sgd": 4}


@dataclass(frozen=True, kw_only=True)
class MemberEstimate(Estimate):
    """The costs of a member, in a recipe or as in a run, for ``batch_size`` sequences of ``length`` tokens.

    peak, peak_bytes: bytes of a process that trains it on a CPU, by part and in all.
    rules_of_thumb: what the field's rules say of a plain decoder of these sizes; None where they say nothing.
    cluster: the costs on many devices; None where no number of them is given.
    """

    recipe: str
    length: int
    batch_size: int
    peak_bytes: int
    peak: dict[str, int]
    rules_of_thumb: RulesOfThumb | None
    cluster: ClusterEstimate | None


def estimate_member(options: EstimateOptions) -> MemberEstimate:
    """Return the costs of ``options.member`` in its recipe, or of a run's model, with its changes.

    Errors: ``KinformerError`` for unknown names, changes that do not fit, and lengths beyond the model's positions.
    """
    record, recipe, config, training = subject_of(options.member, options.recipe, options.vocab_size, options.set)
    sizes = {
        "length": options.length or (training or {}).get("length") or config.input.length or LENGTH,
        "batch": options.batch_size,
    }
    costs = estimate(config, **sizes, optimizer=options.optimizer, precision=options.precision)
    objective = objective_cost(config, record.objective, **sizes, optimizer=options.optimizer)
    process = peak(config, costs, **sizes, objective=objective, interpreter=interpreter_bytes())
    rules = rules_of_thumb(config, **sizes, optimizer_bytes=RULE_BYTES[options.optimizer], precision=options.precision)
    return MemberEstimate(
        **vars(costs),
        recipe=recipe,
        length=sizes["length"],
        batch_size=sizes["batch"],
        peak_bytes=sum(process.values()),
        peak=process,
        rules_of_thumb=rules,
        cluster=cluster_of(config, options, sizes["length"]),
    )


def objective_cost(config: ModelConfig, name: str, *, length: int, batch: int, optimizer: str) -> dict[str, int] | None:
    """Return the bytes of ``weights`` (with gradients and optimiser state) and ``activations`` by which a training step
    with the causal objective ``name`` exceeds one with next-token; None for next-token itself."""
    if name == PLAIN:
        return None
    task = next(task for task in TASKS.values() if name in task.objectives)
    model = without_data(config)
    with unallocated():
        objective = task.objective(name, model)
    module = objective if isinstance(objective, nn.Module) else nn.Module()
    trained = sum(parameter.numel() for parameter in module.parameters())
    plain = _peak_bytes(model, NextTokenLoss(), length, batch)
    return {
        "weights": 8 * trained + optimizer_bytes(module, optimizer),
        "activations": _peak_bytes(model, objective, length, batch) - plain,
    }


def _peak_bytes(model: nn.Module, objective: Objective, length: int, batch: int) -> int:
    """Return the most bytes that are alive at once until the loss is known."""
    rows = TokenBatch(torch.zeros(batch, length + 1, dtype=torch.int64, device="meta"))
    counted = [*model.parameters(), *model.buffers(), *getattr(objective, "parameters", list)()]
    with Live([*counted, rows.tokens]) as live:
        loss, _, _ = objective(model, rows, None, 0.0)
    del loss
    return live.peak
