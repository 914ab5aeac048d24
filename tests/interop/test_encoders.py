"""Import of BERT, RoBERTa and Longformer: the same numbers as transformers, and nothing left out in silence."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load, save_file

from kinformer.core.encoder import GLOBAL
from kinformer.interop import read_checkpoint
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError

from .encoders import Peer, assert_close, edit, imported
from .peers import new_model

MODELS = ("bert", "roberta", "longformer")
LIMITS = ((torch.float32, 1e-5), (torch.float64, 1e-9))


def limits(model_type):
    """Longformer's softmax works in float32 there, whatever the model does."""
    return ((torch.float32, 1e-5), (torch.float64, 1e-6)) if model_type == "longformer" else LIMITS


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    return {name: Peer(tmp_path_factory.mktemp(name), name) for name in MODELS}


@pytest.fixture
def folder(peers, tmp_path):
    """A copy of BERT's checkpoint that a test may spoil."""
    return shutil.copytree(peers["bert"].folder, tmp_path / "checkpoint")


def assert_same_logits(peer, model, model_type):
    tokens, valid, types = peer.texts()
    for dtype, limit in limits(model_type):
        with torch.no_grad():
            got = model.to(dtype)(tokens, valid=valid, types=types)
        want = peer(dtype, input_ids=tokens, attention_mask=valid.long(), token_type_ids=types).logits
        assert_close(got[valid], want[valid], limit)
        assert not got[~valid].any()


CHANGES = {
    "as it is": {},
    "another epsilon": {"layer_norm_eps": 1e-3},
    "tanh gelu": {"hidden_act": "gelu_new"},
    "another padding token": {"pad_token_id": 3},
    "untied": {"tie_word_embeddings": False},
    "dropout": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2},
}


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_same_logits(changes, model_type, tmp_path):
    peer = Peer(tmp_path / "peer", model_type, **changes)
    assert_same_logits(peer, imported(peer.folder, tmp_path / "run"), model_type)


@pytest.mark.parametrize("model_type", ["roberta", "longformer"])
def test_same_logits_with_relu(model_type, tmp_path):
    peer = Peer(tmp_path / "peer", model_type, hidden_act="relu")
    assert_same_logits(peer, imported(peer.folder, tmp_path / "run"), model_type)


@pytest.mark.parametrize("model_type", MODELS)
def test_same_logits_of_whole_texts_without_types(peers, model_type, tmp_path):
    peer, (dtype, limit) = peers[model_type], limits(model_type)[1]
    model, tokens = imported(peer.folder, tmp_path / "run").double(), peer.texts((26, 26))[0]
    with torch.no_grad():
        assert_close(model(tokens), peer(dtype, input_ids=tokens).logits, limit)


@pytest.mark.parametrize("model_type", MODELS)
def test_same_hidden_states_at_every_layer(peers, model_type, tmp_path):
    peer = peers[model_type]
    model = imported(peer.folder, tmp_path / "run").double()
    tokens, valid, types = peer.texts()
    with torch.no_grad():
        got = model.hidden(tokens, valid=valid, types=types, taps=range(3))
    want = peer(input_ids=tokens, attention_mask=valid.long(), token_type_ids=types).hidden_states
    for ours, theirs in zip((*got.tapped, got.long_input), (*want[1:], want[-1]), strict=True):
        assert_close(ours[valid], theirs[valid], limits(model_type)[1][1])


def test_padding_on_the_left_is_that_of_roberta(peers, tmp_path):
    """It counts positions from the first token; BERT of transformers counts from the first slot."""
    peer = peers["roberta"]
    model = imported(peer.folder, tmp_path / "run").double()
    tokens, valid, types = peer.texts(left=True)
    with torch.no_grad():
        got = model(tokens, valid=valid, types=types)
    want = peer(input_ids=tokens, attention_mask=valid.long(), token_type_ids=types).logits
    assert_close(got[valid], want[valid], 1e-9)


