"""The costs of a model before anything is run: parameters, FLOPs, memory in training and inference, by part and in all.

Nothing is computed: one layer of every distinct config is run on shapes only (``parts``), long lengths are continued
from short ones (``length``), and like layers are multiplied. A training step is one forward, the cross-entropy of every
token and one backward; activations are what autograd saves for it. ``peak`` estimates the rest of a process. At
inference a forward may compute less: segment memories hold projections, nothing is computed for learning alone. It may
compute more, too: exits decide.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from kinformer.core.config import Config
from kinformer.core.contract import CausalMixer
from kinformer.core.encoder import EncoderMixer
from kinformer.core.feed_forward import active_parameters
from kinformer.core.model import Model, StackedModel
from kinformer.core.pattern import Pattern
from kinformer.estimation.checkpoint import live_bytes, measure_live
from kinformer.estimation.length import at_length, through
from kinformer.estimation.optimizer_state import OPTIMIZERS, optimizer_bytes
from kinformer.estimation.parts import (
    Costs,
    ModelSpec,
    distinct,
    in_pieces,
    layer_keys,
    measure,
    measure_inference,
    measure_state,
)
from kinformer.runtime.errors import KinformerError, choose
from kinformer.runtime.unallocated import unallocated

Precision = Literal["fp32", "bf16-mixed"]
COUNTED = {
    "flops_inference": "inference",
    "flops_forward": "forward",
    "flops_backward": "backward",
    "activation_bytes": "saved",
}
"""Fields of a :class:`PartCost` and what they count of :data:`Costs`."""


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """A row of the table: ``count`` like parts of the model taken together."""

    part: str
    count: int
    parameters: int
    flops_inference: int
    flops_forward: int
    flops_backward: int
    activation_bytes: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Totals for all rows of the batch; ``memory`` breaks the bytes down, ``parts`` the rest.

    flops_forward: of the forward of a training step, ``flops_step``. flops_inference: of one forward without gradients,
    where tokens may leave early or halt as if none did. active_parameters: those that one token uses, where experts or
    a table have more.
    """

    parameters: int
    active_parameters: int
    flops_forward: int
    flops_inference: int
    flops_step: int
    train_bytes: int
    inference_bytes: int
    state_bytes: int
    memory: dict[str, dict[str, int]]
    parts: list[PartCost]


def estimate(
    config: ModelSpec, *, length: int, batch: int = 1, optimizer: str = "adamw", precision: Precision = "fp32"
) -> Estimate:
    """Return the costs of a model config (with ``layers``, ``replace`` and ``build``) for ``batch`` rows of ``length``
    tokens.

    An encoder, which has no state, is taken to predict every token of sequences without padding; an encoder-decoder to
    read sources of ``length`` tokens first.

    Training memory is weights, gradients and optimiser state in float32, and activations; with ``bf16-mixed`` these
    include the bfloat16 copies of the weights that autocast keeps. Where the stack recomputes layers, activations are
    the most bytes alive at once, and a step's FLOPs count what is computed again. Inference memory is weights and the
    state after ``length`` tokens, in float32, or with ``bf16-mixed`` in bfloat16 (sums stay float32).

    Errors: ``KinformerError`` for an unknown optimiser, sizes below 1 and lengths beyond the model's positions.
    """
    choose(optimizer, OPTIMIZERS, "optimizer")
    with unallocated():
        model = config.build()
    _check(model, length, batch)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    costs = _costs(config, model, batch, length, precision) | _inference_costs(config, model, batch, length)
    rows = _table(config, model, costs)
    if config.stack.recomputes:
        handed = _handed_on(config, model, batch, length, precision)
        live = {part: amount for (kind, part), amount in costs.items() if kind == "live"}
        rows = _with_recomputed(rows, live_bytes(config, live, batch * length, handed), config)
    memory = {
        "train": {
            "weights": 4 * parameters,
            "gradients": 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            "optimizer": optimizer_bytes(model, optimizer),
            "activations": sum(row.activation_bytes for row in rows),
        },
        **_inference(config, model, batch, length),
    }
    inference = memory["inference_fp32" if precision == "fp32" else "inference_bf16"]
    forward = sum(row.flops_forward for row in rows)
    return Estimate(
        parameters=parameters,
        active_parameters=active_parameters(model),
        flops_forward=forward,
        flops_inference=sum(row.flops_inference for row in rows),
        flops_step=forward + sum(row.flops_backward for row in rows),
        train_bytes=sum(memory["train"].values()),
        inference_bytes=sum(inference.values()),
        state_bytes=inference["state"],
        memory=memory,
        parts=rows,
    )


def _check(model: Model, length: int, batch: int) -> None:
    for name, value in (("length", length), ("batch", batch)):
        if value < 1:
            raise KinformerError(f"{name} must be 1 or more, but is {value}.")
    ends = (model.max_length, getattr(model, "max_source_length", None))
    longest = min((end for end in ends if end is not None), default=length)
    if length > longest:
        raise KinformerError(
            f"length is {length}, but the learned positions of this model end at max_length = {longest}; "
            f"use a shorter length, or `set` position.max_length={length}, and the max_length of mixers that have one."
        )


def horizon_of(model: Model) -> int:
    """Return the widest window of the model's mixers."""
    return max((_window(module) for module in model.modules()), default=0)


def _window(module: nn.Module) -> int:
    if isinstance(module, CausalMixer):
        return module.retained or 0
    pattern = getattr(module, "pattern", None) if isinstance(module, EncoderMixer) else None
    return max(pattern.behind or 0, pattern.ahead or 0) if isinstance(pattern, Pattern) else 0


