"""The layout of a run's tensors over processes: which rows of a whole tensor each process holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, distributed

from kinformer.runtime.compiling import gathered, is_sharded, like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Cut(NamedTuple):
    """Where a tensor is cut: along ``dim``, every one of its ``blocks`` into equal parts."""

    dim: int
    blocks: tuple[int, ...]

    def rows(self, part: int, parts: int) -> Tensor:
        """Return the indices along ``dim`` that part number ``part`` takes, in its order."""
        blocks = torch.arange(sum(self.blocks)).split(list(self.blocks))
        return torch.cat([block.view(parts, -1)[part] for block in blocks])

    def order(self, parts: int) -> Tensor:
        """Return the indices along ``dim`` that the parts take, one part after the other."""
        return torch.cat([self.rows(part, parts) for part in range(parts)])


class Layouts:
    """The layout of a run's tensors over processes. Tensor parallelism gives every process the rows of its heads, which
    are not adjacent in a whole weight; checkpoints hold the rows of whole weights in order.

    ``cuts``: the cuts of a model's parameters by name, among the ``parts`` processes of an axis of ``mesh``. Without a
    mesh tensors are not cut.
    """

    def __init__(self, mesh: DeviceMesh | None = None, cuts: Mapping[str, Cut] | None = None, parts: int = 1) -> None:
        self.mesh, self.cuts, self.parts = mesh, cuts or {}, parts

    def in_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``tensors``, called "name" or "name:key" after their parameters, each cut into rows over all
        processes. Each is whole for a moment, one after the other; all processes must call together."""
        if self.mesh is None:
            return dict(tensors)
        return {name: self._in_rows(name, tensor) for name, tensor in tensors.items()}

    def room(self, name: str, parameter: Tensor, form: Tensor) -> Tensor:
        """Return memory for a tensor of the form ``form`` that belongs to ``parameter``, for a reader of rows."""
        if not is_sharded(parameter) and (cut := self._cut(name)):
            shape = list(parameter.shape)
            shape[cut.dim] *= self.parts
            return torch.empty(shape, dtype=form.dtype)
        if not is_sharded(parameter) or parameter.shape != form.shape:
            return torch.empty_like(form, device="cpu")
        if self.mesh is None:
            return torch.empty_like(parameter, dtype=form.dtype, requires_grad=False)
        return self._rows(torch.empty(form.shape, dtype=form.dtype))

    def placed(self, name: str, value: Tensor, parameter: Tensor) -> Tensor:
        """Return ``value``, whole or cut into rows, in the layout of ``parameter``, if it has the parameter's shape."""
        cut = self._cut(name)
        if not is_sharded(parameter) and cut and value.shape != parameter.shape:
            return value.index_select(cut.dim, self._local_rows(cut))
        if self.mesh is None or not is_sharded(parameter) or value.shape != parameter.shape:
            return like(parameter, value)
        whole = gathered(value).to(parameter.device)
        target = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        assert is_sharded(target)
        if cut:
            whole = whole.index_select(cut.dim, self._local_rows(cut).to(whole.device))
        local = target.to_local()
        if target.device_mesh.ndim > 1 and whole.dim():  # FSDP cuts the rest by rows; the last shards have fewer
            size = -(-len(whole) // target.device_mesh.size(0))
            whole = whole[target.device_mesh.get_local_rank(0) * size :][: len(local)]
        local.copy_(whole)
        return target

    def _in_rows(self, name: str, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        cut, spread = self._cut(name), tensor.detach()
        buffer = not is_sharded(tensor)
        if buffer and (cut is None or not tensor.dim()):
            return tensor
        if buffer and cut is not None:
            spread = DTensor.from_local(spread, self.mesh, [Shard(cut.dim)], run_check=False)
        whole = gathered(spread)
        if cut is not None and len(cut.blocks) > 1:
            order = cut.order(self.parts).to(whole.device)
            whole = torch.empty_like(whole).index_copy_(cut.dim, order, whole)
        return whole if buffer or not whole.dim() else self._rows(whole)

    def _local_rows(self, cut: Cut) -> Tensor:
        assert self.mesh is not None
        return cut.rows(self.mesh.get_local_rank(), self.parts)

    def _cut(self, name: str) -> Cut | None:
        return self.cuts.get(name.partition(":")[0])

    def _rows(self, whole: Tensor) -> Tensor:
        """Return ``whole`` cut into rows over all processes of the job."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        if not hasattr(self, "_flat"):
            self._flat = init_device_mesh(whole.device.type, (distributed.get_world_size(),))
        return distribute_tensor(whole, self._flat, [Shard(0)], src_data_rank=None)


UNDIVIDED = Layouts()
"""The layouts of a model that no processes divide."""
