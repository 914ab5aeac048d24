"""Each key of a ``config.json`` that transformers reads is understood, refused by its name, or changes no result."""

import ast
import dataclasses
import importlib
import inspect
import json

import pytest
import torch
import transformers
from transformers import cache_utils, masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kinformer
from kinformer.interop import architecture
from kinformer.interop.checkpoint import ARCHITECTURES
from kinformer.interop.encoders import TextEncoder
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import assert_close
from tests.interop.peers import new_model, tokens

INERT = {
    "how weights are drawn": "initializer_range initializer_factor initializer_cutoff_factor linear_a_log_min "
    "linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor",
    "what happens in training alone": "attention_probs_dropout_prob activation_dropout layerdrop encoder_layerdrop "
    "decoder_layerdrop drop_path_rate mlp_dropout sparse_prediction sparse_pred_ignore_index",
    "what a forward returns, or how it computes the same": "dtype use_cache return_dict "
    "output_hidden_states output_router_logits chunk_size_feed_forward reorder_and_upcast_attn onnx_export "
    "gradient_checkpointing deterministic_flash_attn number_of_conv_states mamba_chunk_size",
    "ids that logits do not depend on": "pad_token_id sep_token_id",
    "lengths that bound a text, or that the run is evaluated with": "max_position_embeddings max_seq_len",
    "which class of transformers reads the folder": "is_decoder is_encoder_decoder id2label num_labels",
    "heads that have other tensors, by which they are refused": "classifier_dropout classifier_pooling summary_type "
    "summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout pooler_act pooler_output_size "
    "encoder_stride out_features out_indices problem_type num_mtp_layers",
}
"""Keys that cannot change the outputs of what is imported, by their reason."""
MULTIPLIERS = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), "a part of weights")
UNREAD = {
    "deepseek_v2": {"head_dim": "transformers overwrites it"},
    **dict.fromkeys(
        ("gemma3_text", "modernbert", "olmo3"),
        {"original_max_position_embeddings": "kinds of layers have tables of their own"},
    ),
    "mt5": {"tie_word_embeddings": "whether the tables differ tells"},
    "umt5": {"tie_word_embeddings": "transformers overwrites it"},
    "kimi_linear": {"head_dim": "transformers overwrites it"},
    "granite": MULTIPLIERS,
    "granitemoehybrid": MULTIPLIERS | {"layers_block_type": "another name of layer_types"},
    "decision_transformer": {"vocab_size": "no ids are read", "max_position_embeddings": "one row is read"},
    "gpt_neox": {"rope_theta": "transformers reads rotary_emb_base"},
    **dict.fromkeys(("swin", "swinv2"), {"num_hidden_layers": "transformers overwrites it"}),
}
DENSE = {"layer_types": ["full_attention"] * 32, "num_local_experts": 0}
BASES = {
    "qwen2": [{"use_sliding_window": True, "num_hidden_layers": 40}],
    "smollm3": [{"use_sliding_window": True, "sliding_window": 4}],
    "qwen3": [{"use_sliding_window": True, "num_hidden_layers": 40}],
    "qwen3_moe": [{"use_sliding_window": True}, {"mlp_only_layers": [0]}],
    "qwen3_next": [{}, {"mlp_only_layers": [0]}],
    "deepseek_v2": [
        {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
        {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ],
    "deepseek_v3": [{"n_group": 1}, {"n_group": 4, "topk_group": 2}, {"n_group": 1, "num_key_value_heads": None}],
    "bloom": [{"pretraining_tp": 2}, {"slow_but_exact": True}],
    "granitemoehybrid": [DENSE | {"position_embedding_type": "rope"}, DENSE, {"num_local_experts": 0}, {}],
    "lfm2": [{}, {"full_attn_idxs": [0, 1]}],
    "kimi_linear": [{}, {"num_expert_group": 4, "topk_group": 2}, {"num_key_value_heads": None}],
    "mbart": [{"decoder_start_token_id": 5}],
    "marian": [{}, {"share_encoder_decoder_embeddings": False}],
    "deit": [{"architectures": ["DeiTForImageClassification"]}],
    **{kind: [{"architectures": ["ForSequenceClassification"]}, {}] for kind in ("bert", "roberta", "longformer")},
    "big_bird": [{"architectures": ["ForSequenceClassification"]}, {}],
}
"""The configs that are changed, as changes of the default one: between them each key has an effect."""
SCALED = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0}
KINDS = [kind for kind in ARCHITECTURES if kind in CONFIG_MAPPING]
CLASSIFY = [
    kind for kind in KINDS if ARCHITECTURES[kind].reads == "patches" or isinstance(ARCHITECTURES[kind], TextEncoder)
]
GENERATE = [kind for kind in KINDS if kind not in CLASSIFY and kind != "modernbert"]


def attributes(module):
    """The names of attributes in a module, and the names that it asks a config for by ``getattr`` or ``kwargs``."""
    named, asked, by_name = set(), set(), {"getattr": 1, "kwargs.pop": 0, "kwargs.get": 0}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute):
            named.add(node.attr)
        function = ast.unparse(node.func) if isinstance(node, ast.Call) else None
        if function not in by_name or "kwargs" in function and "configuration_" not in module.__name__:
            continue
        name = node.args[by_name[function]]
        if isinstance(name, ast.Constant) and (function != "getattr" or ast.unparse(node.args[0]).endswith("config")):
            asked.add(name.value)
    return named, asked


