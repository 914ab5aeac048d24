"""Kinds of models: what they read, how their layers are applied, layers, heads. Part of the table of kinds."""

from __future__ import annotations

from kinformer.core.config import Config


def models() -> list[type[Config]]:
    """Return the models, their inputs, their stacks and their heads."""
    from kinformer.heads import actions, adaptive, ctc, language, logistics, policy, spalm
    from kinformer.heads import modulus as modulus_head
    from kinformer.inputs import adaptive as adaptive_embedding
    from kinformer.inputs import frames, lookup, observations, patches, pixels, steps, tiles, tokens
    from kinformer.models import decoder, encoder_decoder
    from kinformer.stacks import act, confidence, exits, learned_exits, reversible, sequential, stages, universal

    return [
        decoder.Decoder.Config,
        encoder_decoder.EncoderDecoder.Config,
        tokens.Tokens.Config,
        pixels.Pixels.Config,
        steps.Steps.Config,
        observations.Observations.Config,
        patches.Patches.Config,
        tiles.Tiles.Config,
        frames.Frames.Config,
        lookup.Lookup.Config,
        adaptive_embedding.AdaptiveEmbedding.Config,
        sequential.Sequential.Config,
        reversible.Reversible.Config,
        stages.Stages.Config,
        universal.Universal.Config,
        act.ACT.Config,
        exits.Exits.Config,
        confidence.SoftmaxResponse.Config,
        confidence.Saturation.Config,
        confidence.ExitClassifier.Config,
        learned_exits.Multinomial.Config,
        learned_exits.Geometric.Config,
        learned_exits.SequenceMultinomial.Config,
        adaptive.AdaptiveSoftmax.Config,
        language.LanguageModelHead.Config,
        logistics.LogisticMixture.Config,
        modulus_head.ModulusHead.Config,
        ctc.CTCHead.Config,
        spalm.SpalmHead.Config,
        actions.DiscreteActions.Config,
        actions.ContinuousActions.Config,
        policy.PolicyAndValue.Config,
    ]


def encoders() -> list[type[Config]]:
    from kinformer.blocks import bare, encoder_layer, global_input, macaron, parallel, sha_rnn
    from kinformer.mixers import (
        bidirectional,
        bidirectional_linear,
        bidirectional_lsh,
        bidirectional_lstm,
        bidirectional_routing,
        etc,
        linformer,
        separable_convolution,
        sinkhorn,
        star,
        tensorized,
        windows,
    )
    from kinformer.models import encoder
    from kinformer.projections import multi_head_global

    return [
        encoder.Encoder.Config,
        encoder_layer.EncoderLayer.Config,
        macaron.MacaronEncoderLayer.Config,
        parallel.ParallelEncoderLayer.Config,
        bare.BareLayer.Config,
        sha_rnn.ShaRnnEncoderLayer.Config,
        global_input.ExtraTokens.Config,
        global_input.Sentences.Config,
        bidirectional.BidirectionalAttention.Config,
        bidirectional_linear.BidirectionalLinear.Config,
        bidirectional_lsh.BidirectionalLSH.Config,
        bidirectional_lstm.BidirectionalLSTM.Config,
        bidirectional_routing.BidirectionalRouting.Config,
        etc.EtcAttention.Config,
        linformer.Linformer.Config,
        star.StarAttention.Config,
        tensorized.BidirectionalTensorized.Config,
        sinkhorn.SinkhornAttention.Config,
        separable_convolution.SeparableConvolution.Config,
        windows.WindowAttention.Config,
        multi_head_global.MultiHeadGlobal.Config,
        *_encoder_heads(),
    ]


def _encoder_heads() -> list[type[Config]]:
    from kinformer.heads import classification, distilled, masked_language, masked_patches, patch_colours, pooling

    return [
        masked_language.MaskedLanguageHead.Config,
        masked_patches.MaskedPatchesHead.Config,
        patch_colours.PatchColoursHead.Config,
        classification.ClassificationHead.Config,
        classification.LinearClassificationHead.Config,
        distilled.DistilledHead.Config,
        pooling.PooledHead.Config,
        classification.TokenClassificationHead.Config,
    ]


def blocks() -> list[type[Config]]:
    """Return the layers, residuals, norms and feed-forwards."""
    from kinformer.blocks import (
        bare,
        experts,
        feed_forward,
        gated,
        layer,
        macaron,
        norms,
        parallel,
        product_keys,
        residual,
        sha_rnn,
    )
    from kinformer.mixers import channel_mix, separable_transition

    return [
        layer.DecoderLayer.Config,
        macaron.MacaronLayer.Config,
        parallel.ParallelLayer.Config,
        sha_rnn.ShaRnnLayer.Config,
        bare.BareDecoderLayer.Config,
        residual.PreNorm.Config,
        residual.PostNorm.Config,
        residual.ResPostNorm.Config,
        residual.Sandwich.Config,
        gated.Reordered.Config,
        gated.Gated.Config,
        feed_forward.MLP.Config,
        feed_forward.SwiGLU.Config,
        feed_forward.GeGLU.Config,
        feed_forward.Boom.Config,
        separable_transition.SeparableTransition,
        channel_mix.ChannelMix,
        product_keys.ProductKeys.Config,
        experts.Experts.Config,
        norms.LayerNorm,
        norms.RMSNorm,
    ]
