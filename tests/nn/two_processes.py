"""What two processes do with layers whose weights FSDP2 shards over them, for the tests of the plain interface."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kinformer.lab.training.distributed import Group, join
from kinformer.nn import CausalLayer, states
from tests.members import MEMBERS
from tests.nn.layers import DIM, NAMES, extras, made, randn, unlike

CASES = [(name, name in MEMBERS) for name in unlike(NAMES)]
"""The name of a layer, and whether it is a member's whole layer or a mixer alone."""


def work() -> dict[tuple[str, bool], dict[str, Tensor]]:
    """The loss and the gradients of every case, one sequence in each process."""
    torch.set_num_threads(1)
    with join("cpu", "fsdp") as group:
        return {case: learned(*case, slice(group.rank, group.rank + 1), group) for case in CASES}


def learned(name: str, block: bool, rows: slice, group: Group | None = None) -> dict[str, Tensor]:
    """The loss and the gradients of a layer that reads these ``rows`` of the data, where it can in two chunks."""
    dense = {"set": {"feed_forward.sparse": False}} if (name, block) == ("pkm", True) else {}
    layer = made(name, block, **dense)  # sparse gradients cannot be sharded
    if group is not None:
        _shard(layer, group.world)
    x = randn(2, 16, DIM)[rows]
    options = extras(name, layer, len(x))
    if isinstance(layer, CausalLayer):
        y, state = layer(x[:, :9], layer.initial_state(len(x), **options), return_state=True)
        y = torch.cat([y, layer(x[:, 9:], state)], 1)
        assert not any(isinstance(leaf, DTensor) for leaf in states.tensors(state))
    else:
        y = layer(x, **options)
    loss = y.square().mean()
    loss.backward()
    values = {"loss": loss.detach() if group is None else group.mean(loss.detach())}
    gradients = {key: parameter.grad for key, parameter in layer.named_parameters()}
    for key, gradient in gradients.items():
        if gradient is not None:
            values[key] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return values


def _shard(layer: torch.nn.Module, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
    if getattr(layer, "reads_context", False):
        register_fsdp_forward_method(layer, "initial_state")  # it projects the context
