"""The base of the plain interfaces of causal and of bidirectional layers."""

from __future__ import annotations

from torch import nn

from kinformer.core.contract import CausalMixer
from kinformer.core.encoder import EncoderMixer


class PlainLayer(nn.Module):
    """A module x [batch, time, dim] -> y [batch, time, dim] around ``inner``, a mixer, layer or stack of width ``dim``.

    A subclass names the class of its mixers, ``mixer_class``.
    """

    mixer_class: type[CausalMixer] | type[EncoderMixer]

    def __init__(self, inner: nn.Module, dim: int) -> None:
        """Wrap ``inner``, whose mixers are of the class ``mixer_class``."""
        super().__init__()
        self.inner, self.dim = inner, dim

    @property
    def mixers(self) -> tuple[CausalMixer | EncoderMixer, ...]:
        """Return the mixers inside, each once."""
        return tuple(module for module in self.inner.modules() if isinstance(module, self.mixer_class))

    @property
    def max_length(self) -> int | None:
        """Return how many tokens a sequence may have, None for any number."""
        return min((mixer.max_length for mixer in self.mixers if mixer.max_length is not None), default=None)

    def extra_repr(self) -> str:
        """Return the width for ``print(layer)``."""
        return f"dim={self.dim}"
