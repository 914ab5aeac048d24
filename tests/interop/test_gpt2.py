"""Import of GPT-2 checkpoints: the same numbers as transformers, and nothing run, skipped or guessed."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load, save_file

import kinformer
from kinformer.interop import read_checkpoint
from kinformer.lab.cli.exchange import Import
from kinformer.lab.cli.main import main
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from tests.interop.peers import byte_tokenizer

SIZES = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 3, "n_head": 2}


class Peer:
    """A random GPT-2 of transformers and the folder that it was saved to."""

    def __init__(self, folder, **changes):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(**SIZES | {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3} | changes)
        self.model, self.folder = GPT2LMHeadModel(config).eval(), folder
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.model.save_pretrained(folder)


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    return Peer(tmp_path_factory.mktemp("peer"))


@pytest.fixture
def folder(peer, tmp_path):
    """A copy of the checkpoint that a test may spoil."""
    return shutil.copytree(peer.folder, tmp_path / "checkpoint")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def imported(folder, out):
    assert Import(folder=str(folder), out=str(out)).run() == 0
    return kinformer.load(out)


def tokens(time=20):
    return torch.randint(SIZES["vocab_size"], (2, time), generator=torch.Generator().manual_seed(3))


def logits_of(peer, dtype=torch.float64):
    with torch.no_grad():
        return peer.model.to(dtype)(tokens()).logits


def assert_same(model, want):
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        with torch.no_grad():
            got = model.to(dtype)(tokens())[0]
        assert (got - want).abs().max() < limit * want.abs().max().clamp(min=1)


CHANGES = {
    "as it is": {},
    "another epsilon and width": {"layer_norm_epsilon": 1e-3, "n_inner": 40},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "untied": {"tie_word_embeddings": False},
    "upcast": {"reorder_and_upcast_attn": True},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_same_logits(changes, tmp_path):
    peer = Peer(tmp_path / "peer", **changes)
    assert_same(imported(peer.folder, tmp_path / "run"), logits_of(peer))


def test_same_logits_from_several_files(peer, tmp_path):
    peer.model.float().save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_same(imported(tmp_path / "shards", tmp_path / "run"), logits_of(peer))


def test_same_logits_without_prefix_and_with_the_masks_of_old_files(peer, folder, tmp_path):
    tensors = load((folder / "model.safetensors").read_bytes())
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    tensors |= {"lm_head.weight": tensors["wte.weight"].clone()}
    save_file(tensors, folder / "model.safetensors")
    assert_same(imported(folder, tmp_path / "run"), logits_of(peer))


def test_half_precision_weights_become_float32(peer, folder, tmp_path):
    tensors = load((folder / "model.safetensors").read_bytes())
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model = imported(folder, tmp_path / "run")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.input.embedding.weight, tensors["transformer.wte.weight"].half().float())


def test_the_run_is_a_gpt_that_trains_and_generates(folder, tmp_path):
    edit(folder / "config.json", attn_pdrop=0.2, resid_pdrop=0.3, embd_pdrop=0.4)
    model = imported(folder, tmp_path / "run")
    record = open_run(tmp_path / "run")
    assert (record.member, record.recipe) == ("gpt", "imported")
    layer = model.config.layers[0]
    assert (layer.mixer.dropout, layer.dropout, model.config.dropout) == (0.2, 0.3, 0.4)
    assert kinformer.generate(model, tokens(5), max_new_tokens=4, seed=1).shape == (2, 4)
    assert model.max_length == 24
    loss = model.train()(tokens())[0].logsumexp(-1).mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_greedy_continuation_is_that_of_transformers(peer, tmp_path):
    model = imported(peer.folder, tmp_path / "run").double()
    theirs, sequence = peer.model.double(), tokens(6)
    for _ in range(8):
        with torch.no_grad():
            sequence = torch.cat([sequence, theirs(sequence).logits[:, -1:].argmax(-1)], dim=1)
    got = kinformer.generate(model, tokens(6), max_new_tokens=8, temperature=0, seed=0)
    assert torch.equal(got, sequence[:, 6:])


def test_tokenizer_is_copied(folder, tmp_path, capsys):
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    imported(folder, tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert open_run(tmp_path / "run").vocabulary == "tokenizer.json"
    assert capsys.readouterr().err == ""


def test_commands_take_the_run(peer, tmp_path, capsys):
    """A byte-level tokenizer whose 256 tokens the model has: text goes in and comes out."""
    peer = Peer(tmp_path / "peer", vocab_size=256)
    tokenizer = byte_tokenizer(peer.folder)
    out = str(tmp_path / "run")
    assert main(["import", str(peer.folder), "--out", out]) == 0
    capsys.readouterr()
    assert main(["generate", out, "--prompt", "def", "--max-new-tokens", "5", "--temperature", "0"]) == 0
    written = capsys.readouterr().out
    prompt = torch.tensor([tokenizer.encode("def").ids])
    new = kinformer.generate(kinformer.load(out), prompt, max_new_tokens=5, temperature=0)[0].tolist()
    assert tokenizer.decode(new) in written
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 200)
    onward = ["--data", str(text), "--out", str(tmp_path / "onward"), "--length", "16", "--steps", "3"]
    assert main(["train", "gpt", "--init", out, *onward]) == 0
    assert kinformer.load(tmp_path / "onward").config == kinformer.load(out).config


def test_without_a_tokenizer_token_ids_are_the_interface(folder, tmp_path, capsys):
    imported(folder, tmp_path / "run")
    assert "takes token ids only" in capsys.readouterr().err


def test_json(folder, tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["import", str(folder), "--out", out, "--name", "mine", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"out": out, "member": "gpt", "recipe": "mine", "parameters": told["parameters"], "tokenizer": False}
    assert told["parameters"] == sum(parameter.numel() for parameter in kinformer.load(out).parameters())


REFUSED = {
    "scaled by layer": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    "unscaled": ({"scale_attn_weights": False}, "scale_attn_weights is False"),
    "cross-attention": ({"add_cross_attention": True}, "add_cross_attention is True"),
    "another activation": ({"activation_function": "silu"}, "only gelu_new, gelu_pytorch_tanh, gelu, relu"),
    "another model": ({"model_type": "mamba"}, "'mamba' cannot be imported; what can: llama, .*gpt2"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "pruned": ({"pruned_heads": {"0": [1]}}, "pruned"),
    "heads": ({"n_head": 3}, "num_heads = 3 does not divide dim = 16"),
    "width": ({"n_embd": 32}, "is not what config.json says"),
    "depth": ({"n_layer": 4}, "layers.3"),
    "fewer layers": ({"n_layer": 2}, "h.2.* which a GPT-2 language model of 2 layers does not have"),
    "huge": ({"n_layer": 10**9}, "a whole number from 1 to 10000"),
    "vocabulary": ({"vocab_size": 2**30}, "embedding.weight is"),
    "not a number": ({"n_layer": "3"}, "n_layer is '3'"),
    "no epsilon": ({"layer_norm_epsilon": "tiny"}, "layer_norm_epsilon is 'tiny'"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_config_is_refused(changes, message, folder, tmp_path):
    edit(folder / "config.json", **changes)
    with pytest.raises(KinformerError, match=message):
        Import(folder=str(folder), out=str(tmp_path / "run")).run()
    assert not (tmp_path / "run").exists()


def test_tensors_of_another_head_are_refused(folder):
    tensors = load((folder / "model.safetensors").read_bytes())
    save_file(tensors | {"score.weight": torch.ones(2, 16)}, folder / "model.safetensors")
    with pytest.raises(KinformerError, match=r"'score.weight'"):
        read_checkpoint(folder)


def test_tied_weights_that_differ_are_refused(folder):
    tensors = load((folder / "model.safetensors").read_bytes())
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(KinformerError, match=r"the output matrix differs from the embedding"):
        read_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_integer_weights_are_refused(dtype, folder):
    tensors = load((folder / "model.safetensors").read_bytes())
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(KinformerError, match=rf"{dtype}, but weights must be"):
        read_checkpoint(folder)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json", "tokenizer.json"])
def test_pickles_are_never_loaded(name, folder, tmp_path):
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(KinformerError, match="never loaded; convert" if name.endswith(".bin") else "damaged|readable"):
        Import(folder=str(folder), out=str(tmp_path / "run")).run()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("size", [0, 7, 100, 2000])
def test_truncated_weights_are_one_sentence(size, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(KinformerError, match="truncated or damaged"):
        read_checkpoint(folder)


def test_index_cannot_name_files_elsewhere(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = folder / "model.safetensors.index.json"
    for place in ("../elsewhere.safetensors", str(tmp_path / "elsewhere.safetensors"), "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": place}}))
        with pytest.raises(KinformerError, match="not a safetensors file of this folder"):
            read_checkpoint(folder)
    for content in ("[]", '{"weight_map": {}}', '{"weight_map": []}'):
        index.write_text(content)
        with pytest.raises(KinformerError, match="does not have a weight_map"):
            read_checkpoint(folder)


def test_missing_things_are_named(folder, tmp_path):
    with pytest.raises(KinformerError, match="is not a folder.*hf download"):
        read_checkpoint(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(KinformerError, match=r"holds neither model.safetensors nor"):
        read_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(KinformerError, match="the file does not exist"):
        read_checkpoint(folder)


def test_out_must_be_new(folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("precious")
    with pytest.raises(KinformerError, match="is not empty"):
        Import(folder=str(folder), out=str(tmp_path / "run")).run()
