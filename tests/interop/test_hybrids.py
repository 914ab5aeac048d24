"""Import of decoders of delta rule and softmax layers: equal to rounding in float64, and what is refused."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kinformer
from kinformer.interop.recurrent import ARCHITECTURES
from kinformer.lab.cli.main import main
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import Pair, tokens
from tests.interop.peers import HYBRIDS


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs by their ``model_type``, each made once."""
    return {kind: Pair(kind, tmp_path_factory.mktemp("pair")) for kind in HYBRIDS}


class DoubleTorch:
    """The module torch as transformers' models of delta rules see it, with float64 for float32, to which they cast."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@torch.no_grad()
@pytest.mark.parametrize("kind", HYBRIDS)
def test_equal_in_float64(kind, pairs, monkeypatch):
    """With their angles in float64, too."""
    theirs, ours = (model.double() for model in (pairs[kind].theirs, pairs[kind].ours))
    monkeypatch.setattr(sys.modules[type(theirs).__module__], "torch", DoubleTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    rotary = theirs.model.rotary_emb
    pairs_of_features = len(rotary.inv_freq)
    rotary.inv_freq = 500 ** -(torch.arange(pairs_of_features, dtype=torch.float64) / pairs_of_features)
    ids = tokens(70)
    want = theirs(ids).logits
    assert want.dtype == torch.float64
    assert (ours(ids)[0] - want).abs().max() < 1e-12 * want.abs().max()


def test_keys_are_held_once_for_all_values_that_share_them(pairs):
    mixer = open_run(pairs["qwen3_5_text"].out).config.layers[0].mixer
    assert (mixer.num_heads, mixer.key_heads, mixer.head_dim, mixer.value_dim) == (4, 2, 12, 8)


SPARSE = {"num_experts": 8, "mlp_only_layers": [0, 1], "decoder_sparse_step": 1}
REFUSED = {
    "experts": ("qwen3_next", SPARSE, r"holds .*layers.2.mlp.* does not have"),
    "experts in every second layer": (
        "qwen3_next",
        SPARSE | {"decoder_sparse_step": 4},
        r"holds .*layers.3.mlp.* does not have",
    ),
    "no step": ("qwen3_next", SPARSE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, but must be a whole"),
    "dense layers that are no list": ("qwen3_next", SPARSE | {"mlp_only_layers": "all"}, "mlp_only_layers must be"),
    "kinds of layers": ("qwen3_5_text", {"layer_types": ["mamba"] * 4}, "only full_attention, linear_attention can be"),
    "too few kinds": ("olmo_hybrid", {"layer_types": ["linear_attention"]}, "layer_types must be a list of 4 kinds"),
    "heads of values": ("qwen3_5_text", {"linear_num_value_heads": 3}, "is 3, but must be a multiple of .*_key_heads"),
    "heads of keys": ("qwen3_next", {"linear_num_key_heads": 1}, "is not what config.json says"),
    "heads of keys that are none": ("olmo_hybrid", {"linear_num_key_heads": "2"}, "linear_num_key_heads is '2', but"),
    "widths": ("olmo_hybrid", {"linear_value_head_dim": 12}, "is not what config.json says"),
    "taps": ("qwen3_5_text", {"linear_conv_kernel_dim": 3}, "is not what config.json says"),
    "one tap": ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, but must be"),
    "biases of a gate": ("qwen3_next", {"attention_bias": True}, "attention_bias is True, but only False"),
    "positions": ("qwen3_5_text", {"rope_parameters": {"rope_type": "other", "rope_theta": 5.0}}, "'other'"),
    "another activation": ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only silu"),
    "a switch that is none": ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, "must be true or false"),
}


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_lying_config_is_one_sentence(kind, changes, message, pairs, tmp_path):
    folder = shutil.copytree(pairs[kind].folder, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(KinformerError, match=message) as refusal:
        kinformer.import_checkpoint(folder, tmp_path / "run")
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_experts_that_a_folder_lacks_with_exit_code_2(pairs, tmp_path, capsys):
    folder = shutil.copytree(pairs["qwen3_next"].folder, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text()) | {"num_experts": 8}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "does not have" in error and error.count("\n") == 1


def test_which_layers_are_dense_is_what_transformers_computes():
    import transformers

    place = Path("config.json")
    for settings in (
        {"num_experts": 2, "decoder_sparse_step": 9},
        {"num_experts": 2, "mlp_only_layers": list(range(8))},
    ):
        config = transformers.Qwen3NextConfig(num_hidden_layers=8, **settings).to_dict()
        assert len(ARCHITECTURES["qwen3_next"].read_config(config, place)["layers"]) == 8


def respelled(folder, out, change):
    """Copy ``folder`` to ``out`` with its tensors changed."""
    shutil.copytree(folder, out)
    tensors = {name: tensor.clone() for name, tensor in load_file(out / "model.safetensors").items()}
    save_file(change(tensors), out / "model.safetensors")
    return out


def test_weights_that_predict_several_tokens_are_left_out_with_a_note(pairs, tmp_path):
    more = {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}
    folder = respelled(pairs["qwen3_5_text"].folder, tmp_path / "more", lambda tensors: tensors | more)
    done = kinformer.import_checkpoint(folder, tmp_path / "run")
    assert sum("mtp.* left out" in note for note in done.notes) == 1
    weights = kinformer.load(pairs["qwen3_5_text"].out).state_dict()
    assert all(torch.equal(one, weights[name]) for name, one in kinformer.load(done.run.folder).state_dict().items())


@pytest.mark.parametrize("ending", ["linear_attn.in_proj_b.weight", "linear_attn.A_log", "self_attn.q_proj.weight"])
def test_missing_tensors_are_told(ending, pairs, tmp_path):
    def without(tensors):
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}

    folder = respelled(pairs["qwen3_5_text"].folder, tmp_path / "less", without)
    with pytest.raises(KinformerError, match=r"lacks (stack\.)?layers\.\d"):
        kinformer.import_checkpoint(folder, tmp_path / "run")


def test_convolutions_of_olmo_may_be_one_tensor_or_cut_by_their_widths(pairs, tmp_path):
    """transformers 5.23 saves them in equal parts, whatever the widths of queries, keys and values."""

    def cut(tensors, counts, names):
        for layer in range(3):
            stem = f"model.layers.{layer}.linear_attn."
            whole = torch.cat([tensors.pop(f"{stem}{one}_conv1d.weight") for one in "qkv"])
            parts = whole.split(counts)
            tensors |= {f"{stem}{name}.weight": part.clone() for name, part in zip(names, parts, strict=True)}
        return tensors

    weights = kinformer.load(pairs["olmo_hybrid"].out).state_dict()
    width = len(weights["stack.layers.0.mixer.convolution.weight"][0].flatten())
    for counts, names in (([24, 24, 96], ("q_conv1d", "k_conv1d", "v_conv1d")), ([width], ("conv1d",))):
        out = tmp_path / names[0]
        respelled(pairs["olmo_hybrid"].folder, out, lambda tensors: cut(tensors, counts, names))  # noqa: B023
        kinformer.import_checkpoint(out, out / "run")
        assert all(torch.equal(one, weights[name]) for name, one in kinformer.load(out / "run").state_dict().items())
