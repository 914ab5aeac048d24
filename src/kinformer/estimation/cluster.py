"""What training a model on many devices takes of each: bytes of memory, bytes exchanged, and time, for every mesh.

A device of tensor parallelism has a part of the model, so it costs what that part costs, measured as any model is
(``training.division``). What is exchanged in a step, in bytes of a collective's tensor (float32 parameters):

    dp      all-reduce of the gradients
    fsdp    all-gather of the weights of every unit twice, of the others once; reduce-scatter of the gradients
    tp      all-reduce of every divided module's outputs, and of the gradients of its inputs; of a look-up's outputs;
            of the gradients of the hidden states that logits are made of; of three numbers a token of the loss

On a ring of n devices each sends, and receives, 2 (n - 1) / n times the bytes of an all-reduce, and (n - 1) / n times
those of the other two. Tensor parallelism waits for its exchanges, while those of gradients and weights go on during
the computation:

    step = max(FLOPs / (efficiency * FLOP/s) + bytes of tp / link, bytes of data / link or network)

Kernels that wait for memory, latencies and stragglers are what ``efficiency`` stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from kinformer.core.stack import units_of
from kinformer.estimation.estimate import Estimate, Precision, estimate
from kinformer.estimation.machines import Device
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.unallocated import unallocated
from kinformer.training.division import Division, divide

FLOAT = 4
PREFETCHED = 2
"""Units whose weights FSDP has whole at a time: the one that computes, and the next."""


class Mesh(NamedTuple):
    """``tensor`` devices share every row; ``replicas`` groups of them have other rows and, with the strategy fsdp,
    share the weights."""

    tensor: int
    replicas: int
    strategy: str

    @property
    def text(self) -> str:
        """Return the mesh as the option ``parallel`` takes it."""
        axes = {"tp": self.tensor, "fsdp" if self.strategy == "fsdp" else "dp": self.replicas}
        return ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "dp=1"


class Payload(NamedTuple):
    """The bytes of a step's collectives, by what they are for: ``data`` (gradients and weights) and ``tensor``."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    tensor: int = 0

    def sent(self, mesh: Mesh) -> tuple[float, float]:
        """Return the bytes that each device sends on rings, for data and for tensor parallelism."""
        data, tensor = (1 - 1 / mesh.replicas), (1 - 1 / mesh.tensor)
        return data * (2 * self.all_reduce + self.all_gather + self.reduce_scatter), 2 * tensor * self.tensor


@dataclass(frozen=True, kw_only=True)
class MeshCost:
    """What a step on ``mesh`` takes of each device: ``train_bytes``, which ``memory`` breaks down, the ``payload`` of
    its collectives, and ``seconds`` by what they pass with; ``step`` are those of the step. The rows of a replica come
    in ``accumulate`` parts, as few as memory allows."""

    mesh: str
    accumulate: int
    train_bytes: int
    memory: dict[str, int]
    payload: dict[str, int]
    data_bytes: float
    tensor_bytes: float
    seconds: dict[str, float]
    step: float
    tokens_per_second: float
    fits: bool


class PartConfig:
    """A model config whose model is one of ``parts`` parts of the model of ``config``."""

    def __init__(self, config: Any, parts: int) -> None:
        self.config, self.parts = config, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def replace(self, **changes: Any) -> PartConfig:
        return PartConfig(self.config.replace(**changes), self.parts)

    def divided(self) -> tuple[Any, Division | None]:
        """Return the model, and how it is divided."""
        model = self.config.build()
        return model, divide(model, 0, self.parts) if self.parts > 1 else None

    def build(self) -> Any:
        return self.divided()[0]


