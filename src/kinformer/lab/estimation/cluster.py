"""The cost of training a model on many devices, for each device and every mesh: bytes of memory, bytes exchanged, time.

A device of tensor parallelism has a part of the model (``lab.training.tensor_parallel``), whose cost is measured like
the cost of any model. The exchanges of a step, in bytes of a collective's tensor (float32 parameters):

    dp      all-reduce of the gradients
    fsdp    all-gather of the weights of every unit twice, of the others once; reduce-scatter of the gradients
    tp      all-reduce of every divided module's outputs, and of the gradients of its inputs; of a look-up's outputs;
            of the gradients of the logits' hidden states; of three numbers a token of the loss
    cp      states and slots of earlier stretches of a row

Devices that share rows wait for their exchanges; exchanges of gradients and weights overlap the computation:

    step = max(FLOPs / (efficiency * FLOP/s) + bytes of tp and cp / link, bytes of data / link or network,
               kernels * seconds of a launch)

The last stretch of a row computes most, and the devices of the other stretches wait for it. ``efficiency`` covers
kernels that wait for memory, latencies and stragglers. The kernels of a step are the operators of a forward that do
more than view their input, and twice as many in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kinformer.core.contract import Chunk, ReadsSource
from kinformer.core.crossing import Crosses, Crossing, Summary, sent_by_neighbours
from kinformer.core.model import StackedModel, modules_of
from kinformer.core.stack import units_of
from kinformer.lab.estimation.estimate import Precision, at_length, estimate, horizon_of
from kinformer.lab.estimation.options import Device
from kinformer.lab.estimation.parts import Costs, ModelSpec, outputs
from kinformer.lab.runs.options import Parallel as Mesh
from kinformer.lab.training.tensor_parallel import Division, VocabularyPart, divide, output_product
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.progress import note_once

# Context parallelism without processes: a model computes the last stretch of a row, and the bytes that it would receive
# are counted. The last stretch sees most of the past, so every process waits for the process of the last stretch.

FLOAT = 4


class PaperStretches(Crossing):
    """The last of ``count`` stretches. Tensors from earlier stretches have the right shape and meaningless values.
    ``sent``: the bytes that each process sends in both passes; slots are sent in ``narrow`` bytes a number. In an
    all-gather on a ring each process sends the tensors of all processes but one. Neighbours send their slots of a
    window. Keys and values that circulate are counted where they arrive."""

    def __init__(self, count: int, ring: bool, narrow: int) -> None:
        self.number, self.count, self.ring = count - 1, count, ring
        self.sent, self._slot, self._itemsize = 0, narrow, narrow

    def enter(self, mixer: nn.Module, inputs: tuple[Chunk, *tuple[object, ...]]) -> None:
        """Put the counts of tokens on the device of the ``inputs`` of a mixer: the meta device, or imitated tensors."""
        x = inputs[0].x
        self.seen = x.new_zeros(len(x), dtype=torch.int64)

    def row(self, stretch: Tensor, dim: int) -> Tensor:
        self.before = stretch.new_zeros(len(stretch), dtype=torch.int64)
        return super().row(stretch, dim)

    def composed(self, summary: Summary, state: Tensor) -> tuple[Tensor, Tensor]:
        self._itemsize = FLOAT  # sums stay in float32
        result = super().composed(summary, state)
        self._itemsize = self._slot
        return result

    def gathered(self, local: Tensor, tied: Tensor) -> tuple[Tensor, Tensor]:
        self.sent += 2 * (self.count - 1) * local.numel() * self._itemsize  # an all-gather and a reduce-scatter
        return local.repeat(self.count, *(1 for _ in local.shape)), tied

    def from_neighbours(self, slots: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        time = slots.shape[2]
        widths = sent_by_neighbours(time, limit, self.count)
        received = torch.cat([slots[:, :, time - width :] for width in reversed(widths)], dim=2)
        self.sent += 2 * received.numel() * self._itemsize
        return received, slots

    def last(self, slots: Tensor, count: int | None = None) -> Tensor:
        return slots

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> bool:
        if received is None or not 0 <= source < self.count:
            return False
        self.sent += received.numel() * self._itemsize
        return True


def rings(model: StackedModel) -> bool:
    """Return whether keys and values of ``model`` could circulate, so that a ring differs from an all-gather."""
    if model.config.kind != "decoder":  # an encoder needs the keys and values of all stretches at once
        return False
    return any(isinstance(item, Crosses) and item.rings and item.growth == "linear" for item in model.modules())


def share_on_paper(model: Any, stretches: PaperStretches) -> None:
    """Let ``model`` compute the last of the ``stretches``, in place. Errors: ``KinformerError`` for a model whose rows
    cannot be shared by time, and for mixers that wait for the state of the process before: the size of such a state is
    known only after it was made."""
    from kinformer.lab.training.context_parallel import check_time, crosses, mixers_of, readers_of

    check_time(model, stretches.ring)
    for reader in readers_of(model):
        reader.crossing = stretches
    for mixer in mixers_of(model.stack):
        if not crosses(mixer):
            raise KinformerError(
                f"the mixer {type(mixer).__name__} waits for the state of the stretch before, which is not estimated; "
                "leave `parallel` cp out."
            )
        mixer.crossing = stretches  # type: ignore[assignment]
        mixer.register_forward_pre_hook(stretches.enter)


# Meshes of devices: the tensors that devices share, and the bytes that collectives send.
#
# On a ring of n devices each sends, and receives, 2 (n - 1) / n times the bytes of an all-reduce, and (n - 1) / n
# times the bytes of an all-gather and of a reduce-scatter.


class Payload(NamedTuple):
    """The bytes of a step's collectives. ``all_reduce``, ``all_gather`` and ``reduce_scatter``: of gradients and
    weights. ``tensor``: of tensor parallelism. ``context``: the bytes that each device sends for stretches of time."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    tensor: int = 0
    context: int = 0

    def sent(self, mesh: Mesh) -> tuple[float, float, float]:
        """Return the bytes that each device sends on rings: for data, for parts of rows, and for stretches of time."""
        data, tensor = (1 - 1 / mesh.copies), (1 - 1 / mesh.tensor)
        weights = data * (2 * self.all_reduce + self.all_gather + self.reduce_scatter)
        return weights, 2 * tensor * self.tensor, self.context


