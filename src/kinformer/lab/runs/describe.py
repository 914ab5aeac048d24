"""The description of a member or run, without computing anything: its record, config, sizes, formulas and pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn

from kinformer.core.config import override, to_dict
from kinformer.core.parts import active_parameters
from kinformer.core.stack import ModelConfig, Stack
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.record import Member, MemberFacts
from kinformer.family.table import FAMILY, member
from kinformer.lab.drawing.text import TextPicture, formulas, pictures, symbols
from kinformer.lab.estimation.cluster import Cluster, MeshCost, ServingCost, serving_costs
from kinformer.lab.estimation.estimate import (
    Estimate,
    Live,
    RulesOfThumb,
    estimate,
    interpreter_bytes,
    optimizer_bytes,
    peak,
    rules_of_thumb,
    state_bytes,
)
from kinformer.lab.estimation.options import Device, EstimateOptions, device_of, numbers_of
from kinformer.lab.estimation.parts import without_data
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.next_token import NextTokenLoss, TokenBatch
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.training.data_module import Objective
from kinformer.lab.training.settings import Settings
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError, marked, require_path
from kinformer.runtime.parsing import JsonObject

LENGTHS = (1, 128, 1024, 8192, 65536)
"""Tokens at which the bytes of the state are computed."""


class DescriptionFacts(MemberFacts):
    """A member's record, and all facts that follow from a config.

    training: the options of training that differ from the defaults.
    computes: the formulas of the parts: ``slot``, ``kind``, ``says`` (a sentence), ``lines`` (of mathematics).
    parameters: their ``total``, the number ``active`` for one token, and ``parts``.
    symbols: the papers' symbol and the value of each size, by the name of its setting.
    state_bytes: the bytes of the state of one row, by the number of absorbed tokens.
    """

    recipe: str
    training: JsonObject
    computes: list[JsonObject]
    symbols: dict[str, list[object]]
    config: JsonObject
    parameters: JsonObject
    max_length: int | None
    state_bytes: dict[str, int]
    patterns: list[TextPicture]


@dataclass(frozen=True, kw_only=True)
class Description:
    """The description of a member in a recipe, or of a run; the ``facts`` are data for JSON."""

    member: Member
    recipe: str
    config: ModelConfig
    facts: DescriptionFacts


def describe(
    name: str, recipe: str | None = None, vocab_size: int | None = None, changes: Mapping[str, object] | None = None
) -> Description:
    """Describe a member or a run; the public form is :func:`kinformer.show`."""
    record, recipe, config, training = subject_of(name, recipe, vocab_size, changes or {})
    with unallocated():
        model = config.build()
    ends = (model.max_length, getattr(model, "max_source_length", None))
    limit = min((end for end in ends if end is not None), default=None)
    lengths = [length for length in LENGTHS if limit is None or length < limit] + ([limit] if limit else [])
    total = sum(parameter.numel() for parameter in model.parameters())
    facts: DescriptionFacts = {
        **record.facts,
        "recipe": recipe,
        "training": dict(record.training.get(recipe, {})) if training is None else training_of(training),
        "computes": [item._asdict() for item in formulas(config)],
        "symbols": {name: [symbol, value] for symbol, name, value in symbols(config)},
        "config": to_dict(config),
        "parameters": {"total": total, "active": active_parameters(model), "parts": _parameters(model)},
        "max_length": model.max_length,
        "state_bytes": {str(length): state_bytes(model, length) for length in lengths},
        "patterns": pictures(model),
    }
    return Description(member=record, recipe=recipe, config=config, facts=facts)


def training_of(settings: Mapping[str, object]) -> dict[str, object]:
    """Return a run's settings of training that differ from the defaults."""
    plain = {item.name: item.default for item in fields(Settings)}
    return {name: value for name, value in settings.items() if value != plain.get(name) and value not in ([], None)}


def subject_of(
    name: str, recipe: str | None, vocab_size: int | None, changes: Mapping[str, object]
) -> tuple[Member, str, ModelConfig, JsonObject | None]:
    """Return the member, recipe and config with ``changes`` of a member or run; and a run's settings of training."""
    require_path("member", name)
    if name not in FAMILY and "/" in name and not Path(name).is_dir():
        raise KinformerError(f"{name}: is not a run folder, and no member has such a name; see: kinformer list.")
    if name in FAMILY or not Path(name).is_dir():
        record, recipe = member(name), recipe or "small"
        return record, recipe, configure(record.name, recipe, vocab_size, changes), None
    run = open_run(name)
    for option, value in (("recipe", recipe), ("vocab_size", vocab_size)):
        if value is not None:
            raise KinformerError(f"{marked(option)} {value}: the run in {run.folder} has its own; leave it out.")
    return member(run.member), run.recipe, override(run.config, changes, kinds()), run.training


