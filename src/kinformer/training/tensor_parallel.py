"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM, section 3) on PyTorch's DTensor: processes that share tokens.

    x  --copy-->  F_part(x)  --sum-->  y      copy: its gradient is the sum of the parts';  sum: its gradient is a copy

:mod:`kinformer.training.division` says what a part is. Here its weights become DTensors of the mesh's axis "tp", so
that FSDP can cut them again along another axis, optimisers and norms see whole weights, and checkpoints can be written.
While a unit computes, its modules see plain local tensors: they run as they do in one process, on fewer heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from kinformer.core.contract import ReadsSource
from kinformer.core.learning import AuxLoss
from kinformer.core.model import modules_of
from kinformer.core.stack import units_of
from kinformer.core.state import State
from kinformer.training.collectives import copied, joined, summed
from kinformer.training.division import Division, divide, output_product
from kinformer.training.layouts import Layouts
from kinformer.training.objective import ObjectiveModule
from kinformer.training.vocabulary import VocabularyPart


def parallelize(step: ObjectiveModule, mesh: DeviceMesh) -> Layouts:
    """Divide the model of ``step`` among the processes of ``mesh``, one axis called "tp", in place; return where its
    parameters lie. All processes hold the same whole model before."""
    model: Any = step.model
    part, parts = mesh.get_local_rank(), mesh.size()
    division = divide(model, part, parts)
    _distribute(step, division, mesh)
    plan: dict[str, ParallelStyle] = {path: MixerPart() for path in division.mixers}
    plan |= {path: FeedForwardPart() for path in division.feed_forwards}
    if division.vocabulary:
        product = output_product(model)
        assert product is not None
        size = model.vocab_size // parts
        plan |= {"input.embedding": TablePart(part * size, size), product[0]: LogitsPart(part * size, size)}
    parallelize_module(model, mesh, plan)
    units = units_of(model)
    inner = {module for unit in units for module in unit.modules()}
    for unit in units:
        _Local(unit.modules(), division, mesh, model).hook(unit)
    _Local((module for module in step.modules() if module not in inner), division, mesh, model).hook(step)
    step.with_aux_loss = modules_of(model, AuxLoss)
    return Layouts(mesh, division.cuts, parts)


class MixerPart(ParallelStyle):
    """A mixer of some of the heads: its chunk and its source are copied, its outputs are summed, its state is that of
    its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, inputs: (inputs[0]._replace(x=copied(inputs[0].x, device_mesh)), *inputs[1:])
        )
        module.register_forward_hook(lambda _, __, outputs: (summed(outputs[0], device_mesh), *outputs[1:]))
        if isinstance(module, ReadsSource):
            begin: Any = module.initial_state

            def over_copied(*sizes: int, source: Tensor | None = None, **options: object) -> State:
                return begin(*sizes, source=None if source is None else copied(source, device_mesh), **options)

            module.__dict__["initial_state"] = over_copied
        return module


class FeedForwardPart(ParallelStyle):
    """A feed-forward of some of the hidden features: its input is copied, its outputs are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (copied(inputs[0], device_mesh), *inputs[1:]))
        module.register_forward_hook(lambda _, __, y: summed(y, device_mesh))
        for loss in modules_of(module, AuxLoss):  # computed by all: its gradient is summed, so each gives a share
            loss.register_forward_pre_hook(lambda _, inputs: (_shared_out(inputs[0], device_mesh.size()),))
        return module


class TablePart(ParallelStyle):
    """A look-up in ``size`` rows of a table from row ``begin`` on: zeros for other tokens, summed."""

    def __init__(self, begin: int, size: int) -> None:
        super().__init__()
        self.begin, self.size = begin, size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def look_up(tokens: Tensor, *rest: Tensor) -> Tensor:
            here = (tokens >= self.begin) & (tokens < self.begin + self.size)
            y = forward((tokens - self.begin).clamp(0, self.size - 1), *rest)
            return summed(torch.where(here[..., None], y, y.new_zeros(())), device_mesh)

        forward: Callable[..., Tensor] = module.forward
        module.forward = look_up
        return module


class LogitsPart(ParallelStyle):
    """Logits of ``size`` tokens of the vocabulary from ``begin`` on, joined; losses take them as they are."""

    def __init__(self, begin: int, size: int) -> None:
        super().__init__()
        self.begin, self.size = begin, size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (copied(inputs[0], device_mesh), *inputs[1:]))
        module.register_forward_hook(lambda _, __, y: joined(y, device_mesh))
        module.vocabulary_part = VocabularyPart(self.begin, self.size, device_mesh)  # type: ignore[assignment]
        return module


class _Local:
    """The parameters of ``modules`` as plain local tensors, while a root of these modules computes."""

    def __init__(self, modules: Iterable[nn.Module], division: Division, mesh: DeviceMesh, model: nn.Module) -> None:
        self.mesh, self.parts = mesh, division.parts
        names = {module: name for name, module in model.named_modules()}
        self.places = []
        for module in modules:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = ".".join(filter(None, (names.get(module, "?"), key)))
                    self.places.append((module, key, name in division.partial, name in division.added))

    def hook(self, root: nn.Module) -> None:
        root.register_forward_pre_hook(self.enter)
        root.register_forward_hook(self.leave, always_call=True)
        if modules_of(root, ReadsSource) and hasattr(root, "initial_state"):  # whose weights project the source there
            begin: Any = root.initial_state

            def begin_locally(*sizes: int, **options: object) -> State:
                self.enter(root, sizes)
                try:
                    return begin(*sizes, **options)
                finally:
                    self.leave(root, sizes, None)

            root.__dict__["initial_state"] = begin_locally

    def enter(self, root: nn.Module, inputs: object) -> None:
        for module, key, partial, added in self.places:
            # Found before the parameter of this name, which is a DTensor and stays what optimisers see.
            module.__dict__[key] = self._local(module._parameters[key], partial, added)

    def leave(self, root: nn.Module, inputs: object, outputs: object) -> None:
        for module, key, _, _ in self.places:
            module.__dict__.pop(key, None)

    def _local(self, parameter: Any, partial: bool, added: bool) -> Tensor:
        local = parameter.to_local()
        if partial:  # of what every process computes for its heads alone, gradients are parts of a sum
            local = copied(local, self.mesh)
        return local / self.parts if added else local


def _shared_out(cost: Tensor, parts: int) -> Tensor:
    """Return ``cost`` with one of ``parts`` equal shares of its gradient."""
    return cost / parts + (cost - cost / parts).detach()


def _distribute(step: nn.Module, division: Division, mesh: DeviceMesh) -> None:
    """Make DTensors of all parameters: those of the model cut as ``division`` says, all others the same everywhere."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in step.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                name = ".".join(filter(None, (path.removeprefix("model").removeprefix("."), key)))
                cut = division.cuts.get(name) if path.startswith("model") else None
                placement: Placement = Replicate() if cut is None else Shard(cut.dim)
                spread = DTensor.from_local(parameter.detach().contiguous(), mesh, [placement], run_check=False)
                made[parameter] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[parameter]
