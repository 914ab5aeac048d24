import kinformer.adaptive.rules
import kinformer.adaptive.stack
import kinformer.blocks.feed_forward
import kinformer.blocks.layer
import kinformer.blocks.residual
import kinformer.heads.classes
import kinformer.heads.images
import kinformer.heads.language
import kinformer.inputs.images
import kinformer.inputs.signals
import kinformer.inputs.tokens
import kinformer.mixers.bidirectional
import kinformer.mixers.buckets
import kinformer.mixers.chosen_blocks
import kinformer.mixers.compressive
import kinformer.mixers.convolutions
import kinformer.mixers.cross
import kinformer.mixers.encoders
import kinformer.mixers.latent
import kinformer.mixers.linear
import kinformer.mixers.memory
import kinformer.mixers.path
import kinformer.mixers.recurrent
import kinformer.mixers.sinkhorn
import kinformer.mixers.softmax
import kinformer.mixers.tensorized
import kinformer.mixers.ttt
import kinformer.models.decoder
import kinformer.models.encoder
import kinformer.parts.decays
import kinformer.parts.feature_maps
import kinformer.parts.patterns.blocks
import kinformer.parts.patterns.sequence
import kinformer.parts.positions
import kinformer.parts.projections
import kinformer.parts.relative_positions
import kinformer.parts.scores
import kinformer.stacks.reversible
import kinformer.stacks.sequential
from kinformer.nn import states as states
from kinformer.nn.modules import BidirectionalLayer as BidirectionalLayer
from kinformer.nn.modules import CausalLayer as CausalLayer
from kinformer.nn.modules import layer as layer
from kinformer.nn.modules import layers as layers
from kinformer.nn.modules import stack as stack
from kinformer.nn.multihead_attention import MultiheadAttention as MultiheadAttention
from kinformer.nn.multihead_attention import attention as attention

