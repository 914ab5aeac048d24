"""Export of encoders: the classes of transformers compute what the run computes, and importing gives the run's bits."""

import json

import pytest
import torch
import transformers

import kinformer
from kinformer.core.config import to_dict
from kinformer.family.build import configure
from kinformer.interop import auto
from kinformer.interop.architecture import Padding
from kinformer.interop.writing import native_form
from kinformer.lab.data import ByteTokenizer
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.table import task_of
from kinformer.runtime.errors import KinformerError
from tests.interop.encoders import Peer, assert_close, imported
from tests.interop.test_export import assert_same_weights, save_run
from tests.interop.test_images import MEMBERS as OF_PEERS
from tests.interop.test_images import Peer as ImagePeer

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
    data = {"spec": task_of(config).data.default, "holdout": None, "identity": {"classes": list(classes)}}
    more = {"data": data} if classes else {}
    return save_run(
        member, folder, config, model, **more, vocabulary="bytes" if hasattr(config.input, "vocab_size") else None
    )


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


def add_tokenizer(peer, model_type):
    """A tokenizer with the padding token, by whose id RoBERTa and Longformer count positions."""
    if model_type in ("roberta", "longformer"):
        names = ["<s>", "<pad>", "</s>", "<mask>"]
        added = [{"id": number, "content": text, "special": True} for number, text in enumerate(names)]
        tokenizer = {"added_tokens": added, "model": {"type": "BPE", "vocab": {}, "merges": []}}
        (peer.folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "longformer", "big_bird"])
def test_an_architecture_of_transformers_leaves_as_it_came(model_type, kind, tmp_path):
    peer = Peer(tmp_path / "peer", model_type, kind)
    add_tokenizer(peer, model_type)
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


@pytest.mark.parametrize("model_type", ["bert", "roberta", "longformer"])
@torch.no_grad()
def test_the_ends_of_answers_go_in_and_out(model_type, tmp_path, capsys):
    peer = Peer(tmp_path / "peer", model_type, "ForQuestionAnswering")
    add_tokenizer(peer, model_type)
    ours = imported(peer.folder, tmp_path / "run")
    done = kinformer.export(tmp_path / "run", tmp_path / "exported")
    assert (done.model_type, done.model_class) == (model_type, type(peer.model).__name__)
    tokens, valid, types = peer.texts()
    inputs = {"input_ids": tokens, "attention_mask": valid.long(), "token_type_ids": types}
    kinds = {}
    if model_type == "longformer":
        kinds = {"kinds": (torch.arange(tokens.shape[1]) < 3).long().expand_as(tokens)}
        inputs["global_attention_mask"] = kinds["kinds"]
        assert "makes the tokens of a question global" in capsys.readouterr().err
    want, got = peer.model(**inputs), loaded(done)(**inputs)
    for number, name in enumerate(("start_logits", "end_logits")):
        assert_close(got[name][valid], want[name][valid], 1e-6)
        assert_close(ours(tokens, valid=valid, types=types, **kinds)[..., number][valid], want[name][valid], 1e-5)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_same_weights(tmp_path / "run", tmp_path / "again")
    if model_type == "bert":  # in the class of other compositions, with the loss
        config = auto.KinformerConfig(to_dict(open_run(tmp_path / "run").config), "bert")
        model = auto.KinformerForQuestionAnswering(config).eval()
        model.model.load_state_dict(ours.state_dict())
        places = {"start_positions": torch.tensor([3, 0, 5]), "end_positions": torch.tensor([9, 2, 6])}
        mine, theirs = (one(peer.texts((20, 20, 20))[0], **places) for one in (model, peer.model))
        assert_close(mine.loss, theirs.loss, 1e-5)
        assert_close(mine.end_logits, theirs.end_logits, 1e-5)