def keys_of(kind):
    """The keys that transformers reads in the config of a ``kind``."""
    config = CONFIG_MAPPING[kind]
    parts = [config.__module__, config.__module__.replace("configuration_", "modeling_")]
    named, asked = (set().union(*names) for names in zip(*(attributes(importlib.import_module(one)) for one in parts)))
    fields = {field.name for field in dataclasses.fields(config)}
    keys = (fields & named) | asked | set(config.attribute_map) | {"per_layer_config", "problem_type"}
    if kind in GENERATE:
        keys |= attributes(masking_utils)[1] | attributes(cache_utils)[1]
    if "rope_parameters" in fields:
        keys |= {"rope_scaling", "rope_theta", "original_max_position_embeddings"}
    return sorted(name for name in keys if not name.startswith("_"))


ANY = [True, False, 4, 0.5, "other", [2, 2, 2, 2], {"rope_type": "linear", "factor": 2.0}]
OTHERS = {
    bool: lambda value: [not value],
    int: lambda value: [value + 1, 2 * value, 7],
    float: lambda value: [value + 0.125],
}


def others(value):
    """Values of a key that are not ``value``."""
    return [one for one in OTHERS.get(type(value), lambda value: ANY)(value) if one != value]


def handled(kind, base, key, place):
    """Whether another value of ``key`` changes our model's config, or is refused with the name of ``key``."""

    def read(config):
        form = ARCHITECTURES[kind]
        model, head = form.read_config(config, place), ["classifier.weight"] if config.get("architectures") else []
        return model | form.head(config, place, head) if isinstance(form, TextEncoder) else model

    before = read(base)
    for value in others(base.get(key)):
        try:
            if read(base | {key: value}) != before:
                return True
        except KinformerError as error:
            if key in str(error):
                return True
        except TypeError:
            pass
    return False


def ignored(kind, place):
    """The keys of a ``kind`` that another value of neither changes our model's config nor is refused, though it could
    change a result."""
    config = CONFIG_MAPPING[kind]
    default = {one.name: one.default for one in dataclasses.fields(config) if not one.name.startswith("_")}
    default = json.loads(json.dumps(default, default=str)) | {"model_type": kind}
    scaled = [{"rope_parameters": SCALED}] if "rope_parameters" in default else []
    first, *more = BASES.get(kind, [{}])
    bases = [default | changes for changes in (first, *more, *(first | one for one in scaled))]
    inert = {name for names in INERT.values() for name in names.split()} | UNREAD.get(kind, {}).keys()
    if kind in CLASSIFY:
        inert.remove("problem_type")
    keys = keys_of(kind)
    assert len(keys) > 10
    return [key for key in keys if key not in inert and not any(handled(kind, base, key, place) for base in bases)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_is_understood_or_refused(kind, tmp_path):
    assert ignored(kind, tmp_path / "config.json") == []


def test_a_key_that_is_not_declared_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(architecture, "CAUSAL", {})
    monkeypatch.setitem(ARCHITECTURES, "qwen2", ARCHITECTURES["llama"])
    found = ignored("qwen2", tmp_path / "config.json")
    assert {"is_causal", "layer_types", "max_window_layers", "use_sliding_window"} <= set(found)


LAYERS = ["full_attention", "sliding_attention", "full_attention"]
LINEAR = {"rope_type": "linear", "factor": 4.0}
EDITS = {
    "scaling beside positions": ("qwen2", {"rope_scaling": LINEAR}),
    "scaling and a base beside positions": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 77.0},
    ),
    "no scaling beside positions": ("llama", {"rope_scaling": {}, "rope_theta": 77.0}),
    "a length outside the positions": ("llama, yarn", {"original_max_position_embeddings": 64}),
    "scaling of one kind of layer": ("gemma3_text", {"rope_scaling": LINEAR}),
    "a base that is not read": ("gpt_neox", {"rope_theta": 77.0, "rope_parameters": None, "rotary_pct": 1.0}),
    "kinds of layers": ("mistral", {"layer_types": LAYERS}),
    "no kinds of layers": ("mistral", {"layer_types": None}),
}


@pytest.mark.parametrize(("kind", "changes"), EDITS.values(), ids=EDITS)
def test_an_edited_config_means_the_same(kind, changes, tmp_path):
    new_model(kind).save_pretrained(tmp_path / "peer")
    place = tmp_path / "peer" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "peer")
    kinformer.import_checkpoint(tmp_path / "peer", tmp_path / "run")
    ids = tokens(40)
    with torch.no_grad():
        assert_close(kinformer.load(tmp_path / "run")(ids)[0], theirs(ids).logits)
