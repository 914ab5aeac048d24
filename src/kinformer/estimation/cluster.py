"""What training a model on many devices takes of each: bytes of memory, bytes exchanged, and time, for every mesh.

A device of tensor parallelism has a part of the model, so it costs what that part costs, measured as any model is
(``training.division``). What is exchanged in a step, in bytes of a collective's tensor (float32 parameters):

    dp      all-reduce of the gradients
    diloco  all-reduce of the weights, once in a round
    fsdp    all-gather of the weights of every unit twice, of the others once; reduce-scatter of the gradients
    tp      all-reduce of every divided module's outputs, and of the gradients of its inputs; of a look-up's outputs;
            of the gradients of the hidden states that logits are made of; of three numbers a token of the loss
    cp      what mixers need of earlier stretches of a row (``estimation.stretches``)

Devices that share rows wait for their exchanges, while those of gradients and weights go on during the computation:

    step = max(FLOPs / (efficiency * FLOP/s) + bytes of tp and cp / link, bytes of data / link or network)

Devices that train apart (diloco) wait for all exchanges. Of stretches of time, the last computes most, and the others
wait for it. Kernels that wait for memory, latencies and stragglers are what ``efficiency`` stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kinformer.core.stack import units_of
from kinformer.estimation.estimate import Estimate, Precision, estimate, horizon_of
from kinformer.estimation.length import at_length
from kinformer.estimation.machines import Device
from kinformer.estimation.mesh import Mesh, Payload, meshes, module_bytes, powers, sharded_bytes
from kinformer.estimation.parts import Costs
from kinformer.estimation.stretches import FLOAT, PaperStretches, rings, share_on_paper
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.unallocated import unallocated
from kinformer.training.division import Division, divide, output_product
from kinformer.training.vocabulary import VocabularyPart

PREFETCHED = 2
"""Units whose weights FSDP has whole at a time: the one that computes, and the next."""


@dataclass(frozen=True, kw_only=True)
class MeshCost:
    """What a step on ``mesh`` takes of each device: ``train_bytes``, which ``memory`` breaks down, the ``payload`` of
    its collectives, and ``seconds`` by what they pass with; ``step`` are those of the step. The rows of a replica come
    in ``accumulate`` parts, as few as memory allows. Each device sends ``data_bytes`` of gradients and weights,
    ``tensor_bytes`` and ``context_bytes`` of rows that are shared."""

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


class PartConfig:
    """A model config whose model is one of ``parts`` parts of the model of ``config``, which computes one of
    ``stretches`` where there are some."""

    def __init__(self, config: Any, parts: int, stretches: PaperStretches | None = None) -> None:
        self.config, self.parts, self.stretches = config, parts, stretches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def replace(self, **changes: Any) -> PartConfig:
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


class Part:
    """What a device that has a share of every row does in training, for any number of rows.

    Errors: ``KinformerError`` where rows of the model cannot be ``shared`` so.
    """

    def __init__(self, config: Any, shared: Shared, length: int, optimizer: str, precision: Precision) -> None:
        narrow = FLOAT if precision == "fp32" else FLOAT // 2
        self.stretches = PaperStretches(shared.context, shared.ring, narrow) if shared.context > 1 else None
        self.config = PartConfig(config, shared.tensor, self.stretches)
        self.length, self.precision, self.narrow = length // shared.context, precision, narrow
        with unallocated():
            self.model, self.division = self.config.divided()
        self._options: dict[str, Any] = {"length": self.length, "optimizer": optimizer, "precision": precision}

    @cached_property
    def _one(self) -> Estimate:
        return estimate(self.config, batch=1, **self._options)

    @cached_property
    def _two(self) -> Estimate:
        return estimate(self.config, batch=2, **self._options)

    def of_rows(self, name: str, rows: int) -> int:
        """Return the activations' bytes (``activations``) or the ``flops_step`` of so many rows."""
        # Activations and FLOPs are a constant and a number for every row.
        one, two = (_amount(item, name) for item in (self._one, self._two))
        return one + (rows - 1) * (two - one)

    @cached_property
    def units(self) -> list[int]:
        """Return the bytes of the weights of every unit."""
        return [module_bytes(unit) for unit in units_of(self.model)]

    def memory(self, mesh: Mesh, rows: int) -> dict[str, int]:
        """Return the bytes of a device's memory, by what it is for."""
        train = self._one.memory["train"]
        shares = mesh.copies if mesh.strategy == "fsdp" else 1
        sharded = sharded_bytes(self.model, shares)
        memory = {
            "weights": sharded,
            "gradients": sharded,
            "optimizer": round(train["optimizer"] * sharded / max(1, train["weights"])),
            "activations": self.of_rows("activations", rows),
        }
        if mesh.strategy == "diloco":
            memory["outer"] = 2 * sharded  # the shared weights, and their momentum
        if shares > 1:
            rest = module_bytes(self.model) - sum(self.units)
            largest = max(self.units, default=0)
            memory["gathered"] = rest + PREFETCHED * largest + largest  # and the gradients of one unit
        return memory

    def payload(self, mesh: Mesh, rows: int, accumulate: int = 1) -> Payload:
        """Return the bytes of the collectives of a step of ``accumulate`` parts of ``rows`` rows a replica."""
        whole = module_bytes(self.model)
        tensor = accumulate * self._exchanged(rows) if self.division is not None else 0
        within = Payload(tensor=tensor, context=accumulate * rows * self._sent)
        if mesh.copies == 1:
            return within
        if mesh.strategy != "fsdp":
            return within._replace(all_reduce=whole // mesh.rounds)
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
        self.model(self.model.input.example(1, length, "meta"))
        return {("sent", "model"): self.stretches.sent - before}

    def _exchanged(self, rows: int) -> int:
        assert self.division is not None
        tokens, width = rows * self.length, self.config.dim
        # Outputs are in the type of products, gradients of inputs in that of the norms before.
        exchanged = self._sums() * tokens * width * (self.narrow + FLOAT)
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
        logits = self.model.vocab_size // 2 if self.division.vocabulary else 0  # a gather is half of an all-reduce
        return self.narrow * (self._sums() * self.config.dim + logits)

    def _sums(self) -> int:
        """Return how many outputs are added up in a forward pass."""
        assert self.division is not None
        uses = [self.config.stack.uses(len(self.config.layers)).count(i) for i in range(len(self.config.layers))]
        paths = [*self.division.mixers, *self.division.feed_forwards]
        return sum(uses[int(path.split(".")[2])] for path in paths)


class Cluster:
    """The costs of training ``config`` by ``batch`` rows of ``length`` tokens a step on devices like ``device``, whose
    products reach the share ``efficiency`` of their peak. ``refused``: why no row can be shared, where that is so.
    ``tensor``: how many devices may share a row, if not all powers of two up to a node. ``rounds``: the steps of a
    round of DiLoCo, which is then a mesh, too."""

    def __init__(self, config: Any, device: Device, efficiency: float, **sizes: Any) -> None:
        self.config, self.device, self.efficiency = config, device, efficiency
        self.batch: int = sizes.pop("batch")
        self.rounds: int | None = sizes.pop("rounds", None)
        self.sizes, self.refused = sizes, ""
        self.tensor: Sequence[int] = ()
        self._parts: dict[Shared, Part] = {}

    def costs(self, devices: int) -> list[MeshCost]:
        """Return the costs of every mesh of so many devices, fastest first, those that do not fit last. The time of
        rows is shared where no other mesh fits, by as few devices as it takes."""
        costs: list[MeshCost] = []
        whole = self.part(Shared(1))
        for context in powers(devices):
            both = context > 1 and whole is not None and rings(whole.model)
            for ring in (False, True) if both else (False,):
                if not any(cost.fits for cost in costs):
                    costs += self._costs(meshes(devices, self.batch, self.device.node, context, ring))
        if self.rounds and devices > 1 and self.batch % devices == 0:
            costs += self._costs([Mesh(1, devices, "diloco", rounds=self.rounds)])
        return sorted(costs, key=lambda cost: (not cost.fits, cost.step, cost.train_bytes))

    def _costs(self, candidates: Iterable[Mesh]) -> list[MeshCost]:
        costs = []
        for mesh in candidates:
            if self.tensor and mesh.tensor not in self.tensor or self.sizes["length"] % mesh.context:
                continue
            if (part := self.part(Shared(mesh.tensor, mesh.context, mesh.ring))) is not None:
                costs.append(self._cost(mesh, part))
        return costs

    def part(self, shared: Shared) -> Part | None:
        """Return a device's part of rows that are ``shared`` so; None where they cannot be."""
        if shared not in self._parts:
            try:
                self._parts[shared] = Part(self.config, shared, **self.sizes)
            except KinformerError as error:
                if shared == Shared(1):
                    raise
                self.refused = self.refused or error.message
                return None
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
        }
        rows_done = seconds["compute"] + seconds["tensor"] + seconds["context"]
        step = rows_done + seconds["data"] if mesh.strategy == "diloco" else max(rows_done, seconds["data"])
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
            tokens_per_second=self.batch * self.sizes["length"] / step,
            fits=sum(memory.values()) <= device.memory,
        )


def _amount(costs: Estimate, name: str) -> int:
    return costs.memory["train"]["activations"] if name == "activations" else costs.flops_step