DecoderModel = kinformer.models.decoder.Decoder.Config
EncoderModel = kinformer.models.encoder.Encoder.Config
EncoderDecoderModel = kinformer.models.encoder.EncoderDecoder.Config
TokenInput = kinformer.inputs.tokens.Tokens.Config
LookupEmbedding = kinformer.inputs.tokens.Lookup.Config
AdaptiveEmbedding = kinformer.inputs.tokens.AdaptiveEmbedding.Config
ExtraTokens = kinformer.inputs.tokens.ExtraTokens.Config
Sentences = kinformer.inputs.tokens.Sentences.Config
PixelInput = kinformer.inputs.images.Pixels.Config
PatchInput = kinformer.inputs.images.Patches.Config
TileInput = kinformer.inputs.images.Tiles.Config
StepInput = kinformer.inputs.signals.Steps.Config
ObservationInput = kinformer.inputs.signals.Observations.Config
FrameInput = kinformer.inputs.signals.Frames.Config
ComplexOrderEmbedding = kinformer.parts.positions.ComplexOrder.Config
NoPosition = kinformer.parts.positions.NoPosition.Config
SinusoidalPositions = kinformer.parts.positions.Sinusoidal.Config
LearnedPositions = kinformer.parts.positions.Learned.Config
LearnedPositionsPerLayer = kinformer.parts.positions.LearnedPerLayer.Config
TimingSignal = kinformer.parts.positions.Timing.Config
SequentialStack = kinformer.stacks.sequential.Sequential.Config
StagedStack = kinformer.stacks.sequential.Stages.Config
UniversalStack = kinformer.stacks.sequential.Universal.Config
ACT = kinformer.stacks.sequential.ACT.Config
ReversibleStack = kinformer.stacks.reversible.Reversible.Config
ExitStack = kinformer.adaptive.stack.ExitStack.Config
SoftmaxResponseExit = kinformer.adaptive.rules.SoftmaxResponse.Config
SaturationExit = kinformer.adaptive.rules.Saturation.Config
ClassifierExit = kinformer.adaptive.rules.ExitClassifier.Config
MultinomialExit = kinformer.adaptive.rules.Multinomial.Config
GeometricExit = kinformer.adaptive.rules.Geometric.Config
SequenceMultinomialExit = kinformer.adaptive.rules.SequenceMultinomial.Config
AdaptiveSoftmaxHead = kinformer.heads.language.AdaptiveSoftmax.Config
LanguageModelHead = kinformer.heads.language.LanguageModelHead.Config
ModulusHead = kinformer.heads.language.ModulusHead.Config
SpalmHead = kinformer.heads.language.SpalmHead.Config
MaskedLanguageHead = kinformer.heads.language.MaskedLanguageHead.Config
LogisticMixtureHead = kinformer.heads.images.LogisticMixture.Config
MaskedPatchesHead = kinformer.heads.images.MaskedPatchesHead.Config
PatchColoursHead = kinformer.heads.images.PatchColoursHead.Config
CTCHead = kinformer.heads.classes.CTCHead.Config
DiscreteActionsHead = kinformer.heads.classes.DiscreteActions.Config
ContinuousActionsHead = kinformer.heads.classes.ContinuousActions.Config
PolicyAndValueHead = kinformer.heads.classes.PolicyAndValue.Config
ClassificationHead = kinformer.heads.classes.ClassificationHead.Config
LinearClassificationHead = kinformer.heads.classes.LinearClassificationHead.Config
DistilledHead = kinformer.heads.classes.DistilledHead.Config
PooledHead = kinformer.heads.classes.PooledHead.Config
TokenClassificationHead = kinformer.heads.classes.TokenClassificationHead.Config
SpanHead = kinformer.heads.classes.SpanHead
EncoderLayer = kinformer.blocks.layer.EncoderLayer.Config
MacaronEncoderLayer = kinformer.blocks.layer.MacaronEncoderLayer.Config
ParallelEncoderLayer = kinformer.blocks.layer.ParallelEncoderLayer.Config
BareLayer = kinformer.blocks.layer.BareLayer.Config
DecoderLayer = kinformer.blocks.layer.DecoderLayer.Config
MacaronLayer = kinformer.blocks.layer.MacaronLayer.Config
ParallelLayer = kinformer.blocks.layer.ParallelLayer.Config
BareDecoderLayer = kinformer.blocks.layer.BareDecoderLayer.Config
ShaRnnEncoderLayer = kinformer.blocks.layer.ShaRnnEncoderLayer.Config
ShaRnnLayer = kinformer.blocks.layer.ShaRnnLayer.Config
BidirectionalAttention = kinformer.mixers.bidirectional.BidirectionalAttention.Config
BidirectionalLinearAttention = kinformer.mixers.encoders.BidirectionalLinear.Config
EtcAttention = kinformer.mixers.encoders.EtcAttention.Config
LinformerAttention = kinformer.mixers.encoders.Linformer.Config
StarAttention = kinformer.mixers.encoders.StarAttention.Config
WindowAttention = kinformer.mixers.encoders.WindowAttention.Config
BidirectionalLSHAttention = kinformer.mixers.buckets.BidirectionalLSH.Config
LSHAttention = kinformer.mixers.buckets.LSHAttention.Config
RoutingAttention = kinformer.mixers.buckets.RoutingAttention.Config
BidirectionalLSTM = kinformer.mixers.recurrent.BidirectionalLSTM.Config
RWKV7TimeMix = kinformer.mixers.recurrent.RWKV7.Config
LSTM = kinformer.mixers.recurrent.LSTM.Config
OuterProduct = kinformer.mixers.recurrent.OuterProduct.Config
BidirectionalTensorizedAttention = kinformer.mixers.tensorized.BidirectionalTensorized.Config
TensorizedAttention = kinformer.mixers.tensorized.TensorizedAttention.Config
TensorizedMemoryAttention = kinformer.mixers.tensorized.TensorizedMemory.Config
SinkhornAttention = kinformer.mixers.sinkhorn.SinkhornAttention.Config
CausalSinkhornAttention = kinformer.mixers.sinkhorn.CausalSinkhornAttention.Config
GatedConvolution = kinformer.mixers.convolutions.GatedConvolution.Config
SeparableConvolution = kinformer.mixers.convolutions.SeparableConvolution.Config
SeparableTransition = kinformer.mixers.convolutions.SeparableTransition
ChannelMix = kinformer.mixers.convolutions.ChannelMix
MultiHeadGlobalProjection = kinformer.parts.projections.MultiHeadGlobal.Config
MultiHeadProjection = kinformer.parts.projections.MultiHead.Config
GroupedProjection = kinformer.parts.projections.Grouped.Config
NormalisedProjection = kinformer.parts.projections.Normalised.Config
ConvolvedProjection = kinformer.parts.projections.Convolved.Config
ComplexProjection = kinformer.parts.projections.Complex.Config
SharedQKProjection = kinformer.parts.projections.SharedQK.Config
KVShiftProjection = kinformer.parts.projections.KVShift.Config
PreNorm = kinformer.blocks.residual.PreNorm.Config
PostNorm = kinformer.blocks.residual.PostNorm.Config
ResPostNorm = kinformer.blocks.residual.ResPostNorm.Config
SandwichNorm = kinformer.blocks.residual.Sandwich.Config
ReorderedResidual = kinformer.blocks.residual.Reordered.Config
GatedResidual = kinformer.blocks.residual.Gated.Config
LayerNorm = kinformer.blocks.residual.LayerNorm
RMSNorm = kinformer.blocks.residual.RMSNorm
MLP = kinformer.blocks.feed_forward.MLP.Config
SwiGLU = kinformer.blocks.feed_forward.SwiGLU.Config
GeGLU = kinformer.blocks.feed_forward.GeGLU.Config
Boom = kinformer.blocks.feed_forward.Boom.Config
ProductKeys = kinformer.blocks.feed_forward.ProductKeys.Config
Experts = kinformer.blocks.feed_forward.Experts.Config
SoftmaxAttention = kinformer.mixers.softmax.SoftmaxAttention.Config
SegmentMemoryAttention = kinformer.mixers.memory.SegmentMemory.Config
MemorizingAttention = kinformer.mixers.memory.Memorizing.Config
SingleHeadAttention = kinformer.mixers.memory.SingleHead.Config
CompressiveAttention = kinformer.mixers.compressive.Compressive.Config
PoolCompression = kinformer.mixers.compressive.Pool.Config
ConvolutionCompression = kinformer.mixers.compressive.Convolution.Config
DilatedCompression = kinformer.mixers.compressive.DilatedConvolution.Config
MostUsedCompression = kinformer.mixers.compressive.MostUsed.Config
ChosenBlocks = kinformer.mixers.chosen_blocks.ChosenBlocks.Config
LinearAttention = kinformer.mixers.linear.LinearAttention.Config
CrossAttention = kinformer.mixers.cross.CrossAttention.Config
LinearCrossAttention = kinformer.mixers.cross.LinearCrossAttention.Config
LinformerCrossAttention = kinformer.mixers.cross.LinformerCrossAttention.Config
PathAttention = kinformer.mixers.path.PathAttention.Config
LatentAttention = kinformer.mixers.latent.LatentAttention.Config
IndexedAttention = kinformer.mixers.latent.IndexedAttention.Config
TTTLinear = kinformer.mixers.ttt.TTTLinear.Config
RotaryPositions = kinformer.parts.relative_positions.Rope.Config
ShawPositions = kinformer.parts.relative_positions.Shaw.Config
TransformerXLPositions = kinformer.parts.relative_positions.TransformerXL.Config
T5Bias = kinformer.parts.relative_positions.T5.Config
AlibiBias = kinformer.parts.relative_positions.Alibi.Config
DistanceAwareScaling = kinformer.parts.relative_positions.DistanceAware.Config
DistanceKeys = kinformer.parts.relative_positions.DistanceKeys.Config
FullPattern = kinformer.parts.patterns.sequence.Full.Config
CausalPattern = kinformer.parts.patterns.sequence.Causal.Config
LocalPattern = kinformer.parts.patterns.sequence.Local.Config
SinksPattern = kinformer.parts.patterns.sequence.Sinks.Config
DilatedPattern = kinformer.parts.patterns.sequence.Dilated.Config
ColumnsPattern = kinformer.parts.patterns.sequence.Columns.Config
StridedPattern = kinformer.parts.patterns.sequence.Strided
BlocksPattern = kinformer.parts.patterns.sequence.Blocks.Config
SegmentsPattern = kinformer.parts.patterns.sequence.Segments.Config
SummariesPattern = kinformer.parts.patterns.sequence.Summaries.Config
FixedPattern = kinformer.parts.patterns.sequence.Fixed
GlobalTokensPattern = kinformer.parts.patterns.sequence.GlobalTokens.Config
BlockwisePattern = kinformer.parts.patterns.sequence.Blockwise.Config
DocumentsPattern = kinformer.parts.patterns.sequence.Documents.Config
PerHeadPattern = kinformer.parts.patterns.sequence.PerHead.Config
WindowPattern = kinformer.parts.patterns.sequence.Window
UnionPattern = kinformer.parts.patterns.sequence.Union
IntersectionPattern = kinformer.parts.patterns.sequence.Intersection
ComplementPattern = kinformer.parts.patterns.sequence.Complement
RandomBlocksPattern = kinformer.parts.patterns.blocks.RandomBlocks.Config
BigBirdPattern = kinformer.parts.patterns.blocks.BigBird.Config
Image1DPattern = kinformer.parts.patterns.blocks.Image1D
Image2DPattern = kinformer.parts.patterns.blocks.Image2D.Config
ScaledDotScore = kinformer.parts.scores.ScaledDot.Config
DotScore = kinformer.parts.scores.Dot.Config
BilinearScore = kinformer.parts.scores.Bilinear.Config
CappedScore = kinformer.parts.scores.Capped.Config
SinkLogitScore = kinformer.parts.scores.SinkLogit.Config
AdditiveScore = kinformer.parts.scores.Additive.Config
ModulusScore = kinformer.parts.scores.Modulus.Config
SoftSpan = kinformer.parts.scores.SoftSpan.Config
DynamicSpan = kinformer.parts.scores.DynamicSpan.Config
EluFeatures = kinformer.parts.feature_maps.Elu.Config
ReluFeatures = kinformer.parts.feature_maps.Relu.Config
DpfpFeatures = kinformer.parts.feature_maps.Dpfp.Config
QuadraticFeatures = kinformer.parts.feature_maps.Quadratic.Config
IdentityFeatures = kinformer.parts.feature_maps.Identity.Config
UnitFeatures = kinformer.parts.feature_maps.Unit.Config
SumNormalisedFeatures = kinformer.parts.feature_maps.SumNormalised.Config
FavorFeatures = kinformer.parts.feature_maps.Favor.Config
RandomFourierFeatures = kinformer.parts.feature_maps.RandomFourier.Config
FixedDecay = kinformer.parts.decays.Fixed.Config
SigmoidDecay = kinformer.parts.decays.Sigmoid.Config
SoftplusDecay = kinformer.parts.decays.Softplus.Config
LowRankDecay = kinformer.parts.decays.LowRank.Config
SoftplusChannelsDecay = kinformer.parts.decays.SoftplusChannels.Config
