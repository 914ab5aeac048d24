"""The encoder-decoder: its laws over any mixers, its source, and PyTorch's Transformer with the same weights."""

import math

import pytest
import torch
from torch import nn

import kinformer
from kinformer.core.state import pop_aux, select_rows
from kinformer.family.build import configure
from kinformer.runtime.errors import KinformerError
from kinformer.testing import MODEL_CHECKS, SourceModelSubject

VOCAB = 23
OTHERS = {
    "a window beside the whole source": {"layers.*.mixer.pattern": {"kind": "local", "window": 5}},
    "linear attention on both sides": {"layers.*.mixer": "linear", "encoder.layers.*.mixer": "linear"},
    "relative positions": {"position": "none", "layers.*.mixer.position": "shaw", "encoder.position": "none"},
    "one layer looks at the source": {"layers.0.further_mixers": []},
    "pre-norm": {"layers.*.residual": "pre", "encoder.layers.*.residual": "pre", "norm": "layer_norm"},
}


def build(**changes):
    torch.manual_seed(0)
    return kinformer.build("vanilla", recipe="tiny", vocab_size=VOCAB, set=changes).double().eval()


def sources(*lengths):
    source = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    return source, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("check", ["partition", "padding", "ragged_reset", "reserved"])
def test_other_mixers_keep_the_contract(name, check):
    config = configure("vanilla", "tiny", VOCAB, OTHERS[name])
    MODEL_CHECKS[check](SourceModelSubject(config.build, VOCAB, time=13))


@pytest.mark.parametrize("name", ["rfa", "universal", "macaron"])
@pytest.mark.parametrize("check", ["causality", "partition", "padding", "ragged_reset", "reserved"])
def test_other_members_keep_the_contract(name, check):
    MODEL_CHECKS[check](SourceModelSubject(configure(name, "tiny-translate", VOCAB).build, VOCAB, time=13))


def test_a_universal_encoder_and_decoder_tie_their_layers():
    model = configure("universal", "tiny-translate", VOCAB).build()
    assert len(model.encoder.stack.layers) == len(model.stack.layers) == 1
    state = model.begin(*sources(5, 3))
    assert len(state.layers) == 3 and "ponder" in pop_aux(state)[0]
    logits, state = model(torch.randint(VOCAB, (2, 6)), state)
    assert (pop_aux(state)[0]["ponder"] > 0).all() and logits.shape == (2, 6, VOCAB)


def test_every_row_is_as_alone():
    model, tokens = build(), torch.randint(VOCAB, (3, 6))
    source, valid = sources(9, 4, 1)
    given, _ = model(tokens, model.begin(source.masked_fill(~valid, VOCAB), valid))
    for row, length in enumerate((9, 4, 1)):
        alone, _ = model(tokens[row : row + 1], model.begin(source[row : row + 1, :length]))
        assert (given[row] - alone[0]).abs().max() < 1e-12


def test_padding_of_a_source_may_stand_anywhere():
    model, tokens = build(), torch.randint(VOCAB, (1, 6))
    source = torch.tensor([[3, 0, 5, 0, 7]])
    given, _ = model(tokens, model.begin(source, torch.tensor([[True, False, True, False, True]])))
    alone, _ = model(tokens, model.begin(source[:, [0, 2, 4]]))
    assert (given - alone).abs().max() < 1e-12


def test_gradients_reach_the_encoder_through_every_layer():
    model, tokens = build().train(), torch.randint(VOCAB, (2, 6))
    model(tokens, model.begin(*sources(5, 3)))[0].square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def test_one_table_serves_three_times():
    model = build()
    tables = [name for name, weight in model.state_dict().items() if VOCAB in weight.shape]
    assert tables == ["input.embedding.weight"] and model.source_input is model.input
    own = build(**{"encoder.input": {"kind": "tokens", "vocab_size": 11}})
    assert own.source_input is not own.input and own.state_dict()["encoder.input.embedding.weight"].shape == (11, 32)
    own(torch.zeros(1, 2, dtype=torch.int64), own.begin(torch.tensor([[10]])))


