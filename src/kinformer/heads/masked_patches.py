"""The head that predicts the pixels of patches which the encoder did not see (He et al. 2022, MAE, section 3).

    x = [W h_i, i seen; m, i masked] + P;    x = norm(layers(x));    pixels of patch i = V x_i + b

It is a small encoder of its own, over all patches: those that were seen, projected to its width, and a learned mask
token m in place of each of the others. P are the fixed sinusoids of a patch's row and column.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from kinformer.core.encoder import EncoderLayerConfig, SequenceContext
from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.inputs.patches import Patches
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

BASE = 10_000.0


class MaskedPatchesHead(nn.Module):
    """The head hidden_states [batch, tokens + seen patches, width] -> pixels [batch, patches, channels * patch^2].

    Its ``layers`` are ``dim`` wide. Pixels are those that ``Patches.cut`` gives, normalised as the input's.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "masked_patches"
        layers: tuple[EncoderLayerConfig, ...]
        dim: int = 512
        eps: float = 1e-6

        def __post_init__(self) -> None:
            if not self.layers:
                raise KinformerError("layers must hold at least one layer, but is empty.")
            if self.dim < 4 or self.dim % 4:
                raise KinformerError(
                    f"dim must be a multiple of 4, sines and cosines of rows and of columns, but is {self.dim}."
                )

        def check(self, dim: int, input: Input) -> None:
            if not isinstance(input, Patches):
                raise KinformerError(
                    "the head 'masked_patches' predicts the pixels of patches, which this model does not read; use "
                    "the input patches, or another head."
                )

        def build(self, dim: int, input: Input) -> MaskedPatchesHead:
            assert isinstance(input, Patches)
            return MaskedPatchesHead(self, dim, input.config)

    def __init__(self, config: Config, dim: int, input: Patches.Config) -> None:
        super().__init__()
        self.before, self.of_size = input.before, input.grid
        self.entrance = nn.Linear(dim, config.dim)
        self.mask = nn.Parameter(0.02 * torch.randn(config.dim))
        self.layers = nn.ModuleList(layer.build(config.dim) for layer in config.layers)
        self.norm = nn.LayerNorm(config.dim, eps=config.eps)
        self.output = nn.Linear(config.dim, input.channels * input.patch**2)

    def forward(
        self,
        hidden_states: Tensor,
        input: Input,
        valid: Tensor | None = None,
        chosen: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the pixels of all patches of an image of ``grid`` (None: that of the input's size).

        chosen: int64 [batch, time], at which positions the hidden states stand, the tokens before the patches among
        them; None where all are there.
        """
        grid = grid or self.of_size
        x, count = self.entrance(hidden_states), self.before + prod(grid)
        if chosen is not None:
            masked = self.mask.to(x.dtype).expand(len(x), count, -1)
            x = masked.scatter(1, chosen[..., None].expand_as(x), x)
        elif x.shape[1] != count:
            raise KinformerError(
                f"the head 'masked_patches' is for {plural(count, 'position')}, but there are {x.shape[1]}; give "
                "images of the size of the input."
            )
        places = torch.cat([x.new_zeros(self.before, x.shape[2]), sinusoids(grid, x.shape[2], x.device).to(x.dtype)])
        x, text = x + places, SequenceContext(grid=grid)
        for layer in self.layers:
            x = layer(x, text)
        return self.output(self.norm(x))[:, self.before :]


def sinusoids(grid: tuple[int, int], dim: int, device: torch.device) -> Tensor:
    """Return [rows * columns, dim]: sines and cosines of the column in the first half of features, of the row in the
    second, at ``dim`` / 4 frequencies from 1 down to about 1 / 10,000."""
    frequencies = BASE ** -(torch.arange(dim // 4, device=device, dtype=torch.float64) / (dim // 4))
    rows, columns = (torch.arange(side, device=device)[:, None] * frequencies for side in grid)
    halves = [
        torch.cat([columns.sin(), columns.cos()], 1)[None].expand(grid[0], -1, -1),
        torch.cat([rows.sin(), rows.cos()], 1)[:, None].expand(-1, grid[1], -1),
    ]
    return torch.cat(halves, 2).flatten(0, 1)
