"""The parts of attention under the field's names for them: positions, patterns, scores, feature maps, projections.

    from kinformer.nn import LocalPattern, RotaryPositions, SoftmaxAttention, layer

    layer(SoftmaxAttention(num_heads=8, pattern=LocalPattern(window=256), position=RotaryPositions()), dim=512)

A config says what a part is, and its ``build`` makes the module; ``help`` of one lists its settings. The same parts are
named by their ``kind`` in strings and mappings.
"""

from kinformer.decays import fixed as fixed_decay
from kinformer.decays import low_rank, sigmoid, softplus, softplus_channels
from kinformer.features import dpfp, elu, favor, identity, quadratic, random_fourier, relu, sum_normalised, unit
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
from kinformer.positions import (
    alibi,
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
from kinformer.projections import (
    complex,
    convolved,
    grouped,
    kv_shift,
    multi_head,
    multi_head_global,
    normalised,
    shared_qk,
)
from kinformer.scores import additive, bilinear, capped, dot, dynamic_span, modulus, scaled_dot, sink_logit, soft_span

__all__ = [
    "AdditiveScore",
    "AlibiBias",
    "BigBirdPattern",
    "BilinearScore",
    "BlocksPattern",
    "BlockwisePattern",
    "CappedScore",
    "CausalPattern",
    "ColumnsPattern",
    "ComplementPattern",
    "ComplexProjection",
    "ConvolvedProjection",
    "DilatedPattern",
    "DistanceAwareScaling",
    "DistanceKeys",
    "DocumentsPattern",
    "DotScore",
    "DpfpFeatures",
    "DynamicSpan",
    "EluFeatures",
    "FavorFeatures",
    "FixedDecay",
    "FixedPattern",
    "FullPattern",
    "GlobalTokensPattern",
    "GroupedProjection",
    "IdentityFeatures",
    "Image1DPattern",
    "Image2DPattern",
    "IntersectionPattern",
    "KVShiftProjection",
    "LearnedPositions",
    "LearnedPositionsPerLayer",
    "LocalPattern",
    "LowRankDecay",
    "ModulusScore",
    "MultiHeadGlobalProjection",
    "MultiHeadProjection",
    "NoPosition",
    "NormalisedProjection",
    "PerHeadPattern",
    "QuadraticFeatures",
    "RandomBlocksPattern",
    "RandomFourierFeatures",
    "ReluFeatures",
    "RotaryPositions",
    "ScaledDotScore",
    "SegmentsPattern",
    "ShawPositions",
    "SigmoidDecay",
    "SinkLogitScore",
    "SinksPattern",
    "SinusoidalPositions",
    "SoftSpan",
    "SoftplusChannelsDecay",
    "SharedQKProjection",
    "SoftplusDecay",
    "StridedPattern",
    "SumNormalisedFeatures",
    "SummariesPattern",
    "T5Bias",
    "TimingSignal",
    "TransformerXLPositions",
    "UnionPattern",
    "UnitFeatures",
    "WindowPattern",
]

# Positions
NoPosition = none.NoPosition.Config
RotaryPositions = rope.Rope.Config
AlibiBias = alibi.Alibi.Config
T5Bias = t5.T5.Config
ShawPositions = shaw.Shaw.Config
TransformerXLPositions = xl.TransformerXL.Config
DistanceAwareScaling = distance_aware.DistanceAware.Config
DistanceKeys = distance_keys.DistanceKeys.Config
SinusoidalPositions = sinusoidal.Sinusoidal.Config
LearnedPositions = learned.Learned.Config
LearnedPositionsPerLayer = learned_per_layer.LearnedPerLayer.Config
TimingSignal = timing.Timing.Config

# Patterns
CausalPattern = causal.Causal.Config
LocalPattern = local.Local.Config
SinksPattern = sinks.Sinks.Config
FullPattern = full.Full.Config
WindowPattern = window.Window
StridedPattern = strided.Strided
FixedPattern = fixed.Fixed
DilatedPattern = dilated.Dilated.Config
ColumnsPattern = columns.Columns.Config
SummariesPattern = summaries.Summaries.Config
SegmentsPattern = segments.Segments.Config
DocumentsPattern = documents.Documents.Config
BlocksPattern = blocks.Blocks.Config
BlockwisePattern = blockwise.Blockwise.Config
RandomBlocksPattern = random_blocks.RandomBlocks.Config
BigBirdPattern = big_bird.BigBird.Config
GlobalTokensPattern = global_tokens.GlobalTokens.Config
Image1DPattern = image_1d.Image1D
Image2DPattern = image_2d.Image2D.Config
PerHeadPattern = per_head.PerHead.Config
UnionPattern = combined.Union
IntersectionPattern = combined.Intersection
ComplementPattern = combined.Complement

# Scores, and spans of attention
ScaledDotScore = scaled_dot.ScaledDot.Config
DotScore = dot.Dot.Config
BilinearScore = bilinear.Bilinear.Config
CappedScore = capped.Capped.Config
SinkLogitScore = sink_logit.SinkLogit.Config
AdditiveScore = additive.Additive.Config
ModulusScore = modulus.Modulus.Config
SoftSpan = soft_span.SoftSpan.Config
DynamicSpan = dynamic_span.DynamicSpan.Config

# Feature maps and decays of kernel attention
EluFeatures = elu.Elu.Config
ReluFeatures = relu.Relu.Config
DpfpFeatures = dpfp.Dpfp.Config
FavorFeatures = favor.Favor.Config
RandomFourierFeatures = random_fourier.RandomFourier.Config
IdentityFeatures = identity.Identity.Config
QuadraticFeatures = quadratic.Quadratic.Config
UnitFeatures = unit.Unit.Config
SumNormalisedFeatures = sum_normalised.SumNormalised.Config
FixedDecay = fixed_decay.Fixed.Config
SigmoidDecay = sigmoid.Sigmoid.Config
SoftplusDecay = softplus.Softplus.Config
LowRankDecay = low_rank.LowRank.Config
SoftplusChannelsDecay = softplus_channels.SoftplusChannels.Config

# Projections
MultiHeadProjection = multi_head.MultiHead.Config
GroupedProjection = grouped.Grouped.Config
ConvolvedProjection = convolved.Convolved.Config
NormalisedProjection = normalised.Normalised.Config
KVShiftProjection = kv_shift.KVShift.Config
SharedQKProjection = shared_qk.SharedQK.Config
ComplexProjection = complex.Complex.Config
MultiHeadGlobalProjection = multi_head_global.MultiHeadGlobal.Config
