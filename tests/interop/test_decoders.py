"""Import of decoders: the same numbers as transformers, and nothing run, skipped or guessed."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import kinformer
from kinformer.family.build import model_config
from kinformer.interop import read_checkpoint
from kinformer.interop.writing import form_of
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import CHECKS, Pair, tokens
from tests.interop.peers import EXPERTS, GRANITES, HYBRIDS

IMPORTED = {
    "llama": ("llama", {}),
    "llama with biases and heads of their own width": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "llama with as many heads of keys": ("llama", {"num_key_value_heads": 4}),
    **{
        name: (name, {})
        for name in ("llama 3", "llama, linear scaling", "llama, yarn", "llama, yarn with a factor of DeepSeek")
    },
    "llama, dynamic": ("llama, dynamic", {}),
    "phi3": ("phi3", {}),
    "phi3 of short texts": ("phi3", {"sliding_window": None, "rope_parameters": {"rope_type": "default"}}),
    "opt with norms behind": ("opt", {"do_layer_norm_before": False}),
    "opt without a last norm": ("opt", {"_remove_final_layer_norm": True}),
    **{name: (name, {}) for name in ("smollm3", "olmo2", "olmo3")},
    "mistral": ("mistral", {}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 without windows": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    **{name: (name, {}) for name in ("gemma", "gemma2", "gemma3_text", "gpt_neox", "opt", "bloom", "mpt")},
    **{name: (name, {}) for name in EXPERTS},
    "deepseek_v3 without a rank of queries": ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v3 in groups": ("deepseek_v3", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "deepseek_v2 in groups": (
        "deepseek_v2",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"topk_method": "group_limited_greedy"},
    ),
    **{name: (name, {}) for name in GRANITES},
    "granite untied": ("granite", {"tie_word_embeddings": False}),
    "granitemoehybrid without positions": ("granitemoehybrid", {"position_embedding_type": None}),
    "granitemoehybrid with experts": (
        "granitemoehybrid with mamba layers",
        {"num_local_experts": 4, "intermediate_size": 20, "mamba_conv_bias": False, "mamba_n_groups": 1},
    ),
    "lfm2": ("lfm2", {}),
    "lfm2 of plain sizes": (
        "lfm2",
        {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "bloom with 6 heads": ("bloom", {"n_head": 6, "hidden_size": 24}),
    "qwen3 with windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    **{name: (name, {}) for name in HYBRIDS},
    "qwen3_next with experts in no layer": ("qwen3_next", {"num_experts": 4, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_5_text, tied, with as many heads of keys": (
        "qwen3_5_text",
        {"tie_word_embeddings": True, "linear_num_key_heads": 4, "num_key_value_heads": 4},
    ),
    "olmo_hybrid without positions": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "linear_allow_neg_eigval": False},
    ),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs by their name in IMPORTED, each made once."""
    made = {}

    def pair(name):
        if name not in made:
            kind, changes = IMPORTED[name]
            made[name] = Pair(kind, tmp_path_factory.mktemp("pair"), **changes)
        return made[name]

    return pair


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", IMPORTED)
def test_equal(name, check, pairs):
    if check == "gradients" and name.startswith("granite"):
        pytest.skip("its multipliers are a part of the weights")
    CHECKS[check](pairs(name))


@pytest.fixture
def folder(pairs, tmp_path):
    """A copy of a LLaMA's folder that a test may spoil."""
    return shutil.copytree(pairs("llama").folder, tmp_path / "checkpoint")


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "LEFT OUT"}))


def respell(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)


def logits_of(folder, out):
    kinformer.import_checkpoint(folder, out)
    with torch.no_grad():
        return kinformer.load(out)(tokens())[0]


def test_settings_of_older_files(pairs, folder, tmp_path):
    """``rope_theta`` beside the other settings, no ``head_dim``, and angles among the weights."""
    edit(folder, rope_parameters="LEFT OUT", rope_theta=500.0, rope_scaling=None, head_dim="LEFT OUT")
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    respell(folder, lambda tensors: tensors | inv_freq)
    assert torch.equal(logits_of(folder, tmp_path / "run"), pairs("llama").ours(tokens())[0])


