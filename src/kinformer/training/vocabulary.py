"""The cross-entropy of logits that are cut along the vocabulary (Shoeybi et al. 2019, Megatron-LM, section 3): no
process has all logits of a token.

    loss = ln sum over parts of sum_v exp(l_v - m) + m - l_target,     m = the largest logit of all parts
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from kinformer.training.collectives import copied, summed


class VocabularyPart(NamedTuple):
    """The ``size`` tokens from ``begin`` on, which this process of ``mesh`` has; None where nothing is computed
    (``estimation``)."""

    begin: int
    size: int
    mesh: DeviceMesh | None

    def nats(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of ``targets`` [rows], a scalar in float32 or wider, in all processes.

        x: [rows, dim], the same everywhere; weight: [size, dim] and bias: [size] or None, this process's.
        """
        assert self.mesh is not None
        logits = torch.nn.functional.linear(copied(x, self.mesh), weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = logits.detach().amax(-1)
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=self.mesh.get_group())
        local = targets - self.begin
        here = (local >= 0) & (local < self.size)
        # By two indices, of which alone the backward keeps a copy: gather would keep all logits.
        rows = torch.arange(len(logits), device=logits.device)
        wanted = logits[rows, local.clamp(0, self.size - 1)]
        wanted = torch.where(here, wanted - top, wanted.new_zeros(()))
        both = torch.stack([(logits - top[:, None]).exp().sum(-1), wanted])
        total, wanted = summed(both, self.mesh)
        return (total.log() - wanted).sum()
