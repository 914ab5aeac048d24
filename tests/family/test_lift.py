"""A short encoder becomes a long one: the same hidden states as far as all see all, and the authors' tables beyond."""

import json

import pytest
import torch

import kinformer
from kinformer.core.config import override, to_dict
from kinformer.core.encoder import LOCAL
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.cli.main import main
from kinformer.lab.data.corpus import STDLIB
from kinformer.lab.runs.inheritance import inheritance, inherited_config
from kinformer.lab.runs.run import Run, open_run, save_weights
from kinformer.lab.tasks.table import task_of
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors

from ..interop.encoders import SIZES, Peer, assert_close, imported

LENGTH, DEPTH = 512, 3


def save_run(folder, name, **changes):
    """A random model of member ``name`` as a run."""
    torch.manual_seed(0)
    config = configure(name, "tiny", set=changes)
    model = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    save_weights(folder, model.state_dict())
    data = {"spec": STDLIB, "holdout": None, "identity": {}}
    task = task_of(config)
    facts = {"member": name, "recipe": "tiny", "config": config, "task": task, "options": task.Options()}
    Run(folder=folder, data=data, training={}, **facts).save()
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """512 tokens, 3 layers, an epsilon of its own."""
    folder = tmp_path_factory.mktemp("runs") / "bert"
    layer = to_dict(configure("bert", "tiny").layers[0])
    return save_run(folder, "bert", **{"position.max_length": LENGTH, "layers": [layer] * DEPTH, "input.types": 2})


def extend_to_long(folder, name, recipe="small", changes=None):
    """The trained encoder in the run ``folder`` as member ``name``, in eval mode."""
    short = open_run(folder).config
    config = override(inherited_config(short, configure(name, recipe), folder), changes or {}, kinds())
    result, model = inheritance(short, config, folder), config.build()
    weights = load_tensors(folder / "model.safetensors")[0]
    model.load_state_dict(result.weights(weights, model.state_dict()))
    return model.eval()


def tokens_of(length):
    return torch.randint(256, (2, length), generator=torch.Generator().manual_seed(length))


def hidden(model, length, **inputs):
    with torch.no_grad():
        return model.double().hidden(tokens_of(length), **inputs).long_input


def test_longformer_reads_4096_tokens_and_short_texts_as_bert_does(bert):
    """Its windows are 256 a side, so that 257 tokens see each other; a global token projects with equal numbers."""
    short, long = kinformer.load(bert), extend_to_long(bert, "longformer", "paper")
    assert (short.max_length, long.max_length) == (512, 4096)
    none = torch.full((2, 257), LOCAL)
    want = hidden(short, 257)
    assert_close(hidden(long, 257, kinds=none), want, 1e-12)
    assert_close(hidden(long, 257), want, 1e-12)
    one_more = hidden(long, 258, kinds=torch.full((2, 258), LOCAL))
    assert (one_more - hidden(short, 258)).abs().max() > 1e-6
    assert hidden(long, 4096).isfinite().all()


def test_big_bird_reads_short_texts_as_bert_does(bert):
    small = {"layers.*.mixer.pattern.block": 8, "layers.*.mixer.pattern.random": 1}
    short, long = kinformer.load(bert), extend_to_long(bert, "big-bird", "paper", small)
    assert long.max_length == 4096
    assert_close(hidden(long, 56), hidden(short, 56), 1e-12)  # 5 + 2 blocks
    assert (hidden(long, 57) - hidden(short, 57)).abs().max() > 1e-6
    assert [layer.mixer.pattern.seed for layer in long.config.layers] == [0, 1, 2]
    assert {layer.mixer.pattern.num_heads for layer in long.config.layers} == {2}


def test_positions_are_copied_over_and_over(bert):
    table = kinformer.load(bert).position.table
    for name in ("longformer", "big-bird"):
        assert torch.equal(extend_to_long(bert, name, "paper").position.table, table.repeat(8, 1))
    shorter = extend_to_long(bert, "longformer", "small", {"position.max_length": 700}).position.table
    assert torch.equal(shorter, torch.cat([table, table[:188]]))


def test_the_layers_take_the_attention_at_their_place_in_the_recipe(bert):
    layers = extend_to_long(bert, "longformer", "small").config.layers  # of 32, 64, 128, 128
    assert [layer.mixer.pattern.window for layer in layers] == [32, 64, 128]
    assert all(layer.mixer.num_heads == 2 for layer in layers)


@pytest.mark.parametrize("sharing", ["all", "inputs", "pieces"])
def test_etc_begins_with_copies(bert, sharing):
    before = dict(kinformer.load(bert).state_dict())
    model = extend_to_long(bert, "etc", "tiny", {"layers.*.mixer.sharing": sharing})
    after = dict(model.state_dict())
    same = before.keys() & after.keys()
    assert before.keys() - same == {"position.table"}
    assert all(torch.equal(before[name], after[name]) for name in same)
    copies = {"global_out": ("out", 0)}
    copies |= {} if sharing == "all" else {"projection.of_global.qkv": ("projection.qkv", 0)}
    copies |= {f"projection.{piece}": ("projection.qkv", 32) for piece in ("l2g", "g2l") if sharing == "pieces"}
    for layer in range(DEPTH):
        for name, (source, first) in copies.items():
            for kind in ("weight", "bias"):
                mixer = f"stack.layers.{layer}.mixer"
                assert torch.equal(after.pop(f"{mixer}.{name}.{kind}"), before[f"{mixer}.{source}.{kind}"][first:])
    new = {name for name in after.keys() - same if name != "global_input.table.weight"}
    assert len(new) == 4 * DEPTH and all("relations." in name for name in new)
    assert hidden(model, 600).isfinite().all()


