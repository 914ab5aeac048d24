"""The cost of serving a model on devices that share every row: memory, and time as memory and products allow.

    seconds a token = max(bytes of weights and states / bandwidth, FLOPs / (efficiency * FLOP/s)) + bytes of tp / link

Weights are read once for all rows of a step, a row's state for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.estimation.cluster import Cluster
from kinformer.estimation.device_part import Part, Shared


@dataclass(frozen=True, kw_only=True)
class ServingCost:
    """The costs on each of the ``devices`` devices of a row: bytes of ``weights``, and of the ``state`` of a row at its
    full length; how many ``rows`` fit; ``seconds`` a token of one row alone, and the tokens of all rows a second and
    device."""

    devices: int
    weights: int
    state: int
    rows: int
    seconds: float
    tokens_per_second: float


def serving_costs(cluster: Cluster, devices: int) -> list[ServingCost]:
    """Return the costs of serving rows of the cluster's length by 1, 2, 4, ... of this many ``devices`` of a node,
    where the model fits, the most tokens a second first; none of an encoder, which generates nothing."""
    whole = cluster.part(Shared(1))
    if whole is None or not whole.inference()["state"]:
        return []
    costs, shared = [], 1
    while shared <= min(devices, cluster.device.node):
        if (part := cluster.part(Shared(shared))) is not None:
            memory = part.inference()
            rows = int((cluster.device.memory - memory["weights"]) // max(1, memory["state"]))
            if rows >= 1:
                speed = rows / _seconds(cluster, part, shared, rows) / shared
                alone = _seconds(cluster, part, shared, 1)
                costs.append(ServingCost(devices=shared, **memory, rows=rows, seconds=alone, tokens_per_second=speed))
        shared *= 2
    return sorted(costs, key=lambda cost: -cost.tokens_per_second)


def _seconds(cluster: Cluster, part: Part, devices: int, rows: int) -> float:
    """Return the seconds of a step of one token for each of this many rows."""
    memory, device = part.inference(), cluster.device
    read = (memory["weights"] + rows * memory["state"]) / device.bandwidth
    computed = rows * part.token_flops() / cluster.flops(part.precision)
    return max(read, computed) + 2 * (1 - 1 / devices) * rows * part.token_payload() / device.link