def test_settings_that_are_left_out_are_those_of_transformers(pairs, folder, tmp_path):
    edit(folder, rms_norm_eps="LEFT OUT", hidden_act="LEFT OUT", attention_bias="LEFT OUT", mlp_bias="LEFT OUT")
    assert torch.equal(logits_of(folder, tmp_path / "run"), pairs("llama").ours(tokens())[0])


def test_an_mpt_is_always_four_times_as_wide(pairs, tmp_path):
    """transformers has the setting ``expansion_ratio`` and does not read it."""
    folder = shutil.copytree(pairs("mpt").folder, tmp_path / "checkpoint")
    edit(folder, expansion_ratio=2)
    assert torch.equal(logits_of(folder, tmp_path / "run"), pairs("mpt").ours(tokens())[0])
    model = read_checkpoint(folder).model
    assert form_of(model_config(model, "mpt")).model_type == "mpt"
    for layer in model["layers"]:
        layer["feed_forward"]["hidden_dim"] //= 2
    assert form_of(model_config(model, "mpt")).native is None


def test_a_granite_of_old_files(pairs, tmp_path):
    pair = pairs("granitemoehybrid with mamba layers")
    folder = shutil.copytree(pair.folder, tmp_path / "checkpoint")
    edit(folder, layer_types="LEFT OUT", layers_block_type=["mamba", "attention", "mamba"], mamba_d_head="auto")
    assert torch.equal(logits_of(folder, tmp_path / "run"), pair.ours(tokens())[0])
    for changes, message in (
        ({"layers_block_type": ["mamba", "conv", "mamba"]}, "only full_attention, linear_attention can be imported"),
        ({"mamba_d_head": 4}, "mamba_n_heads is 8, but times mamba_d_head it must be 64"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\], but only"),
        ({"num_local_experts": 2}, "block_sparse_moe|lacks"),
    ):
        spoiled = shutil.copytree(folder, tmp_path / str(len(list(tmp_path.iterdir()))))
        edit(spoiled, **changes)
        with pytest.raises(KinformerError, match=message):
            kinformer.import_checkpoint(spoiled, tmp_path / "none")


def test_an_lfm2_of_old_files(pairs, tmp_path):
    """Its authors' names of settings, a list of the layers with attention, and the width that these settings give."""
    pair = pairs("lfm2")
    folder = shutil.copytree(pair.folder, tmp_path / "checkpoint")
    edit(folder, layer_types="LEFT OUT", full_attn_idxs=[1], block_ff_dim=48, intermediate_size=7, tie_embedding=True)
    edit(folder, rope_parameters="LEFT OUT", rope_theta=500.0)
    assert torch.equal(logits_of(folder, tmp_path / "run"), pair.ours(tokens())[0])
    edit(folder, block_ffn_dim_multiplier=None, block_multiple_of=24)  # without a factor the width is not rounded
    assert torch.equal(logits_of(folder, tmp_path / "run 2"), pair.ours(tokens())[0])
    edit(folder, conv_bias=True)
    with pytest.raises(KinformerError, match="conv_bias is True, but only False can be imported"):
        read_checkpoint(folder)
    edit(folder, conv_bias=False, block_ffn_dim_multiplier=0)
    with pytest.raises(KinformerError, match="block_ffn_dim_multiplier is 0, but must be a number above 0"):
        read_checkpoint(folder)


