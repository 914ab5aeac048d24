"""Every kind of part by slot and name: the one explicit table that reads and writes configs (with ``model_kinds``)."""

from __future__ import annotations

from functools import cache

from kinformer.core.config import Config
from kinformer.runtime.plugins import PARTS, Registry, entry_points_of

# Kinds of models: what they read, how their layers are applied, layers, heads. Part of the table of kinds.


def models() -> list[type[Config]]:
    """Return the models, their inputs, their stacks and their heads."""
    from kinformer.heads import language
    from kinformer.heads.classes import ContinuousActions, CTCHead, DiscreteActions, PolicyAndValue
    from kinformer.heads.images import LogisticMixture
    from kinformer.heads.language import AdaptiveSoftmax, ModulusHead, SpalmHead
    from kinformer.inputs import tokens
    from kinformer.inputs.images import Patches, Pixels, Tiles
    from kinformer.inputs.signals import Frames, Observations, Steps
    from kinformer.inputs.tokens import AdaptiveEmbedding, Lookup
    from kinformer.models import decoder, encoder_decoder
    from kinformer.stacks import exits, reversible, sequential, universal
    from kinformer.stacks.exit_rules import (
        ExitClassifier,
        Geometric,
        Multinomial,
        Saturation,
        SequenceMultinomial,
        SoftmaxResponse,
    )
    from kinformer.stacks.sequential import Stages
    from kinformer.stacks.universal import ACT

    return [
        decoder.Decoder.Config,
        encoder_decoder.EncoderDecoder.Config,
        tokens.Tokens.Config,
        Pixels.Config,
        Steps.Config,
        Observations.Config,
        Patches.Config,
        Tiles.Config,
        Frames.Config,
        Lookup.Config,
        AdaptiveEmbedding.Config,
        sequential.Sequential.Config,
        reversible.Reversible.Config,
        Stages.Config,
        universal.Universal.Config,
        ACT.Config,
        exits.Exits.Config,
        SoftmaxResponse.Config,
        Saturation.Config,
        ExitClassifier.Config,
        Multinomial.Config,
        Geometric.Config,
        SequenceMultinomial.Config,
        AdaptiveSoftmax.Config,
        language.LanguageModelHead.Config,
        LogisticMixture.Config,
        ModulusHead.Config,
        CTCHead.Config,
        SpalmHead.Config,
        DiscreteActions.Config,
        ContinuousActions.Config,
        PolicyAndValue.Config,
    ]


def encoders() -> list[type[Config]]:
    from kinformer.blocks import global_input, sha_rnn
    from kinformer.blocks.layer import BareLayer, EncoderLayer, MacaronEncoderLayer, ParallelEncoderLayer
    from kinformer.mixers import bidirectional, sinkhorn, tensorized, windows
    from kinformer.mixers.buckets import BidirectionalLSH
    from kinformer.mixers.convolutions import SeparableConvolution
    from kinformer.mixers.encoders import BidirectionalLinear, EtcAttention, Linformer, StarAttention
    from kinformer.mixers.recurrent import BidirectionalLSTM
    from kinformer.models import encoder
    from kinformer.parts.projections import MultiHeadGlobal

    return [
        encoder.Encoder.Config,
        EncoderLayer.Config,
        MacaronEncoderLayer.Config,
        ParallelEncoderLayer.Config,
        BareLayer.Config,
        sha_rnn.ShaRnnEncoderLayer.Config,
        global_input.ExtraTokens.Config,
        global_input.Sentences.Config,
        bidirectional.BidirectionalAttention.Config,
        BidirectionalLinear.Config,
        BidirectionalLSH.Config,
        BidirectionalLSTM.Config,
        EtcAttention.Config,
        Linformer.Config,
        StarAttention.Config,
        tensorized.BidirectionalTensorized.Config,
        sinkhorn.SinkhornAttention.Config,
        SeparableConvolution.Config,
        windows.WindowAttention.Config,
        MultiHeadGlobal.Config,
        *_encoder_heads(),
    ]


def _encoder_heads() -> list[type[Config]]:
    from kinformer.heads.classes import (
        ClassificationHead,
        DistilledHead,
        LinearClassificationHead,
        PooledHead,
        TokenClassificationHead,
    )
    from kinformer.heads.images import MaskedPatchesHead, PatchColoursHead
    from kinformer.heads.language import MaskedLanguageHead

    return [
        MaskedLanguageHead.Config,
        MaskedPatchesHead.Config,
        PatchColoursHead.Config,
        ClassificationHead.Config,
        LinearClassificationHead.Config,
        DistilledHead.Config,
        PooledHead.Config,
        TokenClassificationHead.Config,
    ]


