"""The parts of attention under the field's names for them: positions, patterns, scores, feature maps, projections.

    from kinformer.nn import LocalPattern, RotaryPositions, SoftmaxAttention, layer

    layer(SoftmaxAttention(num_heads=8, pattern=LocalPattern(window=256), position=RotaryPositions()), dim=512)

A config says what a part is, and its ``build`` makes the module; ``help`` of one lists its settings. The same parts are
named by their ``kind`` in strings and mappings.
"""

from kinformer.parts import positions as none
from kinformer.parts import relative_positions as distance_keys
from kinformer.parts import scores as dynamic_span
from kinformer.parts import scores as soft_span
from kinformer.parts.decays import Fixed, LowRank, Sigmoid, Softplus, SoftplusChannels
from kinformer.parts.feature_maps import Dpfp, Elu, Favor, Identity, Quadratic, RandomFourier, Relu, SumNormalised, Unit
from kinformer.parts.patterns import big_bird
from kinformer.parts.patterns import sequence as fixed
from kinformer.parts.patterns.big_bird import RandomBlocks
from kinformer.parts.patterns.images import Image1D, Image2D
from kinformer.parts.patterns.sequence import (
    Blocks,
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
from kinformer.parts.positions import Learned, LearnedPerLayer, Sinusoidal, Timing
from kinformer.parts.projections import (
    Complex,
    Convolved,
    Grouped,
    KVShift,
    MultiHead,
    MultiHeadGlobal,
    Normalised,
    SharedQK,
)
from kinformer.parts.relative_positions import T5, Alibi, DistanceAware, Rope, Shaw, TransformerXL
from kinformer.parts.scores import Additive, Bilinear, Capped, Dot, Modulus, ScaledDot, SinkLogit

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
RotaryPositions = Rope.Config
AlibiBias = Alibi.Config
T5Bias = T5.Config
ShawPositions = Shaw.Config
TransformerXLPositions = TransformerXL.Config
DistanceAwareScaling = DistanceAware.Config
DistanceKeys = distance_keys.DistanceKeys.Config
SinusoidalPositions = Sinusoidal.Config
LearnedPositions = Learned.Config
LearnedPositionsPerLayer = LearnedPerLayer.Config
TimingSignal = Timing.Config

# Patterns
CausalPattern = Causal.Config
LocalPattern = Local.Config
SinksPattern = Sinks.Config
FullPattern = Full.Config
WindowPattern = Window
StridedPattern = Strided
FixedPattern = fixed.Fixed
DilatedPattern = Dilated.Config
ColumnsPattern = Columns.Config
SummariesPattern = Summaries.Config
SegmentsPattern = Segments.Config
DocumentsPattern = Documents.Config
BlocksPattern = Blocks.Config
BlockwisePattern = Blockwise.Config
RandomBlocksPattern = RandomBlocks.Config
BigBirdPattern = big_bird.BigBird.Config
GlobalTokensPattern = GlobalTokens.Config
Image1DPattern = Image1D
Image2DPattern = Image2D.Config
PerHeadPattern = PerHead.Config
UnionPattern = Union
IntersectionPattern = Intersection
ComplementPattern = Complement

# Scores, and spans of attention
ScaledDotScore = ScaledDot.Config
DotScore = Dot.Config
BilinearScore = Bilinear.Config
CappedScore = Capped.Config
SinkLogitScore = SinkLogit.Config
AdditiveScore = Additive.Config
ModulusScore = Modulus.Config
SoftSpan = soft_span.SoftSpan.Config
DynamicSpan = dynamic_span.DynamicSpan.Config

# Feature maps and decays of kernel attention
EluFeatures = Elu.Config
ReluFeatures = Relu.Config
DpfpFeatures = Dpfp.Config
FavorFeatures = Favor.Config
RandomFourierFeatures = RandomFourier.Config
IdentityFeatures = Identity.Config
QuadraticFeatures = Quadratic.Config
UnitFeatures = Unit.Config
SumNormalisedFeatures = SumNormalised.Config
FixedDecay = Fixed.Config
SigmoidDecay = Sigmoid.Config
SoftplusDecay = Softplus.Config
LowRankDecay = LowRank.Config
SoftplusChannelsDecay = SoftplusChannels.Config

# Projections
MultiHeadProjection = MultiHead.Config
GroupedProjection = Grouped.Config
ConvolvedProjection = Convolved.Config
NormalisedProjection = Normalised.Config
KVShiftProjection = KVShift.Config
SharedQKProjection = SharedQK.Config
ComplexProjection = Complex.Config
MultiHeadGlobalProjection = MultiHeadGlobal.Config