def meshes(devices: int, batch: int, largest: int, context: int = 1, ring: bool = False) -> Iterator[Mesh]:
    """Yield the meshes of this many ``devices`` for ``batch`` rows a step, with parts of the model on ``largest``
    devices at most, and ``context`` stretches of every row, with ``ring`` by circulating keys and values."""
    for tensor in powers(min(devices // context, largest)):
        replicas = devices // (tensor * context)
        if devices % (tensor * context) == 0 and batch % replicas == 0:
            yield Mesh(tensor, replicas, "ddp", context, ring)
            if replicas * context > 1:
                yield Mesh(tensor, replicas, "fsdp", context, ring)


def powers(limit: int) -> Iterator[int]:
    """Return the powers of two up to ``limit``."""
    return (1 << power for power in range(limit.bit_length()))


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights in float32."""
    return FLOAT * sum(parameter.numel() for parameter in module.parameters())


def sharded_bytes(module: nn.Module, shares: int) -> int:
    """Return the bytes of the first of ``shares`` shares of the weights of ``module``, cut by rows."""
    rows = [(-(-len(item) // shares), item[0].numel()) if item.dim() else (1, 1) for item in module.parameters()]
    return FLOAT * sum(count * width for count, width in rows)


# A device's part of a model and of its rows: its memory, its collectives and its FLOPs, for any number of rows.

PREFETCHED = 2
"""Units whose whole weights FSDP holds at a time: the unit that computes, and the next."""
SHORT = 64


class PartConfig:
    """A config whose model is one of ``parts`` parts of ``config``'s, and computes one of ``stretches`` if given."""

    def __init__(self, config: ModelSpec, parts: int, stretches: PaperStretches | None = None) -> None:
        self.config, self.parts, self.stretches = config, parts, stretches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def replace(self, **changes: object) -> PartConfig:
        return PartConfig(self.config.replace(**changes), self.parts, self.stretches)

    def divided(self) -> tuple[Any, Division | None]:
        """Return the model, and how it is divided."""
        model = self.config.build()
        division = divide(model, 0, self.parts) if self.parts > 1 else None
        if division is not None and division.vocabulary and (product := output_product(model)) is not None:
            product[1].vocabulary_part = VocabularyPart(0, model.vocab_size // self.parts, None)
        if self.stretches is not None:
            share_on_paper(model, self.stretches)
        return model, division

    def build(self) -> Any:
        return self.divided()[0]


class Shared(NamedTuple):
    """How a row is shared: by ``tensor`` parts of the model and ``context`` stretches of time, in a ``ring`` or not."""

    tensor: int
    context: int = 1
    ring: bool = False


class _Operators(TorchDispatchMode):
    """Counts the operators that compute, which are all but views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Part:
    """The training work of a device with a share of every row, for any number of rows. Errors: ``KinformerError`` where
    devices cannot share rows of the model in the way ``shared``."""

    def __init__(self, config: ModelSpec, shared: Shared, length: int, optimizer: str, precision: Precision) -> None:
        narrow = FLOAT if precision == "fp32" else FLOAT // 2
        self.stretches = PaperStretches(shared.context, shared.ring, narrow) if shared.context > 1 else None
        self.config = PartConfig(config, shared.tensor, self.stretches)
        self.length, self.precision, self.narrow = length // shared.context, precision, narrow
        with unallocated():
            self.model, self.division = self.config.divided()
        self._estimate = cache(
            partial(estimate, self.config, length=self.length, optimizer=optimizer, precision=precision)
        )

    def of_rows(self, name: str, rows: int) -> int:
        """Return the activations' bytes (``activations``) or the ``flops_step`` of this many rows."""
        # Activations and FLOPs are linear in the number of rows, so the estimates of one and two rows suffice.
        one, two = (
            (item.memory["train"]["activations"] if name == "activations" else item.flops_step)
            for item in (self._estimate(batch=1), self._estimate(batch=2))
        )
        return one + (rows - 1) * (two - one)

    @cached_property
    def kernels(self) -> int:
        """Return the kernels of a forward, counted on a short row: kernels for a GPU do not cut rows into tiles."""
        length = self.length if self.config.input.length else min(self.length, SHORT)
        with _Operators() as operators, torch.no_grad():
            outputs(self.model, self.model.input.example(1, length, "meta"))
        return operators.count

    def memory(self, mesh: Mesh, rows: int) -> dict[str, int]:
        """Return the bytes of a device's memory, by purpose."""
        train = self._estimate(batch=1).memory["train"]
        shares = mesh.copies if mesh.strategy == "fsdp" else 1
        sharded = sharded_bytes(self.model, shares)
        memory = {
            "weights": sharded,
            "gradients": sharded,
            "optimizer": round(train["optimizer"] * sharded / max(1, train["weights"])),
            "activations": self.of_rows("activations", rows),
        }
        if shares > 1:
            units = [module_bytes(unit) for unit in units_of(self.model)]
            # The modules outside of units, the whole units, and the gradients of one unit.
            memory["gathered"] = module_bytes(self.model) - sum(units) + (PREFETCHED + 1) * max(units, default=0)
        return memory

    def payload(self, mesh: Mesh, rows: int, accumulate: int = 1) -> Payload:
        """Return the bytes of the collectives of a step of ``accumulate`` parts of ``rows`` rows a replica."""
        whole = module_bytes(self.model)
        tensor = accumulate * self._exchanged(rows) if self.division is not None else 0
        within = Payload(tensor=tensor, context=accumulate * rows * self._sent)
        if mesh.copies == 1:
            return within
        if mesh.strategy != "fsdp":
            return within._replace(all_reduce=whole)
        padded = mesh.copies * sharded_bytes(self.model, mesh.copies)
        units = mesh.copies * sum(sharded_bytes(unit, mesh.copies) for unit in units_of(self.model))
        return within._replace(all_gather=accumulate * (padded + units), reduce_scatter=padded)

    @cached_property
    def _sent(self) -> int:
        """Return the bytes that a device sends of a row's stretch, in both passes."""
        if self.stretches is None:
            return 0
        return at_length(self._sent_at, self.length, horizon_of(self.model))["sent", "model"]

    def _sent_at(self, length: int) -> Costs:
        assert self.stretches is not None
        before = self.stretches.sent
        outputs(self.model, self.model.input.example(1, length, "meta"))
        return {("sent", "model"): self.stretches.sent - before}

    def _exchanged(self, rows: int) -> int:
        assert self.division is not None
        tokens, width = rows * self.length, self.config.dim
        # Outputs are in the type of products, gradients of inputs in the type of the norms before.
        exchanged = self._sums(encodes=True) * tokens * width * (self.narrow + FLOAT)
        exchanged += len(modules_of(self.model, ReadsSource)) * tokens * width * FLOAT  # gradients of the source
        if self.division.vocabulary:
            exchanged += tokens * width * (FLOAT + FLOAT) + 3 * tokens * FLOAT
        parameters = dict(self.model.named_parameters())
        return exchanged + FLOAT * sum(parameters[name].numel() for name in self.division.partial & parameters.keys())

    def inference(self) -> dict[str, int]:
        """Return the bytes of ``weights``, and of the ``state`` of a row of the length."""
        return self._estimate(batch=1).memory["inference_fp32" if self.precision == "fp32" else "inference_bf16"]

    def token_flops(self) -> float:
        """Return the FLOPs of a generated token, as a mean over the length."""
        return self._estimate(batch=1).flops_inference / self.length

    def token_payload(self) -> int:
        """Return the bytes of the collectives of a generated token."""
        if self.division is None:
            return 0
        logits = self.model.vocab_size // 2 if self.division.vocabulary else 0  # a gather is half of an all-reduce
        return self.narrow * (self._sums(encodes=False) * self.config.dim + logits)

    def _sums(self, encodes: bool) -> int:
        """Return how many outputs a forward pass sums over devices; ``encodes``: with the outputs of the encoder."""
        assert self.division is not None
        total = 0
        for path in (*self.division.mixers, *self.division.feed_forwards):
            encoder, _, place = path.partition("stack.layers.")
            config = self.config.encoder if encoder else self.config
            if encodes or not encoder:
                total += config.stack.uses(len(config.layers)).count(int(place.partition(".")[0]))
        return total


@dataclass(frozen=True, kw_only=True)
class MeshCost:
    """The cost of a step on ``mesh`` for each device.

    ``memory`` breaks ``train_bytes`` down. ``payload``: the bytes of the collectives. ``seconds``: the time of each
    kind of work; ``step``: the time of the whole step. The rows of a replica come in ``accumulate`` parts, as few as
    memory allows. Each device sends ``data_bytes`` of gradients and weights, and ``tensor_bytes`` and
    ``context_bytes`` of shared rows.
    """

    mesh: str
    accumulate: int
    train_bytes: int
    memory: dict[str, int]
    payload: dict[str, int]
    data_bytes: float
    tensor_bytes: float
    context_bytes: float
    seconds: dict[str, float]
    step: float
    tokens_per_second: float
    fits: bool


@dataclass
class Cluster:
    """The costs of training ``config`` by ``batch`` rows of ``length`` tokens a step on devices like ``device``, whose
    products reach the share ``efficiency`` of their peak. ``refused``: why devices cannot share a row, or an empty
    text. ``tensor``: how many devices may share a row; if empty, all powers of two up to a node."""

    config: ModelSpec
    device: Device
    efficiency: float
    _: KW_ONLY
    batch: int
    length: int
    optimizer: str
    precision: Precision
    refused: str = ""
    tensor: Sequence[int] = ()
    _parts: dict[Shared, Part | None] = field(default_factory=dict, init=False)

    def costs(self, devices: int) -> list[MeshCost]:
        """Return the costs of every mesh of this many devices: first a mesh that shares nothing, if it fits, then the
        fastest, and meshes that do not fit last. Devices share the time of rows only where no other mesh fits, and as
        few devices as possible."""
        costs: list[MeshCost] = []
        whole = self.part(Shared(1))
        for context in powers(devices):
            both = context > 1 and whole is not None and rings(whole.model)
            for ring in (False, True) if both else (False,):
                if not any(cost.fits for cost in costs):
                    costs += self._costs(meshes(devices, self.batch, self.device.node, context, ring))
        key = lambda cost: (not cost.fits, not cost.mesh.startswith("dp="), cost.step, cost.train_bytes)  # noqa: E731
        return sorted(costs, key=key)

    def _costs(self, candidates: Iterable[Mesh]) -> list[MeshCost]:
        costs = []
        for mesh in candidates:
            if self.tensor and mesh.tensor not in self.tensor or self.length % mesh.context:
                continue
            if (part := self.part(Shared(mesh.tensor, mesh.context, mesh.ring))) is not None:
                costs.append(self._cost(mesh, part))
        return costs

    def part(self, shared: Shared) -> Part | None:
        """Return a device's part of rows ``shared`` in this way; None where devices cannot share them."""
        if shared not in self._parts:
            note_once(f"estimating 1 of {plural(shared.tensor * shared.context, 'part')} of a row")
            self._parts[shared] = None
            try:
                self._parts[shared] = Part(self.config, shared, self.length, self.optimizer, self.precision)
            except KinformerError as error:
                if shared == Shared(1):
                    raise
                self.refused = self.refused or error.message
        return self._parts[shared]

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
        data, tensor, context = payload.sent(mesh)
        within = mesh.tensor * mesh.copies <= device.node
        seconds = {
            "compute": part.of_rows("flops_step", rows) / self.flops(part.precision),
            "tensor": tensor / device.link,
            "context": context / (device.link if mesh.tensor * mesh.context <= device.node else device.network),
            "data": data / (device.link if within else device.network),
            "launches": 3 * accumulate * part.kernels * device.launch,
        }
        rows_done = seconds["compute"] + seconds["tensor"] + seconds["context"]
        step = max(rows_done, seconds["data"], seconds["launches"])
        return MeshCost(
            mesh=mesh.text,
            accumulate=accumulate,
            train_bytes=sum(memory.values()),
            memory=memory,
            payload=payload._asdict(),
            data_bytes=data,
            tensor_bytes=tensor,
            context_bytes=context,
            seconds=seconds,
            step=step,
            tokens_per_second=self.batch * self.length / step,
            fits=sum(memory.values()) <= device.memory,
        )


# The cost of serving a model on devices that share every row: memory, and time as memory and products allow.
#
#     seconds a token = max(bytes of weights and states / bandwidth, FLOPs / (efficiency * FLOP/s),
#                           kernels * seconds of a launch) + bytes of tp / link
#
# A step reads the weights once for all rows, and the state of every row.


@dataclass(frozen=True, kw_only=True)
class ServingCost:
    """The costs on each of the ``devices`` devices that share every row. ``weights``: bytes of the weights. ``state``:
    bytes of a row's state at its full length. ``rows``: how many rows fit. ``seconds``: the time of a token of one row
    alone. ``tokens_per_second``: of all rows, for each device."""

    devices: int
    weights: int
    state: int
    rows: int
    seconds: float
    tokens_per_second: float


def serving_costs(cluster: Cluster, devices: int) -> list[ServingCost]:
    """Return the costs of serving rows of the cluster's length by 1, 2, 4, ... of ``devices`` devices of a node, where
    the model fits, the most tokens a second first; an empty list for an encoder, which does not generate."""
    whole = cluster.part(Shared(1))
    if whole is None or not whole.inference()["state"]:
        return []
    costs = []
    for shared in powers(min(devices, cluster.device.node)):
        if (part := cluster.part(Shared(shared))) is not None:
            memory = part.inference()
            rows = int((cluster.device.memory - memory["weights"]) // max(1, memory["state"]))
            if rows >= 1:
                speed = rows / _seconds(cluster, part, shared, rows) / shared
                alone = _seconds(cluster, part, shared, 1)
                costs.append(ServingCost(devices=shared, **memory, rows=rows, seconds=alone, tokens_per_second=speed))
    return sorted(costs, key=lambda cost: -cost.tokens_per_second)


def _seconds(cluster: Cluster, part: Part, devices: int, rows: int) -> float:
    """Return the seconds of a step of one token for each of this many rows."""
    memory, device = part.inference(), cluster.device
    read = (memory["weights"] + rows * memory["state"]) / device.bandwidth
    computed = rows * part.token_flops() / cluster.flops(part.precision)
    return (
        max(read, computed, part.kernels * device.launch)
        + 2 * (1 - 1 / devices) * rows * part.token_payload() / device.link
    )
