"""The engines behind a group of processes: DDP, FSDP2 and tensor parallelism, alone or one over the other."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed, nn

from kinformer.core.contract import ReadsSource
from kinformer.core.model import modules_of
from kinformer.core.stack import Stack, sparse_tables, units_of
from kinformer.runtime.errors import KinformerError
from kinformer.training.data_module import DataModule
from kinformer.training.distributed import Group
from kinformer.training.objective import ObjectiveModule
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile_units(model: nn.Module, objective: object, group: Group) -> None:
    """Compile ``model``: as a whole, or its layers where engines or the ``objective`` look between them."""
    sharded = group.world > 1 and group.strategy == "fsdp"
    by_layer = sharded or getattr(objective, "reads_hidden", False)
    for module in units_of(model) if by_layer else (model,):
        module.compile()


def wrapped(step: ObjectiveModule, group: Group, keeps: bool = False) -> nn.Module:
    """Return ``step`` behind the engine of ``group``; ``keeps``: whether states are carried."""
    check_shared(step, group)
    if group.world == 1 or group.strategy == "diloco":
        return step
    if group.tensor == 1:
        _share_time(step, group, keeps)
        if group.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(step)
    from torch.distributed.device_mesh import init_device_mesh

    if group.tensor > 1:
        from kinformer.training.tensor_parallel import parallelize

        # DTensor warns that norms and checkpoints are gathered along one axis after the other.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        sizes = (group.copies, group.tensor)
        mesh = init_device_mesh(group.device.type, sizes, mesh_dim_names=("replicas", "tp"))
        step.layouts = parallelize(step, mesh["tp"])
        _share_time(step, group, keeps)  # of the parts, which are new modules
        if group.copies == 1:
            return step
        if group.strategy == "ddp":
            step.replicas = mesh["replicas"].get_group()
            return step
        return _sharded(step, mesh["replicas"])
    return _sharded(step, init_device_mesh(group.device.type, (group.world,)))


def _share_time(step: ObjectiveModule, group: Group, keeps: bool) -> None:
    if group.context > 1:
        from kinformer.training.context_parallel import groups_of, share_time

        processes = groups_of(group.replicas, group.context, group.tensor)
        share_time(step, processes, keeps, group.ring)


def _sharded(step: ObjectiveModule, mesh: DeviceMesh) -> nn.Module:
    """Cut the weights of ``step`` along ``mesh``, unit by unit, in place."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # Layers return slices of their state and never write into them, which is what this warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for unit in units_of(step.model):
        fully_shard(unit, mesh=mesh)
        if modules_of(unit, ReadsSource):  # whose weights project the source before the unit's forward
            register_fsdp_forward_method(unit, "initial_state")
    return cast(nn.Module, fully_shard(step, mesh=mesh))


def average_gradients(engine: nn.Module) -> None:
    """Replace gradients by their means over the replicas of a divided model, where no engine does."""
    replicas = getattr(engine, "replicas", None)
    if replicas is None:
        return
    count = distributed.get_world_size(replicas)
    gradients = [cast(Any, item.grad).to_local() for item in engine.parameters() if item.grad is not None]
    for work in [distributed.all_reduce(gradient, group=replicas, async_op=True) for gradient in gradients]:
        assert work is not None
        work.wait()
    torch._foreach_div_(gradients, count)


def check_divided(data: DataModule, objective: object, settings: Settings, group: Group) -> None:
    """Refuse runs of several processes that do more with the model than compute losses of its rows."""
    if group.strategy == "diloco" and type(data).begin is not DataModule.begin:
        raise KinformerError(
            "`strategy` diloco: rows of this task are made by the model itself, which processes train apart; train "
            "with `strategy` ddp."
        )
    if group.context > 1:
        _check_stretches(data, objective, settings, group)
    if group.tensor == 1:
        return
    if type(data).begin is not DataModule.begin:
        raise KinformerError(
            f"`parallel` tp={group.tensor}: rows of this task are made by the model itself, which has a part of its "
            "heads only; leave tp out."
        )
    if settings.compile:
        raise KinformerError(
            f"`parallel` tp={group.tensor}: `compile` does not see how processes add up their parts; leave one out."
        )


def _check_stretches(data: DataModule, objective: object, settings: Settings, group: Group) -> None:
    """Refuse rows that cannot be cut along time into stretches of one length."""
    place = f"`parallel` {'ring' if group.ring else 'cp'}={group.context}"
    if not (data.by_time and getattr(objective, "by_token", False)):
        raise KinformerError(
            f"{place}: only rows of text can be cut along time, for losses of each token or label alone; train with "
            "the task next-token, mlm, classify or translate and its first objective, or leave it out."
        )
    check_length(settings, group)
    if settings.compile:
        raise KinformerError(f"{place}: `compile` does not see what processes send each other; leave one out.")


def check_length(settings: Settings, group: Group) -> None:
    """Refuse rows whose time cannot be cut into stretches of one length."""
    if settings.length % group.context:
        raise KinformerError(
            f"`parallel` {'ring' if group.ring else 'cp'}={group.context}: does not divide `length` {settings.length}; "
            f"give a multiple of {group.context}."
        )


def check_shared(model: nn.Module, group: Group) -> None:
    """Refuse models that several processes cannot train together."""
    if group.world == 1:
        return
    if group.world % (group.tensor * group.context):
        sizes = f"tp={group.tensor}" if group.context == 1 else f"tp={group.tensor},cp={group.context}"
        raise KinformerError(
            f"`parallel` {sizes}: does not divide {group.world} processes; give a divisor of that number."
        )
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise KinformerError(
            f"`devices` {group.world}: the norm 'batch' sees the tokens of one process only; train in one, or with "
            "`set` layers.*.feed_forward.norm=layer."
        )
    if group.strategy == "fsdp" and any(not stack.shardable for stack in model.modules() if isinstance(stack, Stack)):
        raise KinformerError(
            "`strategy` fsdp: a stack that computes layers again from their outputs needs whole weights then; train "
            "with `strategy` ddp, or with `set` stack=sequential."
        )
    if sparse_tables(model) and (group.strategy == "fsdp" or group.device.type != "cpu"):
        where = "`strategy` fsdp" if group.strategy == "fsdp" else f"`devices` {group.world} on GPUs"
        raise KinformerError(
            f"{where}: a table with sparse gradients cannot be shared so; train in one process, with `strategy` ddp on "
            "a CPU, or with `set` layers.N.feed_forward.sparse=false, which makes them dense."
        )