def test_a_model_of_answers_does_not_fill_masks(tmp_path):
    run = saved_run("bert", tmp_path / "run", head={"kind": "span"})
    with pytest.raises(KinformerError, match="lacks a mask token or a head for masked tokens"):
        list(kinformer.predict(run, ["a [MASK] text"]))
    (tmp_path / "text.txt").write_text("a text of some words\n" * 300)
    with pytest.raises(KinformerError, match="the head 'span' does not predict masked tokens"):
        kinformer.evaluate(run, data=tmp_path / "text.txt", quiet=True)


SEVERAL = {"head": {"kind": "classification", "classes": 3, "multi_label": True}}


@pytest.mark.parametrize("changes", [SEVERAL, SEVERAL | {"norm": "rms_norm"}], ids=["native", "with code"])
def test_texts_of_several_classes_go_out_and_in(changes, tmp_path):
    run = saved_run("bert", tmp_path / "run", ["cat", "dog", "newt"], **changes)
    done = kinformer.export(run, tmp_path / "exported")
    assert done.native == (changes is SEVERAL)
    place = {"model": str(done.folder), "trust_remote_code": True, "device": "cpu"}
    (theirs,) = transformers.pipeline("text-classification", top_k=None, **place)(["a text"])
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert open_run(tmp_path / "again").config.head.multi_label
    for folder in (run, tmp_path / "again"):
        (row,) = kinformer.predict(folder, ["a text"], top_k=3)
        ours = {one["class"]: one["probability"] for one in row["classes"]}
        assert ours == pytest.approx({one["label"]: one["score"] for one in theirs}, abs=1e-6)
    table = tmp_path / "texts.tsv"
    table.write_text("cat\ta\ndog\tb\n" * 9)
    with pytest.raises(KinformerError, match="its texts may have several classes, which examples with one label"):
        kinformer.evaluate(run, data=table, quiet=True)


@pytest.mark.parametrize("learned", [False, True])
def test_one_type_counts_where_it_learned(learned, tmp_path):
    """RoBERTa has one type, whose vector is zero."""
    peer = Peer(tmp_path / "peer", "bert", type_vocab_size=1)
    if not learned:
        with torch.no_grad():
            peer.model.bert.embeddings.token_type_embeddings.weight.zero_()
        peer.model.save_pretrained(peer.folder)
    assert imported(peer.folder, tmp_path / "run").config.input.types == int(learned)
    done = kinformer.export(tmp_path / "run", tmp_path / "exported")
    tokens = peer.texts((20, 20))[0]
    with torch.no_grad():
        assert_close(loaded(done)(tokens).logits, peer.model(tokens).logits, 1e-6)


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
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    (row,) = kinformer.predict(tmp_path / "again", ["a text"], top_k=3)
    assert {one["class"] for one in row["classes"]} == {"cat", "dog", "newt"}


def images(*size):
    return torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(1))


NORMAL = {"input.mean": [0.5, 0.25, 0.75], "input.std": [0.5, 0.25, 1.0]}
OF_IMAGES = {
    "vit": ("vit", {}),
    "deit": ("deit", {}),
    "deit, one classifier": ("deit", {"head": {"kind": "linear_classification", "classes": 5}}),
    "swin": ("swin", {}),
    "vit, normalised": ("vit", NORMAL),
}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_members_of_images(name, tmp_path):
    kind, changes = OF_IMAGES[name]
    run = saved_run(name.split(",")[0], tmp_path / "run", **changes)
    done = kinformer.export(run, tmp_path / "exported")
    assert (done.native, done.model_type) == (True, kind)
    x, ours = images(32, 32), kinformer.load(run)
    normal = x
    if "normalised" in name:
        mean, std = (torch.tensor(NORMAL[f"input.{one}"])[:, None, None] for one in ("mean", "std"))
        normal = (x - mean) / std
    with torch.no_grad():
        assert_close(loaded(done)(pixel_values=normal).logits, ours(x), 1e-5)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_same_weights(run, tmp_path / "again")
    assert_same_config(run, tmp_path / "again")


