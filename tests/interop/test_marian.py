"""Import of Marian's encoder-decoders: the logits of transformers, and what cannot be imported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load, save_file

import kinformer
from kinformer.interop import read_checkpoint
from kinformer.lab.runs.importing import import_checkpoint
from kinformer.runtime.errors import KinformerError

SIZES = {
    "vocab_size": 29, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 40, "max_position_embeddings": 40,
    "pad_token_id": 28, "eos_token_id": 0, "decoder_start_token_id": 28, "forced_eos_token_id": 0,
}  # fmt: skip


def saved(folder, **changes):
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(**SIZES | changes)
    config.tie_word_embeddings = True  # in transformers 5.0 that is False where both sides have a table
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.final_logits_bias.add_(torch.randn(model.final_logits_bias.shape))
    model.save_pretrained(folder)
    return model


CHANGES = {
    "as it is": {},
    "as Opus-MT": {"activation_function": "swish", "scale_embedding": True},
    "two tables": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 31, "decoder_start_token_id": 30},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_same_logits(changes, tmp_path):
    theirs = saved(tmp_path / "theirs", **changes)
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    run, ours = done.run, kinformer.load(tmp_path / "run")
    assert (run.member, run.task.name) == ("vanilla", "translate") and "has no tokenizer.json" in done.notes[0]
    source, valid = torch.randint(28, (2, 7)), torch.arange(7) < torch.tensor([[7], [4]])
    target = torch.randint(28, (2, 5))
    with torch.no_grad():
        want = theirs(input_ids=source, attention_mask=valid.long(), decoder_input_ids=target).logits
        got, _ = ours(target, ours.begin(source, valid))
    assert (got - want).abs().max() < 1e-5 * want.abs().max().clamp(min=1)
    assert (run.config.input.bos_token, run.config.input.eos_token) == (changes.get("decoder_start_token_id", 28), 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian")
    saved(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"normalize_before": True}, "normalize_before is True, but only False can be imported"),
        ({"static_position_embeddings": False}, "static_position_embeddings is False"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"encoder_layers": "two"}, "encoder_layers is 'two'"),
    ],
)
def test_settings_that_compute_something_else(whole, tmp_path, changes, told):
    folder = shutil.copytree(whole, tmp_path / "copy")
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))
    with pytest.raises(KinformerError, match=told):
        read_checkpoint(folder)


_KEY = "model.decoder.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.update(extra=torch.zeros(2)), "holds 'extra'"),
        (lambda t: t.pop("model.shared.weight"), "lacks shared.weight"),
        (
            lambda t: t.pop("model.encoder.layers.0.self_attn.k_proj.bias"),
            "lacks encoder.*k_proj.bias",
        ),
        (lambda t: t.update({_KEY: t[_KEY] > 0}), "k_proj.weight is torch.bool, but weights must be"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(29, 16)}), "shared.weight and lm_head.weight differ"),
    ],
)
def test_other_tensors(whole, tmp_path, change, told):
    folder = shutil.copytree(whole, tmp_path / "copy")
    tensors = load((folder / "model.safetensors").read_bytes())
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(KinformerError, match=told):
        read_checkpoint(folder)
