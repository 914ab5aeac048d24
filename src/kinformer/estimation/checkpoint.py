"""The memory of a training step that recomputes layers: every live tensor is counted while it runs on shapes only.

With checkpoints every layer keeps its input, in a reversible stack nothing; the state that it passes on lives until the
loss is computed. In the backward one layer at a time is computed again. Memory is highest either where the loss is or
in the widest layer's backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinformer.core.stack import sparse_tables
from kinformer.estimation.parts import Costs, ModelSpec, forward_and_loss, imitated, without_data
from kinformer.runtime.workspace import scratch_bytes

FLOAT = 4


class Live(TorchDispatchMode):
    """The bytes of the distinct storages that operations have made and that are still alive, ``counted`` ones excluded.

    ``now``: at present; ``peak``: at most so far. With ``inside``, the peak also counts what operators allocate before
    they return.
    """

    def __init__(self, counted: Iterable[Tensor], inside: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._inside = inside
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in counted}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue  # a sparse tensor owns none; its indices and values are tensors of their own
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
    """Return the most ``live`` bytes until the ``loss`` exists, and in the ``backward``, which frees the state.

    Arguments as of ``estimation.parts.measure``; ``inside``: with the operators' own temporaries. Weights
    and their gradients, which exist before, do not count.
    """
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


def live_bytes(config: ModelSpec, live: Mapping[str, int], tokens: int, handed: int) -> int:
    """Return the bytes at the highest moment of a step of the whole model.

    live: of the model of distinct layers, at most until the ``loss`` and in the ``backward``. tokens: batch * length.
    handed: the bytes that further layers leave until the loss is computed; checkpointed ones keep their inputs until
    their backward (the residual stream is float32 also under autocast).
    """
    inputs = len(config.uses) - len(set(config.layers)) if config.stack.checkpoint else 0
    further = FLOAT * tokens * config.dim * inputs
    return further + max(live["loss"] + handed, live["backward"])
