"""The interface of PyTorch's multi-head attention around a member's mixer."""

import sys
import unittest
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kinformer.nn import MultiheadAttention
from kinformer.runtime.errors import KinformerError

DIM, HEADS = 16, 4


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def torch_module(**options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(DIM, HEADS, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


@pytest.mark.parametrize("batch_first", [True, False])
def test_exact_mixers_give_the_outputs_of_pytorchs_module(batch_first):
    module = torch_module(batch_first=batch_first)
    both = MultiheadAttention.from_torch(module).eval()
    causal = MultiheadAttention.from_torch(module, "softmax").eval()
    x = randn(3, 7, DIM) if batch_first else randn(7, 3, DIM)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    got, weights = both(x, x, x, key_padding_mask=padding)
    want, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    valid = ~padding if batch_first else ~padding.T
    assert weights is None
    assert torch.allclose(got[valid], want[valid], atol=1e-6)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    want, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    for options in ({}, {"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}, {"is_causal": True}):
        assert torch.allclose(causal(x, x, x, **options)[0], want, atol=1e-6)
    one = x[0] if batch_first else x[:, 0]
    assert torch.allclose(both(one, one, one)[0], module(one, one, one, need_weights=False)[0], atol=1e-6)


@pytest.mark.parametrize("hides", [-torch.inf, -1e9, -1e4, torch.finfo(torch.float16).min])
@pytest.mark.parametrize("mixer", ["bidirectional", "gpt"])
def test_numbers_that_hide_are_masks(mixer, hides):
    module = torch_module(batch_first=True)
    built = MultiheadAttention.from_torch(module, mixer)
    x, padding = randn(2, 7, DIM), torch.arange(7) >= torch.tensor([[7], [5]])
    floats = torch.zeros(2, 7).masked_fill(padding, hides)
    causal = torch.full((7, 7), hides).triu(1) if mixer == "gpt" else None
    want, _ = module(x, x, x, key_padding_mask=floats, attn_mask=causal)
    got, _ = built(x, x, x, key_padding_mask=floats, attn_mask=causal)
    assert torch.allclose(got[~padding], want[~padding], atol=1e-6)
    assert not got[padding].any()
    cross = MultiheadAttention(DIM, HEADS, batch_first=True, mixer="cross").eval()
    assert torch.equal(cross(x, x, x, key_padding_mask=floats)[0], cross(x, x, x, key_padding_mask=padding)[0])


def test_from_torch_takes_over_mode_and_frozen_weights():
    module = torch_module(dropout=0.5)
    module.in_proj_weight.requires_grad_(False)
    built = MultiheadAttention.from_torch(module)
    x = randn(7, 3, DIM)
    assert torch.equal(built(x, x, x)[0], built(x, x, x)[0])
    assert not built.training
    assert MultiheadAttention.from_torch(module.train()).training
    assert [name for name, weight in built.named_parameters() if not weight.requires_grad] == [
        "layer.inner.projection.qkv.weight"
    ]


def test_it_stands_in_the_layers_of_a_built_encoder():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    for layer in model.layers:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    x, padding = randn(2, 9, DIM), torch.arange(9) >= torch.tensor([[9], [5]])
    want = model(x, src_key_padding_mask=padding)
    assert torch.allclose(model.eval()(x, src_key_padding_mask=padding), want, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(model(x, src_key_padding_mask=padding), want, atol=1e-6)


@pytest.mark.parametrize("mixer", ["longformer", "local", "gated-deltanet", "bert"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_it_stands_in_pytorchs_layers(mixer, norm_first):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True, norm_first=norm_first)
    layer.self_attn = MultiheadAttention(DIM, HEADS, batch_first=True, mixer=mixer)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = randn(2, 6, DIM)
    y = model(x)
    y.sum().backward()
    of_global_tokens = "of_global"  # which there are none of
    assert all(weight.grad is not None for name, weight in model.named_parameters() if of_global_tokens not in name)
    model.eval()
    with torch.no_grad():
        padded = model(torch.cat([x, x], 1), src_key_padding_mask=torch.arange(12).expand(2, -1) >= 6)
        assert torch.allclose(padded[:, :6], model(x), atol=1e-5)


def test_cross_attention_is_that_of_a_decoder_layer():
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 32, batch_first=True)
    layer.self_attn = MultiheadAttention(DIM, HEADS, batch_first=True, mixer="gpt")
    layer.multihead_attn = MultiheadAttention(DIM, HEADS, batch_first=True, mixer="cross")
    x, memory = randn(2, 6, DIM), randn(2, 9, DIM, seed=2)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.arange(9).expand(2, -1) >= 7
    layer.eval()
    y = layer(x, memory, tgt_mask=mask, memory_key_padding_mask=padding)
    assert y.shape == x.shape
    assert torch.allclose(layer(x, memory[:, :7], tgt_mask=mask), y, atol=1e-6)


def test_a_whole_transformer_of_pytorch_is_carried_over():
    torch.manual_seed(0)
    model = nn.Transformer(DIM, HEADS, 2, 2, 32, dropout=0.0, batch_first=True).eval()
    source, target = randn(2, 9, DIM), randn(2, 6, DIM, seed=2)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    options = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(6),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    want = model(source, target, **options)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for block in [*model.encoder.layers, *model.decoder.layers]:
        block.self_attn = MultiheadAttention.from_torch(
            block.self_attn, "gpt" if hasattr(block, "multihead_attn") else "bidirectional"
        )
    for block in model.decoder.layers:
        block.multihead_attn = MultiheadAttention.from_torch(block.multihead_attn, "cross")
    assert torch.allclose(model(source, target, **options), want, atol=1e-5)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_state_dict(weights)  # under PyTorch's names
    assert torch.allclose(model(source, target, **options), want, atol=1e-5)
    ours = model.state_dict()
    assert not [name for name in ours if "in_proj" in name]
    model.load_state_dict(ours)
    assert torch.allclose(model(source, target, **options), want, atol=1e-5)


@pytest.mark.parametrize("width", [None, 8])
def test_cross_attention_takes_over_weights(width):
    module = torch_module(batch_first=True, kdim=width, vdim=width)
    module.out_proj.weight.requires_grad_(False)
    built = MultiheadAttention.from_torch(module, "cross")
    x, source = randn(2, 5, DIM), randn(2, 7, width or DIM, seed=2)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    want, _ = module(x, source, source, key_padding_mask=padding)
    assert torch.allclose(built(x, source, source, key_padding_mask=padding)[0], want, atol=1e-6)
    assert [name for name, weight in built.named_parameters() if not weight.requires_grad] == ["layer.inner.out.weight"]
    assert (built.kdim, built.vdim, built.head_dim) == (module.kdim, module.vdim, module.head_dim)


def test_views_of_one_tensor_are_self_attention():
    module = torch_module()
    built = MultiheadAttention.from_torch(module)
    x = randn(2, 7, DIM).requires_grad_()
    got, _ = built(x[0], x[0], x[0])
    assert torch.allclose(got, module(x[0], x[0], x[0])[0], atol=1e-6)
    (ours,) = torch.autograd.grad(got.sum(), x)
    (theirs,) = torch.autograd.grad(module(x[0], x[0], x[0])[0].sum(), x)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert built(x.detach(), x.detach(), x.detach())[1] is None
    for other in (x[0].detach(), x[1], x[0].clone()):
        with pytest.raises(KinformerError, match="attends within one sequence"):
            built(x[0], other, other)
    nothing = torch.zeros(7, 7, dtype=torch.bool)
    assert torch.equal(built(x[0], x[0], x[0], attn_mask=nothing)[0], got)


def test_pytorchs_own_inputs_give_its_outputs_or_a_sentence(monkeypatch):
    # PyTorch's list of inputs imports a package of its tests, from which it takes nothing but the base class.
    monkeypatch.setitem(sys.modules, "expecttest", SimpleNamespace(TestCase=unittest.TestCase))
    modules = pytest.importorskip("torch.testing._internal.common_modules")
    info = next(item for item in modules.module_db if item.module_cls is nn.MultiheadAttention)
    equal = refused = 0
    for training in (False, True):
        for case in info.module_inputs_func(info, "cpu", torch.float64, True, training):
            if case.forward_input is None:
                continue
            module = nn.MultiheadAttention(
                *case.constructor_input.args, **case.constructor_input.kwargs, dtype=torch.float64
            ).train(training)
            query, key, value = case.forward_input.args
            options = {**case.forward_input.kwargs, "need_weights": False}
            del options["attn_mask"]  # random numbers, which are refused
            try:
                built = MultiheadAttention.from_torch(module, "cross")
                with pytest.raises(KinformerError, match="makes both of one sequence"):
                    built(query, key, value, **options)
                got, _ = built(query, key, key, **options)
            except KinformerError as error:
                assert str(error).endswith(".") and "\n" not in str(error)
                refused += 1
                continue
            equal += 1
            assert torch.allclose(got, module(query, key, key, **options)[0], atol=1e-9)
    assert equal >= 16 and equal + refused > 100


def _called(mixer, **options):
    return MultiheadAttention(DIM, HEADS, batch_first=True, mixer=mixer)(*[randn(2, 5, DIM)] * 3, **options)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (
                partial(_called, mixer, key_padding_mask=torch.full((2, 5), -2.0)),
                "key_padding_mask holds -2, but no mixer",
            )
            for mixer in ("bidirectional", "gpt", "cross", "gated-deltanet")
        ),
        (lambda: _called("gpt", key_padding_mask=torch.zeros(2, 5).long()), "key_padding_mask is torch.int64"),
        (lambda: _called("gpt", attn_mask=CAUSAL + 0.5), "attn_mask holds 0.5, but no mixer"),
        (lambda: _called("gpt", attn_mask=CAUSAL + 0.5, is_causal=True), "attn_mask holds 0.5, but no mixer"),
        (lambda: _called("gpt", attn_mask=(CAUSAL - 1).repeat(8, 1, 1)), "attn_mask holds -1, but no mixer"),
        (lambda: _called("gpt", attn_mask=CAUSAL.T, is_causal=True), "give a causal mask or none"),
        (lambda: _called("gpt", attn_mask=torch.ones(5, 5).long().triu(1)), "attn_mask is torch.int64"),
        (lambda: MultiheadAttention.from_torch(torch_module(add_zero_attn=True)), "it adds a key"),
        (lambda: MultiheadAttention.from_torch(torch_module(), "transformer-xl"), "projections without a bias"),
        (lambda: MultiheadAttention(DIM, HEADS, add_bias_kv=True), "add_bias_kv and add_zero_attn"),
        (lambda: MultiheadAttention(DIM, HEADS, kdim=8), "keys and values are made of one sequence"),
        (lambda: MultiheadAttention(DIM, HEADS, mixer="longfomer"), "did you mean 'longformer'"),
        (lambda: MultiheadAttention.from_torch(torch_module(), "gated-deltanet"), "has other projections"),
        (lambda: MultiheadAttention.from_torch(torch_module(kdim=8, vdim=6), "cross"), "made of one sequence"),
        (lambda: MultiheadAttention.from_torch(torch_module(kdim=8, vdim=8)), "made of one sequence"),
        (lambda: MultiheadAttention(DIM, HEADS)(*[randn(5, 2, DIM)] * 3, need_weights=True), "need_weights"),
        (lambda: MultiheadAttention(DIM, HEADS)(*[randn(5, 2, DIM)] * 3, is_causal=True), "is not causal"),
        (
            lambda: MultiheadAttention(DIM, HEADS, mixer="gpt")(
                *[randn(5, 2, DIM)] * 3, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(2)
            ),
            "give a causal mask or none",
        ),
        (lambda: MultiheadAttention(DIM, HEADS)(randn(5, 2, DIM), *[randn(6, 2, DIM)] * 2), 'take mixer="cross"'),
    ],
)
def test_what_it_cannot_do_is_one_sentence(make, message):
    with pytest.raises(KinformerError) as error:
        make()
    assert message in str(error.value)