def test_global_tokens_of_longformer(peers, tmp_path):
    peer = peers["longformer"]
    model = imported(peer.folder, tmp_path / "run").double()
    tokens, valid, types = peer.texts()
    kinds = torch.zeros_like(tokens)
    kinds[0, [0, 13, 29]] = kinds[2, [2, 3]] = kinds[2, 20] = GLOBAL  # the last of them is padding
    with torch.no_grad():
        got = model(tokens, valid=valid, kinds=kinds, types=types)
        without = model(tokens, valid=valid, types=types)
    inputs = {"input_ids": tokens, "attention_mask": valid.long(), "token_type_ids": types}
    want = peer(**inputs, global_attention_mask=kinds).logits
    assert_close(got[valid], want[valid], 1e-6)
    assert (got - without)[0].abs().max() > 0.1 and torch.equal(got[1], without[1])


def test_windows_of_longformer(peers, tmp_path):
    imported(peers["longformer"].folder, tmp_path / "run")
    windows = [layer.mixer.pattern.window for layer in open_run(tmp_path / "run").config.layers]
    assert windows == [2, 8, 4]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
def test_same_classes(kind, model_type, tmp_path):
    peer = Peer(tmp_path / "peer", model_type, kind, num_labels=5)
    model = imported(peer.folder, tmp_path / "run").double()
    tokens, valid, types = peer.texts()
    with torch.no_grad():
        got = model(tokens, valid=valid, types=types)
    want = peer(input_ids=tokens, attention_mask=valid.long(), token_type_ids=types).logits
    if kind == "ForTokenClassification":
        got, want = got[valid], want[valid]
    assert_close(got, want, limits(model_type)[1][1])
    assert open_run(tmp_path / "run").config.global_tokens == (
        1 if (model_type, kind) == ("longformer", "ForSequenceClassification") else 0
    )


def test_a_classifier_of_the_first_token_takes_the_first_that_is_valid(tmp_path):
    peer = Peer(tmp_path / "peer", "roberta", "ForSequenceClassification")
    model = imported(peer.folder, tmp_path / "run").double()
    (right, valid, _), (left, behind, _) = peer.texts(), peer.texts(left=True)
    with torch.no_grad():
        assert_close(model(left.masked_scatter(behind, right[valid]), valid=behind), model(right, valid=valid), 1e-12)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_without_a_head_gets_a_new_one_and_says_so(model_type, tmp_path, capsys):
    peer = Peer(tmp_path / "peer", model_type, "Model")
    model = imported(peer.folder, tmp_path / "run").double()
    told = capsys.readouterr().err
    assert "it does not have a head, so the masked-language head is a new one" in told
    assert "pooler.dense.bias, pooler.dense.weight left out" in told
    tokens, valid, types = peer.texts()
    with torch.no_grad():
        got = model.hidden(tokens, valid=valid, types=types).long_input
    want = peer(input_ids=tokens, attention_mask=valid.long(), token_type_ids=types).last_hidden_state
    assert_close(got[valid], want[valid], limits(model_type)[1][1])


def test_what_predicts_the_next_sentence_is_left_out_and_told(tmp_path, capsys):
    peer = Peer(tmp_path / "peer", "bert", "ForPreTraining")
    model = imported(peer.folder, tmp_path / "run").double()
    assert "cls.seq_relationship.bias, cls.seq_relationship.weight, pooler.dense.bias" in capsys.readouterr().err
    tokens, valid, types = peer.texts()
    with torch.no_grad():
        got = model(tokens, valid=valid, types=types)
    want = peer(input_ids=tokens, attention_mask=valid.long(), token_type_ids=types).prediction_logits
    assert_close(got[valid], want[valid], 1e-9)


def test_same_logits_with_the_names_of_old_files(peers, folder, tmp_path):
    tensors = load((folder / "model.safetensors").read_bytes())
    embedding, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {each.replace(new, name): tensor for each, tensor in tensors.items()}
    tensors |= {"bert.embeddings.position_ids": torch.arange(40)[None]}
    tensors |= {"cls.predictions.decoder.weight": embedding.clone(), "cls.predictions.decoder.bias": bias.clone()}
    save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", architectures=None)
    assert_same_logits(peers["bert"], imported(folder, tmp_path / "run"), "bert")


