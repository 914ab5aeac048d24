"""Every kind of part by slot and name: the one explicit table that reads and writes configs (with ``model_kinds``)."""

from __future__ import annotations

from functools import cache

from kinformer.core.config import Config
from kinformer.family.model_kinds import blocks, encoders, models
from kinformer.runtime.plugins import PARTS, Registry, entry_points_of


def kinds() -> dict[str, Registry[type[Config]]]:
    """Return the table slot -> kind -> config class; those of other packages are imported when they are looked up."""
    builtin = _builtin_kinds()
    added = [name.partition(".")[0] for name in entry_points_of(PARTS)]
    return {slot: _kinds_of(slot, builtin.get(slot, {})) for slot in dict.fromkeys([*builtin, *added])}


def _kinds_of(slot: str, builtin: dict[str, type[Config]]) -> Registry[type[Config]]:
    def fits(kind: str, record: object) -> bool:
        return isinstance(record, type) and issubclass(record, Config) and (record.slot, record.kind) == (slot, kind)

    def expected(kind: str) -> str:
        return f"a config class with the slot {slot!r} and the kind {kind!r}"

    return Registry(slot, builtin, PARTS, fits=fits, expected=expected, prefix=f"{slot}.")


@cache
def _builtin_kinds() -> dict[str, dict[str, type[Config]]]:
    """Return Kinformer's own slots, kinds and config classes."""
    table: dict[str, dict[str, type[Config]]] = {}
    parts = (
        _mixers(),
        _mixers_over_a_source(),
        _positions(),
        _patterns(),
        _scores_and_projections(),
        _features_and_decays(),
    )
    for some in (models(), encoders(), blocks(), *parts):
        for config in some:
            table.setdefault(config.slot, {})[config.kind] = config
    return table


def _mixers() -> list[type[Config]]:
    """Return the causal mixers and the compressions of memories."""
    from kinformer.mixers import (
        causal_sinkhorn,
        chosen_blocks,
        compressive,
        latent,
        linear,
        lsh,
        lstm,
        memorizing,
        outer_product,
        routing,
        rwkv7,
        segment_memory,
        single_head,
        softmax,
        tensorized,
        tensorized_memory,
    )
    from kinformer.mixers.compressive import compression

    return [
        softmax.SoftmaxAttention.Config,
        segment_memory.SegmentMemory.Config,
        compressive.Compressive.Config,
        causal_sinkhorn.CausalSinkhornAttention.Config,
        chosen_blocks.ChosenBlocks.Config,
        latent.LatentAttention.Config,
        linear.LinearAttention.Config,
        rwkv7.RWKV7.Config,
        lsh.LSHAttention.Config,
        lstm.LSTM.Config,
        single_head.SingleHead.Config,
        memorizing.Memorizing.Config,
        outer_product.OuterProduct.Config,
        routing.RoutingAttention.Config,
        tensorized.TensorizedAttention.Config,
        tensorized_memory.TensorizedMemory.Config,
        compression.Pool.Config,
        compression.Convolution.Config,
        compression.DilatedConvolution.Config,
        compression.MostUsed.Config,
    ]


def _mixers_over_a_source() -> list[type[Config]]:
    from kinformer.mixers import cross, cross_linear, cross_linformer, cross_local, cross_predictive

    return [
        cross.CrossAttention.Config,
        cross_linear.LinearCrossAttention.Config,
        cross_linformer.LinformerCrossAttention.Config,
        cross_local.LocalCrossAttention.Config,
        cross_predictive.PredictiveCrossAttention.Config,
    ]


def _scores_and_projections() -> list[type[Config]]:
    """Return the scores, spans and projections."""
    from kinformer.projections import complex, convolved, grouped, kv_shift, multi_head, normalised, shared_qk
    from kinformer.scores import (
        additive,
        bilinear,
        capped,
        dot,
        dynamic_span,
        modulus,
        scaled_dot,
        sink_logit,
        soft_span,
    )

    return [
        scaled_dot.ScaledDot.Config,
        dot.Dot.Config,
        bilinear.Bilinear.Config,
        capped.Capped.Config,
        sink_logit.SinkLogit.Config,
        additive.Additive.Config,
        modulus.Modulus.Config,
        soft_span.SoftSpan.Config,
        dynamic_span.DynamicSpan.Config,
        multi_head.MultiHead.Config,
        grouped.Grouped.Config,
        normalised.Normalised.Config,
        convolved.Convolved.Config,
        complex.Complex.Config,
        shared_qk.SharedQK.Config,
        kv_shift.KVShift.Config,
    ]


def _features_and_decays() -> list[type[Config]]:
    """Return the feature maps and decays of kernel attention."""
    from kinformer.decays import fixed, low_rank, sigmoid, softplus, softplus_channels
    from kinformer.features import (
        dpfp,
        elu,
        favor,
        identity,
        quadratic,
        random_fourier,
        relu,
        sum_normalised,
        unit,
    )

    return [
        elu.Elu.Config,
        relu.Relu.Config,
        dpfp.Dpfp.Config,
        quadratic.Quadratic.Config,
        identity.Identity.Config,
        unit.Unit.Config,
        sum_normalised.SumNormalised.Config,
        favor.Favor.Config,
        random_fourier.RandomFourier.Config,
        fixed.Fixed.Config,
        sigmoid.Sigmoid.Config,
        softplus.Softplus.Config,
        low_rank.LowRank.Config,
        softplus_channels.SoftplusChannels.Config,
    ]


def _positions() -> list[type[Config]]:
    from kinformer.positions import (
        alibi,
        complex_order,
        distance_aware,
        distance_keys,
        learned,
        learned_per_layer,
        none,
        rope,
        shaw,
        sinusoidal,
        t5,
        timing,
        xl,
    )

    return [
        complex_order.ComplexOrder.Config,
        none.NoPosition.Config,
        sinusoidal.Sinusoidal.Config,
        learned.Learned.Config,
        learned_per_layer.LearnedPerLayer.Config,
        timing.Timing.Config,
        rope.Rope.Config,
        shaw.Shaw.Config,
        xl.TransformerXL.Config,
        t5.T5.Config,
        alibi.Alibi.Config,
        distance_aware.DistanceAware.Config,
        distance_keys.DistanceKeys.Config,
    ]


def _patterns() -> list[type[Config]]:
    from kinformer.patterns import (
        big_bird,
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
        segments,
        sinks,
        strided,
        summaries,
        window,
    )

    return [
        full.Full.Config,
        causal.Causal.Config,
        local.Local.Config,
        sinks.Sinks.Config,
        dilated.Dilated.Config,
        columns.Columns.Config,
        strided.Strided,
        blocks.Blocks.Config,
        segments.Segments.Config,
        summaries.Summaries.Config,
        fixed.Fixed,
        global_tokens.GlobalTokens.Config,
        random_blocks.RandomBlocks.Config,
        big_bird.BigBird.Config,
        blockwise.Blockwise.Config,
        image_1d.Image1D,
        image_2d.Image2D.Config,
        documents.Documents.Config,
        per_head.PerHead.Config,
        window.Window,
        combined.Union,
        combined.Intersection,
        combined.Complement,
    ]
