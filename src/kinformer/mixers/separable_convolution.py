"""The separable convolution of ConvFormer (Yu et al. 2022, MetaFormer Baselines for Vision, section 2.2), no attention.

y = W_2 (depthwise convolution over the grid of patches of relu(W_1 x)^2)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, GridOnly, SequenceContext, gridded, refuse_global
from kinformer.core.parts import ResidualOutput
from kinformer.runtime.errors import KinformerError


class SeparableConvolution(GridOnly, EncoderMixer):
    """The mixer x [batch, rows * columns, dim] of the patches of images -> y of the same shape.

    ``kernel``: patches on a side, an odd number; beyond the image there are zeros. ``expansion``: how much wider than
    a token what is convolved is.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "separable_convolution"
        kernel: int = 7
        expansion: int = 2
        bias: bool = False

        def __post_init__(self) -> None:
            if self.kernel < 1 or self.kernel % 2 == 0:
                raise KinformerError(f"kernel must be an odd number of 1 or more, but is {self.kernel}.")
            if self.expansion < 1:
                raise KinformerError(f"expansion must be 1 or more, but is {self.expansion}.")

        def build(self, dim: int) -> SeparableConvolution:
            return SeparableConvolution(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        width = config.expansion * dim
        self.up = nn.Linear(dim, width, bias=config.bias)
        self.depthwise = nn.Conv2d(
            width, width, config.kernel, padding=config.kernel // 2, groups=width, bias=config.bias
        )
        self.down = ResidualOutput(width, dim, bias=config.bias)

    def check(self, global_tokens: bool, global_input: bool) -> None:
        refuse_global("the mixer separable_convolution reads the patches of images alone", global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        rows, columns = gridded(x, text, "separable_convolution")
        # relu(W_1 x)^2 as an image [batch, channels, rows, columns]
        x = self.up(x).relu().square().unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
        return self.down(self.depthwise(x).permute(0, 2, 3, 1).flatten(1, 2))