def _parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters by part; equal parts of all layers are counted together."""
    parts: dict[str, int] = {}
    for name, child in model.named_children():
        inner = [(name, child)]
        if isinstance(child, Stack):
            inner = [(f"layers.*.{part}", item) for unit in child.units for part, item in unit.named_children()]
            inner.append(("shared", child.shared))
        for part, module in inner:
            parts[part] = parts.get(part, 0) + sum(parameter.numel() for parameter in module.parameters())
    return {part: count for part, count in parts.items() if count}


# The estimate of a member on many devices: the best meshes for training it, and for serving it.


@dataclass(frozen=True, kw_only=True)
class ClusterEstimate:
    """The costs on many devices.

    meshes: the meshes for training by the number of devices, the fastest first.
    serving: the costs of serving on one device of a node and on several.
    refused: the reason why devices cannot share a row; "" if they can.
    """

    device: Device
    meshes: dict[int, list[MeshCost]]
    serving: list[ServingCost]
    refused: str


def cluster_of(config: ModelConfig, options: EstimateOptions, length: int) -> ClusterEstimate | None:
    """Return the costs of ``config`` on the numbers of devices in ``options``; None if ``options`` name no numbers."""
    if options.devices is None:
        return None
    device, numbers = device_of(options.hardware), numbers_of(options.devices)
    cluster = Cluster(
        config,
        device,
        options.efficiency,
        batch=options.batch_size,
        length=length,
        optimizer=options.optimizer,
        precision=options.precision,
    )
    meshes = {number: cluster.costs(number) for number in numbers}
    if not any(meshes.values()):
        least = max(1, max(numbers) // device.node)
        raise KinformerError(
            f"`batch_size` {options.batch_size} cannot be shared by {max(numbers)} devices when at most "
            f"{device.node} share a row; give a multiple of {least}, or fewer `devices`."
        )
    serving = serving_costs(cluster, max(numbers))
    return ClusterEstimate(device=device, meshes=meshes, serving=serving, refused=cluster.refused)


# The estimate of a member's costs, before anything is run: of the model, its objective, and the process.

LENGTH = 1024
PLAIN = "next-token"
RULE_BYTES = {"adamw": 8, "adamw-8bit": 2, "radam": 8, "lamb": 8, "muon": 4, "adafactor": 0, "adagrad": 4, "sgd": 4}


@dataclass(frozen=True, kw_only=True)
class MemberEstimate(Estimate):
    """The costs of a member, in a recipe or as in a run, for ``batch_size`` sequences of ``length`` tokens.

    peak, peak_bytes: bytes of a process that trains it on a CPU, by part and in all.
    rules_of_thumb: estimates of a plain decoder of these sizes by the field's rules; None for other models.
    cluster: the costs on many devices; None without a number of devices.
    """

    recipe: str
    length: int
    batch_size: int
    peak_bytes: int
    peak: dict[str, int]
    rules_of_thumb: RulesOfThumb | None
    cluster: ClusterEstimate | None


def estimate_member(options: EstimateOptions) -> MemberEstimate:
    """Return the costs of ``options.member`` in its recipe, or of a run's model, with its changes."""
    record, recipe, config, training = subject_of(options.member, options.recipe, options.vocab_size, options.set)
    length = options.length or (training or {}).get("length") or config.input.length or LENGTH
    sizes = {"length": length, "batch": options.batch_size}
    costs = estimate(config, **sizes, optimizer=options.optimizer, precision=options.precision)
    objective = objective_cost(config, record.objective, **sizes, optimizer=options.optimizer)
    process = peak(config, costs, **sizes, objective=objective, interpreter=interpreter_bytes())
    rules = rules_of_thumb(config, **sizes, optimizer_bytes=RULE_BYTES[options.optimizer], precision=options.precision)
    return MemberEstimate(
        **vars(costs),
        recipe=recipe,
        length=length,
        batch_size=options.batch_size,
        peak_bytes=sum(process.values()),
        peak=process,
        rules_of_thumb=rules,
        cluster=cluster_of(config, options, length),
    )


def objective_cost(config: ModelConfig, name: str, *, length: int, batch: int, optimizer: str) -> dict[str, int] | None:
    """Return the bytes that the causal objective ``name`` adds to a training step with the objective next-token: of
    ``weights`` (with gradients and optimiser state) and ``activations``; None for next-token itself."""
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
    """Return the peak number of live bytes from the start of a forward until the loss is known."""
    rows = TokenBatch(torch.zeros(batch, length + 1, dtype=torch.int64, device="meta"))
    counted = [*model.parameters(), *model.buffers(), *getattr(objective, "parameters", list)()]
    with Live([*counted, rows.tokens]) as live:
        loss, _, _ = objective(model, rows, None, 0.0)
    del loss
    return live.peak