def test_the_global_input_of_big_bird_is_new(bert):
    model = extend_to_long(bert, "big-bird", "tiny-etc")
    assert model.global_input.table.weight.shape == (3, 32)
    assert hidden(model, 100).isfinite().all()


def test_lifted_roberta_is_the_longformer_that_its_authors_make_of_it(tmp_path):
    """Their way, by hand: rows from the third on copied over and over, global projections equal to the local ones."""
    short = Peer(tmp_path / "roberta", "roberta", max_position_embeddings=18)
    long = Peer(tmp_path / "longformer", "longformer", max_position_embeddings=50, attention_window=8)
    weights = {name.replace("roberta.", "longformer."): value for name, value in short.model.state_dict().items()}
    weights |= {name.replace(".self.query.", ".self.query_global."): value for name, value in weights.items()}
    weights |= {name.replace(".self.key.", ".self.key_global."): value for name, value in weights.items()}
    weights |= {name.replace(".self.value.", ".self.value_global."): value for name, value in weights.items()}
    table = weights["longformer.embeddings.position_embeddings.weight"]
    weights["longformer.embeddings.position_embeddings.weight"] = torch.cat([table[:2], table[2:].repeat(3, 1)])
    long.model.load_state_dict(weights)
    imported(short.folder, tmp_path / "run")
    changes = {"position.max_length": 48, "layers.*.mixer.pattern.window": 4}
    model = extend_to_long(tmp_path / "run", "longformer", "paper", changes).double()
    tokens, valid, types = long.texts((40, 31, 9))
    marked = torch.zeros_like(tokens).index_fill_(1, torch.tensor([0]), 1)
    with torch.no_grad():
        got = model(tokens, valid=valid, types=types)
    inputs = {"input_ids": tokens, "attention_mask": valid.long(), "token_type_ids": types}
    assert_close(got[valid], long(**inputs, global_attention_mask=marked).logits[valid], 1e-6)
    assert model.config.input.vocab_size == SIZES["vocab_size"]


@pytest.mark.parametrize(
    ("changes", "what"), [({"dim": 64}, "dim = 32"), ({"input.vocab_size": 300}, "vocab_size = 259")]
)
def test_another_width_or_vocabulary_is_refused(bert, changes, what):
    with pytest.raises(KinformerError, match=f"{what}, .* leave such a set out"):
        extend_to_long(bert, "longformer", "tiny", changes)


def test_a_long_encoder_begins_with_another_one(tmp_path):
    """Global projections have no place in Big Bird, nor have those of ETC's global input in BERT."""
    for name, other, left in (("longformer", "big-bird", "of_global"), ("etc", "bert", "global_out")):
        folder = save_run(tmp_path / name, name)
        short = open_run(folder).config
        result = inheritance(short, inherited_config(short, configure(other, "tiny"), folder), folder)
        mixers = [item for item in result.left if ".mixer." in item and "relations" not in item]
        assert mixers and all(left in item for item in mixers)
        assert all("position" in item for item in result.new) and result.partly_new == ()


def train(name, base, out, text_file, *more):
    options = ["--data", str(text_file), "--out", str(out), "--recipe", "tiny", "--threads", "1", *more]
    return main(["train", name, "--init", str(base), "--length", "600", "--batch-size", "2", "--steps", "1", *options])


@pytest.mark.parametrize("name", ["longformer", "big-bird", "etc"])
def test_training_begins_with_the_weights_of_a_run(bert, tmp_path, text_file, name):
    """At a learning rate of next to nothing they stay what they were."""
    long = () if name == "etc" else ("--set", "position.max_length=1024")
    assert train(name, bert, tmp_path / "run", text_file, "--lr", "1e-12", *long) == 0
    run = open_run(tmp_path / "run")
    assert (run.member, run.recipe, len(run.config.layers)) == (name, "tiny", DEPTH)
    got, own = load_tensors(run.folder / "model.safetensors")[0], kinformer.load(bert).state_dict()
    for each in (
        "input.embedding.weight",
        "stack.layers.2.mixer.projection.qkv.weight",
        "head.dense.weight",
        "input.types.weight",
    ):
        assert (got[each] - own[each]).abs().max() < 1e-6
    if name == "longformer":
        assert (got["position.table"] - own["position.table"].repeat(2, 1)).abs().max() < 1e-6


def test_the_command_refuses_what_cannot_be(bert, tmp_path, text_file, capsys):
    assert train("longformer", bert, tmp_path / "a", text_file, "--set", "dim=64") == 2
    assert "keeps its width and its vocabulary" in capsys.readouterr().err
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    assert train("longformer", tmp_path / "hf", tmp_path / "b", text_file) == 2
    assert "make it a run first: kinformer import" in capsys.readouterr().err
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
