"""Mixers, feed-forwards, layers and stacks under the field's names for them: the configs of what a model is made of.

    from kinformer.nn import MacaronLayer, SoftmaxAttention, layer

    layer(MacaronLayer(mixer=SoftmaxAttention(num_heads=8)), dim=512)

A config says what a thing is, and its ``build`` makes the module; ``help`` of one lists its settings.
"""

from kinformer.blocks import (
    bare,
    encoder_layer,
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
from kinformer.mixers import (
    bidirectional,
    bidirectional_linear,
    bidirectional_lsh,
    bidirectional_lstm,
    bidirectional_routing,
    causal_sinkhorn,
    channel_mix,
    chosen_blocks,
    compressive,
    cross,
    cross_linear,
    cross_linformer,
    cross_local,
    cross_predictive,
    etc,
    latent,
    linear,
    linformer,
    lsh,
    lstm,
    memorizing,
    outer_product,
    routing,
    rwkv7,
    segment_memory,
    separable_convolution,
    separable_transition,
    single_head,
    sinkhorn,
    softmax,
    star,
    tensorized,
    tensorized_memory,
    windows,
)
from kinformer.stacks import act, reversible, sequential, universal

__all__ = [
    "ACT",
    "BareDecoderLayer",
    "BareLayer",
    "BidirectionalAttention",
    "BidirectionalLSHAttention",
    "BidirectionalLSTM",
    "BidirectionalLinearAttention",
    "BidirectionalRoutingAttention",
    "BidirectionalTensorizedAttention",
    "Boom",
    "CausalSinkhornAttention",
    "ChannelMix",
    "ChosenBlocks",
    "CompressiveAttention",
    "CrossAttention",
    "LinearCrossAttention",
    "DecoderLayer",
    "EncoderLayer",
    "EtcAttention",
    "Experts",
    "GatedResidual",
    "GeGLU",
    "LSHAttention",
    "LSTM",
    "LatentAttention",
    "LayerNorm",
    "LinearAttention",
    "LinformerAttention",
    "LinformerCrossAttention",
    "LocalCrossAttention",
    "MLP",
    "MacaronEncoderLayer",
    "MacaronLayer",
    "MemorizingAttention",
    "OuterProduct",
    "ParallelEncoderLayer",
    "ParallelLayer",
    "PostNorm",
    "PreNorm",
    "PredictiveCrossAttention",
    "ProductKeys",
    "RMSNorm",
    "RWKV7TimeMix",
    "ReorderedResidual",
    "ResPostNorm",
    "ReversibleStack",
    "RoutingAttention",
    "SandwichNorm",
    "SegmentMemoryAttention",
    "SeparableConvolution",
    "SeparableTransition",
    "SequentialStack",
    "ShaRnnEncoderLayer",
    "ShaRnnLayer",
    "SingleHeadAttention",
    "SinkhornAttention",
    "SoftmaxAttention",
    "StarAttention",
    "SwiGLU",
    "TensorizedAttention",
    "TensorizedMemoryAttention",
    "UniversalStack",
    "WindowAttention",
]

# Mixers of causal layers
SoftmaxAttention = softmax.SoftmaxAttention.Config
CrossAttention = cross.CrossAttention.Config
LinearCrossAttention = cross_linear.LinearCrossAttention.Config
LinformerCrossAttention = cross_linformer.LinformerCrossAttention.Config
LocalCrossAttention = cross_local.LocalCrossAttention.Config
PredictiveCrossAttention = cross_predictive.PredictiveCrossAttention.Config
LatentAttention = latent.LatentAttention.Config
LinearAttention = linear.LinearAttention.Config
ChosenBlocks = chosen_blocks.ChosenBlocks.Config
CausalSinkhornAttention = causal_sinkhorn.CausalSinkhornAttention.Config
RWKV7TimeMix = rwkv7.RWKV7.Config
LSHAttention = lsh.LSHAttention.Config
OuterProduct = outer_product.OuterProduct.Config
RoutingAttention = routing.RoutingAttention.Config
MemorizingAttention = memorizing.Memorizing.Config
SegmentMemoryAttention = segment_memory.SegmentMemory.Config
CompressiveAttention = compressive.Compressive.Config
TensorizedAttention = tensorized.TensorizedAttention.Config
TensorizedMemoryAttention = tensorized_memory.TensorizedMemory.Config
SingleHeadAttention = single_head.SingleHead.Config
LSTM = lstm.LSTM.Config

# Mixers of bidirectional layers
BidirectionalAttention = bidirectional.BidirectionalAttention.Config
BidirectionalLinearAttention = bidirectional_linear.BidirectionalLinear.Config
BidirectionalLSHAttention = bidirectional_lsh.BidirectionalLSH.Config
BidirectionalRoutingAttention = bidirectional_routing.BidirectionalRouting.Config
BidirectionalLSTM = bidirectional_lstm.BidirectionalLSTM.Config
EtcAttention = etc.EtcAttention.Config
LinformerAttention = linformer.Linformer.Config
SinkhornAttention = sinkhorn.SinkhornAttention.Config
BidirectionalTensorizedAttention = tensorized.BidirectionalTensorized.Config
StarAttention = star.StarAttention.Config
WindowAttention = windows.WindowAttention.Config
SeparableConvolution = separable_convolution.SeparableConvolution.Config

# Feed-forwards, norms and residuals
MLP = feed_forward.MLP.Config
SwiGLU = feed_forward.SwiGLU.Config
GeGLU = feed_forward.GeGLU.Config
Boom = feed_forward.Boom.Config
Experts = experts.Experts.Config
ProductKeys = product_keys.ProductKeys.Config
SeparableTransition = separable_transition.SeparableTransition
ChannelMix = channel_mix.ChannelMix
LayerNorm = norms.LayerNorm
RMSNorm = norms.RMSNorm
PreNorm = residual.PreNorm.Config
PostNorm = residual.PostNorm.Config
ResPostNorm = residual.ResPostNorm.Config
SandwichNorm = residual.Sandwich.Config
ReorderedResidual = gated.Reordered.Config
GatedResidual = gated.Gated.Config

# Layers and stacks
DecoderLayer = layer.DecoderLayer.Config
ParallelLayer = parallel.ParallelLayer.Config
ParallelEncoderLayer = parallel.ParallelEncoderLayer.Config
MacaronLayer = macaron.MacaronLayer.Config
MacaronEncoderLayer = macaron.MacaronEncoderLayer.Config
ShaRnnLayer = sha_rnn.ShaRnnLayer.Config
ShaRnnEncoderLayer = sha_rnn.ShaRnnEncoderLayer.Config
EncoderLayer = encoder_layer.EncoderLayer.Config
BareLayer = bare.BareLayer.Config
BareDecoderLayer = bare.BareDecoderLayer.Config
SequentialStack = sequential.Sequential.Config
UniversalStack = universal.Universal.Config
ReversibleStack = reversible.Reversible.Config
ACT = act.ACT.Config