def test_a_kimi_linear_with_the_names_of_its_authors(pairs, tmp_path):
    """The config has a table of sizes and of layers counted from 1, and its own names of settings."""
    pair = pairs("kimi_linear")
    folder = shutil.copytree(pair.folder, tmp_path / "checkpoint")
    table = {"head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1, 3]}
    others = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads")
    edit(folder, linear_attn_config=table, first_k_dense_replace=1, **dict.fromkeys(others, "LEFT OUT"))
    assert torch.equal(logits_of(folder, tmp_path / "run"), pair.ours(tokens())[0])
    edit(folder, mlp_layer_types=["sparse", "dense", "sparse"])
    with pytest.raises(KinformerError, match="mlp_layer_types must name dense layers, and then sparse"):
        read_checkpoint(folder)


NARROW = {"word_embed_proj_dim": 12, "do_layer_norm_before": False, "tie_word_embeddings": True}


def test_narrow_vectors_of_an_opt(tmp_path):
    """OPT-350m's form, but for the gradients of products that are one matrix here; a lost product is named."""
    pair = Pair("opt", tmp_path, **NARROW)
    for name in CHECKS.keys() - {"gradients"}:
        CHECKS[name](pair)
    assert any("project_in is part of the embedding" in note for note in pair.done.notes)
    for ending, message in (("project_in.weight", "lacks project_in.weight"), ("embed_tokens.weight", "lacks embed_t")):
        folder = shutil.copytree(pair.folder, tmp_path / ending)
        respell(folder, without(ending))
        with pytest.raises(KinformerError, match=message):
            read_checkpoint(folder)
    folder = shutil.copytree(pair.folder, tmp_path / "narrow")
    respell(folder, lambda tensors: {n: t[:, :5] if n.endswith("in.weight") else t for n, t in tensors.items()})
    with pytest.raises(KinformerError, match="not as wide as the vectors of tokens"):
        read_checkpoint(folder)


def test_several_files(pairs, tmp_path):
    pairs("qwen3").theirs.save_pretrained(tmp_path / "shards", max_shard_size="16KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(tmp_path / "shards", tmp_path / "run"), pairs("qwen3").ours(tokens())[0])


def test_half_precision_becomes_float32(folder, tmp_path):
    respell(folder, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    kinformer.import_checkpoint(folder, tmp_path / "run")
    assert {parameter.dtype for parameter in kinformer.load(tmp_path / "run").parameters()} == {torch.float32}


def test_a_window_bounds_the_state(pairs):
    model = pairs("mistral").ours
    sizes = [kinformer.core.state.nbytes(model(tokens(time))[1]) for time in (6, 20)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("name", "length"), [("llama, dynamic", 64), ("phi3", 32)])
def test_positions_that_follow_the_length_hold_up_to_the_length_in_a_note(name, length, pairs, tmp_path):
    """Texts of this length are equal; longer ones differ, as the note says."""
    pair = pairs(name)
    (note,) = (one for one in pair.done.notes if "rotary positions" in one)
    assert f"whose frequencies change in texts of more than {length} tokens" in note
    assert open_run(pair.out).training == {"length": length}
    for time, equal in ((length, True), (length + 8, False)):
        with torch.no_grad():
            assert torch.allclose(pair.ours(tokens(time))[0], pair.logits(tokens(time)), rtol=0, atol=1e-4) == equal


def test_the_factors_of_longer_texts_are_imported_where_the_file_names_them_alone(pairs, tmp_path):
    """The old name of the type, too; an export has one table for every length, and so needs no note."""
    folder, pair = shutil.copytree(pairs("phi3").folder, tmp_path / "checkpoint"), pairs("phi3")
    scaling = {"type": "su", "short_factor": [2.0, 6.0], "long_factor": [2.0, 6.0]}
    edit(folder, rope_parameters="LEFT OUT", rope_theta=500.0, rope_scaling=scaling, partial_rotary_factor=0.5)
    done = kinformer.import_checkpoint(folder, tmp_path / "run")
    assert not any("rotary" in note for note in done.notes)
    with torch.no_grad():
        ours, theirs = kinformer.load(tmp_path / "run")(tokens(40))[0], pair.logits(tokens(40))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-4)
    kinformer.export(tmp_path / "run", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "phi3"
    assert not any(
        "rotary" in note for note in kinformer.import_checkpoint(tmp_path / "back", tmp_path / "again").notes
    )
    with torch.no_grad():
        assert torch.equal(kinformer.load(tmp_path / "again")(tokens(40))[0], ours)


ENDS = {
    "one": ({"eos_token_id": 7}, None, 7, 0),
    "several": ({"eos_token_id": [7, 3]}, None, (7, 3), 0),
    "none": ({"eos_token_id": None}, None, None, 0),
    "of generation": ({"eos_token_id": 7}, {"eos_token_id": [5, 5, 6]}, (5, 6), 0),
    "of the model where generation names none": ({"eos_token_id": 7}, {"temperature": 0.6}, 7, 0),
    "beyond the vocabulary": ({"eos_token_id": [7, 61]}, None, 7, 1),
}


@pytest.mark.parametrize(("changes", "generation", "ends", "notes"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_text_is_that_of_the_folder(changes, generation, ends, notes, folder, tmp_path):
    edit(folder, **changes)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    done = kinformer.import_checkpoint(folder, tmp_path / "run")
    assert open_run(tmp_path / "run").config.input.eos_token == ends
    assert sum("eos_token_id" in note for note in done.notes) == notes


def test_the_longest_text_is_that_of_the_folder(folder, tmp_path):
    """It is what the run is evaluated with, and what an export says."""
    kinformer.import_checkpoint(folder, tmp_path / "run")
    assert open_run(tmp_path / "run").training == {"length": 64}
    kinformer.export(tmp_path / "run", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 64


REFUSED = {
    "an end that is no id": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', but must be an id or a list of ids"),
    "a length that is none": (
        {"max_position_embeddings": "64"},
        "max_position_embeddings is '64', but must be a whole",
    ),
    "scaled positions": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 5e5, "factor": 8.0}},
        "rotary positions are of the type 'proportional'",
    ),
    "scaled positions of older files": (
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}},
        "factor is None",
    ),
    "positions with too few factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "needs a factor of each of the 4 pairs that turn, but factors has 1",
    ),
    "factors that are none": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0, "2"], "long_factor": [2.0]}},
        "short_factor is '2', but must be a number above 0",
    ),
    "positions that are no table": ({"rope_parameters": [1]}, "rope_parameters is not a table"),
    "attention to later tokens": ({"is_causal": False}, "is_causal is False, but only True can be imported"),
    "scaled by nothing": ({"rope_parameters": {"rope_type": "linear"}}, "factor is None, but must be a number above 0"),
    "no base": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta is 0"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only silu"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    "heads": ({"num_attention_heads": 8}, "is not what config.json says"),
    "key heads": ({"num_key_value_heads": 1}, r"self_attn.q_proj.weight is \[32, 32\] and \[16, 32\] and \[16, 32\]"),
    "key heads that divide nothing": ({"num_key_value_heads": 3}, "is not what config.json says"),
    "width": ({"hidden_size": 64, "head_dim": 8}, "is not what config.json says"),
    "feed-forward": ({"intermediate_size": 2**31 - 1}, "is not what config.json says"),
    "fewer layers": ({"num_hidden_layers": 2}, "holds 'model.layers.2.* which a LLaMA language model of 2 layers"),
    "more layers": ({"num_hidden_layers": 4}, r"lacks stack.layers.3"),
    "huge": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "biases": ({"attention_bias": True}, "lacks stack.layers.0.mixer.out.bias"),
    "tied": ({"tie_word_embeddings": True}, "the output matrix differs from the embedding"),
    "remote code": ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "'mine' cannot be"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_config_is_refused(changes, message, folder, tmp_path):
    edit(folder, **changes)
    with pytest.raises(KinformerError, match=message) as refusal:
        kinformer.import_checkpoint(folder, tmp_path / "run")
    assert str(folder) in str(refusal.value)
    assert not (tmp_path / "run").exists()


