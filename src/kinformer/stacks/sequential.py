"""Stacks that apply every layer once: one after the other, or in stages that join patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.encoder import GridOnly, SequenceContext
from kinformer.core.parts import Position
from kinformer.core.stack import BeforeUse, Stack, StackConfig
from kinformer.runtime.errors import KinformerError, plural


class Sequential(Stack):
    """One layer after the other, each once: the stack of most members."""

    opens_values = True

    @dataclass(frozen=True, kw_only=True)
    class Config(StackConfig):
        kind = "sequential"

        def select(self, layers: Sequence[int]) -> Sequential.Config:
            return self

        def build(self, layers: Sequence[nn.Module]) -> Sequential:
            return Sequential(self, layers)


class Stages(GridOnly, Stack):
    """Stages of layers: between two stages, four patches become one, twice as wide (Liu et al. 2021, Swin, section
    3.1).

    x -> W norm([x_(2i, 2j); x_(2i+1, 2j); x_(2i, 2j+1); x_(2i+1, 2j+1)])

    Stage i has ``depths[i]`` layers of the width dim * 2^i, on a grid of patches that was halved i times. ``norm``
    stands ``before`` the product that merges four patches, as in Swin, or ``behind`` it, as in Swin V2. A grid with odd
    sides is padded with zeros.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(StackConfig):
        kind = "stages"
        depths: tuple[int, ...] = (2, 2)
        norm: Literal["before", "behind"] = "before"

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.depths or min(self.depths) < 1:
                raise KinformerError(f"depths must be layers of each stage, 1 or more, but is {self.depths}.")

        def stage_of(self, layer: int) -> int:
            """Return the number of a layer's stage."""
            return next(i for i in range(len(self.depths)) if layer < sum(self.depths[: i + 1]))

        def width(self, dim: int) -> int:
            return dim << len(self.depths) - 1

        def widths(self, dim: int, layers: int) -> tuple[int, ...]:
            if sum(self.depths) != layers:
                raise KinformerError(
                    f"stack.depths is {list(self.depths)}, {plural(sum(self.depths), 'layer')} together, but the "
                    f"model has {layers}; give both alike, as in `set` layers=4 `set` stack.depths=[2,2]."
                )
            return tuple(dim << self.stage_of(layer) for layer in range(layers))

        def select(self, layers: Sequence[int]) -> StackConfig:
            stages = [self.stage_of(layer) for layer in layers]
            return self.replace(depths=tuple(stages.count(stage) for stage in range(len(self.depths))))

        def check(self, position: nn.Module) -> None:
            if isinstance(position, Position) and type(position).layer_input is not Position.layer_input:
                raise KinformerError(
                    "the stack 'stages' has fewer patches from stage to stage, but this position enters every layer; "
                    "use another position, such as `set` position=none."
                )

        def build_model(self, layers: Sequence[nn.Module], dim: int) -> Stages:
            return Stages(self, layers, dim)

    config: Config

    def __init__(self, config: Config, layers: Sequence[nn.Module], dim: int) -> None:
        if any(hasattr(layer, "initial_state") for layer in layers):
            raise KinformerError(
                "the stack 'stages' is for the patches of images, which no decoder reads; leave it out."
            )
        super().__init__(config, layers)
        self.merges = nn.ModuleList(
            PatchMerging(dim << stage, config.norm == "behind") for stage in range(len(config.depths) - 1)
        )

    def read(
        self, x: Tensor, text: SequenceContext, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        tapped: list[Tensor] = []
        first = 0
        for stage, depth in enumerate(self.config.depths):
            if stage:
                x, text = self.merges[stage - 1](x, text)
            chosen = [tap - first for tap in taps if first <= tap < first + depth]
            x, output = self._stage(range(first, first + depth), x, text, chosen)
            tapped += output
            first += depth
        return x, tuple(tapped)

    def _stage(
        self, layers: Sequence[int], x: Tensor, text: SequenceContext, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        tapped = []
        for number, layer in enumerate(layers):
            x = self._read(self.layers[layer], x, text)
            if number in taps:
                tapped.append(x)
        return x, tapped


class PatchMerging(nn.Module):
    """Merges four patches into one: x [batch, rows * columns, dim] -> [batch, half the rows * half the columns, 2 dim],
    and the context of the smaller grid."""

    def __init__(self, dim: int, norm_behind: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * dim if norm_behind else 4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm_behind = norm_behind

    def forward(self, x: Tensor, text: SequenceContext) -> tuple[Tensor, SequenceContext]:
        grid = text.grid
        assert grid is not None, "a model of patches alone"
        x = functional.pad(x.unflatten(1, grid), (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
        four = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
        y = self.norm(self.reduction(four)) if self.norm_behind else self.reduction(self.norm(four))
        return y.flatten(1, 2), text._replace(grid=(y.shape[1], y.shape[2]))


PARTS = {"SequentialStack": Sequential.Config, "StagedStack": Stages.Config}
