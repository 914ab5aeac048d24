"""The estimate of a member on many devices: the best meshes for training it, and for serving it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kinformer.core.model_config import ModelConfig
from kinformer.estimation.cluster import Cluster, MeshCost
from kinformer.estimation.machines import Device, device_of, numbers_of
from kinformer.estimation.options import EstimateOptions
from kinformer.estimation.serving import ServingCost, serving_costs
from kinformer.runtime.errors import KinformerError


@dataclass(frozen=True, kw_only=True)
class ClusterEstimate:
    """The costs on many devices: ``meshes``, by the number of devices, fastest first; ``serving``, for a device of a
    node and for several; ``refused``: why no row can be shared by devices, where that is so ("" else)."""

    device: Device
    meshes: dict[int, list[MeshCost]]
    serving: list[ServingCost]
    refused: str

    @property
    def facts(self) -> dict[str, object]:
        """Return the estimate as data that JSON can hold."""
        return asdict(self)


def cluster_of(config: ModelConfig, options: EstimateOptions, length: int) -> ClusterEstimate | None:
    """Return the costs of ``config`` on the numbers of devices that ``options`` name; None where these name none."""
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
        rounds=options.rounds,
    )
    meshes = {number: cluster.costs(number) for number in numbers}
    if not any(meshes.values()):
        least = max(1, max(numbers) // device.node)
        raise KinformerError(
            f"`batch_size` {options.batch_size} cannot be shared by {max(numbers)} devices, of which at most "
            f"{device.node} share a row; give a multiple of {least}, or fewer `devices`."
        )
    return ClusterEstimate(
        device=device, meshes=meshes, serving=serving_costs(cluster, max(numbers)), refused=cluster.refused
    )
