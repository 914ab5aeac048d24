"""Transformer-XL's relative positions (Dai et al. 2019, section 3.3).

    score(i, j) = ((q_i + u) . k_j + (q_i + v) . W_R R_{i-j}) / sqrt(head_dim)

R_d is a sinusoid of the model's width, all sines before all cosines. Queries are handed on as q + u; a distance moves
every key by W_R R_d, which a query meets as q + u + (v - u). Other scores of products take both sums as they take q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.parts import Position, PositionConfig, Relative, is_plain
from kinformer.runtime.autocast import autocast_dtype
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import arguments_trusted


class Biases(nn.Module):
    """The biases of queries: ``content`` (the paper's u) and ``position`` (its v), [heads,
    head_dim]; ``shared``: one pair for all layers."""

    def __init__(self, config: TransformerXL.Config, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.shared = config, config.share_biases
        self.content = nn.Parameter(torch.randn(num_heads, head_dim) * 0.02)
        self.position = nn.Parameter(torch.randn(num_heads, head_dim) * 0.02)


class TransformerXL(Position):
    """The relative positions of Transformer-XL. W_R is learned per layer; u and v are shared by all layers, as in the
    authors' PyTorch code, or learned per layer.

    Beyond ``clamp`` distances count as ``clamp`` (None: no limit).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(PositionConfig):
        kind = "xl"
        bounded_by_training = True
        clamp: int | None = None
        share_biases: bool = True
        base: float = 10000.0

        def __post_init__(self) -> None:
            if self.clamp is not None and self.clamp < 1:
                raise KinformerError(f"clamp must be 1 or more, or none, but is {self.clamp}.")

        def build_heads(self, dim: int, num_heads: int, head_dim: int) -> TransformerXL:
            if dim % 2:
                raise KinformerError(f"xl positions need an even width, but dim is {dim}.")
            return TransformerXL(self, dim, num_heads, head_dim)

    def __init__(self, config: Config, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.dim, self.shape = config, dim, (num_heads, head_dim)
        self.projection = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.biases = Biases(config, num_heads, head_dim)
        self._recent: _Rows | None = None

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q + self.biases.content[:, None].to(q.dtype), k

    def rotate_keys(self, k: Tensor, positions: Tensor) -> Tensor:
        return k

    def relative(self, lowest: int, highest: int) -> Relative | None:
        if self.config.clamp is not None:
            highest = min(highest, self.config.clamp - 1)
        if highest < lowest:
            return None
        # q + v = (q + u) + (v - u): the queries are already q + u, and distances meet them shifted by v - u.
        shift = (self.biases.position - self.biases.content)[:, None]
        return Relative(lowest, keys=self._rows(lowest, highest), shift=shift)

    def _rows(self, lowest: int, highest: int) -> Tensor:
        """Return the rows of :meth:`_project`, from a cache without gradients while the weights stay the same. Only on
        a CPU, as comparing weights elsewhere would wait for the device."""
        if torch.compiler.is_compiling() or not is_plain(self.projection):  # the weight says not all of an adapter
            return self._project(lowest, highest)
        weight = self.projection.weight
        if lowest < 0 or torch.is_grad_enabled() or weight.device.type != "cpu" or weight.is_inference():
            self._recent = None
            return self._project(lowest, highest)
        rows = self._recent
        name = _name(weight)
        # A step is behind a chunk that has looked at the bits.
        if rows is None or rows.name != name or not (arguments_trusted() or rows.bits == _sum_of_bits(weight)):
            rows = _Rows(self._project(0, highest), weight.detach(), name, _sum_of_bits(weight))
        if (count := rows.keys.shape[1]) <= highest:
            more = self._project(count, max(highest, 2 * count))
            rows = rows._replace(keys=torch.cat([rows.keys, more], 1))
        self._recent = rows
        return rows.keys[:, lowest : highest + 1]

    def _project(self, lowest: int, highest: int) -> Tensor:
        """Return the keys [heads, n, head_dim] of the distances ``lowest .. highest``.

        With a clamp they are relative to the farthest: a constant per query, which softmax does not see.
        """
        weight, (heads, head_dim) = self.projection.weight, self.shape
        distance = torch.arange(lowest, highest + 1, device=weight.device)
        if self.config.clamp is not None:
            distance = torch.cat([distance, distance.new_tensor([self.config.clamp])])
        keys = self.projection(sinusoids(distance, self.dim, self.config.base).to(weight.dtype))
        keys = keys.view(-1, heads, head_dim).transpose(0, 1)
        if self.config.clamp is not None:
            keys = keys[:, :-1] - keys[:, -1:]
        return keys


def sinusoids(distance: Tensor, dim: int, base: float) -> Tensor:
    """Return sin(distance / base^(2i / dim)) for all i, then the cosines, [n, dim] float64."""
    index = torch.arange(0, dim, 2, device=distance.device, dtype=torch.float64)
    angles = distance[:, None] * base ** (-index / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class _Rows(NamedTuple):
    """The projected rows of the distances 0, 1, ..., and the weight that made them; holding it keeps its
    address from going to another tensor."""

    keys: Tensor
    weight: Tensor
    name: tuple[object, ...]
    bits: int


def _name(weight: Tensor) -> tuple[object, ...]:
    """Return an identity of the weight that changes with every write that PyTorch counts."""
    return weight.data_ptr(), weight._version, weight.dtype, autocast_dtype(weight.device)


def _sum_of_bits(weight: Tensor) -> int:
    """Return a number that also changes when values are written through ``.data``, which no version counts."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().view(integers).sum(dtype=torch.int64))
