"""The costs of a model before anything is run: parameters, FLOPs, memory in training and inference, by part and in all.

Nothing is computed. One layer of every distinct config runs on shapes only (``parts``), costs of long lengths are
extrapolated from short lengths, and equal layers are multiplied. A training step is one forward, the cross-entropy of
every token and one backward; activations are the tensors that autograd saves for the backward. ``peak`` estimates the
rest of a process. A forward at inference may compute less, because segment memories hold projections and work for
learning alone is left out. It may also compute more, because exits decide.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinformer.adaptive.stack import ExitStack
from kinformer.core.contract import CausalMixer, ReadsSource
from kinformer.core.encoder import EncoderMixer
from kinformer.core.model import Model, SourceModel, StackedModel, WholeModel
from kinformer.core.parts import active_parameters
from kinformer.core.pattern import Pattern
from kinformer.core.stack import ModelConfig, sparse_tables, units_of
from kinformer.core.state import nbytes
from kinformer.lab.estimation.parts import (
    Costs,
    ModelSpec,
    distinct,
    forward_and_loss,
    imitated,
    in_pieces,
    layer_keys,
    measure,
    measure_inference,
    without_data,
)
from kinformer.lab.training import cross_entropy
from kinformer.runtime.compiling import scratch_bytes, unallocated
from kinformer.runtime.errors import KinformerError, choose

# The rules of thumb of the field for plain decoders, printed beside the counted costs.
#
# Sources: 12 L E^2 + V E parameters and 6 FLOPs a parameter and token (Kaplan et al. 2020, section 2.1); activations
# of B T L (14 E + T N) numbers (after Korthikanti et al. 2022, section 4, which counts every stored score of N heads).


@dataclass(frozen=True, kw_only=True)
class RulesOfThumb:
    """The results of the rules; ``train_bytes`` is weights, gradients, optimiser state and activations."""

    parameters: int
    flops_step: int
    activation_bytes: int
    train_bytes: int


def rules_of_thumb(
    config: ModelConfig, *, length: int, batch: int, optimizer_bytes: int, precision: str
) -> RulesOfThumb | None:
    """Return the rules for a config of tokens whose first layer's mixer has ``num_heads``; None for any other. A
    parameter takes 4 bytes (6 with a bfloat16 copy), its gradient 4, its optimiser state ``optimizer_bytes`` (AdamW 8,
    momentum 4, AdamW in 8 bits 2). A stored number takes 4 bytes (2 in bfloat16)."""
    heads = getattr(getattr(config.layers[0], "mixer", None), "num_heads", None)
    if heads is None or hasattr(config, "encoder") or not hasattr(config.input, "vocab_size"):
        return None
    depth, width, narrow = len(config.uses), config.dim, precision == "bf16-mixed"
    parameters = (getattr(config.input, "vocab_size", None) or 0) * width + 12 * depth * width**2
    activations = (2 if narrow else 4) * batch * length * depth * (14 * width + length * heads)
    return RulesOfThumb(
        parameters=parameters,
        flops_step=6 * parameters * batch * length,
        activation_bytes=activations,
        train_bytes=parameters * ((6 if narrow else 4) + 4 + optimizer_bytes) + activations,
    )


# The size of a model's state, from the declarations of its mixers.


def state_bytes(model: Any, length: int) -> int:
    """Return the bytes of one row's state in float32 after ``length`` tokens; 0 for an encoder. The mixers declare
    their bytes; the model's counters are added. A source also has ``length`` tokens. Nothing is computed, so the model
    may be on the meta device."""
    if model.config.protocol is WholeModel:
        return 0
    mixers = [module for module in model.modules() if isinstance(module, CausalMixer)]

    def declared(length: int, source: int) -> int:
        total = 0
        for mixer in mixers:
            options: dict[str, Any] = {"source_length": source} if isinstance(mixer, ReadsSource) else {}
            total += mixer.state_bytes(length, **options)
        return total

    reads = model.config.protocol is SourceModel
    begun = model.begin(model.source_input.example(1, 1, "meta")) if reads else model.initial_state(1)
    return nbytes(begun) - declared(0, 1) + declared(length, length)


# The bytes of an optimiser's state, by the kind of the optimiser and of each parameter.

OPTIMIZERS = ("adamw", "adamw-8bit", "radam", "muon", "lamb", "adafactor", "adagrad", "sgd")
ADAMS = ("adamw", "adamw-8bit", "radam", "lamb")
LEAST_IN_8_BITS, SCALED_TOGETHER = 4096, 256
"""Elements of the smallest tensor with an AdamW state in 8 bits, and elements that share a scale."""


def optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """Return the bytes of an optimiser's float32 state: two elements a parameter for AdamW, RAdam and LAMB, one for
    SGD with momentum and for Adagrad. AdamW in 8 bits has two bytes a parameter and two scales for every 256, in
    tensors of 4,096 elements or more (Dettmers et al. 2022).

    Muon has one element a parameter for the layers' matrices and is AdamW for the rest. Adafactor has a row and a
    column for each matrix. Tables with sparse gradients have a separate Adam, and frozen parameters do not have a
    state.
    """
    total, tables = 0, sparse_tables(model)
    inner = {parameter for unit in units_of(model) for parameter in unit.parameters()}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        count, matrix, sparse = parameter.numel(), parameter.dim() >= 2, parameter in tables
        adam = optimizer in ADAMS or (optimizer == "muon" and not (matrix and parameter in inner))
        if optimizer == "adamw-8bit" and count >= LEAST_IN_8_BITS and not sparse:
            total += 2 * count + 8 * -(-count // SCALED_TOGETHER)
        elif optimizer == "adafactor" and matrix and not sparse:
            total += 4 * (count // parameter.shape[-1] + count // parameter.shape[-2])
        else:
            total += 4 * count * (2 if sparse or adam else 1)
    return total


# Costs at any length from runs at short lengths: counts are exact quadratics of the length for lengths cut into tiles
# in the same way.

DIRECT = 2048
"""Up to this length costs are measured at the length itself."""
STEP = 512
"""A multiple of every kernel's tile: lengths that differ by it are cut into tiles in the same way."""