def test_dropout_is_taken_over(tmp_path):
    peer = Peer(
        tmp_path / "peer", "bert", "ForSequenceClassification",
        hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2, classifier_dropout=0.4,
    )  # fmt: skip
    config = imported(peer.folder, tmp_path / "run").config
    layer = config.layers[0]
    assert (layer.dropout, config.dropout, layer.mixer.dropout, config.head.dropout) == (0.3, 0.3, 0.2, 0.4)


def test_texts_end_where_theirs_do(peers, tmp_path):
    bert = imported(peers["bert"].folder, tmp_path / "bert")
    roberta = imported(peers["roberta"].folder, tmp_path / "roberta")
    assert (bert.max_length, roberta.max_length) == (40, 38)
    with pytest.raises(KinformerError, match="positions end at max_length = 38"):
        roberta(peers["roberta"].texts((39,))[0])


def tokenizer_files(folder, tokens, **roles):
    """``tokens``: text to id; ``roles`` as transformers writes them."""
    added = [{"id": number, "content": text, "special": True} for text, number in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 9}}}))
    if roles:
        (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def special_of(folder):
    model = read_checkpoint(folder).model
    return tuple(model["input"].get(name) for name in ("mask_token", "bos_token", "eos_token"))


def test_special_tokens_are_those_of_the_tokenizer(peers, folder):
    assert special_of(folder) == (None, None, None)
    tokenizer_files(folder, {"[PAD]": 0, "[CLS]": 5, "[SEP]": 6, "[MASK]": 7, "<m>": 8})
    assert special_of(folder) == (7, 5, 6)
    tokenizer_files(folder, {"[CLS]": 5, "<m>": 8}, mask_token={"content": "<m>"}, sep_token="a")
    assert special_of(folder) == (8, 5, 9)
    assert special_of(peers["roberta"].folder) == (None, 0, 2)


def test_special_tokens_of_a_list_of_pieces(folder):
    pieces = {"model": {"vocab": [["<s>", 0.0], ["</s>", 0.0], ["<mask>", -1.5]]}}
    (folder / "tokenizer.json").write_text(json.dumps(pieces))
    assert special_of(folder) == (2, 0, 1)


def test_a_missing_mask_is_told(peers, tmp_path, capsys):
    imported(peers["roberta"].folder, tmp_path / "run")
    told = capsys.readouterr().err
    assert 'give set={"input.mask_token": "ID"}' in told and "takes token ids only (kinformer.load);" in told


def test_works_without_transformers(folder, tmp_path):
    new_model("gpt2", scale_attn_by_inverse_layer_idx=False).save_pretrained(tmp_path / "gpt2")
    commands = [
        ["import", str(path), "--out", str(tmp_path / f"run-{path.name}"), "--json"]
        for path in (folder, tmp_path / "gpt2")
    ]
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['tokenizers'] = None\n"
        "from kinformer.lab.cli.main import main\n"
        f"sys.exit(max(map(main, {commands!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r'"member": "(\w+)"', done.stdout) == ["bert", "gpt"]


REFUSED = {
    "a decoder": ({"is_decoder": True}, "is_decoder is True, but only False can"),
    "cross-attention": ({"add_cross_attention": True}, "add_cross_attention is True"),
    "relative positions": ({"position_embedding_type": "relative_key"}, "'relative_key', but only 'absolute'"),
    "pruned": ({"pruned_heads": {"0": [1]}}, "pruned"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "another activation": ({"hidden_act": "silu"}, "hidden_act is 'silu', but only gelu_new, "),
    "no activation": ({"hidden_act": ["gelu"]}, "hidden_act is"),
    "relu in the head": ({"hidden_act": "relu"}, "which the head for masked tokens cannot have"),
    "heads": ({"num_attention_heads": 3}, "num_heads = 3 does not divide dim = 16"),
    "width": ({"hidden_size": 32}, "which is not what config.json says"),
    "depth": ({"num_hidden_layers": 4}, "layers.3"),
    "fewer layers": ({"num_hidden_layers": 2}, "encoder.layer.2.*2 layers does not have"),
    "huge": ({"num_hidden_layers": 10**9}, "from 1 to 10000"),
    "types": ({"type_vocab_size": 3}, "input.types.weight"),
    "positions": ({"max_position_embeddings": 41}, "position.table"),
    "vocabulary": ({"vocab_size": 60}, "is not what config.json says"),
    "no number": ({"intermediate_size": "24"}, "intermediate_size is '24'"),
    "no epsilon": ({"layer_norm_eps": None}, "layer_norm_eps is None"),
    "another model": (
        {"model_type": "electra"},
        "what can: llama, .*gpt2, .*bert, roberta, longformer, big_bird, modernbert, .*marian, t5",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_config_is_refused(changes, message, folder, tmp_path):
    edit(folder / "config.json", **changes)
    with pytest.raises(KinformerError, match=message):
        imported(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("window", "message"),
    [(3, "even numbers"), ([4, 4], "one per layer"), ("4", "one per layer"), ([4, 4, 0], "2 or more")],
)
def test_windows_are_refused(window, message, peers, tmp_path):
    folder = shutil.copytree(peers["longformer"].folder, tmp_path / "checkpoint")
    edit(folder / "config.json", attention_window=window)
    with pytest.raises(KinformerError, match=message):
        read_checkpoint(folder)


SPOILT = {
    "another head": ({"qa_outputs.weight": torch.ones(2, 16)}, "question answering"),
    "a nameless classifier": ({"classifier.weight": torch.ones(2, 16)}, "does not say ForSequenceClassification"),
    "an unknown tensor": (
        {"bert.adapter.weight": torch.ones(2)},
        r"holds 'adapter.weight', which a BERT with the head",
    ),
    "an untied matrix": ({"cls.predictions.decoder.weight": torch.ones(61, 16)}, "differs from the embedding"),
    "an untied bias": ({"cls.predictions.decoder.bias": torch.ones(61)}, "two biases differ"),
    "a query of bools": (
        {"bert.encoder.layer.0.attention.self.query.weight": torch.ones(16, 16, dtype=torch.bool)},
        "query.weight is torch.bool, but weights must be",
    ),
    "whole numbers": ({"bert.more": torch.ones(2, dtype=torch.int8)}, "torch.int8, but weights must be"),
}


@pytest.mark.parametrize(("more", "message"), SPOILT.values(), ids=SPOILT)
def test_tensors_are_refused(more, message, folder):
    tensors = load((folder / "model.safetensors").read_bytes())
    save_file(tensors | more, folder / "model.safetensors")
    with pytest.raises(KinformerError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "the head has 1 class, so it predicts a number"),
        ({"num_labels": 1}, "the head has 1 class, so it predicts a number"),
        (
            {"problem_type": "regression"},
            "problem_type is .regression., but only single_label_classification, multi_label",
        ),
    ],
)
def test_a_head_that_does_not_choose_a_class_is_refused(settings, message, folder):
    tensors = load((folder / "model.safetensors").read_bytes())
    more = {"classifier.weight": torch.ones(1, 16), "classifier.bias": torch.ones(1)}
    save_file({name: one for name, one in tensors.items() if "cls." not in name} | more, folder / "model.safetensors")
    edit(folder / "config.json", architectures=["BertForSequenceClassification"], **settings)
    with pytest.raises(KinformerError, match=message):
        read_checkpoint(folder)


def test_a_missing_projection_is_named(folder):
    tensors = load((folder / "model.safetensors").read_bytes())
    del tensors["bert.encoder.layer.1.attention.self.key.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(KinformerError, match="lacks encoder.layer.1.attention.self.key.bias; restore it"):
        read_checkpoint(folder)