class Part:
    """One of ``parts`` parts of a model in training, for any number of rows.

    Errors: ``KinformerError`` where the model cannot be divided so.
    """

    def __init__(self, config: Any, parts: int, length: int, optimizer: str, precision: Precision) -> None:
        self.config, self.parts, self.length, self.precision = PartConfig(config, parts), parts, length, precision
        with unallocated():
            self.model, self.division = self.config.divided()
        options: dict[str, Any] = {"length": length, "optimizer": optimizer, "precision": precision}
        # Activations and FLOPs are a constant and a number for every row.
        self._one, self._two = (estimate(self.config, batch=rows, **options) for rows in (1, 2))

    def of_rows(self, name: str, rows: int) -> int:
        """Return the activations' bytes (``activations``) or the ``flops_step`` of so many rows."""
        one, two = (_amount(item, name) for item in (self._one, self._two))
        return one + (rows - 1) * (two - one)

    @cached_property
    def units(self) -> list[int]:
        """Return the bytes of the weights of every unit."""
        return [_bytes(unit) for unit in units_of(self.model)]

    def memory(self, mesh: Mesh, rows: int) -> dict[str, int]:
        """Return the bytes of a device's memory, by what it is for."""
        train = self._one.memory["train"]
        shares = mesh.replicas if mesh.strategy == "fsdp" else 1
        sharded = _sharded(self.model, shares)
        memory = {
            "weights": sharded,
            "gradients": sharded,
            "optimizer": round(train["optimizer"] * sharded / max(1, train["weights"])),
            "activations": self.of_rows("activations", rows),
        }
        if shares > 1:
            rest = _bytes(self.model) - sum(self.units)
            largest = max(self.units, default=0)
            memory["gathered"] = rest + PREFETCHED * largest + largest  # and the gradients of one unit
        return memory

    def payload(self, mesh: Mesh, rows: int, accumulate: int = 1) -> Payload:
        """Return the bytes of the collectives of a step of ``accumulate`` parts of ``rows`` rows a replica."""
        whole = _bytes(self.model)
        tensor = accumulate * self._exchanged(rows) if self.division is not None else 0
        if mesh.replicas == 1:
            return Payload(tensor=tensor)
        if mesh.strategy == "ddp":
            return Payload(all_reduce=whole, tensor=tensor)
        padded = mesh.replicas * _sharded(self.model, mesh.replicas)
        units = mesh.replicas * sum(_sharded(unit, mesh.replicas) for unit in units_of(self.model))
        return Payload(all_gather=accumulate * (padded + units), reduce_scatter=padded, tensor=tensor)

    def _exchanged(self, rows: int) -> int:
        assert self.division is not None
        narrow = FLOAT if self.precision == "fp32" else FLOAT // 2
        tokens, width = rows * self.length, self.config.dim
        # Outputs are in the type of products, gradients of inputs in that of the norms before.
        exchanged = self._sums() * tokens * width * (narrow + FLOAT)
        if self.division.vocabulary:
            exchanged += tokens * width * (FLOAT + FLOAT) + 3 * tokens * FLOAT
        parameters = dict(self.model.named_parameters())
        return exchanged + FLOAT * sum(parameters[name].numel() for name in self.division.partial & parameters.keys())

    def inference(self) -> dict[str, int]:
        """Return the bytes of ``weights``, and of the ``state`` of a row of the length."""
        return self._one.memory["inference_fp32" if self.precision == "fp32" else "inference_bf16"]

    def token_flops(self) -> float:
        """Return the FLOPs of a generated token, as a mean over the length."""
        return self._one.flops_inference / self.length

    def token_payload(self) -> int:
        """Return the bytes of the collectives of a generated token."""
        if self.division is None:
            return 0
        number = FLOAT if self.precision == "fp32" else FLOAT // 2
        logits = self.model.vocab_size // 2 if self.division.vocabulary else 0  # a gather is half of an all-reduce
        return number * (self._sums() * self.config.dim + logits)

    def _sums(self) -> int:
        """Return how many outputs are added up in a forward pass."""
        assert self.division is not None
        uses = [self.config.stack.uses(len(self.config.layers)).count(i) for i in range(len(self.config.layers))]
        paths = [*self.division.mixers, *self.division.feed_forwards]
        return sum(uses[int(path.split(".")[2])] for path in paths)


