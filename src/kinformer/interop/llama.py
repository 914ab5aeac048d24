"""LLaMA and the decoders like it, as the library transformers saves them: Mistral, Phi-3, SmolLM3, Qwen2, Qwen3, Gemma
1 to 3, OLMo 2 and OLMo 3.

All have RMSNorm, rotary positions whose pairs lie half a head apart, and a gated feed-forward. They differ in biases,
in the norm of queries and keys, and in which layers have a window or no positions. Gemma multiplies embeddings by
sqrt(dim), rounded there to the weights' type and here not; from Gemma 2 on a sublayer has a norm on either side. OLMo
has norms behind sublayers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from kinformer.interop.architecture import Decoder, decoder_of, rms_layer
from kinformer.interop.key_map import GATED, ONE_PLUS, QKV, SAME, ConfigData, ConfigView, Key, KeyMap, Layout, key
from kinformer.interop.settings import COMMON, FULL, WINDOW, At, Settings, Table, rope, rope_parameters
from kinformer.runtime.errors import plural
from kinformer.runtime.parsing import JsonObject

TANH = "gelu_pytorch_tanh"
"""Gemma's activation."""
LLAMA = Table(
    COMMON,
    hidden_act="silu",
    rms_norm_eps=At(1e-6, "layers.norm.eps"),
    max_position_embeddings=2048,
    tie_word_embeddings=At(False, "head.tied"),
    attention_bias=False,
    attention_dropout=At(0.0, "layers.mixer.dropout"),
    mlp_bias=False,
)
MISTRAL = LLAMA.changed(num_key_value_heads=8, sliding_window=4096, layer_types=None)
PHI3 = LLAMA.changed(rms_norm_eps=1e-5, original_max_position_embeddings=4096, sliding_window=None, resid_pdrop=0.0)
QWEN = LLAMA.changed(use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None)
SMOLLM3 = QWEN.changed(num_key_value_heads=4, sliding_window=None, no_rope_layers=None, no_rope_layer_interval=4)
OLMO = LLAMA.changed(rms_norm_eps=1e-5)
OLMO3 = OLMO.changed(sliding_window=4096, layer_types=None)
GEMMA = LLAMA.changed(head_dim=256, hidden_act=TANH, tie_word_embeddings=True)
GEMMA2 = GEMMA.changed(
    num_key_value_heads=4,
    hidden_activation=TANH,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    layer_types=None,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)
GEMMA3 = GEMMA2.changed(attn_logit_softcapping=None, final_logit_softcapping=None)


def keys(
    model: ConfigView,
    norm: Layout = SAME,
    feed_forward: Callable[[ConfigView], tuple[Key, ...]] = lambda _: GATED,
    fused: bool = False,
) -> KeyMap:
    """Return the key map of a LLaMA-like ``model``; ``norm``: the layout of the weights of norms; ``feed_forward``
    gives the keys of a layer's feed-forward by its config; ``fused``: whether queries, keys and values are one
    product."""
    first = model["layers"][0]
    names = {"mixer_residual.norm": "input_layernorm", "feed_forward_residual.norm": "post_attention_layernorm"}
    if first["residual"] in ("sandwich", {"kind": "sandwich"}):
        names = {
            "mixer_residual.inner_norm": "input_layernorm",
            "mixer_residual.norm": "post_attention_layernorm",
            "feed_forward_residual.inner_norm": "pre_feedforward_layernorm",
            "feed_forward_residual.norm": "post_feedforward_layernorm",
        }
    if first["residual"] == "res_post":
        names = {f"{part}_residual.norm": f"post_{theirs}_layernorm" for part, theirs in BEHIND.items()}
    normed = first["mixer"]["projection"]["kind"] == "normalised"
    head = "head.output" if model["head"].get("softcap") is None else "head.inner.output"
    projection = "mixer.projection.inner" if normed else "mixer.projection"
    if normed:
        names |= {f"mixer.projection.{one}": f"self_attn.{one}" for one in ("q_norm", "k_norm")}
    qkv = ("qkv",) if fused else ("q", "k", "v")
    attention = (
        *(key(ours, theirs, layout=norm) for ours, theirs in names.items()),
        key(f"{projection}.qkv", *(f"self_attn.{one}_proj" for one in qkv), layout=SAME if fused else QKV),
        key("mixer.out", "self_attn.o_proj"),
    )
    return KeyMap(
        model=(key("input.embedding", "embed_tokens"), key("norm", "norm", layout=norm), key(head, "lm_head")),
        layer=lambda layer: (*attention, *feed_forward(layer["feed_forward"])),
    )


