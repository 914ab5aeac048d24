"""Pre- and post-norm layers against PyTorch's own Transformer layer, values and gradients."""

import pytest
import torch
from torch import nn

from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.residual import PostNorm, PreNorm
from kinformer.core.contract import Chunk
from kinformer.family.build import build
from kinformer.mixers.softmax import SoftmaxAttention

NAMES = {
    "self_attn.in_proj_weight": "mixer.projection.qkv.weight",
    "self_attn.in_proj_bias": "mixer.projection.qkv.bias",
    "self_attn.out_proj.weight": "mixer.out.weight",
    "self_attn.out_proj.bias": "mixer.out.bias",
    "linear1.weight": "feed_forward.up.weight",
    "linear1.bias": "feed_forward.up.bias",
    "linear2.weight": "feed_forward.down.weight",
    "linear2.bias": "feed_forward.down.bias",
    "norm1.weight": "mixer_residual.norm.weight",
    "norm1.bias": "mixer_residual.norm.bias",
    "norm2.weight": "feed_forward_residual.norm.weight",
    "norm2.bias": "feed_forward_residual.norm.bias",
}


@pytest.mark.parametrize("residual", [PreNorm.Config(), PostNorm.Config()])
def test_a_layer_is_that_of_pytorch(residual):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, batch_first=True, norm_first=residual.kind == "pre", dtype=torch.float64
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    config = DecoderLayer.Config(
        mixer=SoftmaxAttention.Config(num_heads=3),
        feed_forward=MLP.Config(hidden_dim=20, activation="relu"),
        residual=residual,
    )
    ours = config.build(12).double()
    ours.load_state_dict({NAMES[name]: weight for name, weight in theirs.state_dict().items()})
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    want = theirs(x, src_mask=mask, is_causal=True)
    got, _ = ours(Chunk(x), ours.initial_state(2))
    assert (got - want).abs().max() < 1e-12
    for y in (want, got):
        y.square().sum().backward()
    for name, parameter in theirs.named_parameters():
        assert (ours.get_parameter(NAMES[name]).grad - parameter.grad).abs().max() < 1e-10, name


def test_the_original_decoder_scales_embeddings_and_ends_with_its_last_layers_norm():
    model = build("post-ln", "tiny", 23)
    tokens = torch.randint(23, (2, 9))
    entered = []
    model.stack.layers[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0].x))
    hidden, _, _ = model.hidden(tokens)
    positions = torch.arange(9).expand(2, 9)
    embedded = torch.nn.functional.embedding(tokens, model.input.embedding.weight)
    assert torch.equal(entered[0], embedded * 32**0.5 + model.position.embed(positions))
    assert hidden.mean(-1).abs().max() < 1e-5 and (hidden.var(-1, unbiased=False) - 1).abs().max() < 1e-3


def test_xavier_weights_have_the_variance_of_their_shape():
    torch.manual_seed(0)
    model = build("post-ln", "small", 256)
    layer = model.stack.layers[0]
    for linear in (layer.mixer.projection.qkv, layer.mixer.out, layer.feed_forward.up, layer.feed_forward.down):
        assert float(linear.weight.detach().var()) == pytest.approx(2 / sum(linear.weight.shape), rel=0.05)
        assert not linear.bias.any()
    assert float(model.input.embedding.weight.detach().std()) == pytest.approx(256**-0.5, rel=0.05)
