"""The initialisation of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from kinformer.core.config import Config
from kinformer.core.parts import ResidualOutput


@dataclass(frozen=True, kw_only=True)
class Initialisation(Config):
    """The initialisation by name. ``normal``: every product and embedding N(0, std), biases 0. ``framework``: PyTorch's
    defaults, as in the Linear Transformer's code (embeddings N(0, 1), products uniform in 1/sqrt(fan-in)).
    ``xavier``: products uniform with variance 2 / (fan-in + fan-out) (Glorot and Bengio 2010), embeddings N(0, 1 /
    dim), biases 0, as the original Transformer.

    ``residual`` says how the products that write into the residual stream differ: ``plain``, not at all; ``scaled``,
    those of ``normal`` are divided by the root of their number (GPT-2); ``zero``, so that every layer begins as the
    identity.
    """

    kind = ""
    scheme: Literal["normal", "framework", "xavier"] = "normal"
    std: float = 0.02
    residual: Literal["scaled", "plain", "zero"] = "scaled"

    def apply(self, model: nn.Module) -> None:
        """Initialise every linear product and embedding of ``model`` in place, but those of a model inside it, which
        has an initialisation of its own."""
        initialised = {
            part for module in model.modules() if getattr(module, "initialised", False) for part in module.modules()
        }
        modules = [
            module
            for module in model.modules()
            if isinstance(module, (nn.Linear, nn.Embedding)) and module not in initialised
        ]
        outputs = [module for module in modules if isinstance(module, ResidualOutput)]
        with torch.no_grad():
            if self.scheme != "framework":
                for module in modules:
                    self._begin(module, len(outputs))
            if self.residual == "zero":
                for module in outputs:
                    module.weight.zero_()

    def _begin(self, module: nn.Linear | nn.Embedding, outputs: int) -> None:
        if self.scheme == "normal":
            shrink = self.residual == "scaled" and isinstance(module, ResidualOutput)
            # GPT-2: the residual stream sums ``outputs`` products, whose variances then add up to that of one.
            module.weight.normal_(0.0, self.std / outputs**0.5 if shrink else self.std)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        else:
            module.weight.normal_(0.0, module.embedding_dim**-0.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
