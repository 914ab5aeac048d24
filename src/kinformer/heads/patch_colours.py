"""The head that predicts the mean colour of patches that were corrupted (Dosovitskiy et al. 2020, ViT, appendix B.1.2).

    logits of patch i = W h_i + b,    one for each colour: 512 with 3 bits for each of 3 channels

It also holds the vector that stands in place of a masked patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.input import Input
from kinformer.core.model_config import HeadConfig
from kinformer.inputs.patches import Patches
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

MOST_BITS = 16
"""Bits of a colour, of all channels together."""


class PatchColoursHead(nn.Module):
    """The head hidden_states [batch, tokens + patches, width] -> logits [batch, patches, colours].

    ``bits``: of each channel of a colour. ``mask`` [width] is what the encoder gets in place of a masked patch.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadConfig):
        kind = "patch_colours"
        bits: int = 3

        def __post_init__(self) -> None:
            if not 1 <= self.bits <= 8:
                raise KinformerError(f"bits must be 1 to 8, of each channel of a colour, but is {self.bits}.")

        def check(self, dim: int, input: Input) -> None:
            if not isinstance(input, Patches):
                raise KinformerError(
                    "the head 'patch_colours' predicts colours of patches, which this model does not read; use the "
                    "input patches, or another head."
                )
            if (bits := self.bits * input.config.channels) > MOST_BITS:
                raise KinformerError(
                    f"bits is {self.bits}: of {plural(input.config.channels, 'channel')} makes 2^{bits} colours, but "
                    f"2^{MOST_BITS} are the most; give fewer."
                )

        def build(self, dim: int, input: Input) -> PatchColoursHead:
            assert isinstance(input, Patches)
            return PatchColoursHead(self, dim, input.config)

    def __init__(self, config: Config, dim: int, input: Patches.Config) -> None:
        super().__init__()
        self.before = input.before
        self.mask = nn.Parameter(0.02 * torch.randn(dim))
        self.output = nn.Linear(dim, 2 ** (config.bits * input.channels))

    def forward(self, hidden_states: Tensor, input: Input, valid: Tensor | None = None) -> Tensor:
        """Return the logits of all patches; the tokens before them have none."""
        return self.output(hidden_states[:, self.before :])