def meshes(devices: int, batch: int, largest: int) -> Iterator[Mesh]:
    """Yield the meshes of so many ``devices`` for ``batch`` rows a step, with ``largest`` devices of a row at most."""
    tensor = 1
    while tensor <= min(devices, largest):
        replicas = devices // tensor
        if devices % tensor == 0 and batch % replicas == 0:
            yield Mesh(tensor, replicas, "ddp")
            if replicas > 1:
                yield Mesh(tensor, replicas, "fsdp")
        tensor *= 2


class Cluster:
    """The costs of training ``config`` by ``batch`` rows of ``length`` tokens a step on devices like ``device``, whose
    products reach the share ``efficiency`` of their peak. ``refused``: why no row can be shared, where that is so.
    ``tensor``: how many devices may share a row, if not all powers of two up to a node."""

    def __init__(self, config: Any, device: Device, efficiency: float, **sizes: Any) -> None:
        self.config, self.device, self.efficiency = config, device, efficiency
        self.batch: int = sizes.pop("batch")
        self.sizes, self.refused = sizes, ""
        self.tensor: Sequence[int] = ()
        self._parts: dict[int, Part] = {}

    def costs(self, devices: int) -> list[MeshCost]:
        """Return the costs of every mesh of so many devices, fastest first, those that do not fit last."""
        costs = []
        for mesh in meshes(devices, self.batch, self.device.node):
            if self.tensor and mesh.tensor not in self.tensor:
                continue
            if (part := self.part(mesh.tensor)) is not None:
                costs.append(self._cost(mesh, part))
        return sorted(costs, key=lambda cost: (not cost.fits, cost.step, cost.train_bytes))

    def part(self, parts: int) -> Part | None:
        """Return one of ``parts`` parts of the model; None where it cannot be divided."""
        if parts not in self._parts:
            try:
                self._parts[parts] = Part(self.config, parts, **self.sizes)
            except KinformerError as error:
                if parts == 1:
                    raise
                self.refused = self.refused or error.message
                return None
        return self._parts[parts]

    def flops(self, precision: Precision) -> float:
        """Return the operations that a device makes in a second."""
        return self.efficiency * (self.device.flops_fp32 if precision == "fp32" else self.device.flops)

    def _cost(self, mesh: Mesh, part: Part) -> MeshCost:
        rows, accumulate, device = self.batch // mesh.replicas, 1, self.device
        memory = part.memory(mesh, rows)
        while sum(memory.values()) > device.memory and rows % (2 * accumulate) == 0:
            accumulate *= 2
            memory = part.memory(mesh, rows // accumulate)
        payload = part.payload(mesh, rows // accumulate, accumulate)
        data, tensor = payload.sent(mesh)
        within = mesh.tensor * mesh.replicas <= device.node
        seconds = {
            "compute": part.of_rows("flops_step", rows) / self.flops(part.precision),
            "tensor": tensor / device.link,
            "data": data / (device.link if within else device.network),
        }
        step = max(seconds["compute"] + seconds["tensor"], seconds["data"])
        return MeshCost(
            mesh=mesh.text,
            accumulate=accumulate,
            train_bytes=sum(memory.values()),
            memory=memory,
            payload=payload._asdict(),
            data_bytes=data,
            tensor_bytes=tensor,
            seconds=seconds,
            step=step,
            tokens_per_second=self.batch * part.length / step,
            fits=sum(memory.values()) <= device.memory,
        )


def _amount(costs: Estimate, name: str) -> int:
    return costs.memory["train"]["activations"] if name == "activations" else costs.flops_step


def _bytes(module: nn.Module) -> int:
    return FLOAT * sum(parameter.numel() for parameter in module.parameters())


def _sharded(module: nn.Module, shares: int) -> int:
    """Return the bytes of the first of ``shares`` shares of the weights of ``module``, cut by rows."""
    rows = [(-(-len(item) // shares), item[0].numel()) if item.dim() else (1, 1) for item in module.parameters()]
    return FLOAT * sum(count * width for count, width in rows)