# From settings to our model.


def mistral(full: Settings) -> ConfigData:
    """Return the model config, as data, of a Mistral."""
    kinds = [FULL if full["sliding_window"] is None else WINDOW] * full["num_hidden_layers"]
    kinds = kinds if full["layer_types"] is None else full.layer_types(FULL, WINDOW)
    return like_llama(full, kinds, biases=(False, False))


def _phi3(full: Settings) -> ConfigData:
    position = rope(full, partial=True)
    kinds = [FULL if full["sliding_window"] is None else WINDOW] * full["num_hidden_layers"]
    model = like_llama(full, kinds, (False, False), positions=dict.fromkeys((FULL, WINDOW), position))
    return model | {"layers": [layer | {"dropout": full.number("resid_pdrop")} for layer in model["layers"]]}


def _smollm3(full: Settings) -> ConfigData:
    numbers, step = range(1, full["num_hidden_layers"] + 1), full.integer("no_rope_layer_interval")
    turned = full["no_rope_layers"]
    turned = [int(number % step != 0) for number in numbers] if turned is None else turned
    if not isinstance(turned, list) or len(turned) != len(numbers):
        raise full.error(
            f"no_rope_layers must be a list of {plural(len(numbers), 'number')}, 0 for layers without positions."
        )
    windowed = full.switch("use_sliding_window") and full["sliding_window"] is not None
    kinds = [WINDOW if windowed and not turns else FULL for turns in turned]
    model = like_llama(full, kinds if full["layer_types"] is None else full.layer_types(FULL, WINDOW))
    for layer, turns in zip(model["layers"], turned, strict=True):
        if not turns:
            layer["mixer"]["position"] = {"kind": "none"}
    return model


def _olmo2(full: Settings, kinds: Sequence[str] | None = None, **options: Any) -> ConfigData:
    model = like_llama(full, kinds, normed=True, **options)
    for layer in model["layers"]:
        layer["residual"] = "res_post"
        layer["mixer"]["projection"] = layer["mixer"]["projection"] | {"over": "heads"}
    return model


def _olmo3(full: Settings) -> ConfigData:
    local = full.changed(rope_theta=5e5, rope_scaling=None)
    positions = {FULL: rope(full, FULL, base=5e5), WINDOW: rope(local, WINDOW)}
    return _olmo2(full, _alternating(full, 4), positions=positions)


def _qwen(full: Settings, **options: Any) -> ConfigData:
    windowed = full.switch("use_sliding_window") and full["sliding_window"] is not None
    if windowed and full["layer_types"] is not None:
        return like_llama(full, full.layer_types(FULL, WINDOW), **options)
    depth = full["num_hidden_layers"]
    first = full.count("max_window_layers") if windowed else depth
    return like_llama(full, [WINDOW if layer >= first else FULL for layer in range(depth)], **options)


def _gemma(full: Settings) -> ConfigData:
    name = "hidden_act" if full.get("hidden_activation") is None else "hidden_activation"
    return _as_gemma(like_llama(full, activation=(name, TANH)), full)


def _gemma2(full: Settings) -> ConfigData:
    model = like_llama(full, _alternating(full, 2), activation=("hidden_activation", TANH))
    return _as_gemma(model, full, _gemma_score(full))


def _gemma3(full: Settings) -> ConfigData:
    pattern = full.get("sliding_window_pattern", full.get("_sliding_window_pattern", 6))
    kinds = _alternating(full, full.changed(sliding_window_pattern=pattern).integer("sliding_window_pattern"))
    local = full.changed(rope_theta=full.get("rope_local_base_freq", 10_000.0), rope_scaling=None)
    positions = {FULL: rope(full, FULL, base=1e6), WINDOW: rope(local, WINDOW)}
    model = like_llama(full, kinds, normed=True, positions=positions, activation=("hidden_activation", TANH))
    return _as_gemma(model, full, _gemma_score(full))


def _gemma_score(full: Settings) -> ConfigData:
    score: ConfigData = {"scale": full.positive("query_pre_attn_scalar") ** -0.5}
    if full["attn_logit_softcapping"] is None:
        return score
    return score | {"kind": "capped", "cap": full.positive("attn_logit_softcapping")}


