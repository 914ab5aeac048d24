"""Tensorized attention: the contract, its definition as a tensor, and the numbers of its authors' code."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm

import kinformer
from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.residual import PostNorm
from kinformer.core.contract import Chunk
from kinformer.core.encoder import SequenceContext
from kinformer.mixers import tensorized
from kinformer.mixers.tensorized import BidirectionalTensorized, TensorizedAttention
from kinformer.parts.positions import sinusoids
from kinformer.runtime.errors import KinformerError
from kinformer.testing import CHECKS, ENCODER_CHECKS, EncoderMixerSubject, MixerSubject

DIM = 8
SMALL = TensorizedAttention.Config(rank=3, blocks=2, max_length=60)
MIXERS = {"positions": SMALL, "content alone": SMALL.replace(positions=False, blocks=1)}


def made(config, dim=DIM):
    torch.manual_seed(0)
    mixer = config.build(dim).double()
    with torch.no_grad():
        mixer.query_bias.normal_()
    return mixer


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "implementations"])
@pytest.mark.parametrize("name", MIXERS)
def test_contract(name, check):
    CHECKS[check](MixerSubject(lambda: MIXERS[name].build(DIM), dim=DIM))


def tensor_of(mixer, x):
    """T [time, time, time] of one text [time, dim], every element by the definition; nothing is hidden."""
    q, k, v = mixer.qkv(x).chunk(3, -1)
    core, found = mixer.core.mean(0), 0
    keys = [k]
    if mixer.position is not None:
        distance = mixer.config.max_length - 1 - torch.arange(len(x))
        keys.append(mixer.position(tensorized.sinusoids(distance, x.shape[1], 10000.0)))
    for bias, each in zip(mixer.query_bias, keys, strict=True):
        found = found + torch.einsum("r,ir,jr,kr->ijk", core, q + bias, each, v)
    return found


@pytest.mark.parametrize("name", MIXERS)
def test_it_is_the_tensor_with_later_tokens_hidden(name):
    mixer, x = made(MIXERS[name]), torch.randn(2, 13, DIM, dtype=torch.float64)
    weight = mixer.pairs[:, :13, :13]
    index = torch.arange(13)
    seen = (index[:, None, None] >= index[:, None]) & (index[:, None, None] >= index)
    want = torch.stack([torch.einsum("ojk,ijk->io", weight, tensor_of(mixer, row) * seen) for row in x])
    torch.testing.assert_close(mixer(Chunk(x), mixer.initial_state(2, dtype=x.dtype))[0], want, rtol=0, atol=1e-12)


def test_several_blocks_are_one_with_their_mean():
    several = made(SMALL.replace(blocks=3))
    one, x = made(SMALL.replace(blocks=1)), torch.randn(1, 9, DIM, dtype=torch.float64)
    weights = dict(several.state_dict())
    one.load_state_dict(weights | {"core": weights["core"].mean(0, keepdim=True)})
    got, want = (each(Chunk(x), each.initial_state(1, dtype=x.dtype))[0] for each in (one, several))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    one.core.data.copy_(weights["core"][:1])
    assert (one(Chunk(x), one.initial_state(1, dtype=x.dtype))[0] - want).detach().abs().max() > 1e-4


def test_values_of_ones_leave_the_scores_of_attention():
    """Output o picks the slice of the first value and the key o: the causal part of Q K^T / sqrt(rank)."""
    mixer = made(SMALL.replace(positions=False, blocks=1, max_length=DIM))
    x = torch.randn(1, DIM, DIM, dtype=torch.float64)
    x[..., -1] = 1.0
    with torch.no_grad():
        mixer.query_bias.zero_()
        mixer.core.fill_(3**-0.5)
        mixer.qkv.weight[6:].zero_()
        mixer.qkv.weight[6:, -1] = 1.0
        mixer.pairs.zero_()
        mixer.pairs[torch.arange(DIM), torch.arange(DIM), 0] = 1.0
    q, k, _ = mixer.qkv(x).chunk(3, -1)
    scores = (q @ k.mT / 3**0.5).tril()
    torch.testing.assert_close(mixer(Chunk(x), mixer.initial_state(1, dtype=x.dtype))[0], scores, rtol=0, atol=1e-12)
    mixer.qkv.weight.data[6, 0] = 0.5  # one value is no constant any more
    assert (mixer(Chunk(x), mixer.initial_state(1, dtype=x.dtype))[0] - scores).detach().abs().max() > 1e-3


def test_a_tensor_is_not_made():
    """No tensor of a forward comes near length^3 elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                self.size = max(self.size, found.untyped_storage().nbytes() // found.element_size())
            return found

    with torch.device("meta"):
        mixer = TensorizedAttention.Config(rank=3, max_length=200).build(DIM)
        x = torch.zeros(1, 200, DIM)
        with Largest() as mode:
            mixer(Chunk(x), mixer.initial_state(1))
    assert mode.size < 200**3 / 8


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "tensorized.npz", allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


@pytest.fixture
def single(golden, monkeypatch):
    """Their sinusoids, which are rounded to float32."""
    index = torch.arange(len(golden["r"])).flip(0)
    assert (sinusoids(index, golden["r"].shape[1], 10000.0) - golden["r"]).abs().max() < 1e-6
    monkeypatch.setattr("kinformer.mixers.tensorized.sinusoids", lambda *_: golden["r"])


def authors(golden):
    """A layer with the authors' weights."""
    length, _, dim = golden["w_in"].shape
    mixer = TensorizedAttention.Config(rank=int(golden["d_head"]), max_length=length)
    feed_forward = MLP.Config(hidden_dim=24, activation="relu")
    layer = DecoderLayer.Config(mixer=mixer, feed_forward=feed_forward, residual=PostNorm.Config()).build(dim).double()
    weights = {
        "mixer.qkv.weight": golden["w.dec_attn.qkv_net.weight"],
        "mixer.position.weight": golden["w.dec_attn.r_net.weight"],
        "mixer.query_bias": torch.stack([golden["r_w_bias"], golden["r_r_bias"]]),
        "mixer.core": golden["w.dec_attn.core_value"],
        "mixer.pairs": golden["w.dec_attn.o_net.weight"].view(dim, length, length),
    }
    for kind in ("weight", "bias"):
        weights[f"mixer_residual.norm.{kind}"] = golden[f"w.dec_attn.layer_norm.{kind}"]
        weights[f"feed_forward_residual.norm.{kind}"] = golden[f"w.pos_ff.layer_norm.{kind}"]
        weights[f"feed_forward.up.{kind}"] = golden[f"w.pos_ff.CoreNet.0.{kind}"]
        weights[f"feed_forward.down.{kind}"] = golden[f"w.pos_ff.CoreNet.3.{kind}"]
    layer.load_state_dict(weights)
    return layer


def test_it_computes_what_its_authors_code_does(golden, single):
    """Their class, in float64 (except for sinusoids), hides nothing: M of the whole text gives what it makes of each
    token, and gradients."""
    layer, x = authors(golden), golden["w_in"].transpose(0, 1).clone().requires_grad_()
    mixer, (_, batch, dim) = layer.mixer, golden["w_in"].shape
    _, state = mixer(Chunk(x), mixer.initial_state(batch, dtype=x.dtype))
    q = mixer.qkv(x)[..., : mixer.config.rank]
    queries = torch.cat([(q + bias) * mixer.core.mean(0) for bias in mixer.query_bias], -1)
    norm = layer.mixer_residual.norm
    y = layer_norm(x + queries @ state.total.mT, (dim,), norm.weight, norm.bias)
    torch.testing.assert_close(y.transpose(0, 1), golden["attn_out"], rtol=0, atol=1e-11)
    (y.transpose(0, 1) * golden["grad_out"]).sum().backward()
    torch.testing.assert_close(x.grad.transpose(0, 1), golden["grad_w_in"], rtol=0, atol=1e-11)
    torch.testing.assert_close(mixer.core.grad, golden["grad_core"], rtol=0, atol=1e-11)
    tensors = torch.stack([tensor_of(mixer, row) for row in x]).transpose(0, 1).flatten(2)
    torch.testing.assert_close(tensors, golden["tensor"], rtol=0, atol=1e-11)


def test_their_last_token_sees_what_ours_does_and_their_first_sees_the_future(golden, single):
    layer, x = authors(golden), golden["w_in"].transpose(0, 1)
    y, _ = layer(Chunk(x), layer.initial_state(len(x), dtype=x.dtype))
    gap = (y.transpose(0, 1) - golden["layer_out"]).detach().abs().amax((1, 2))
    assert gap[-1] < 1e-11 and gap[:-1].min() > 1e-2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SMALL.replace(blocks=0), "blocks"),
        (lambda: SMALL.build(7), "sinusoids need an even width, but dim = 7"),
    ],
)
def test_what_does_not_fit_is_one_sentence(make, message):
    with pytest.raises(KinformerError, match=message):
        make()