def without(ending):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}


SPOILED = {
    "another head": (lambda tensors: tensors | {"score.weight": torch.ones(2, 32)}, "holds 'score.weight'"),
    "no keys": (without("1.self_attn.k_proj.weight"), "lacks layers.1.self_attn.k_proj.weight"),
    "no norm": (without("model.norm.weight"), "lacks norm.weight, so it holds a part of a model"),
    "no head": (without("lm_head.weight"), "lacks head.output.weight, so it holds a part of a model; import the whole"),
    "twice": (lambda tensors: tensors | {"norm.weight": torch.ones(32)}, "with 'model.' before it and without"),
    "whole numbers": (
        lambda tensors: {name: tensor.to(torch.int8) for name, tensor in tensors.items()},
        "weights must be floating-point",
    ),
    "scalars": (lambda tensors: tensors | {"model.norm.weight": torch.tensor(1.0)}, "is not what config.json says"),
}


@pytest.mark.parametrize(("change", "message"), SPOILED.values(), ids=SPOILED)
def test_tensors_are_refused(change, message, folder, tmp_path):
    respell(folder, change)
    with pytest.raises(KinformerError, match=message):
        kinformer.import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_code_of_a_folder_is_never_run(pairs, folder, tmp_path):
    """A folder of a known kind is read as that kind, whatever code it brings."""
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    (folder / "modeling_mine.py").write_text(f"open({str(tmp_path / 'run-code')!r}, 'w')")
    assert torch.equal(logits_of(folder, tmp_path / "run"), pairs("llama").ours(tokens())[0])
    assert not (tmp_path / "run-code").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("deepseek_v3", {"n_group": 3}, "groups must divide num_experts = 4, but is 3"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 1}, "topk_groups = 1 of the groups have 1"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group is None, but must be a whole number"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 3 numbers"),
        ("mixtral", {"num_experts_per_tok": 9}, "topk must be from 1 to num_experts = 4"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 17},
            "config.json says|shape",
        ),
    ],
)
def test_a_mixture_that_cannot_be_read_is_one_sentence(kind, changes, sentence, pairs, tmp_path):
    folder = shutil.copytree(pairs(kind).folder, tmp_path / "checkpoint")
    edit(folder, **changes)
    with pytest.raises(KinformerError, match=sentence):
        kinformer.import_checkpoint(folder, tmp_path / "run")


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_the_layer_that_predicts_a_further_token_is_left_out_in_a_note(kind, pairs, tmp_path):
    folder = shutil.copytree(pairs(kind).folder, tmp_path / "checkpoint")
    further = {f"model.layers.3.{name}.weight": torch.ones(2, 2) for name in ("enorm", "eh_proj", "mlp.gate_proj")}
    respell(folder, lambda tensors: tensors | further)
    result = read_checkpoint(folder)
    assert "layer 3 left out: it predicts a further token" in result.notes
    assert result.weights.keys() == read_checkpoint(pairs(kind).folder).weights.keys()
    respell(folder, without("eh_proj.weight"))
    with pytest.raises(KinformerError, match=r"holds 'model.layers.3.* of 3 layers does not have"):
        read_checkpoint(folder)


