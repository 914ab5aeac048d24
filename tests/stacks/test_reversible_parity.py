"""The reversible stack against transformers' Reformer, whose backward pass makes inputs of outputs too."""

import pytest
import torch

from kinformer.blocks.layer import DecoderLayer
from kinformer.core.contract import Chunk
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.stacks.reversible import Reversible


def test_it_is_that_of_transformers():
    """Outputs and gradients of Hugging Face's Reformer layers around the same attention and feed-forward."""
    reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    torch.manual_seed(0)
    config = DecoderLayer.Config(mixer=SoftmaxAttention.Config(num_heads=2))
    stack = Reversible.Config().build([config.build(8).double() for _ in range(3)]).train()

    class Attention(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states, **_):
            mixer = self.layer.mixer
            y, _ = mixer(Chunk(self.layer.mixer_residual(hidden_states)), mixer.initial_state(2, dtype=torch.float64))
            return reformer.AttentionOutput(hidden_states=y, attention_probs=None, buckets=None)

    class Layer(reformer.ReformerLayer):
        def __init__(self, layer):
            torch.nn.Module.__init__(self)
            self.attention = Attention(layer)
            self.feed_forward = torch.nn.Sequential(layer.feed_forward_residual, layer.feed_forward)

    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    theirs = [Layer(layer).train() for layer in stack.layers]
    found = []
    for run in (
        lambda: stack.absorb(Chunk(x), stack.initial_state(2, dtype=torch.float64), lambda x, _: x)[0],
        lambda: reformer._ReversibleFunction.apply(torch.cat([x, x], -1), theirs, *[None] * 5, False, *[None] * 3),
    ):
        stack.zero_grad()
        x.grad = None
        with torch.random.fork_rng():
            y = run()
            (y * torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)).sum().backward()
        found.append([y.detach(), x.grad, *(weight.grad for weight in stack.parameters())])
    for ours, other in zip(*found, strict=True):
        assert (ours - other).abs().max() < 1e-12