def at_length(measure: Callable[[int], Costs], length: int, horizon: int) -> Costs:
    """Return ``measure(length)``; for a long ``length``, from three shorter lengths beyond ``horizon``, the widest
    window. The costs are extrapolated as a quadratic. Two further lengths check the quadratic; the second is a horizon
    beyond the others. Irregular patterns, and segments cut differently at every length, fail this check and are
    measured at ``length`` itself."""
    windows = -(-horizon // STEP)
    start, checks = length % STEP + STEP * max(2, windows), (3, 4 + windows)
    if length <= max(DIRECT, start + checks[-1] * STEP):
        return measure(length)
    samples = [measure(start + i * STEP) for i in range(3)]
    for number in checks:
        want, got = through(samples, start, STEP, start + number * STEP), measure(start + number * STEP)
        if any(want.get(key, 0) != got.get(key, 0) for key in want.keys() | got.keys()):
            return measure(length)
    return through(samples, start, STEP, length)


def at_batch(
    measure: Callable[..., Costs], config: ModelSpec, model: Any, batch: int, length: int, **options: bool
) -> Costs:
    """Return ``measure(config, batch, length, pieces=..., **options)`` for the ``model`` of ``config``. Where logits
    are made in pieces, a large batch has thousands of pieces, each with some twenty operators. The costs are then
    extrapolated from two small batches; the smaller one has two pieces."""
    if not (pieces := in_pieces(model, batch * length)):
        return measure(config, batch, length, pieces=False, **options)
    least = max(2 * cross_entropy.LEAST, cross_entropy.LOGITS // model.vocab_size)
    # Counts are linear in the batch. Peaks are the maximum of linear functions, and the steepest needs more rows.
    few = max(8 if measure is measure_live else 2, -(-least // length))
    if batch <= 2 * few:
        return measure(config, batch, length, pieces=pieces, **options)
    low, high = (measure(config, rows, length, pieces=pieces, **options) for rows in (few, 2 * few))
    return {key: low.get(key, 0) + (batch - few) * (high[key] - low.get(key, 0)) // few for key in high}


def through(samples: list[Costs], start: int, step: int, length: int) -> Costs:
    """Return the value at ``length`` of the parabola through three samples, ``step`` apart from ``start`` on."""
    steps = Fraction(length - start, step)
    costs = {}
    for key in samples[0].keys() | samples[1].keys() | samples[2].keys():
        first, second, third = (sample.get(key, 0) for sample in samples)
        curve = steps * (steps - 1) / 2 * (third - 2 * second + first)
        costs[key] = round(first + steps * (second - first) + curve)
    return costs


# The memory of a training step that recomputes layers: every live tensor is counted while it runs on shapes only.
#
# With checkpoints every layer keeps its input; in a reversible stack a layer keeps nothing. The state that a layer
# passes on lives until the loss is computed. The backward recomputes one layer at a time. Memory peaks either at the
# loss or in the backward of the widest layer.

FLOAT = 4


class Live(TorchDispatchMode):
    """The bytes of the distinct live storages that operations have allocated, without the storages of ``counted``.
    ``now``: at present; ``peak``: at most so far. With ``inside``, the peak also counts the temporary buffers of
    operators."""

    def __init__(self, counted: Iterable[Tensor], inside: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._inside = inside
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in counted}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue  # a sparse tensor does not own a storage; its indices and values are separate tensors
            if tensor.untyped_storage()._cdata not in self._sizes:
                self._add(tensor.untyped_storage())
        inside = scratch_bytes(func, args) if self._inside else 0
        self.peak = max(self.peak, self.now + inside)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def measure_live(
    config: ModelSpec, batch: int, length: int, autocast: bool = False, pieces: bool = False, inside: bool = False
) -> Costs:
    """Return the most ``live`` bytes until the ``loss`` exists, and in the ``backward``, which frees the state. The
    arguments are the arguments of ``lab.estimation.parts.measure``; ``inside``: with the operators' temporary buffers.
    Weights and their gradients do not count, because they exist before the step."""
    forward, loss_from = forward_and_loss(pieces)
    model = without_data(config)
    with FakeTensorMode() if autocast else nullcontext():
        model, tokens = imitated(model, batch, length, "cpu" if autocast else "meta")
        sparse = sparse_tables(model)
        for parameter in model.parameters():
            parameter.grad = None if parameter in sparse else torch.zeros_like(parameter)
        gradients = (parameter.grad for parameter in model.parameters() if parameter not in sparse)
        with Live([*model.parameters(), *model.buffers(), *gradients, tokens], inside) as live:
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                made, state = forward(model, tokens)
                loss = loss_from(model, made, tokens)
            until_loss = live.peak
            del made, state
            live.peak = live.now
            loss.backward()
    return {("live", "loss"): until_loss, ("live", "backward"): live.peak}


Precision = Literal["fp32", "bf16-mixed"]
DTYPES = torch.float32, torch.bfloat16
"""Of the weights and the state at inference, by precision."""
COUNTED = {
    "flops_inference": "inference",
    "flops_forward": "forward",
    "flops_backward": "backward",
    "activation_bytes": "saved",
}
"""Fields of a :class:`PartCost`, each with its kind of amount in :data:`Costs`."""


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """A row of the table: ``count`` equal parts of the model together."""

    part: str
    count: int
    parameters: int
    flops_inference: int
    flops_forward: int
    flops_backward: int
    activation_bytes: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Totals for all rows of the batch; ``memory`` breaks the bytes down, ``parts`` the rest. flops_forward: the FLOPs
    of a training step's forward. flops_step: the FLOPs of the whole step. flops_inference: the FLOPs of one forward
    without gradients, as if no token left early or halted. active_parameters: the parameters that one token uses;
    experts and tables have more."""

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

    The estimate assumes that an encoder predicts every token of sequences without padding, and that an encoder-decoder
    first reads sources of ``length`` tokens.

    Training memory is weights, gradients and optimiser state in float32, and activations; with ``bf16-mixed`` the
    activations include the bfloat16 copies of the weights that autocast keeps. The probabilities that short causal rows
    keep on a CPU, at most 3 MiB a layer, are left out. Where the stack recomputes layers,
    activations are the most bytes alive at once, and a step's FLOPs include the recomputation. Inference memory is
    weights and the state after ``length`` tokens, in float32, or with ``bf16-mixed`` in bfloat16 (sums stay float32).
    """
    choose(optimizer, OPTIMIZERS, "optimizer")
    with unallocated():
        model = config.build()
    _check(model, length, batch)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    inferred = {DTYPES[0]: _inference_costs(config, model, batch, length, DTYPES[0])}
    keeps = any(kind == "state" for kind, _ in inferred[DTYPES[0]])
    inferred[DTYPES[1]] = _inference_costs(config, model, batch, length, DTYPES[1]) if keeps else {}
    costs = _costs(config, model, batch, length, precision)
    rows = _table(config, model, costs | inferred[torch.float32])
    if config.stack.recomputes:
        dtype = DTYPES[precision != "fp32"]
        handed = _handed_on(config, model, inferred[dtype], dtype)
        live = max(costs["live", "loss"] + handed, costs["live", "backward"])
        # Further checkpointed layers keep their inputs; the residual stream is float32 also under autocast.
        inputs = len(config.uses) - len(set(config.layers)) if config.stack.checkpoint else 0
        live += FLOAT * batch * length * config.dim * inputs
        # a row for recomputed layers: the live bytes at the peak minus the activations of the other rows
        activations = live - sum(row.activation_bytes for row in rows)
        recomputed = {"parameters": 0} | dict.fromkeys(COUNTED, 0) | {"activation_bytes": activations}
        part = "checkpoints" if config.stack.checkpoint else "recomputed"
        rows = [*rows, PartCost(part=part, count=len(config.uses), **recomputed)]
    memory = {
        "train": {
            "weights": 4 * parameters,
            "gradients": 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            "optimizer": optimizer_bytes(model, optimizer),
            "activations": sum(row.activation_bytes for row in rows),
        }
    }
    for name, dtype in zip(("fp32", "bf16"), DTYPES, strict=True):
        state = _state(config, inferred[dtype])
        memory[f"inference_{name}"] = {"weights": dtype.itemsize * parameters, "state": state}
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
            f"use a shorter length, or `set` position.max_length={length}, and the mixers' max_length, if they have it."
        )


def horizon_of(model: Model) -> int:
    """Return the widest window of the model's mixers."""
    widest = 0
    for module in model.modules():
        if isinstance(module, CausalMixer):
            widest = max(widest, module.retained or 0)
        elif isinstance(module, EncoderMixer) and isinstance(pattern := getattr(module, "pattern", None), Pattern):
            widest = max(widest, pattern.behind or 0, pattern.ahead or 0)
    return widest


def _costs(config: ModelSpec, model: StackedModel, batch: int, length: int, precision: Precision) -> Costs:
    """Return the costs of the model of distinct layers."""
    single = distinct(config)
    measures = (measure, measure_live) if config.stack.recomputes else (measure,)
    costs: Costs = {}
    for one in measures:
        costs |= at_length(partial(at_batch, one, single, model, batch), length, horizon_of(model))
    if precision == "fp32":
        return costs
    step, settled = 64, 320  # from this length on kernels no longer switch to their variants for small calls
    start = settled + step * (horizon_of(model) // step)
    for one in measures:
        if length <= start:
            result = at_batch(one, single, model, batch, length, autocast=True)
        else:
            pieces = in_pieces(model, batch * length)
            samples = [one(single, 1, start + i * step, autocast=True, pieces=pieces) for i in range(3)]
            fixed, row = through(samples, start, step, 0), through(samples, start, step, length)
            result = {key: fixed[key] + batch * (row[key] - fixed[key]) for key in row}
        costs |= {key: amount for key, amount in result.items() if key[0] in ("saved", "live")}
    return costs


def _inference_costs(config: ModelSpec, model: StackedModel, batch: int, length: int, dtype: torch.dtype) -> Costs:
    """Return the ``inference`` and ``state`` costs of the model of distinct layers. Exits stand between layers, so a
    model with exits runs whole, and the first layer of each kind represents all equal layers."""
    reads_exits = isinstance(config.stack, ExitStack.Config) and config.stack.rule is not None
    single = config if reads_exits else distinct(config)
    costs = at_length(lambda n: measure_inference(single, batch, n, dtype), length, horizon_of(model))
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


def _state(config: ModelSpec, costs: Costs) -> int:
    """Return the bytes of the state; equal layers are measured once and multiplied."""
    keys = layer_keys(config)
    uses = Counter(keys[index] for index in config.stack.uses(len(keys)))
    times = {f"layers.{number}": uses[key] for number, key in enumerate(dict.fromkeys(keys))}
    return sum(times.get(part, 1) * amount for (kind, part), amount in costs.items() if kind == "state")


def _table(config: ModelSpec, model: StackedModel, costs: Costs) -> list[PartCost]:
    """Return the rows in the order of the model, one for equal layers; the rest and the loss come last."""
    keys = layer_keys(config)
    kinds = list(dict.fromkeys(keys))
    group_of = {index: kinds.index(key) for index, key in enumerate(keys)}
    groups = [[index for index, owner in group_of.items() if owner == number] for number in range(len(kinds))]
    uses = Counter(keys[index] for index in config.stack.uses(len(keys)))
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        part, *rest = name.split(".")
        if part == "stack":
            part = f"layers.{group_of[int(rest[1])]}.{rest[2]}" if rest[0] == "layers" else rest[0]
        parameters[part] += parameter.numel()
    rows = []
    for name in dict.fromkeys([*parameters, *(part for kind, part in costs if kind in COUNTED.values())]):
        label, count = name, len(config.uses) // len(config.layers) if name == "halting" else 1
        if name.startswith("layers."):
            _, number, *rest = name.split(".")
            group = groups[int(number)]
            runs_on = len(group) > 1 and group == list(range(group[0], group[-1] + 1))
            numbers = f"{group[0]}-{group[-1]}" if runs_on else ",".join(map(str, group))
            label, count = ".".join(["layers", numbers, *rest]), uses[keys[group[0]]]
        amounts = {field: count * costs.get((kind, name), 0) for field, kind in COUNTED.items()}
        rows.append(PartCost(part=label, count=count, parameters=parameters[name], **amounts))
    return [row for row in rows if row.parameters or any(getattr(row, field) for field in COUNTED)]


def _handed_on(config: ModelSpec, model: StackedModel, costs: Costs, dtype: torch.dtype) -> int:
    """Return the bytes that layers beyond the first of each kind keep until the loss: states, and autocast's copies."""
    single = distinct(config)
    whole, part = _state(config, costs), _state(single, costs)
    if dtype == torch.float32 or not config.stack.checkpoint:
        return whole - part
    with unallocated():
        parameters = sum(parameter.numel() for parameter in single.build().parameters())
    return whole - part + dtype.itemsize * (sum(parameter.numel() for parameter in model.parameters()) - parameters)


# The peak memory of a training process: the bytes beyond weights, optimiser and activations.
#
# Interpreter: Python, PyTorch and Kinformer themselves. The part of their files that the system keeps in memory differs
# by 80 MB between otherwise equal machines, so this page starts a process and measures it.
#
# Temporaries: tensors that live for a moment at the widest point of a step, counted in a run on shapes only.
#
# Allocator: freed memory that cannot be used again. glibc cuts a tensor out of a free block larger by the tensor's
# alignment. The block of a freed tensor therefore does not fit the next tensor of the same size. Large tensors take
# whole pages of 2 MiB. The allocator's share was measured (``benchmarks/estimate_peak.py``) and is the least certain
# term.

INTERPRETER = 440 << 20
"""The bytes of an interpreter that is not measured: PyTorch's CPU build with Triton, on Linux."""
LOADED_LATER = 55 << 20
"""The bytes that a run loads beyond :data:`PROBE`: readers of data, compiled products, the run's records."""
PROBE = """
import torch, kinformer.lab.runs.train
layer = torch.nn.Linear(8, 8)
optimiser = torch.optim.AdamW(layer.parameters(), fused=True)
layer(torch.ones(1, 8)).sum().backward()
optimiser.step()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
ALLOCATOR, ALLOCATOR_LARGE = 0.45, 0.8
"""The allocator's share of activations and temporaries, where a layer's input is below LARGE bytes, and from LARGE
on."""
LARGE = 2 << 20


def peak(
    config: ModelSpec,
    estimated: Estimate,
    *,
    length: int,
    batch: int,
    objective: Mapping[str, int] | None = None,
    interpreter: int = INTERPRETER,
) -> dict[str, int]:
    """Return the bytes of resident memory at the peak of ``kinformer train`` on a CPU, by their holder. ``estimated``:
    the estimate of the same config and sizes. ``objective``: bytes that the objective holds beside the model, if any.
    ``interpreter``: bytes before the model is built, as :func:`interpreter_bytes` measures them."""
    temporaries, objective = _temporaries(config, length, batch), objective or {}
    moving = estimated.memory["train"]["activations"] + temporaries + objective.get("activations", 0)
    large = FLOAT * batch * length * config.dim >= LARGE
    return {
        "interpreter": interpreter,
        "training": estimated.train_bytes,
        "temporaries": temporaries,
        "allocator": round((ALLOCATOR_LARGE if large else ALLOCATOR) * moving),
    } | ({"objective": sum(objective.values())} if objective else {})


@cache
def interpreter_bytes() -> int:
    """Return the bytes of a training process before its model is built, measured (on Linux) in a process."""
    folder = str(Path(__file__).parents[2])  # the folder of the package, which need not be installed
    code = f"import sys; sys.path.append({folder!r})\n{PROBE}"
    # -P: `python -c` imports from the current folder first, so it would run a file queue.py there.
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    return INTERPRETER if done.returncode else 1024 * int(done.stdout) + LOADED_LATER


def _temporaries(config: ModelSpec, length: int, batch: int) -> int:
    """Return the bytes alive at the peak of a step beyond its activations. The activations are the bytes that autograd
    saves, or, where layers are recomputed, the live bytes without the operators' temporary buffers."""
    single = distinct(config)
    model = without_data(single)
    usual = measure_live if config.stack.recomputes else measure
    usually, at_most = (
        at_length(partial(at_batch, one, single, model, batch, **options), length, horizon_of(model))
        for one, options in ((usual, {}), (measure_live, {"inside": True}))
    )
    if config.stack.recomputes:
        return max(at_most.values()) - max(usually.values())
    return max(0, max(at_most.values()) - sum(amount for (kind, _), amount in usually.items() if kind == "saved"))
