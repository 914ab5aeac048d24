"""What a step exchanges and what processes hold, counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from kinformer.lab.data import open_corpus
from kinformer.lab.training.distributed import Group
from tests.training.tiny import trainer

MESHES = {"tp=2": ("ddp", 2), "fsdp=2": ("fsdp", 1), "dp=2": ("ddp", 1)}
FOUR = {"tp=2,fsdp=2": ("fsdp", 2)}
"""Meshes of two and of four processes."""
MEMBERS = ("rope", "gated-deltanet")
LENGTH, ROWS = 32, 4
_TENSOR = {
    "c10d::allreduce_": "all_reduce",
    "_c10d_functional::all_reduce": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
}


class Collectives(TorchDispatchMode):
    """The bytes of the tensors of collectives within the context, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name in _TENSOR:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes[_TENSOR[name]] += sum(tensor.nbytes for tensor in tensors)
        elif name == "c10d::send":
            self.bytes["sent"] += sum(tensor.nbytes for tensor in args[0])
        elif name == "c10d::_reduce_scatter_base_":
            self.bytes["reduce_scatter"] += args[1].nbytes
        elif name.startswith("c10d::") and name not in ("c10d::barrier",):
            self.bytes[name] += 1
        return function(*args, **(kwargs or {}))


class Saved:
    """The bytes of the distinct storages that autograd saves, except for parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.bytes = 0
        self._keep = {_local(item).untyped_storage()._cdata: item for item in model.parameters()}

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        if storage._cdata not in self._keep:
            self._keep[storage._cdata] = storage  # type: ignore[assignment]
            self.bytes += storage.nbytes()
        return tensor


def measured(place: Path, text: str) -> Callable[[Group], object]:
    """One step by every mesh of so many processes, of members with and without a growing state."""

    def work(group: Group) -> None:
        corpus, results = open_corpus(text), {}
        for member in MEMBERS if group.world == 2 else MEMBERS[:1]:
            for mesh, (strategy, tensor) in (MESHES if group.world == 2 else FOUR).items():
                torch.set_default_dtype(torch.float32)
                many = replace(group, strategy=strategy, tensor=tensor)
                folder = place / f"{member} {mesh}"
                folder.mkdir(exist_ok=True)
                options: dict[str, Any] = {"length": LENGTH, "batch_size": ROWS, "model": {"member": member}}
                update = trainer(corpus, folder, many, **options).update
                update(0, 1e-3, 0.0)
                saved = Saved(update.engine)
                with Collectives() as counted, saved_tensors_hooks(saved.save, lambda tensor: tensor):
                    update(1, 1e-3, 0.0)
                held = [update.engine.parameters(), [item for _, item in update.optimiser.tensors()]]
                weights, optimizer = (sum(_local(item).nbytes for item in items) for items in held)
                results[f"{member} {mesh}"] = {"weights": weights, "optimizer": optimizer, **counted.bytes}
                results[f"{member} {mesh}"]["activations"] = saved.bytes
        group.on_first(lambda: (place / f"measured by {group.world}.json").write_text(json.dumps(results)))

    return work


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
