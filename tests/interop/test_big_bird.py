"""Import of Big Bird: the numbers of transformers as it trains, with the same random blocks and without dropout.

When it does not train, transformers takes block 0 for every random block; a test shows that.
"""

import numpy as np
import pytest
import torch

import kinformer
from kinformer.interop import read_checkpoint
from kinformer.lab.runs.run import open_run
from kinformer.parts.patterns.blocks import general_plan, random_table
from kinformer.runtime.errors import KinformerError

from .encoders import Peer, assert_close, edit, imported

BLOCK, RANDOM = 4, 2
SPARSE = {"block_size": BLOCK, "num_random_blocks": RANDOM, "max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def numpy_as_it_was():
    """transformers seeds NumPy's one generator."""
    before = np.random.get_state()
    yield
    np.random.set_state(before)


def peer_of(folder, kind="ForMaskedLM", **changes):
    peer = Peer(folder, "big_bird", kind, **SPARSE | changes)
    peer.model.train()
    return peer


def theirs(peer, tokens, valid=None, dtype=torch.float64, **inputs):
    valid = torch.ones_like(tokens) if valid is None else valid
    return peer(dtype, input_ids=tokens, attention_mask=valid.to(dtype), **inputs)


def ours(model, *tokens, **inputs):
    with torch.no_grad():
        return model(*tokens, **inputs)


CHANGES = {
    "as it is": {},
    "exact gelu": {"hidden_act": "gelu"},
    "without bias": {"use_bias": False},
    "untied": {"tie_word_embeddings": False},
    "one random block": {"num_random_blocks": 1},
    "full attention": {"attention_type": "original_full"},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_same_logits(changes, tmp_path):
    peer = peer_of(tmp_path / "peer", **changes)
    model = imported(peer.folder, tmp_path / "run")
    tokens, _, types = peer.texts((48, 48))
    for dtype, limit in ((torch.float32, 2e-5), (torch.float64, 1e-9)):
        want = theirs(peer, tokens, dtype=dtype, token_type_ids=types).logits
        assert_close(ours(model.to(dtype), tokens, types=types), want, limit)


@pytest.mark.parametrize("length", [36, 37, 46, 60])
def test_same_hidden_states_at_every_layer(length, tmp_path):
    """36 tokens are 5 + 2 * 2 blocks, which see all; 37 and 46 end in the middle of a block."""
    peer = peer_of(tmp_path / "peer")
    model = imported(peer.folder, tmp_path / "run").double()
    tokens = peer.texts((length,))[0]
    with torch.no_grad():
        got = model.hidden(tokens, taps=range(3))
    want = theirs(peer, tokens).hidden_states
    assert peer.model.bert.attention_type == ("original_full" if length == 36 else "block_sparse")
    for each, their in zip((*got.tapped, got.long_input), (*want[1:], want[-1]), strict=True):
        assert_close(each, their[:, :length], 1e-9)


def test_a_padded_text_is_what_it_is_alone(tmp_path):
    peer = peer_of(tmp_path / "peer")
    model = imported(peer.folder, tmp_path / "run").double()
    tokens, valid, types = peer.texts((56, 48, 41))
    got = ours(model, tokens, valid=valid, types=types)
    for row, length in enumerate((56, 48, 41)):
        part = slice(row, row + 1), slice(length)
        want = theirs(peer, tokens[part], token_type_ids=types[part]).logits
        assert_close(got[part], want, 1e-9)


def test_with_one_length_for_all_a_padded_batch_is_theirs(tmp_path):
    """There the last block of the batch is global, though it be padding."""
    peer = peer_of(tmp_path / "peer")
    imported(peer.folder, tmp_path / "run")
    model = kinformer.load(tmp_path / "run", set={"layers.*.mixer.pattern.length": 56}).double()
    tokens, valid, types = peer.texts((56, 48, 41))
    want = theirs(peer, tokens, valid, token_type_ids=types).logits
    assert_close(ours(model, tokens, valid=valid, types=types)[valid], want[valid], 1e-9)


def test_evaluation_is_another_model_there_and_the_same_here(tmp_path):
    peer = peer_of(tmp_path / "peer")
    model = imported(peer.folder, tmp_path / "run").double()
    tokens = peer.texts((48,))[0]
    training = theirs(peer, tokens).logits
    peer.model.eval()
    assert (training - theirs(peer, tokens).logits).abs().max() > 0.1
    assert torch.equal(ours(model.train(), tokens), ours(model.eval(), tokens))


def listed(blocks, table):
    """[heads, blocks] lists of the key blocks of the middle blocks, as often as they are listed; edges see all."""
    return [
        [[0, row - 1, row, row + 1, blocks - 1, *map(int, drawn[row])] for row in range(2, blocks - 2)]
        for drawn in table
    ]


def differing(peer, folder, length):
    """The blocks in the middle whose hidden states differ from theirs, and the largest difference in every block."""
    model = imported(peer.folder, folder).double()
    tokens = peer.texts((length,))[0]
    with torch.no_grad():
        got = model.hidden(tokens).long_input
    apart = (got - theirs(peer, tokens).hidden_states[-1]).abs().amax((0, 2)).view(-1, 64).amax(1)
    assert ((apart < 1e-9) | (apart > 1e-5)).all()
    return {int(block) for block in (apart > 1e-9).nonzero()} & set(range(2, length // 64 - 2)), apart


LONG = {"block_size": 64, "num_random_blocks": 3, "max_position_embeddings": 4096, "num_hidden_layers": 1}


def test_a_block_that_is_listed_twice_counts_once_and_nothing_else_differs(tmp_path):
    """At 1,024 tokens, 16 blocks, the authors draw the last block too, which all see anyway."""
    found, apart = differing(peer_of(tmp_path / "peer", **LONG), tmp_path / "run", 1024)
    lists = listed(16, random_table(16, 64, 3, seed=0, heads=2))
    twice = {row for drawn in lists for row, blocks in enumerate(drawn, 2) if len(set(blocks)) < len(blocks)}
    assert found == twice and 0 < len(twice) < 12
    assert apart[0] < 1e-9 and apart[-1] < 1e-9


def test_at_3072_tokens_nothing_differs(tmp_path):
    _, apart = differing(peer_of(tmp_path / "peer", **LONG), tmp_path / "run", 3072)
    assert (apart < 1e-9).all()


def test_at_2048_tokens_transformers_has_another_table_than_the_authors(tmp_path):
    found, _ = differing(peer_of(tmp_path / "peer", **LONG), tmp_path / "run", 2048)
    paper, general = (listed(32, table) for table in (random_table(32, 64, 3, 0, 2), general_plan(64, 3, 0, 2)[:, :32]))
    unlike = {
        row
        for one, other in zip(paper, general, strict=True)
        for row, (own, their) in enumerate(zip(one, other, strict=True), 2)
        if set(own) != set(their)
    }
    assert found == unlike and unlike


def test_same_classes(tmp_path, capsys):
    """The activation in the classifier is that of the layers, not a tanh."""
    peer = peer_of(tmp_path / "peer", "ForSequenceClassification", num_labels=4)
    model = imported(peer.folder, tmp_path / "run").double()
    notes = capsys.readouterr().err
    assert "pooler.bias, pooler.weight left out" in notes and "the first block in their place" in notes
    tokens = peer.texts((48, 48))[0]
    assert_close(ours(model, tokens), theirs(peer, tokens).logits, 1e-9)
    assert model.config.head.activation == "gelu_tanh"


def test_attention_has_dropout_only_where_it_is_full(tmp_path):
    dropout = {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}
    for kind, want in (("block_sparse", 0.0), ("original_full", 0.3)):
        peer = peer_of(tmp_path / kind, attention_type=kind, **dropout)
        done = kinformer.import_checkpoint(peer.folder, tmp_path / f"run-{kind}")
        assert any("random blocks" in note for note in done.notes) == (kind == "block_sparse")
        run = open_run(tmp_path / f"run-{kind}")
        layer = run.config.layers[0]
        assert (run.member, layer.mixer.dropout, layer.dropout) == ("big-bird", want, 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rescale_embeddings": True}, "rescale_embeddings is True"),
        ({"attention_type": "sparse"}, "only block_sparse, original_full can"),
        ({"block_size": 0}, "block_size is 0"),
        ({"is_decoder": True}, "is_decoder is True"),
    ],
)
def test_config_is_refused(changes, message, tmp_path):
    folder = peer_of(tmp_path / "peer").folder
    edit(folder / "config.json", **changes)
    with pytest.raises(KinformerError, match=message):
        read_checkpoint(folder)
