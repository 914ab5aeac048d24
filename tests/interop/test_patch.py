"""Models of transformers with other mixers: equal where the mixer is their attention, trained and saved as before."""

import copy
import logging
import sys

import pytest
import torch
from torch import nn

from kinformer import interop
from kinformer.interop import patch, patched_layers
from kinformer.nn import RotaryPositions, SoftmaxAttention
from kinformer.runtime.errors import KinformerError
from tests.interop.peers import MAIN, PATCHED, assert_equal, logits, new_model, tokens


def checkpoint(model):
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


LONG_WINDOW = {"set": {"pattern.window": 20}}


@pytest.mark.parametrize("kind", PATCHED)
def test_softmax_attention_is_the_models(kind):
    model = new_model(kind)
    want = logits(model, tokens())
    patched = patch(model, "softmax")
    assert patched is model
    assert_equal(logits(patched, tokens()), want)
    records = patched_layers(model)
    norms = {"q_norm", "k_norm"} if kind == "qwen3" else set()
    assert [record.layer for record in records] == [0, 1, 2]
    assert all(set(record.copied) == {"q", "k", "v", "o"} | norms and not record.new for record in records)
    assert not any(record.dropped for record in records)


def test_weights_of_norms_are_those_of_every_head_or_dropped():
    want = logits(new_model("qwen3"), tokens())
    by_head = patch(new_model("qwen3"), "rope", set={"projection.over": "by_head"})
    assert_equal(logits(by_head, tokens()), want)
    for change in ({"projection.over": "heads"}, {"projection.weight": False}):
        record = patched_layers(patch(new_model("qwen3"), "rope", set=change))[0]
        assert set(record.dropped) == {"q_norm", "k_norm"}


def test_the_record_names_weights_that_the_mixer_drops():
    model = patch(new_model("qwen3"), "linear-transformer")
    record = patched_layers(model)[0]
    assert set(record.dropped) >= {"q_norm", "k_norm"} and not set(record.dropped) & set(record.copied)
    assert "dropped: " in str(record) and "q_norm" in str(record)