def _costs(config: ModelSpec, model: StackedModel, batch: int, length: int, precision: Precision) -> Costs:
    """Return the costs of the model of distinct layers."""
    single = distinct(config)
    pieces = in_pieces(model, batch * length)
    usual = [partial(item, pieces=pieces) for item in (measure, measure_live)]
    measures = usual if config.stack.recomputes else usual[:1]
    costs: Costs = {}
    for one in measures:
        costs |= at_length(partial(one, single, batch), length, horizon_of(model))
    if precision == "fp32":
        return costs
    step, settled = 64, 320  # from here on kernels no longer choose otherwise for small calls
    start = settled + step * (horizon_of(model) // step)
    for one in measures:
        if length <= start:
            result = one(single, batch, length, autocast=True)
        else:
            samples = [one(single, 1, start + i * step, autocast=True) for i in range(3)]
            fixed, row = through(samples, start, step, 0), through(samples, start, step, length)
            result = {key: fixed[key] + batch * (row[key] - fixed[key]) for key in row}
        costs |= {key: amount for key, amount in result.items() if key[0] in ("saved", "live")}
    return costs


def _inference_costs(config: ModelSpec, model: StackedModel, batch: int, length: int) -> Costs:
    """Return the ``inference`` costs of the model of distinct layers. Exits stand between layers, so with exits the
    whole model is run, and the first layer of each kind stands for its like."""
    single = config if config.stack.reads_exits else distinct(config)
    costs = at_length(partial(measure_inference, single, batch), length, horizon_of(model))
    keys = layer_keys(single)
    firsts = {str(keys.index(key)): str(number) for number, key in enumerate(dict.fromkeys(keys))}
    chosen: Costs = {}
    for (kind, part), amount in costs.items():
        path = part.split(".")
        if path[0] != "layers":
            chosen[kind, part] = amount
        elif path[1] in firsts:
            chosen[kind, ".".join(["layers", firsts[path[1]], *path[2:]])] = amount
    return chosen


def _inference(config: ModelSpec, model: StackedModel, batch: int, length: int) -> dict[str, dict[str, int]]:
    """Return the bytes of weights and state after ``length`` tokens, in either precision."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        f"inference_{name}": {
            "weights": dtype.itemsize * parameters,
            "state": _state(config, model, batch, length, dtype),
        }
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }


def _state(config: ModelSpec, model: StackedModel, batch: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the state, like layers multiplied."""
    layers, single = Counter(config.uses), distinct(config)
    costs = at_length(lambda n: measure_state(single, batch, n, dtype), length, horizon_of(model))
    times = {f"layers.{index}": layers[layer] for index, layer in enumerate(single.layers)}
    total = sum(times.get(part, 1) * amount for (_, part), amount in costs.items())
    # The stack of ``single`` has no exits, whose rule may read the mean vector of the source.
    return total + (batch * config.dim * dtype.itemsize if model.stack.reads_source else 0)


def _table(config: ModelSpec, model: StackedModel, costs: Costs) -> list[PartCost]:
    """Return the rows in the order of the model, like layers in one, and at last
    the rest between the parts and the loss."""
    alike: dict[tuple[int, Config], list[int]] = {}
    keys = layer_keys(config)
    for index, key in enumerate(keys):
        alike.setdefault(key, []).append(index)
    groups = list(alike.values())
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    uses = Counter(keys[index] for index in config.stack.uses(len(keys)))
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[_part(name.split("."), group_of)] += parameter.numel()
    rows = []
    for name in dict.fromkeys([*parameters, *(part for kind, part in costs if kind != "live")]):
        label, count = name, len(config.uses) // len(config.layers) if name == "halting" else 1
        if name.startswith("layers."):
            _, number, *rest = name.split(".")
            group = groups[int(number)]
            label, count = ".".join(["layers", _span(group), *rest]), uses[keys[group[0]]]
        amounts = {field: count * costs.get((kind, name), 0) for field, kind in COUNTED.items()}
        rows.append(PartCost(part=label, count=count, parameters=parameters[name], **amounts))
    return [row for row in rows if row.parameters or any(getattr(row, field) for field in COUNTED)]


def _handed_on(config: ModelSpec, model: StackedModel, batch: int, length: int, precision: Precision) -> int:
    """Return the bytes that layers beyond the first of each kind leave until the loss
    exists: states, and autocast's copies."""
    single = distinct(config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    whole, part = (_state(item, model, batch, length, dtype) for item in (config, single))
    if precision == "fp32" or not config.stack.checkpoint:
        return whole - part
    with unallocated():
        parameters = sum(parameter.numel() for parameter in single.build().parameters())
    return whole - part + dtype.itemsize * (sum(parameter.numel() for parameter in model.parameters()) - parameters)


def _with_recomputed(rows: list[PartCost], live: int, config: ModelSpec) -> list[PartCost]:
    """Return the rows with one more: the bytes of all layers together, at the highest
    moment, beyond those of the other parts."""
    live -= sum(row.activation_bytes for row in rows)
    recomputed = {"parameters": 0} | dict.fromkeys(COUNTED, 0) | {"activation_bytes": live}
    part = "checkpoints" if config.stack.checkpoint else "recomputed"
    return [*rows, PartCost(part=part, count=len(config.uses), **recomputed)]


def _part(path: list[str], group_of: dict[int, int]) -> str:
    """Return the part that owns a parameter, in the model of distinct layers."""
    if path[0] != "stack":
        return path[0]
    return ".".join(["layers", str(group_of[int(path[2])]), path[3]]) if path[1] == "layers" else path[1]


def _span(indices: list[int]) -> str:
    """Return numbers of layers as text: ``0-11``, or ``0,2,4``."""
    if len(indices) > 1 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))