@pytest.mark.parametrize("name", OF_PEERS)
def test_an_image_architecture_leaves_as_it_came(name, tmp_path):
    peer = ImagePeer(tmp_path / "peer", name)
    imported(peer.folder, tmp_path / "run")
    done = kinformer.export(tmp_path / "run", tmp_path / "exported")
    config = json.loads((done.folder / "config.json").read_text())
    assert done.model_class == type(peer.model).__name__ and list(config["id2label"].values()) == ["cat", "dog", "newt"]
    side = 24 if name.startswith("swin") else 12
    x = torch.rand(2, 2, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(loaded(done)(pixel_values=x).logits, peer(x), 1e-6)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    assert_same_weights(tmp_path / "run", tmp_path / "again")


def test_images_are_prepared_as_the_run_reads_them(tmp_path):
    processors = pytest.importorskip("transformers.models.vit")
    done = kinformer.export(saved_run("vit", tmp_path / "run", **NORMAL), tmp_path / "exported")
    try:
        processor = processors.ViTImageProcessor.from_pretrained(done.folder)
    except ImportError as error:
        pytest.skip(str(error).strip().split("\n")[0])
    pixels = torch.randint(256, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    inputs = processor(pixels.numpy(), return_tensors="pt")
    with torch.no_grad():
        got = loaded(done)(**inputs).logits
        assert_close(got, kinformer.load(tmp_path / "run")(pixels.permute(2, 0, 1)[None]), 1e-5)


def test_images_of_another_size_are_announced(tmp_path):
    said = []
    run = saved_run("vit", tmp_path / "run")
    kinformer.lab.runs.exporting.export(run, tmp_path / "exported", announce=said.append)
    assert "another size than 32 x 32 are resized bicubically there" in said[0]


LAYOUT = {"position.layout": "split", "encoder.position.layout": "split"}


@pytest.mark.parametrize("changes", [{}, LAYOUT, LAYOUT | {"head.bias": True}], ids=["as it is", "split", "bias"])
@torch.no_grad()
def test_a_translator(changes, tmp_path):
    """Sines and cosines take turns in the paper's order; there all sines come first."""
    run = saved_run("vanilla", tmp_path / "run", **changes)
    done = kinformer.export(run, tmp_path / "exported")
    assert (done.model_type, done.model_class) == ("marian", "MarianMTModel")
    theirs, ours = loaded(done), kinformer.load(run)
    source, valid = torch.randint(256, (2, 7)), torch.arange(7) < torch.tensor([[7], [4]])
    target = torch.randint(256, (2, 5))
    want = theirs(input_ids=source, attention_mask=valid.long(), decoder_input_ids=target).logits
    assert_close(ours(target, ours.begin(source, valid))[0], want, 1e-5)
    kinformer.import_checkpoint(done.folder, tmp_path / "again")
    again = kinformer.load(tmp_path / "again")
    assert_close(again(target, again.begin(source, valid))[0], want, 1e-5)
    if changes:
        assert_same_weights(run, tmp_path / "again")
        assert_same_config(run, tmp_path / "again")


@torch.no_grad()
def test_a_translator_translates_text(tmp_path):
    from transformers import AutoTokenizer

    run = saved_run("vanilla", tmp_path / "run")
    done = kinformer.export(run, tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    batch = tokenizer(["two and", "a"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[*b"two and", 257], [*b"a", 257, *[256] * 6]]
    got = loaded(done).generate(**batch, max_new_tokens=6, num_beams=1, do_sample=False)
    ours = kinformer.load(run)
    state, token, new = ours.begin(batch["input_ids"], batch["attention_mask"].bool()), torch.full((2, 1), 256), []
    for _ in range(6):
        logits, state = ours(token, state)
        token = logits[:, -1:].argmax(-1)
        new.append(token)
    want = torch.cat(new, dim=1)
    for row, other in zip(got[:, 1:], want, strict=True):
        end = other.tolist().index(257) + 1 if 257 in other else 6
        assert torch.equal(row[:end], other[:end])


def test_padding_decides_where_positions_begin():
    config = configure("longformer", "tiny")
    form = native_form(config, padding=Padding(7, "<pad>"))
    assert form.config["max_position_embeddings"] == config.position.max_length + 8
    assert isinstance(native_form(config), str)
