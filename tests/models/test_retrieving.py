"""A decoder that is given neighbours: the contract holds for it and its retriever together; where it is another."""

import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.parts import Neighbours
from kinformer.core.state import difference, nbytes
from kinformer.generation.generate import generate
from kinformer.generation.session import Session
from kinformer.generation.weights import pack
from kinformer.lab.datastore.attach import RetrievingDecoder, RetrievingState
from kinformer.lab.datastore.keys import KeyedDecoder
from kinformer.lab.tasks.next_token import NextTokenLoss, RetrievedNextToken, TokenBatch
from kinformer.testing import MODEL_CHECKS, ModelSubject

VOCAB, ENTRIES = 23, 40
TOKENS = torch.randint(VOCAB, (3, 30), generator=torch.Generator().manual_seed(2))


class Table:
    """A searcher over a few keys in memory; ``far``: entries farther than that are none."""

    def __init__(self, width, far=float("inf")):
        generator = torch.Generator().manual_seed(1)
        self.keys = torch.randn(ENTRIES, width, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(VOCAB, (ENTRIES,), generator=generator)
        self.entries, self.bytes_read, self.far = ENTRIES, 0, far

    def search(self, queries, neighbours):
        best = torch.cdist(queries.double(), self.keys).square().topk(neighbours, largest=False)
        entries = best.indices.masked_fill(best.values > self.far, -1)
        return Neighbours(best.values.float(), self.tokens[best.indices], entries)


def build(member="spalm", **changes):
    torch.manual_seed(0)
    return kinformer.build(member, recipe="tiny", vocab_size=VOCAB, set=changes)


def retrieving(retriever="linear-transformer", neighbours=4, **changes):
    keys = KeyedDecoder(build(retriever))
    return RetrievingDecoder(build(**changes), keys, Table(keys.width), neighbours)


def strong(model):
    """In double precision and eval mode, with weights that make a difference."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


@pytest.mark.parametrize("check", MODEL_CHECKS)
@pytest.mark.parametrize("retriever", ["linear-transformer", "transformer-xl", "gpt"])
def test_it_keeps_the_contract(retriever, check):
    MODEL_CHECKS[check](ModelSubject(lambda: retrieving(retriever), vocab_size=VOCAB))


def test_any_causal_member_may_have_the_gate():
    model = kinformer.build("gpt", recipe="tiny", vocab_size=VOCAB, set={"head": "spalm"})
    keys = KeyedDecoder(build("transformer-xl"))
    found = strong(RetrievingDecoder(model, keys, Table(keys.width), 3))
    assert (found(TOKENS)[0] - model(TOKENS)[0]).abs().max() > 1e-3


def twin(model):
    """Transformer-XL with the weights of ``model``, a SPALM decoder."""
    base = build("transformer-xl").to(next(model.parameters()).dtype).eval()
    weights = {name.replace("head.inner.", "head."): leaf for name, leaf in model.state_dict().items()}
    base.load_state_dict({name: leaf for name, leaf in weights.items() if "head.gate" not in name})
    return base


class Fixed(nn.Module):
    """A gate's product that is the same for every token."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, hidden):
        return torch.full_like(hidden[..., :1], self.value)


def test_a_gate_of_one_no_neighbour_and_no_store_are_transformer_xl():
    model = strong(retrieving())
    base = twin(model.decoder)
    wanted = base(TOKENS)[0]
    assert torch.equal(model.decoder(TOKENS)[0], wanted)
    open_ = model(TOKENS)[0]
    assert (open_ - wanted).abs().max() > 1e-2
    model.searcher.far = -1.0
    assert torch.equal(model(TOKENS)[0], wanted)
    model.searcher.far = float("inf")
    model.decoder.head.gate = Fixed(60.0)
    assert torch.equal(model(TOKENS)[0], wanted)
    model.decoder.head.gate = Fixed(6.0)
    assert 1e-4 < (model(TOKENS)[0] - wanted).abs().max() < (open_ - wanted).abs().max()


def test_the_state_is_that_of_both():
    model = strong(retrieving("transformer-xl"))
    with torch.no_grad():
        state, own, other = (each(TOKENS)[1] for each in (model, model.decoder, model.retriever.decoder))
    assert isinstance(state, RetrievingState)
    assert difference(state.decoder, own) == 0 and difference(state.retriever, other) == 0
    declared = sum(
        layer.mixer.state_bytes(TOKENS.shape[1], dtype=torch.float64)
        for decoder in (model.decoder, model.retriever.decoder)
        for layer in decoder.stack.units
    )
    counters = 2 * 8
    assert nbytes(state) == 3 * (declared + counters)


def test_the_retriever_is_frozen():
    model = retrieving().train()
    assert not model.retriever.training and model.decoder.training
    model(TOKENS)[0].square().sum().backward()
    assert all(parameter.grad is None for parameter in model.retriever.parameters())
    assert all(parameter.grad is not None for parameter in model.decoder.parameters())


def test_it_ends_where_either_ends():
    end = kinformer.build("gpt", recipe="tiny", vocab_size=VOCAB).max_length
    assert end is not None
    assert retrieving().max_length is None and retrieving("gpt").max_length == end


def test_it_generates_token_by_token_what_the_whole_text_gives():
    model = strong(retrieving()).float()
    new = generate(model, TOKENS, max_new_tokens=20, temperature=0)
    whole = model(torch.cat([TOKENS, new], 1))[0]
    assert torch.equal(whole[:, TOKENS.shape[1] - 1 : -1].argmax(-1), new)
    assert not torch.equal(new, generate(model.decoder, TOKENS, max_new_tokens=20, temperature=0))
    keys = KeyedDecoder(pack(model.retriever.decoder))
    packed = RetrievingDecoder(pack(model.decoder), keys, model.searcher, 4)
    assert torch.equal(generate(packed, TOKENS, max_new_tokens=20, temperature=0), new)
    session, alone = Session(model, 3), Session(model.decoder, 3)
    for each in (session, alone):
        each.feed(TOKENS)
    assert session.state_bytes == alone.state_bytes + nbytes(model.retriever.decoder.initial_state(3))


def test_narrow_weights_look_up_with_wide_keys():
    model = strong(retrieving()).float()
    model.decoder.to(torch.bfloat16)
    keys = model.retriever(TOKENS)[0].keys
    seen = []
    model.searcher.search, search = (
        lambda queries, count: seen.append(queries) or search(queries, count),
        (model.searcher.search),
    )
    assert model(TOKENS)[0].dtype == torch.bfloat16
    assert torch.equal(seen[0], keys.flatten(0, 1))


@pytest.mark.parametrize("told", [True, False])
def test_it_learns_to_trust_what_neighbours_say(told):
    """Of tokens that nothing else predicts, two in three neighbours tell the next one."""
    model = build().train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        tokens = torch.randint(VOCAB, (8, 25), generator=generator)
        near = torch.randint(VOCAB, (8, 24, 3), generator=generator)
        near[..., :2] = tokens[:, 1:, None]
        batch = TokenBatch(tokens, neighbours=near if told else None)
        objective = RetrievedNextToken() if told else NextTokenLoss()
        loss, *_ = objective(model, batch, None, 0.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1.0 if told else losses[-1] > 3.0
