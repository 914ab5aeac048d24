"""Mixers, feed-forwards, layers and stacks under the field's names for them: the configs of what a model is made of.

    from kinformer.nn import MacaronLayer, SoftmaxAttention, layer

    layer(MacaronLayer(mixer=SoftmaxAttention(num_heads=8)), dim=512)

A config says what a thing is, and its ``build`` makes the module; ``help`` of one lists its settings.
"""

from kinformer.blocks import experts, feed_forward, layer, residual, sha_rnn
from kinformer.blocks import feed_forward as product_keys
from kinformer.blocks import layer as bare
from kinformer.blocks import layer as encoder_layer
from kinformer.blocks import layer as macaron
from kinformer.blocks import layer as parallel
from kinformer.blocks import residual as norms
from kinformer.blocks.residual import Gated, Reordered
from kinformer.mixers import (
    bidirectional,
    chosen_blocks,
    compressive,
    cross,
    latent,
    linear,
    memorizing,
    segment_memory,
    sinkhorn,
    softmax,
    tensorized,
    windows,
)
from kinformer.mixers import buckets as lsh
from kinformer.mixers import buckets as routing
from kinformer.mixers import convolutions as channel_mix
from kinformer.mixers import convolutions as separable_convolution
from kinformer.mixers import convolutions as separable_transition
from kinformer.mixers import cross as cross_linear
from kinformer.mixers import cross as cross_linformer
from kinformer.mixers import encoders as etc
from kinformer.mixers import encoders as star
from kinformer.mixers import recurrent as bidirectional_lstm
from kinformer.mixers import recurrent as lstm
from kinformer.mixers import recurrent as outer_product
from kinformer.mixers import sinkhorn as causal_sinkhorn
from kinformer.mixers.buckets import BidirectionalLSH
from kinformer.mixers.encoders import BidirectionalLinear, Linformer
from kinformer.mixers.latent import SingleHead
from kinformer.mixers.recurrent import RWKV7
from kinformer.mixers.tensorized import TensorizedMemory
from kinformer.stacks import reversible, sequential, universal
from kinformer.stacks import universal as act

__all__ = [
    "ACT",
    "BareDecoderLayer",
    "BareLayer",
    "BidirectionalAttention",
    "BidirectionalLSHAttention",
    "BidirectionalLSTM",
    "BidirectionalLinearAttention",
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
    "MLP",
    "MacaronEncoderLayer",
    "MacaronLayer",
    "MemorizingAttention",
    "OuterProduct",
    "ParallelEncoderLayer",
    "ParallelLayer",
    "PostNorm",
    "PreNorm",
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
LatentAttention = latent.LatentAttention.Config
LinearAttention = linear.LinearAttention.Config
ChosenBlocks = chosen_blocks.ChosenBlocks.Config
CausalSinkhornAttention = causal_sinkhorn.CausalSinkhornAttention.Config
RWKV7TimeMix = RWKV7.Config
LSHAttention = lsh.LSHAttention.Config
OuterProduct = outer_product.OuterProduct.Config
RoutingAttention = routing.RoutingAttention.Config
MemorizingAttention = memorizing.Memorizing.Config
SegmentMemoryAttention = segment_memory.SegmentMemory.Config
CompressiveAttention = compressive.Compressive.Config
TensorizedAttention = tensorized.TensorizedAttention.Config
TensorizedMemoryAttention = TensorizedMemory.Config
SingleHeadAttention = SingleHead.Config
LSTM = lstm.LSTM.Config

# Mixers of bidirectional layers
BidirectionalAttention = bidirectional.BidirectionalAttention.Config
BidirectionalLinearAttention = BidirectionalLinear.Config
BidirectionalLSHAttention = BidirectionalLSH.Config
BidirectionalLSTM = bidirectional_lstm.BidirectionalLSTM.Config
EtcAttention = etc.EtcAttention.Config
LinformerAttention = Linformer.Config
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
ReorderedResidual = Reordered.Config
GatedResidual = Gated.Config

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
