from kinformer.nn import states as states
from kinformer.nn.attention import attention as attention
from kinformer.nn.bidirectional import BidirectionalLayer as BidirectionalLayer
from kinformer.nn.blocks import *  # noqa: F403
from kinformer.nn.causal import CausalLayer as CausalLayer
from kinformer.nn.factory import layer as layer
from kinformer.nn.factory import layers as layers
from kinformer.nn.factory import stack as stack
from kinformer.nn.multihead_attention import MultiheadAttention as MultiheadAttention
from kinformer.nn.parts import *  # noqa: F403