def blocks() -> list[type[Config]]:
    """Return the layers, residuals, norms and feed-forwards."""
    from kinformer.blocks import experts, feed_forward, layer, residual, sha_rnn
    from kinformer.blocks.feed_forward import ProductKeys
    from kinformer.blocks.layer import BareDecoderLayer, MacaronLayer, ParallelLayer
    from kinformer.blocks.residual import Gated, LayerNorm, Reordered, RMSNorm
    from kinformer.mixers.convolutions import ChannelMix, SeparableTransition

    return [
        layer.DecoderLayer.Config,
        MacaronLayer.Config,
        ParallelLayer.Config,
        sha_rnn.ShaRnnLayer.Config,
        BareDecoderLayer.Config,
        residual.PreNorm.Config,
        residual.PostNorm.Config,
        residual.ResPostNorm.Config,
        residual.Sandwich.Config,
        Reordered.Config,
        Gated.Config,
        feed_forward.MLP.Config,
        feed_forward.SwiGLU.Config,
        feed_forward.GeGLU.Config,
        feed_forward.Boom.Config,
        SeparableTransition,
        ChannelMix,
        ProductKeys.Config,
        experts.Experts.Config,
        LayerNorm,
        RMSNorm,
    ]


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
        chosen_blocks,
        compressive,
        latent,
        linear,
        memorizing,
        segment_memory,
        softmax,
        tensorized,
    )
    from kinformer.mixers.buckets import LSHAttention, RoutingAttention
    from kinformer.mixers.compressive import Convolution, DilatedConvolution, MostUsed, Pool
    from kinformer.mixers.latent import SingleHead
    from kinformer.mixers.recurrent import LSTM, RWKV7, OuterProduct
    from kinformer.mixers.sinkhorn import CausalSinkhornAttention
    from kinformer.mixers.tensorized import TensorizedMemory

    return [
        softmax.SoftmaxAttention.Config,
        segment_memory.SegmentMemory.Config,
        compressive.Compressive.Config,
        CausalSinkhornAttention.Config,
        chosen_blocks.ChosenBlocks.Config,
        latent.LatentAttention.Config,
        linear.LinearAttention.Config,
        RWKV7.Config,
        LSHAttention.Config,
        LSTM.Config,
        SingleHead.Config,
        memorizing.Memorizing.Config,
        OuterProduct.Config,
        RoutingAttention.Config,
        tensorized.TensorizedAttention.Config,
        TensorizedMemory.Config,
        Pool.Config,
        Convolution.Config,
        DilatedConvolution.Config,
        MostUsed.Config,
    ]


def _mixers_over_a_source() -> list[type[Config]]:
    from kinformer.mixers import cross
    from kinformer.mixers.cross import (
        LinearCrossAttention,
        LinformerCrossAttention,
    )

    return [
        cross.CrossAttention.Config,
        LinearCrossAttention.Config,
        LinformerCrossAttention.Config,
    ]


def _scores_and_projections() -> list[type[Config]]:
    """Return the scores, spans and projections."""
    from kinformer.parts.projections import Complex, Convolved, Grouped, KVShift, MultiHead, Normalised, SharedQK
    from kinformer.parts.scores import (
        Additive,
        Bilinear,
        Capped,
        Dot,
        DynamicSpan,
        Modulus,
        ScaledDot,
        SinkLogit,
        SoftSpan,
    )

    return [
        ScaledDot.Config,
        Dot.Config,
        Bilinear.Config,
        Capped.Config,
        SinkLogit.Config,
        Additive.Config,
        Modulus.Config,
        SoftSpan.Config,
        DynamicSpan.Config,
        MultiHead.Config,
        Grouped.Config,
        Normalised.Config,
        Convolved.Config,
        Complex.Config,
        SharedQK.Config,
        KVShift.Config,
    ]


def _features_and_decays() -> list[type[Config]]:
    """Return the feature maps and decays of kernel attention."""
    from kinformer.parts import decays as fixed
    from kinformer.parts.decays import LowRank, Sigmoid, Softplus, SoftplusChannels
    from kinformer.parts.feature_maps import (
        Dpfp,
        Elu,
        Favor,
        Identity,
        Quadratic,
        RandomFourier,
        Relu,
        SumNormalised,
        Unit,
    )

    return [
        Elu.Config,
        Relu.Config,
        Dpfp.Config,
        Quadratic.Config,
        Identity.Config,
        Unit.Config,
        SumNormalised.Config,
        Favor.Config,
        RandomFourier.Config,
        fixed.Fixed.Config,
        Sigmoid.Config,
        Softplus.Config,
        LowRank.Config,
        SoftplusChannels.Config,
    ]


def _positions() -> list[type[Config]]:
    from kinformer.parts.positions import ComplexOrder, Learned, LearnedPerLayer, NoPosition, Sinusoidal, Timing
    from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, DistanceKeys, Rope, Shaw, TransformerXL

    return [
        ComplexOrder.Config,
        NoPosition.Config,
        Sinusoidal.Config,
        Learned.Config,
        LearnedPerLayer.Config,
        Timing.Config,
        Rope.Config,
        Shaw.Config,
        TransformerXL.Config,
        T5.Config,
        Alibi.Config,
        DistanceAware.Config,
        DistanceKeys.Config,
    ]


def _patterns() -> list[type[Config]]:
    from kinformer.parts.patterns import big_bird
    from kinformer.parts.patterns import sequence as blocks
    from kinformer.parts.patterns import sequence as fixed
    from kinformer.parts.patterns.big_bird import RandomBlocks
    from kinformer.parts.patterns.images import Image1D, Image2D
    from kinformer.parts.patterns.sequence import (
        Blockwise,
        Causal,
        Columns,
        Complement,
        Dilated,
        Documents,
        Full,
        GlobalTokens,
        Intersection,
        Local,
        PerHead,
        Segments,
        Sinks,
        Strided,
        Summaries,
        Union,
        Window,
    )

    return [
        Full.Config,
        Causal.Config,
        Local.Config,
        Sinks.Config,
        Dilated.Config,
        Columns.Config,
        Strided,
        blocks.Blocks.Config,
        Segments.Config,
        Summaries.Config,
        fixed.Fixed,
        GlobalTokens.Config,
        RandomBlocks.Config,
        big_bird.BigBird.Config,
        Blockwise.Config,
        Image1D,
        Image2D.Config,
        Documents.Config,
        PerHead.Config,
        Window,
        Union,
        Intersection,
        Complement,
    ]
