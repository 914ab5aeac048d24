"""States that are images, as the convolutions of a network that plays see them (Mnih et al. 2015, Methods):

h(s) = W flatten(relu(conv(... relu(conv(s / 255))))) + b
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kinformer.runtime.errors import KinformerError

LARGEST_INTENSITY = 255.0


class ImageStates(nn.Module):
    """The map of intensities [n, channels * height * width] from 0 to 255 to [n, dim]. ``image``: channels, height and
    width; ``convolutions``: filters, side and stride of each."""

    def __init__(self, image: Sequence[int], convolutions: Sequence[Sequence[int]], dim: int) -> None:
        super().__init__()
        self.image = tuple(image)
        layers: list[nn.Module] = []
        channels = image[0]
        for filters, side, stride in convolutions:
            layers += [nn.Conv2d(channels, filters, side, stride), nn.ReLU()]
            channels = filters
        height, width = features_of(image, convolutions)
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(channels * height * width, dim)

    @property
    def weight(self) -> Tensor:
        """Return the weight of the last product."""
        return self.output.weight

    def forward(self, values: Tensor) -> Tensor:
        """Return vectors [n, dim] of ``values``."""
        images = values.unflatten(-1, self.image) / LARGEST_INTENSITY
        return self.output(self.layers(images).flatten(1))


def features_of(image: Sequence[int], convolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the height and width of what the last of ``convolutions`` gives.

    Errors: ``KinformerError`` for lists that say no convolution, and images smaller than a filter.
    """
    _, height, width = image
    for item in convolutions:
        if len(item) != 3 or min(item) < 1:
            raise KinformerError(
                f"convolutions must be lists of filters, side and stride of 1 or more, but hold {list(item)}."
            )
        _, side, stride = item
        if side > min(height, width):
            raise KinformerError(
                f"convolutions: a filter of side {side} is larger than what it reads, {height} x {width}; give smaller "
                "ones, or fewer, by `set` input.convolutions."
            )
        height, width = (height - side) // stride + 1, (width - side) // stride + 1
    return height, width
