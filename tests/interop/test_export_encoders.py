"""Export of encoders: the classes of transformers compute what the run computes, and importing gives the run's bits."""

import json

import pytest
import torch
import transformers

import kinformer
from kinformer.core.config import to_dict
from kinformer.data import ByteTokenizer
from kinformer.family.build import configure
from kinformer.interop.native import native_form
from kinformer.interop.routes import Padding
from kinformer.runs.run import Run, open_run, save_weights
from kinformer.tasks.table import task_of
from tests.interop.encoders import Peer, assert_close, imported
from tests.interop.test_export import assert_same_weights

VOCABULARY, MASK, BEGIN, END = 259, 256, 257, 258
CLASSIFIER = {"head": {"kind": "classification", "classes": 3}}


def saved_run(member, folder, classes=(), **changes):
    """A run of the recipe tiny, of bytes, with random weights; biases and norms are random as well."""
    torch.manual_seed(0)
    config = configure(member, "tiny", None, changes)
    model = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    folder.mkdir()
    save_weights(folder, model.state_dict())
    task = task_of(config)
    identity = {"classes": list(classes)} if classes else {}
    data = {"spec": task.data.default, "holdout": None, "identity": identity}
    vocabulary = "bytes" if hasattr(config.input, "vocab_size") else None
    Run(
        folder=folder,
        member=member,
        recipe="tiny",
        config=config,
        task=task,
        options=task.Options(),
        data=data,
        training={},
        vocabulary=vocabulary,
    ).save()
    return folder


def texts(lengths=(40, 26, 9)):
    """Tokens [rows, time] with their ends, padded with the byte 0, and which are real."""
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, 256, valid.shape, generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = BEGIN
    for row, length in enumerate(lengths):
        tokens[row, length - 1] = END
    return tokens.masked_fill(~valid, 0), valid


def loaded(done):
    return getattr(transformers, done.auto_class).from_pretrained(done.folder).eval()


def assert_same_config(one, other):
    one, other = (to_dict(open_run(folder).config) for folder in (one, other))
    assert one.pop("initialisation") and other.pop("initialisation")
    position = one["position"].pop("std", None), other["position"].pop("std", None)
    assert one == other, position


MEMBERS = {
    "bert": ("bert", {}, {}),
    "longformer": ("longformer", {}, {"global_attention_mask": lambda tokens: (tokens == BEGIN).long()}),
    "big-bird": ("big_bird", {}, {}),
    "bert, classes": ("bert", CLASSIFIER, {}),
    "longformer, classes": ("longformer", CLASSIFIER, {}),
    "big-bird, classes": ("big_bird", CLASSIFIER | {"head.activation": "gelu"}, {}),
    "bert, untied": ("bert", {"head.tied": False}, {}),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members_that_are_architectures(name, tmp_path):
    kind, changes, more = MEMBERS[name]
    run = saved_run(name.split(",")[0], tmp_path / "run", **changes)
    done = kinformer.export(run, tmp_path / "exported")
    assert (done.native, done.model_type) == (True, kind) and not list(done.folder.glob("*.py"))
    theirs, ours = loaded(done), kinformer.load(run)
    if kind == "big_bird":  # random blocks are drawn while it trains, and padding of a batch is global
        theirs.train()
    tokens, valid = texts((40, 40) if kind == "big_bird" else (40, 26, 9))
    with torch.no_grad():
        want = ours(tokens, valid=valid)
        options = {one: made(tokens) for one, made in more.items()}
        got = theirs(input_ids=tokens, attention_mask=valid.long(), **options).logits
    real = valid if want.dim() == 3 else slice(None)
    assert_close(got[real], want[real], 1e-5)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_same_weights(run, tmp_path / "again")
    assert_same_config(run, tmp_path / "again")


@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "longformer", "big_bird"])
def test_an_architecture_of_transformers_leaves_as_it_came(model_type, kind, tmp_path):
    peer = Peer(tmp_path / "peer", model_type, kind)
    ids = {f"{text}": number for number, text in enumerate(["<s>", "<pad>", "</s>", "<mask>"])}
    if model_type in ("roberta", "longformer"):
        added = [{"id": number, "content": text, "special": True} for text, number in ids.items()]
        tokenizer = {"added_tokens": added, "model": {"type": "BPE", "vocab": {}, "merges": []}}
        (peer.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    imported(peer.folder, tmp_path / "run")
    done = kinformer.export(tmp_path / "run", tmp_path / "exported")
    assert (done.model_type, done.model_class) == (model_type, type(peer.model).__name__)
    tokens, valid, types = peer.texts((24, 24) if model_type == "big_bird" else (30, 22, 7))
    with torch.no_grad():
        inputs = {"input_ids": tokens, "attention_mask": valid.long(), "token_type_ids": types}
        got, want = (model(**inputs).logits for model in (loaded(done), peer.model))
    real = valid if want.dim() == 3 else slice(None)
    assert_close(got[real], want[real], 1e-6)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_same_weights(tmp_path / "run", tmp_path / "again")
    assert_same_config(tmp_path / "run", tmp_path / "again")


def test_ids_of_an_encoder_of_bytes_are_those_of_its_run(tmp_path):
    from transformers import AutoTokenizer

    done = kinformer.export(saved_run("bert", tmp_path / "run"), tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    text = "It was\n\t the  »best« of times, \N{PILE OF POO}\x00\x7f."
    assert tokenizer(text)["input_ids"] == [BEGIN, *ByteTokenizer().encode(text).tolist(), END]
    assert tokenizer("a[MASK]")["input_ids"] == [BEGIN, ord("a"), MASK, END]
    batch = tokenizer([text, "b"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum().item() == len(text.encode()) + 5
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert open_run(tmp_path / "again").tokenizer.encode(text).tolist() == ByteTokenizer().encode(text).tolist()


def test_classes_keep_their_names(tmp_path):
    run = saved_run("bert", tmp_path / "run", ["cat", "dog", "newt"], **CLASSIFIER)
    done = kinformer.export(run, tmp_path / "exported")
    assert loaded(done).config.id2label == {0: "cat", 1: "dog", 2: "newt"}


def test_padding_decides_where_positions_begin():
    config = configure("longformer", "tiny")
    form = native_form(config, padding=Padding(7, "<pad>"))
    assert form.config["max_position_embeddings"] == config.position.max_length + 8
    assert isinstance(native_form(config), str)
