"""The memory of a training step that recomputes layers: every live tensor is counted while it runs on shapes only.

With checkpoints every layer keeps its input, in a reversible stack nothing; the state that it passes on lives until the
loss is computed. In the backward one layer at a time is computed again. Memory is highest either where the loss is or
in the widest layer's backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinformer.estimation.parts import Costs, imitated, making, without_data
from kinformer.runtime.workspace import scratch_bytes
from kinformer.training.optimiser import sparse_tables

FLOAT = 4


class Live(TorchDispatchMode):
    """The bytes of the distinct storages that operations have made and that are still alive, ``counted`` ones excluded.

    With ``inside``, the ``most`` counts what operators allocate before they return, too.
    """

    def __init__(self, counted: Iterable[Tensor], inside: bool = False) -> None:
        super().__init__()
        self.now = self.most = 0
        self._inside = inside
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in counted}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue  # a sparse tensor owns none; its indices and values are tensors of their own
            if tensor.untyped_storage()._cdata not in self._sizes:
                self._add(tensor.untyped_storage())
        inside = scratch_bytes(func, args) if self._inside else 0
        self.most = max(self.most, self.now + inside)
        return made

    def _add(self, storage: Any) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def measure_held(
    config: object, batch: int, length: int, autocast: bool = False, pieces: bool = False, inside: bool = False
) -> Costs:
    """Return the most bytes ``held`` until the ``loss`` exists, and in the ``backward``, which frees the state.

    Arguments as of ``estimation.parts.measure``; ``inside``: with the operators' own temporaries. Weights
    and their gradients, which are there before, do not count.
    """
    make, judge = making(pieces)
    model = without_data(config)
    with FakeTensorMode() if autocast else nullcontext():
        model, tokens = imitated(model, batch, length, "cpu" if autocast else "meta")
        sparse = sparse_tables(model)
        for parameter in model.parameters():
            parameter.grad = None if parameter in sparse else torch.zeros_like(parameter)
        gradients = (parameter.grad for parameter in model.parameters() if parameter not in sparse)
        with Live([*model.parameters(), *model.buffers(), *gradients, tokens], inside) as live:
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                made, state = make(model, tokens)
                loss = judge(model, made, tokens)
            until_loss = live.most
            del made, state
            live.most = live.now
            loss.backward()
    return {("held", "loss"): until_loss, ("held", "backward"): live.most}


def held_bytes(config: Any, held: Mapping[str, int], tokens: int, handed: int) -> int:
    """Return the bytes at the highest moment of a step of the whole model.

    held: of the model of distinct layers, at most until the ``loss`` and in the ``backward``. tokens: batch * length.
    handed: the bytes that further layers leave until the loss is computed; checkpointed ones keep their inputs until
    their backward (the residual stream is float32 also under autocast).
    """
    inputs = len(config.uses) - len(set(config.layers)) if config.stack.checkpoint else 0
    further = FLOAT * tokens * config.dim * inputs
    return further + max(held["loss"] + handed, held["backward"])