@pytest.mark.parametrize("kind", MAIN)
def test_a_window_is_the_models_attention_up_to_its_length(kind):
    model = new_model(kind)
    windows = patch(copy.deepcopy(model), "local", [0, 2], **LONG_WINDOW)
    short = patch(copy.deepcopy(model), "local", [0, 2], set={"pattern.window": 19})
    want = logits(model, tokens())
    assert_equal(logits(windows, tokens()), want)
    assert_equal(logits(short, tokens())[:, :19], want[:, :19])
    assert (logits(short, tokens())[:, 19] - want[:, 19]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", MAIN)
def test_padding_anywhere_leaves_no_trace(kind):
    model = patch(new_model(kind), "gated-deltanet", [0, 1])
    ids, mask = tokens(), torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    padded = logits(model, ids, attention_mask=mask, position_ids=positions)
    assert_equal(padded[1:, 6:], logits(model, ids[1:, 6:]))
    mask = mask.flip(1)
    assert_equal(logits(model, ids, attention_mask=mask)[1:, :14], logits(model, ids[1:, :14]))


@pytest.mark.parametrize("mixer", ["softmax", "linear-transformer"])
def test_packed_sequences_do_not_see_each_other(mixer):
    model = patch(new_model("llama"), mixer)
    ids = tokens(rows=1)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = logits(model, ids, position_ids=positions, use_cache=False)
    assert_equal(packed[:, :8], logits(model, ids[:, :8]))
    assert_equal(packed[:, 8:], logits(model, ids[:, 8:]))


@pytest.mark.parametrize("mixer", ["linear-transformer", "gated-deltanet", "retnet", "gla"])
@pytest.mark.parametrize("kind", [*MAIN, "qwen2"])
def test_kernel_attention_takes_the_projections(kind, mixer):
    """Keys that heads share stand in the rows of each; the delta rule has its rows head by head, with beta between."""
    model = new_model(kind)
    theirs = model.base_model.h[1].attn if kind == "gpt2" else model.base_model.layers[1].self_attn
    patch(model, mixer)
    record, ours = (
        patched_layers(model)[1],
        model.base_model.get_submodule("h.1.attn" if kind == "gpt2" else "layers.1.self_attn"),
    )
    assert record.copied == ("q", "k", "v", "o")
    inner, x = ours.layer.inner, torch.randn(2, 5, 32)
    q, k, v, _ = inner._project(x)
    if kind == "gpt2":
        wanted = theirs.c_attn(x).split(32, dim=-1)
        scale = (1 / 2, 1, 1)  # scale_attn_by_inverse_layer_idx
    else:
        wanted, scale = (theirs.q_proj(x), theirs.k_proj(x), theirs.v_proj(x)), (1, 1, 1)
    for got, want, factor in zip((q, k, v), wanted, scale, strict=True):
        want = want.unflatten(-1, (-1, 8)).transpose(1, 2) * factor
        assert_equal(got, want.repeat_interleave(4 // want.shape[1], dim=1))
    assert ("qkv.weight (beta)" in record.new) == (mixer == "gated-deltanet")


def test_what_was_copied_is_logged_and_said(caplog):
    with caplog.at_level(logging.INFO, "kinformer"):
        model = patch(new_model("llama"), "gated-deltanet", [1])
    [record] = patched_layers(model)
    assert str(record) in caplog.text and "layer 1: linear; copied: q, k, v, o; new: qkv.weight (beta)" in str(record)


def test_a_config_is_taken_as_it_is():
    model = new_model("llama")
    want = logits(model, tokens())
    config = SoftmaxAttention(
        num_heads=4,
        projection={"kind": "grouped", "num_kv_heads": 2, "bias": False},
        position=RotaryPositions(base=500.0),
        bias=False,
    )
    assert_equal(logits(patch(model, config, [0]), tokens()), want)


def test_settings_are_stronger_than_the_models():
    model = patch(new_model("llama"), "linear-transformer", [0], num_heads=8, position="none")
    [record], mixer = patched_layers(model), model.model.layers[0].self_attn.layer.inner
    assert (mixer.config.num_heads, mixer.head_dim, mixer.config.position.kind) == (8, 4, "none")
    assert record.copied == ("o",) and "qkv.weight" in record.new


@pytest.mark.parametrize("kind", MAIN)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_reduces_the_loss(kind, checkpointing):
    model = patch(new_model(kind), "gated-deltanet", [0, 2]).train()
    if checkpointing:
        checkpoint(model)
    ids, mask = tokens(rows=4), torch.ones(4, 20, dtype=torch.long)
    mask[1, :6] = 0
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(12):
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", MAIN)
def test_checkpointed_gradients_are_those_without(kind):
    ids, mask, gradients = tokens(), torch.ones(2, 20, dtype=torch.long), []
    mask[1, :6] = 0
    for checkpointing in (False, True):
        torch.manual_seed(5)
        model = patch(new_model(kind), "linear-transformer").train()
        if checkpointing:
            checkpoint(model)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for left, right in zip(*gradients, strict=True):
        assert_equal(left, right)


def test_saved_weights_come_back_into_a_model_patched_alike(tmp_path):
    from safetensors.torch import load_file

    model = patch(new_model("llama"), "gated-deltanet", [1])
    model.save_pretrained(tmp_path)
    again = patch(new_model("llama"), "gated-deltanet", [1])
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    assert torch.equal(logits(copy.deepcopy(model), tokens()), logits(model, tokens()))


def test_dtype_and_device_are_the_models():
    model = patch(new_model("llama").bfloat16(), "gated-deltanet")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logits(model, tokens()).isfinite().all()


REFUSED = {
    "unknown mixer": (lambda model: patch(model, "gated-deltanett"), "gated-deltanett.*gated-deltanet"),
    "bidirectional": (lambda model: patch(model, "bert"), "'bert' is not causal"),
    "cross-attention": (lambda model: patch(model, "cross"), "attends to another sequence"),
    "unknown setting": (lambda model: patch(model, "local", windo=3), "'windo' is not a setting"),
    "no such layer": (lambda model: patch(model, "local", [0, 3]), r"layers is \[0, 3\].*from 0 to 2"),
    "no layer": (lambda model: patch(model, "local", []), r"one index or more"),
    "a word": (lambda model: patch(model, "local", "first"), "'all' or a list of indices"),
    "fractions": (lambda model: patch(model, "local", [0.5]), "list of indices"),
    "twice": (lambda model: patch(patch(model, "local", [1]), "local"), "layer 1 is patched already"),
    "no model": (lambda model: patch(nn.Linear(2, 2), "local"), "'?Linear'?, but must be a model of transformers"),
    "mask of pairs": (
        lambda model: patch(model, "local")(tokens(), attention_mask=torch.ones(2, 1, 20, 20)),
        r"attention_mask is \[2, 1, 20, 20\], but",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_sentence(call, message):
    with pytest.raises(KinformerError, match=message):
        call(new_model("llama"))


def test_other_models_and_positions_are_refused_by_name():
    from transformers import BloomConfig, BloomForCausalLM

    other = BloomForCausalLM(BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(KinformerError, match="'bloom' cannot be patched; what can: gpt2"):
        patch(other, "softmax")
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(KinformerError, match="of the type 'dynamic'.*follow the length of the text"):
        patch(new_model("llama", rope_parameters=dynamic), "softmax")
    patch(new_model("llama", rope_parameters=dynamic), "gated-deltanet")  # has no positions
    with pytest.raises(KinformerError, match="add_cross_attention"):
        patch(new_model("gpt2", add_cross_attention=True), "softmax")


def test_without_transformers_one_sentence_says_how_to_get_it(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kinformer.interop.patching")
    monkeypatch.delitem(vars(interop), "patch", raising=False)
    with pytest.raises(KinformerError, match=r"patch needs transformers .*pip install 'kinformer\[transformers\]'"):
        interop.patch  # noqa: B018 - it is imported when it is asked for
