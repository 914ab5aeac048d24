"""The gated short convolution of LFM2: the contract, its formula, its limit, and its place in a decoder.

Parity with the layers of transformers: tests/interop/test_decoders.py."""

import torch

import kinformer
from kinformer.core.contract import Chunk
from kinformer.mixers.convolutions import GatedConvolution
from kinformer.testing import verify_mixer


def built(width=3):
    torch.manual_seed(0)
    return GatedConvolution.Config(width=width).build(8).double()


def test_it_keeps_the_contract():
    report = verify_mixer(lambda: GatedConvolution.Config().build(8), dim=8)
    assert report.skipped.keys() == {"implementations"} and "compile" in report.passed


def test_it_is_its_formula():
    mixer, x = built(), torch.randn(2, 7, 8, dtype=torch.float64)
    b, c, v = (x @ mixer.products.weight.T).chunk(3, -1)
    u, taps = torch.cat([torch.zeros(2, 2, 8, dtype=x.dtype), b * v], 1), mixer.convolution.weight[:, 0]
    mixed = taps[0] * u[:, 2:] + taps[1] * u[:, 1:-1] + taps[2] * u[:, :-2]
    want = (c * mixed) @ mixer.out.weight.T
    got = mixer(Chunk(x), mixer.initial_state(2, dtype=x.dtype))[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_without_weights_of_earlier_tokens_it_is_a_feed_forward_of_each_token():
    mixer, x = built(), torch.randn(1, 5, 8, dtype=torch.float64)

    def alone():
        return torch.cat(
            [mixer(Chunk(row[None]), mixer.initial_state(1, dtype=x.dtype))[0] for row in x[0].split(1)], 1
        )

    def whole():
        return mixer(Chunk(x), mixer.initial_state(1, dtype=x.dtype))[0]

    assert not torch.allclose(alone(), whole())
    with torch.no_grad():
        mixer.convolution.weight[1:] = 0
    torch.testing.assert_close(alone(), whole())


def test_it_is_a_layer_and_a_mixer_of_a_decoder():
    layer = kinformer.layer("gated_convolution", 16, width=4)
    assert layer(torch.randn(2, 5, 16)).shape == (2, 5, 16) and "width=4" in repr(layer)
    model = kinformer.build("gpt", recipe="tiny", set={"layers.0.mixer": {"kind": "gated_convolution"}})
    logits, state = model(torch.zeros(1, 3, dtype=torch.int64))
    assert logits.shape[:2] == (1, 3) and state is not None
