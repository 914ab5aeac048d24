"""The interface of the feed-forwards of layers."""

from __future__ import annotations

from torch import Tensor, nn

from kinformer.core.config import Config
from kinformer.core.division import Divisible


class ReadsPadding:
    """Mixin of a feed-forward whose ``forward`` also takes ``valid`` [...] bool or None, because what it does or counts
    depends on which tokens are real."""


class FeedForwardConfig(Divisible, Config):
    """The config; ``build(dim)`` returns a module [..., dim] -> [..., dim]. ``hidden_dim`` defaults to 4 * dim.

    A :class:`ReadsPadding` also takes ``valid``. One that looks at other tokens is a mixer: ``build`` gives an
    ``EncoderMixer``, and ``build_causal``, for layers of decoders, a ``CausalMixer``.
    """

    slot = "feed_forward"

    def build(self, dim: int) -> nn.Module:
        raise NotImplementedError

    def build_causal(self, dim: int) -> nn.Module:
        return self.build(dim)


class PartlyUsed:
    """Mixin of a feed-forward of whose weights every token uses a part: a table, a mixture of experts."""

    @property
    def unused_parameters(self) -> int:
        """Return how many of its weights one token does not use."""
        raise NotImplementedError


def active_parameters(model: nn.Module) -> int:
    """Return how many parameters of ``model`` one token uses."""
    unused = sum(part.unused_parameters for part in model.modules() if isinstance(part, PartlyUsed))
    return sum(parameter.numel() for parameter in model.parameters()) - unused


class Selection(nn.Module):
    """A module that is called with the experts chosen among ``size`` and does nothing, for hooks that measure usage."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, chosen: Tensor, weights: Tensor) -> None:
        """Take the experts ``chosen`` [..., n] int64 and their ``weights`` [..., n]."""
