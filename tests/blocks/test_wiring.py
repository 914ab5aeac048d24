"""Pre- and post-norm layers against PyTorch's own Transformer layer, values and gradients."""

import pytest
import torch
from torch import nn

from kinformer.blocks.feed_forward import MLP, GeGLU
from kinformer.blocks.layer import DecoderLayer, ParallelEncoderLayer, ParallelLayer
from kinformer.blocks.residual import LayerNorm, PostNorm, PreNorm, Sandwich
from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.family.build import build, configure
from kinformer.heads.language import LanguageModelHead
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.cross import CrossAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_MODEL_CHECKS, EncoderModelSubject

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


def random_layer(config):
    torch.manual_seed(0)
    layer = config.build(12).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer, torch.randn(2, 7, 12, dtype=torch.float64)


def test_parallel_sublayers_read_the_same_stream():
    layer, x = random_layer(ParallelLayer.Config(mixer=SoftmaxAttention.Config(num_heads=3)))
    mixed, _ = layer.mixer(Chunk(layer.mixer_residual.norm(x)), layer.mixer.initial_state(2))
    want = x + mixed + layer.feed_forward(layer.feed_forward_residual.norm(x))
    y, _ = layer(Chunk(x), layer.initial_state(2))
    assert (y - want).abs().max() < 1e-12
    mask = torch.rand(2, 7) < 0.5
    some, _ = layer(Chunk(x), layer.initial_state(2), mask)
    assert torch.equal(some, torch.where(mask[..., None], y, x))


def test_parallel_sublayers_of_an_encoder_read_the_same_stream():
    layer, x = random_layer(ParallelEncoderLayer.Config(mixer=BidirectionalAttention.Config(num_heads=3)))
    text = SequenceContext(torch.rand(2, 7) < 0.8)
    mixed = layer.mixer(layer.mixer_residual.norm(x), text)
    want = x + mixed + layer.feed_forward(layer.feed_forward_residual.norm(x))
    y, mask = layer(x, text), torch.rand(2, 7) < 0.5
    assert (y - want).abs().max() < 1e-12
    assert torch.equal(layer(x, text, mask), torch.where(mask[..., None], y, x))


@pytest.mark.parametrize("check", ENCODER_MODEL_CHECKS)
def test_an_encoder_of_parallel_layers_keeps_the_laws(check):
    config = configure("bert", "tiny", 61, {"layers.*": {"kind": "parallel", "mixer": "bidirectional"}})
    ENCODER_MODEL_CHECKS[check](EncoderModelSubject(config.build, 61, time=17))


def test_parallel_refuses_what_is_not_parallel():
    mixer = SoftmaxAttention.Config(num_heads=3)
    with pytest.raises(KinformerError, match="changes; use pre, res_post"):
        ParallelLayer.Config(mixer=mixer, residual=PostNorm.Config()).build(12)
    with pytest.raises(KinformerError, match="the residual 'post' changes; use pre"):
        build("bert", "tiny", 23, {"layers.*": {"kind": "parallel", "mixer": "bidirectional", "residual": "post"}})
    with pytest.raises(KinformerError, match="does not take further_mixers"):
        ParallelLayer.Config(mixer=mixer, further_mixers=(CrossAttention.Config(),))
    with pytest.raises(KinformerError, match="has one step"):
        build("gpt", "tiny", 23, {"layers.*": {"kind": "parallel", "mixer": "softmax"}, "stack": "reversible"})


def test_a_sandwich_has_a_norm_on_either_side():
    config = DecoderLayer.Config(mixer=SoftmaxAttention.Config(num_heads=3), residual=Sandwich.Config())
    layer, x = random_layer(config)
    residual = layer.mixer_residual
    mixed, _ = layer.mixer(Chunk(residual.inner_norm(x)), layer.mixer.initial_state(2))
    x1 = x + residual.norm(mixed)
    residual = layer.feed_forward_residual
    want = x1 + residual.norm(layer.feed_forward(residual.inner_norm(x1)))
    assert (layer(Chunk(x), layer.initial_state(2))[0] - want).abs().max() < 1e-12


@pytest.mark.parametrize(("activation", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_geglu(activation, approximate):
    layer, x = random_layer(GeGLU.Config(hidden_dim=20, activation=activation))
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    want = layer.down(nn.functional.gelu(gate, approximate=approximate) * up)
    assert (layer(x) - want).abs().max() < 1e-12


def test_logits_are_scaled_and_capped_and_embeddings_normed():
    torch.manual_seed(0)
    plain = build("gpt", "tiny", 23, {"head.tied": False})
    tokens = torch.randint(23, (2, 9))
    capped = plain.config.replace(head=LanguageModelHead.Config(tied=False, softcap=0.3)).build()
    weights = {name.replace("head.", "head.inner."): weight for name, weight in plain.state_dict().items()}
    capped.load_state_dict(weights)
    with torch.no_grad():
        assert (capped(tokens)[0] - 0.3 * (plain(tokens)[0] / 0.3).tanh()).abs().max() < 1e-6
        capped.head.scale = 0.2
        assert (capped(tokens)[0] - 0.3 * (plain(tokens)[0] * 0.2 / 0.3).tanh()).abs().max() < 1e-6
        scaled = plain.config.replace(head=LanguageModelHead.Config(tied=False, scale=0.2)).build()
        scaled.load_state_dict(weights)
        assert (scaled(tokens)[0] - 0.2 * plain(tokens)[0]).abs().max() < 1e-6
    normed = plain.config.replace(embedding_norm=LayerNorm()).build()
    entered = []
    normed.stack.layers[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0].x))
    normed(tokens)
    assert entered[0].mean(-1).abs().max() < 1e-6
    with pytest.raises(KinformerError, match="softcap must be above 0"):
        LanguageModelHead.Config(softcap=0.0)


@pytest.mark.parametrize("kind", ["parallel", "macaron"])
def test_another_kind_of_layer_keeps_its_parts(kind):
    """``layers.*.kind`` changes the layer alone: mixer, feed-forward and norm stay what they were."""
    plain = configure("gpt", recipe="tiny", set={"layers.*.feed_forward.hidden_dim": 24})
    changed = configure("gpt", recipe="tiny", set={"layers.*.feed_forward.hidden_dim": 24, "layers.*.kind": kind})
    for before, after in zip(plain.layers, changed.layers, strict=True):
        assert after.kind == kind
        assert (after.mixer, after.feed_forward, after.norm) == (before.mixer, before.feed_forward, before.norm)