SIZES = {
    "mixtral": ("num_local_experts", "intermediate_size", "hidden_size"),
    "qwen3_moe": ("num_local_experts", "moe_intermediate_size", "hidden_size", "head_dim"),
    "deepseek_v2": ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "kv_lora_rank", "v_head_dim"),
    "deepseek_v3": ("n_routed_experts", "qk_rope_head_dim", "q_lora_rank", "qk_nope_head_dim", "first_k_dense_replace"),
    "qwen3_next with experts": ("num_experts", "shared_expert_intermediate_size", "linear_num_value_heads"),
}


@pytest.mark.parametrize("kind", SIZES)
def test_a_damaged_mixture_is_one_sentence(kind, pairs, tmp_path):
    """Sizes that are huge or wrong, experts that are missing, of another shape or of whole numbers, a missing file."""
    folder = shutil.copytree(pairs(kind).folder, tmp_path / "checkpoint")
    settings = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    expert = next(name for name in reversed(tensors) if ".experts.3." in name)
    stem = expert.split(".experts.")[0]
    several = {name: tensor for name, tensor in tensors.items() if name != expert}

    def refused(out):
        with pytest.raises(KinformerError) as refusal:
            kinformer.import_checkpoint(folder, out)
        assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value) and not out.exists()
        return str(refusal.value)

    for name in SIZES[kind]:
        for value in (1, 3, 4096, 2**31 - 1, 10**12, "4", None):
            if value != settings.get(name) and (value, name) != (None, "q_lora_rank"):
                edit(folder, **settings | {name: value})
                refused(tmp_path / "run")
    edit(folder, **settings)
    for spoiled, message in (
        (several, f"lacks {expert.removeprefix('model.')}"),
        (tensors | {expert: tensors[expert][:1]}, "is not what config.json says"),
        (tensors | {expert: tensors[expert].to(torch.int8)}, "weights must be floating-point"),
        (tensors | {f"{stem}.experts.4.w9.weight": tensors[expert] + 1}, "which a .* does not have"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in spoiled.items()}, folder / "model.safetensors")
        assert re.search(message, refused(tmp_path / "run"))
    (folder / "model.safetensors").unlink()
    pairs(kind).theirs.save_pretrained(folder, max_shard_size="8KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    refused(tmp_path / "run")
