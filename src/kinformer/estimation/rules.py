"""The rules of thumb of the field for plain decoders, to be printed with what was counted.

Sources: 12 L E^2 + V E parameters and 6 FLOPs a parameter and token (Kaplan et al. 2020, section 2.1); activations of
B T L (14 E + T N) numbers (after Korthikanti et al. 2022, section 4, which counts every stored score of N heads).
"""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.core.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RulesOfThumb:
    """The results of the rules; ``train_bytes`` is weights, gradients, optimiser state and activations."""

    parameters: int
    flops_step: int
    activation_bytes: int
    train_bytes: int


def rules_of_thumb(
    config: ModelConfig, *, length: int, batch: int, optimizer_bytes: int, precision: str
) -> RulesOfThumb | None:
    """Return the rules for a config of tokens whose first layer's mixer has ``num_heads``; None for any other.

    Weights take 4 bytes (6 with a bfloat16 copy), gradients 4, optimiser state ``optimizer_bytes`` (AdamW 8, momentum
    4, one in 8 bits 2), a stored number 4 bytes (2 in bfloat16).
    """
    heads = getattr(getattr(config.layers[0], "mixer", None), "num_heads", None)
    if heads is None or hasattr(config, "encoder") or not hasattr(config.input, "vocab_size"):
        return None
    depth, width, narrow = len(config.uses), config.dim, precision == "bf16-mixed"
    parameters = (getattr(config.input, "vocab_size", None) or 0) * width + 12 * depth * width**2
    activations = (2 if narrow else 4) * batch * length * depth * (14 * width + length * heads)
    return RulesOfThumb(
        parameters=parameters,
        flops_step=6 * parameters * batch * length,
        activation_bytes=activations,
        train_bytes=parameters * ((6 if narrow else 4) + 4 + optimizer_bytes) + activations,
    )