def test_sequences_that_are_too_long_are_refused():
    mixer = made(SMALL)
    state = mixer.initial_state(1, dtype=torch.float64)
    with pytest.raises(KinformerError, match="position 60 is without weights: .* ends at max_length = 60"):
        mixer(Chunk(torch.randn(1, 61, DIM, dtype=torch.float64)), state)
    _, state = mixer(Chunk(torch.randn(1, 60, DIM, dtype=torch.float64)), state)
    with pytest.raises(KinformerError, match="position 60 is without weights"):
        mixer(Chunk(torch.randn(1, 1, DIM, dtype=torch.float64)), state)
    assert kinformer.build("tensorized", recipe="small").max_length == 32


WHOLE = {
    "positions": BidirectionalTensorized.Config(rank=3, blocks=2, max_length=60),
    "content alone": BidirectionalTensorized.Config(rank=3, max_length=60, positions=False),
}


@pytest.mark.parametrize("check", [check for check in ENCODER_CHECKS if check != "implementations"])
@pytest.mark.parametrize("name", WHOLE)
def test_the_encoders_contract(name, check):
    make = WHOLE[name].build
    subject = EncoderMixerSubject(lambda: make(DIM), dim=DIM, num_globals=(0,), global_tokens=False)
    ENCODER_CHECKS[check](subject)


@pytest.mark.parametrize("name", WHOLE)
def test_the_encoder_is_the_tensor_with_nothing_hidden(name):
    """And its last token is the decoder's, which sees as much."""
    mixer, x = made(WHOLE[name]), torch.randn(2, 17, DIM, dtype=torch.float64)
    want = torch.stack([torch.einsum("ojk,ijk->io", mixer.pairs[:, :13, :13], tensor_of(mixer, row[:13])) for row in x])
    got = mixer(x, SequenceContext(torch.arange(17).expand(2, 17) < 13))
    torch.testing.assert_close(got[:, :13], want, rtol=0, atol=1e-12)
    decoder = made(MIXERS[name])
    decoder.load_state_dict(mixer.state_dict())
    last = decoder(Chunk(x[:, :13]), decoder.initial_state(2, dtype=x.dtype))[0][:, -1]
    torch.testing.assert_close(got[:, 12], last, rtol=0, atol=1e-12)
