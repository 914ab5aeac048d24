"""A decoder with a store at its head: keys are right however the text is cut; the state is the decoder's."""

import pytest
import torch

import kinformer
from kinformer.blocks.residual import PreNorm
from kinformer.core.parts import Neighbours
from kinformer.core.state import difference
from kinformer.generation.generate import generate
from kinformer.generation.weights import pack
from kinformer.heads.language import KnnMixture
from kinformer.lab.datastore.attach import AttachedDecoder
from kinformer.lab.datastore.keys import FEED_FORWARD, HIDDEN, KeyedDecoder

VOCAB = 23


def build(member, **changes):
    torch.manual_seed(0)
    model = kinformer.build(member, recipe="tiny", vocab_size=VOCAB, set=changes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


class Table:
    """A searcher over a few keys in memory."""

    def __init__(self, width):
        generator = torch.Generator().manual_seed(1)
        self.keys = torch.randn(50, width, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(VOCAB, (50,), generator=generator)
        self.entries, self.bytes_read = 50, 0

    def search(self, queries, neighbours):
        distances = torch.cdist(queries.double(), self.keys).square().float()
        best = distances.topk(neighbours, largest=False)
        return Neighbours(best.values, self.tokens[best.indices], best.indices)


def attached(model, **options):
    return AttachedDecoder(model, KnnMixture(Table(KeyedDecoder(model).width), neighbours=5, **options))


TOKENS = torch.randint(VOCAB, (3, 17), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("member", ["gpt", "post-ln", "macaron", "linear-transformer"])
def test_the_key_is_what_enters_the_last_feed_forward(member):
    model = build(member)
    keyed = KeyedDecoder(model)
    assert (keyed.representation, keyed.width) == (FEED_FORWARD, 32)
    (hidden, keys), _ = keyed(TOKENS)
    last = model.stack.layers[-1]
    _, _, (before,) = model.hidden(TOKENS, taps=(len(model.stack.layers) - 1,))
    with torch.no_grad():
        if isinstance(
            last.feed_forward_residual, PreNorm
        ):  # the layer's output less what the feed-forward adds must be what the norm was given
            share = 0.5 if member == "macaron" else 1.0
            residual = before - share * last.feed_forward(keys)
            wanted = last.feed_forward_residual.norm(residual)
        else:
            wanted = keys
            assert (last.feed_forward_residual.norm(keys + last.feed_forward(keys)) - before).abs().max() < 1e-12
    assert (keys - wanted).abs().max() < 1e-12
    assert torch.equal(hidden, model.hidden(TOKENS)[0])


def test_without_a_feed_forward_it_is_the_final_hidden_state():
    model = build("gpt")
    del model.stack.layers[-1].feed_forward
    model.stack.layers[-1].feed_forward = lambda x: x  # a function, no module
    keyed = KeyedDecoder(model)
    (hidden, keys), _ = keyed(TOKENS)
    assert (keyed.representation, keyed.width) == (HIDDEN, 32)
    assert torch.equal(keys, hidden)


@pytest.mark.parametrize("member", ["gpt", "linear-transformer"])
def test_cuts_and_padding_change_nothing(member):
    model = attached(build(member))
    whole, end = model(TOKENS)
    left, middle = model(TOKENS[:, :6])
    right, last = model(TOKENS[:, 6:], middle)
    assert (torch.cat([left, right], 1) - whole).abs().max() < 1e-9
    assert difference(end, last) < 1e-9
    assert difference(end, model.decoder(TOKENS)[1]) == 0
    valid = torch.rand(3, 25, generator=torch.Generator().manual_seed(3)) < 2
    valid[0, 3:11], valid[1, :8], valid[2, 17:] = False, False, False
    ragged = torch.zeros(3, 25, dtype=torch.int64)
    ragged[valid] = TOKENS.flatten()
    told, _ = model(ragged, valid=valid)
    assert (told[valid] - whole.flatten(0, 1)).abs().max() < 1e-9
    assert not told[~valid].any()


def test_no_store_is_the_decoder_exactly():
    model = build("gpt")
    for head in (KnnMixture(None), KnnMixture(Table(32), weight=0.0)):
        assert torch.equal(AttachedDecoder(model, head)(TOKENS)[0], model(TOKENS)[0])
    assert (attached(model, weight=0.01)(TOKENS)[0] - model(TOKENS)[0].log_softmax(-1)).abs().max() > 1e-3


def test_it_generates_with_and_without_packed_weights():
    model = build("gpt").float()
    options = {"max_new_tokens": 12, "temperature": 0}
    plain = generate(model, TOKENS, **options)
    mixed = generate(attached(model, weight=0.9), TOKENS, **options)
    assert not torch.equal(plain, mixed)
    assert torch.equal(mixed, generate(attached(pack(model), weight=0.9), TOKENS, **options))
    step = attached(model, weight=0.9)(torch.cat([TOKENS, mixed], 1))[0]
    assert torch.equal(step[:, TOKENS.shape[1] - 1 : -1].argmax(-1), mixed)
