"""The cost for each device of training a model on many: bytes of memory, bytes exchanged, and time, for every mesh.

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

from kinformer.estimation.device_part import Part, Shared
from kinformer.estimation.estimate import Precision
from kinformer.estimation.machines import Device
from kinformer.estimation.mesh import Mesh, meshes, powers
from kinformer.estimation.parts import ModelSpec
from kinformer.estimation.stretches import rings
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class MeshCost:
    """The cost of a step on ``mesh`` for each device: ``train_bytes``, which ``memory`` breaks down, the ``payload`` of
    its collectives, and ``seconds`` by what takes them; ``step`` is the time of the whole step. The rows of a replica
    come in ``accumulate`` parts, as few as memory allows. Each device sends ``data_bytes`` of gradients and weights,
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


class Cluster:
    """The costs of training ``config`` by ``batch`` rows of ``length`` tokens a step on devices like ``device``, whose
    products reach the share ``efficiency`` of their peak. ``refused``: why no row can be shared, where that is so.
    ``tensor``: how many devices may share a row, if not all powers of two up to a node. ``rounds``: the steps of a
    round of DiLoCo, which is then a mesh, too."""

    def __init__(
        self,
        config: ModelSpec,
        device: Device,
        efficiency: float,
        *,
        batch: int,
        length: int,
        optimizer: str,
        precision: Precision,
        rounds: int | None = None,
    ) -> None:
        self.config, self.device, self.efficiency = config, device, efficiency
        self.batch, self.length, self.rounds = batch, length, rounds
        self.optimizer, self.precision, self.refused = optimizer, precision, ""
        self.tensor: Sequence[int] = ()
        self._parts: dict[Shared, Part] = {}

    def costs(self, devices: int) -> list[MeshCost]:
        """Return the costs of every mesh of this many devices, fastest first, those that do not fit last. The time of
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
            if self.tensor and mesh.tensor not in self.tensor or self.length % mesh.context:
                continue
            if (part := self.part(Shared(mesh.tensor, mesh.context, mesh.ring))) is not None:
                costs.append(self._cost(mesh, part))
        return costs

    def part(self, shared: Shared) -> Part | None:
        """Return a device's part of rows that are ``shared`` so; None where they cannot be."""
        if shared not in self._parts:
            try:
                self._parts[shared] = Part(self.config, shared, self.length, self.optimizer, self.precision)
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
            tokens_per_second=self.batch * self.length / step,
            fits=sum(memory.values()) <= device.memory,
        )
