"""Every kind of part by slot and name: the one explicit table that reads and writes configs."""

from __future__ import annotations

from functools import cache

from kinformer.core.config import Config


@cache
def kinds() -> dict[str, dict[str, type[Config]]]:
    """Slot -> kind -> config class."""
    from kinformer.blocks import feed_forward, norms, residual
    from kinformer.features import dpfp, elu, quadratic, relu
    from kinformer.heads import language
    from kinformer.mixers import fast_weight, linear, softmax
    from kinformer.models import decoder
    from kinformer.patterns import causal, full, local
    from kinformer.positions import learned, none, rope, sinusoidal
    from kinformer.projections import grouped, shared
    from kinformer.scores import scaled_dot

    classes: list[type[Config]] = [
        decoder.Decoder.Config,
        residual.ResidualLayer.Config,
        softmax.SoftmaxAttention.Config,
        linear.LinearAttention.Config,
        fast_weight.FastWeight.Config,
        feed_forward.MLP.Config,
        feed_forward.SwiGLU.Config,
        norms.LayerNorm,
        norms.RMSNorm,
        none.NoPosition.Config,
        sinusoidal.Sinusoidal.Config,
        learned.Learned.Config,
        rope.Rope.Config,
        full.Full.Config,
        causal.Causal.Config,
        local.Local.Config,
        scaled_dot.ScaledDot.Config,
        shared.Shared.Config,
        grouped.Grouped.Config,
        elu.Elu.Config,
        relu.Relu.Config,
        dpfp.Dpfp.Config,
        quadratic.Quadratic.Config,
        language.LanguageModelHead.Config,
    ]
    table: dict[str, dict[str, type[Config]]] = {}
    for config in classes:
        table.setdefault(config.slot, {})[config.kind] = config
    return table
