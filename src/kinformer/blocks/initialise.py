"""How weights begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from kinformer.core.config import Config
from kinformer.core.parts import ResidualOutput


@dataclass(frozen=True, kw_only=True)
class Initialisation(Config):
    """``normal``: every product and embedding N(0, std), biases 0; with ``scale_residual`` the products that write into
    the residual stream are divided by the root of their number (GPT-2). ``framework``: what PyTorch's modules do by
    themselves, as the Linear Transformer's code does (embeddings N(0, 1), products uniform in 1/sqrt(fan-in)).
    """

    kind = ""
    scheme: Literal["normal", "framework"] = "normal"
    std: float = 0.02
    scale_residual: bool = True

    def apply(self, model: nn.Module) -> None:
        """Initialise every linear product and embedding of ``model`` in place."""
        if self.scheme == "framework":
            return
        modules = list(model.modules())
        outputs = sum(isinstance(module, ResidualOutput) for module in modules)
        with torch.no_grad():
            for module in modules:
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    shrink = self.scale_residual and isinstance(module, ResidualOutput)
                    module.weight.normal_(0.0, self.std / max(1, outputs) ** 0.5 if shrink else self.std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