def _as_gemma(model: ConfigData, full: Settings, score: ConfigView | None = None) -> ConfigData:
    """Return a LLaMA-like ``model`` with Gemma's scaled embeddings and feed-forward. With a ``score``, as from Gemma 2
    on, each sublayer also has a norm on either side."""
    model["input"]["scale"] = True
    for layer in model["layers"]:
        layer["feed_forward"] = layer["feed_forward"] | {"kind": "geglu", "activation": "gelu_tanh"}
        if score is not None:
            layer["residual"] = "sandwich"
            layer["mixer"]["score"] = {"kind": "scaled_dot", **score}
    if full.get("final_logit_softcapping") is not None and score is not None:
        model["head"]["softcap"] = full.positive("final_logit_softcapping")
    return model


def _alternating(full: Settings, pattern: int) -> list[str]:
    """Return each layer's kind of attention: a window, but in every layer whose number ``pattern`` divides."""
    if full["layer_types"] is not None:
        return full.layer_types(FULL, WINDOW)
    return [WINDOW if (layer + 1) % pattern else FULL for layer in range(full["num_hidden_layers"])]


def like_llama(
    full: Settings,
    kinds: Sequence[str] | None = None,
    biases: tuple[bool, bool] | None = None,
    normed: bool = False,
    positions: Mapping[str, ConfigView] | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> ConfigData:
    """Return our model config, as data, of a LLaMA-like model.

    ``kinds``: each layer's kind of attention, by default FULL; ``biases``: whether the products before and behind
    attention have biases, by default ``attention_bias`` of both; ``normed``: whether queries and keys are normed;
    ``positions``: the positions of each kind of attention, where they differ; ``activation``: the setting of the
    activation and its only value.
    """
    full.choice(*activation)
    mixer = attention(full, full.integer("hidden_size"), biases or (full.switch("attention_bias"),) * 2)
    if normed:
        eps = full.number("rms_norm_eps")
        mixer["projection"] = {"kind": "normalised", "inner": mixer["projection"], "eps": eps}
    layer = rms_layer(mixer, {"kind": "swiglu", "bias": full.switch("mlp_bias")})
    model = decoder_of(full, LLAMA, layer)
    kinds = kinds or [FULL] * len(model["layers"])
    positions = positions or dict.fromkeys((FULL, WINDOW), rope(full))
    patterns: dict[str, ConfigView] = {FULL: {"kind": "causal"}}
    if WINDOW in kinds:
        patterns[WINDOW] = {"kind": "local", "window": full.integer("sliding_window")}
    mixers = {kind: mixer | {"pattern": patterns[kind], "position": positions[kind]} for kind in patterns}
    return model | {"layers": [layer | {"mixer": dict(mixers[kind])} for kind in kinds]}


def attention(full: Settings, dim: int, biases: tuple[bool, bool]) -> ConfigData:
    """Return the config, as data, of softmax attention with grouped queries, without its position."""
    heads = full.integer("num_attention_heads")
    shared = full.get("num_key_value_heads")
    kv_heads = heads if shared is None else full.integer("num_key_value_heads")
    projection: ConfigData = {"kind": "multi_head", "bias": biases[0]}
    if kv_heads != heads:
        projection |= {"kind": "grouped", "num_kv_heads": kv_heads}
    return {
        "kind": "softmax",
        "num_heads": heads,
        "head_dim": dim // heads if full.get("head_dim") is None else full.integer("head_dim"),
        "projection": projection,
        "bias": biases[1],
        "dropout": full.number("attention_dropout"),
    }


# From our model to settings.


def write_llama(model: ConfigView, *, left_out: Collection[str] = (), **added: object) -> JsonObject:
    """Return the settings of a LLaMA-like model, without the ``left_out`` settings and with the ``added`` ones."""
    layers, mixer = model["layers"], model["layers"][0]["mixer"]
    projection = mixer["projection"].get("inner", mixer["projection"])
    patterns = [layer["mixer"]["pattern"] for layer in layers]
    windows = {pattern["window"] for pattern in patterns if pattern["kind"] == "local"}
    settings = LLAMA.written(model) | {
        "num_key_value_heads": projection.get("num_kv_heads", mixer["num_heads"]),
        "head_dim": mixer["head_dim"] or model["dim"] // mixer["num_heads"],
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(mixer["position"]),
        "attention_bias": projection["bias"],
        "mlp_bias": layers[0]["feed_forward"].get("bias", False),
        "layer_types": [WINDOW if pattern["kind"] == "local" else FULL for pattern in patterns],
        "sliding_window": windows.pop() if len(windows) == 1 else None,
    }
    return {name: value for name, value in settings.items() if name not in left_out} | added


def write_qwen(model: ConfigView, *left_out: str) -> JsonObject:
    """Return the settings of Qwen3 without the ``left_out`` settings."""
    settings = write_llama(model, left_out=("mlp_bias", *left_out))
    return settings | {"use_sliding_window": settings["sliding_window"] is not None, "max_window_layers": 0}


def _write_later_gemma(model: ConfigView) -> JsonObject:
    layers, score = model["layers"], model["layers"][0]["mixer"]["score"]
    scalar = score["scale"] ** -2
    scalar = round(scalar) if round(scalar) ** -0.5 == score["scale"] else scalar
    settings = write_llama(model, left_out=("mlp_bias", "hidden_act"), hidden_activation=TANH)
    settings |= {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": score.get("cap"),
        "final_logit_softcapping": model["head"]["softcap"],
        "sliding_window": settings["sliding_window"] or 4096,
    }
    if "inner" not in layers[0]["mixer"]["projection"]:
        return settings
    positions = {kind: layer["mixer"]["position"] for kind, layer in zip(settings["layer_types"], layers, strict=True)}
    first = layers[0]["mixer"]["position"]
    return settings | {
        "rope_parameters": {kind: rope_parameters(positions.get(kind, first)) for kind in (FULL, WINDOW)}
    }


write_mistral = partial(write_llama, left_out=("mlp_bias", "attention_bias", "layer_types"))


def _write_phi3(model: ConfigView) -> JsonObject:
    layer = model["layers"][0]
    position = layer["mixer"]["position"]
    left_out = ("mlp_bias", "attention_bias", "layer_types", "head_dim")
    settings = write_llama(model, left_out=left_out, resid_pdrop=layer["dropout"])
    settings["rope_parameters"] |= {"partial_rotary_factor": position["fraction"]}
    return settings | {"original_max_position_embeddings": position["original_length"] or 4096}


FUSED = key("feed_forward.gate_up", "mlp.gate_up_proj"), key("feed_forward.down", "mlp.down_proj")
"""The keys of a feed-forward whose gate and other rows are one product."""
PHI3_KEYS = partial(keys, feed_forward=lambda _: FUSED, fused=True)
PHI3_REQUIRED = {"mlp_bias": False, "attention_bias": False, "head_dim": None}
BEHIND = {"mixer": "attention", "feed_forward": "feedforward"}
"""Our sublayers to the names that norms behind them have."""
PLUS_ONE: dict[str, Any] = {"keys": partial(keys, norm=ONE_PLUS), "required": {"use_bidirectional_attention": False}}
QWEN2 = partial(_qwen, biases=(True, False)), lambda model: write_qwen(model, "attention_bias")
QWEN3 = partial(_qwen, normed=True), write_qwen
NO_MLP_BIAS = {"mlp_bias": False}
WINDOWS = ("layer_types", "sliding_window")
WRITE_LLAMA = partial(write_llama, left_out=WINDOWS)
WRITE_GEMMA = partial(write_llama, left_out=("mlp_bias", *WINDOWS), hidden_act=TANH)
ARCHITECTURES = {
    "llama": Decoder("LLaMA", "rope", "LlamaForCausalLM", LLAMA, like_llama, WRITE_LLAMA, keys),
    "mistral": Decoder("Mistral", "rope", "MistralForCausalLM", MISTRAL, mistral, write_mistral, keys),
    "phi3": Decoder("Phi-3", "rope", "Phi3ForCausalLM", PHI3, _phi3, _write_phi3, PHI3_KEYS, required=PHI3_REQUIRED),
    "qwen2": Decoder("Qwen2", "rope", "Qwen2ForCausalLM", QWEN, *QWEN2, keys),
    "qwen3": Decoder("Qwen3", "rope", "Qwen3ForCausalLM", QWEN.changed(head_dim=128), *QWEN3, keys),
    "smollm3": Decoder("SmolLM3", "rope", "", SMOLLM3, _smollm3, None, keys),
    "olmo2": Decoder("OLMo 2", "rope", "", OLMO, _olmo2, None, keys, required=NO_MLP_BIAS),
    "olmo3": Decoder("OLMo 3", "rope", "", OLMO3, _olmo3, None, keys, required=NO_MLP_BIAS),
    "gemma": Decoder("Gemma", "rope", "GemmaForCausalLM", GEMMA, _gemma, WRITE_GEMMA, **PLUS_ONE),
    "gemma2": Decoder("Gemma 2", "rope", "Gemma2ForCausalLM", GEMMA2, _gemma2, _write_later_gemma, **PLUS_ONE),
    "gemma3_text": Decoder("Gemma 3", "rope", "Gemma3ForCausalLM", GEMMA3, _gemma3, _write_later_gemma, **PLUS_ONE),
}
