"""Every kind of part by slot and name: the one explicit table that reads and writes configs."""

from __future__ import annotations

from functools import cache

from kinformer.core.config import Config


@cache
def kinds() -> dict[str, dict[str, type[Config]]]:
    """Slot -> kind -> config class."""
    from kinformer.blocks import embedding, feed_forward, macaron, norms, residual
    from kinformer.features import dpfp, elu, quadratic, relu
    from kinformer.heads import language
    from kinformer.heads import modulus as modulus_head
    from kinformer.mixers import cross, fast_weight, linear, softmax
    from kinformer.models import decoder
    from kinformer.projections import complex, convolved, grouped, shared
    from kinformer.scores import additive, bilinear, dot, modulus, scaled_dot

    classes: list[type[Config]] = [
        decoder.Decoder.Config,
        residual.ResidualLayer.Config,
        macaron.MacaronLayer.Config,
        softmax.SoftmaxAttention.Config,
        linear.LinearAttention.Config,
        fast_weight.FastWeight.Config,
        cross.CrossAttention.Config,
        feed_forward.MLP.Config,
        feed_forward.SwiGLU.Config,
        norms.LayerNorm,
        norms.RMSNorm,
        *_positions(),
        *_patterns(),
        scaled_dot.ScaledDot.Config,
        dot.Dot.Config,
        bilinear.Bilinear.Config,
        additive.Additive.Config,
        modulus.Modulus.Config,
        shared.Shared.Config,
        grouped.Grouped.Config,
        convolved.Convolved.Config,
        complex.Complex.Config,
        elu.Elu.Config,
        relu.Relu.Config,
        dpfp.Dpfp.Config,
        quadratic.Quadratic.Config,
        embedding.Lookup.Config,
        language.LanguageModelHead.Config,
        modulus_head.ModulusHead.Config,
    ]
    table: dict[str, dict[str, type[Config]]] = {}
    for config in classes:
        table.setdefault(config.slot, {})[config.kind] = config
    return table


def _positions() -> list[type[Config]]:
    from kinformer.positions import (
        alibi,
        complex_order,
        distance_aware,
        learned,
        learned_per_layer,
        none,
        rope,
        shaw,
        sinusoidal,
        t5,
        xl,
    )

    return [
        complex_order.ComplexOrder.Config,
        none.NoPosition.Config,
        sinusoidal.Sinusoidal.Config,
        learned.Learned.Config,
        learned_per_layer.LearnedPerLayer.Config,
        rope.Rope.Config,
        shaw.Shaw.Config,
        xl.TransformerXL.Config,
        t5.T5.Config,
        alibi.Alibi.Config,
        distance_aware.DistanceAware.Config,
    ]


def _patterns() -> list[type[Config]]:
    from kinformer.patterns import (
        blocks,
        blockwise,
        causal,
        columns,
        combined,
        dilated,
        documents,
        fixed,
        full,
        global_tokens,
        image_1d,
        image_2d,
        local,
        per_head,
        random_blocks,
        strided,
        summaries,
    )

    return [
        full.Full.Config,
        causal.Causal.Config,
        local.Local.Config,
        dilated.Dilated.Config,
        columns.Columns.Config,
        strided.Strided,
        blocks.Blocks.Config,
        summaries.Summaries.Config,
        fixed.Fixed,
        global_tokens.GlobalTokens.Config,
        random_blocks.RandomBlocks.Config,
        blockwise.Blockwise.Config,
        image_1d.Image1D,
        image_2d.Image2D.Config,
        documents.Documents.Config,
        per_head.PerHead.Config,
        combined.Union,
        combined.Intersection,
        combined.Complement,
    ]
