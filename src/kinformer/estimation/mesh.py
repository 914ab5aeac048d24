"""Meshes of devices: who shares what, and what collectives send.

On a ring of n devices each sends, and receives, 2 (n - 1) / n times the bytes of an all-reduce, and (n - 1) / n times
those of an all-gather and a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from kinformer.estimation.stretches import FLOAT


class Mesh(NamedTuple):
    """``tensor`` devices share the heads and features of every row, ``context`` groups of them its time (with ``ring``
    by keys and values that go round); ``replicas`` of all that have other rows. With the ``strategy`` fsdp those that
    have other tokens share the weights; with diloco they exchange them once in ``rounds`` steps."""

    tensor: int
    replicas: int
    strategy: str
    context: int = 1
    ring: bool = False
    rounds: int = 1

    @property
    def text(self) -> str:
        """Return the mesh as the option ``parallel`` takes it."""
        data = "dp" if self.strategy == "ddp" else self.strategy
        axes = {"tp": self.tensor, "ring" if self.ring else "cp": self.context, data: self.replicas}
        named = [f"{axis}={size}" for axis, size in axes.items() if size > 1 or (axis == "fsdp" and self.context > 1)]
        return ",".join(named) or "dp=1"

    @property
    def copies(self) -> int:
        """Return how many devices have other tokens of the same part of the model."""
        return self.replicas * self.context


class Payload(NamedTuple):
    """The bytes of a step's collectives, by what they are for: ``data`` (gradients and weights) and ``tensor``;
    ``context``: those that each device sends for stretches of time."""

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
    devices at most, and ``context`` stretches of every row, with ``ring`` by keys and values that go round."""
    for tensor in powers(min(devices // context, largest)):
        replicas = devices // (tensor * context)
        if devices % (tensor * context) == 0 and batch % replicas == 0:
            yield Mesh(tensor, replicas, "ddp", context, ring)
            if replicas * context > 1:
                yield Mesh(tensor, replicas, "fsdp", context, ring)


def powers(limit: int) -> Iterator[int]:
    """Yield the powers of two up to ``limit``."""
    power = 1
    while power <= limit:
        yield power
        power *= 2


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights in float32."""
    return FLOAT * sum(parameter.numel() for parameter in module.parameters())


def sharded_bytes(module: nn.Module, shares: int) -> int:
    """Return the bytes of the first of ``shares`` shares of the weights of ``module``, cut by rows."""
    rows = [(-(-len(item) // shares), item[0].numel()) if item.dim() else (1, 1) for item in module.parameters()]
    return FLOAT * sum(count * width for count, width in rows)