def test_a_source_may_be_longer_than_what_follows():
    model = build(position={"kind": "learned", "max_length": 4})
    assert (model.max_length, model.max_source_length) == (4, None)
    state = model.begin(sources(9)[0])
    assert select_rows(state, torch.tensor([0, 0])).seen.shape == (2,)
    with pytest.raises(KinformerError, match="end at max_length"):
        model(torch.zeros(1, 5, dtype=torch.int64), state)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers.*.further_mixers": []}, "no layer of the decoder looks at the source"),
        ({"encoder.layers": []}, "encoder.layers must hold at least one layer"),
        ({"encoder.layers.*.mixer": "softmax"}, "'softmax' is not a known encoder_mixer"),
        ({"encoder.global_tokens": -1}, "global_tokens must be 0 or more"),
    ],
)
def test_mistakes(changes, told):
    with pytest.raises(KinformerError, match=told):
        build(**changes)


def test_without_a_source_it_is_refused():
    with pytest.raises(KinformerError, match=r"begin with state = model.begin\(source, valid\)"):
        build()(torch.zeros(1, 2, dtype=torch.int64))


def theirs_and_ours(norm_first):
    """PyTorch's Transformer, whose final norms the paper does not have, and ours with its weights."""
    dim, heads, layers = 32, 2, 2
    torch.manual_seed(3)
    sizes = {"dim_feedforward": 4 * dim, "dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    layer, norm = nn.TransformerEncoderLayer(dim, heads, **sizes), nn.LayerNorm(dim)
    encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
    theirs = nn.Transformer(dim, heads, layers, layers, custom_encoder=encoder, **sizes).double().eval()
    for weight in theirs.parameters():
        nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.2)
    norms = {"norm": "layer_norm", "encoder.norm": "layer_norm"}
    residual = "pre" if norm_first else "post"
    ours = build(**norms, **{f"{side}layers.*.residual": residual for side in ("", "encoder.")})
    weights = dict(ours.state_dict())
    for side, own in (("encoder", "encoder."), ("decoder", "")):
        for name, weight in getattr(theirs, side).state_dict().items():
            weights |= {own + place: part for place, part in _named(name, weight, side == "decoder")}
    ours.load_state_dict(weights)
    return theirs, ours


def _named(name, weight, decoder):
    """PyTorch's weight under our names."""
    if name.startswith("norm"):
        return [(name, weight)]
    _, index, part, *rest = name.split(".")
    stem, kind = f"stack.layers.{index}", name.rpartition("_" if "in_proj" in name else ".")[2]
    if part == "self_attn":
        return [(f"{stem}.mixer." + ("projection.qkv" if "in_proj" in name else "out") + f".{kind}", weight)]
    if part == "multihead_attn" and "in_proj" in name:
        query, rest = weight[:32], weight[32:]
        stem += ".further_mixers.0"
        return [(f"{stem}.query.{kind}", query), (f"{stem}.key_value.{kind}", rest)]
    ours = {
        "multihead_attn": "further_mixers.0.out",
        "linear1": "feed_forward.up",
        "linear2": "feed_forward.down",
        "norm1": "mixer_residual.norm",
        "norm2": "further_residuals.0.norm" if decoder else "feed_forward_residual.norm",
        "norm3": "feed_forward_residual.norm",
    }
    return [(f"{stem}.{ours[part]}.{kind}", weight)]


@pytest.mark.parametrize("norm_first", [False, True])
def test_it_is_pytorchs_transformer(norm_first):
    theirs, ours = theirs_and_ours(norm_first)
    (source, valid), tokens = sources(7, 4), torch.randint(VOCAB, (2, 5))
    real = torch.arange(5) < torch.tensor([[5], [3]])

    def embedded(ids):
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        return ours.input(ids, positions) + ours.position.embed(positions)

    want = theirs(
        embedded(source),
        embedded(tokens),
        tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
        src_key_padding_mask=~valid,
        tgt_key_padding_mask=~real,
        memory_key_padding_mask=~valid,
        tgt_is_causal=True,
    )
    got = ours.hidden(tokens, ours.begin(source, valid), valid=real).hidden_states
    assert (got - want)[real].abs().max() < 1e-9
    table = ours.input.embedding.weight * math.sqrt(32)
    assert torch.allclose(embedded(source)[0, 0], table[source[0, 0]] + torch.tensor([0.0, 1.0] * 16).double())
