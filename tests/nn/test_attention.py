"""Attention of q, k and v by named parts, beside PyTorch's own."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kinformer.nn import AlibiBias, BilinearScore, FullPattern, LocalPattern, RotaryPositions, T5Bias, attention
from kinformer.runtime.errors import KinformerError


def qkv(time=24, slots=24, heads=4, kv_heads=4, width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, time, width), (2, kv_heads, slots, width), (2, kv_heads, slots, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_plain_attention_is_that_of_pytorch():
    q, k, v = qkv(kv_heads=2)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(attention(q, k, v), want)
    assert torch.allclose(attention(q, k, v, pattern=None), scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert torch.allclose(attention(q, k, v, pattern="full"), attention(q, k, v, pattern=FullPattern()))
    scaled = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
    assert torch.allclose(attention(q, k, v, scale=0.3), scaled)


@pytest.mark.parametrize("pattern", [LocalPattern(window=5), {"kind": "local", "window": 5}])
def test_a_window_is_a_mask(pattern):
    q, k, v = qkv()
    distance = torch.arange(24)[:, None] - torch.arange(24)
    want = scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < 5))
    assert torch.allclose(attention(q, k, v, pattern=pattern), want)


@pytest.mark.parametrize("position", ["rope", RotaryPositions(), AlibiBias(), "distance_keys"])
def test_the_last_queries_are_those_of_the_full_sequence(position):
    q, k, v = qkv()
    if position == "distance_keys":
        with pytest.raises(KinformerError, match="has weights, which a function cannot hold"):
            attention(q, k, v, position=position)
        return
    full = attention(q, k, v, position=position)
    assert not torch.allclose(full, attention(q, k, v))
    assert torch.allclose(attention(q[:, :, 20:], k, v, position=position), full[:, :, 20:])


def test_parts_with_weights_are_modules():
    q, k, v = qkv()
    bias = T5Bias().build_heads(32, 4, 8).double()
    score = BilinearScore().build(4, 8).double()
    out = attention(q.requires_grad_(), k, v, position=bias, score=score)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in (*bias.parameters(), *score.parameters()))


def test_padding_hides_keys():
    q, k, v = qkv()
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[:, 20:] = True
    want = attention(q, k[:, :, :20], v[:, :, :20], pattern=None)
    assert torch.allclose(attention(q, k, v, pattern=None, key_padding_mask=padding), want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "locale"}, "did you mean 'local'"),
        ({"pattern": 3}, "pattern: 3 is of the type int"),
        ({"position": "rope", "pattern": None}, "queries and keys do not have an order"),
        ({"position": "sinusoidal"}, "is added to token embeddings"),
        ({"score": "bilinear"}, "has weights"),
    ],
)
def test_wrong_parts_are_one_sentence(options, message):
    with pytest.raises(KinformerError) as error:
        attention(*qkv(), **options)
    assert message in str(error.value)


def test_wrong_tensors_are_one_sentence():
    q, k, v = qkv()
    for arguments, message in (
        ((q[0], k, v), "q is [4, 24, 8], but must be"),
        ((q, k[:, :, :9], v), "expected k and v"),
    ):
        with pytest.raises(KinformerError) as error:
            attention(*arguments)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_padding_mask": torch.zeros(2, 24)}, "key_padding_mask is torch.float32 [2, 24], but must be torch.bool"),
        ({"key_padding_mask": torch.zeros(2, 24).long()}, "key_padding_mask is torch.int64 [2, 24], but must be"),
        ({"key_padding_mask": torch.zeros(2, 9).bool()}, "key_padding_mask is torch.bool [2, 9], but must be"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1, but must be"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0, but must be"),
    ],
)
@pytest.mark.parametrize("pattern", ["causal", None])
def test_wrong_masks_and_probabilities_are_one_sentence(options, message, pattern):
    with pytest.raises(KinformerError) as error:
        attention(*qkv(), pattern=pattern, **options)
    assert message in str(error.value)
