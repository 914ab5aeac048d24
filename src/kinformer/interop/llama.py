"""LLaMA and the decoders like it, as the library transformers saves them: Mistral, Qwen2, Qwen3 and Gemma 1 to 3.

All have RMSNorm, rotary positions whose pairs lie half a head apart, and a gated feed-forward. They differ in biases,
in the norm of queries and keys, and in which layers have a window. Gemma multiplies embeddings by sqrt(dim), rounded
there to the weights' type and here not; from Gemma 2 on a sublayer has a norm on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kinformer.interop.architecture import (
    FULL,
    WINDOW,
    Architecture,
    Settings,
    choice,
    integer,
    number,
    positive,
    rope,
    switch,
)
from kinformer.interop.key_map import GATED, ONE_PLUS, QKV, SAME, ConfigData, ConfigView, Key, KeyMap, Layout, key
from kinformer.runtime.errors import KinformerError

DEFAULTS: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
MISTRAL: Mapping[str, object] = {
    **DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "layer_types": None,
}
QWEN: Mapping[str, object] = {
    **DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
GEMMA: Mapping[str, object] = {
    **DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GEMMA2: Mapping[str, object] = {
    **GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3: Mapping[str, object] = {
    **GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
ENCODES = {"use_bidirectional_attention": False}


def keys(
    model: ConfigView, norm: Layout = SAME, feed_forward: Callable[[ConfigView], tuple[Key, ...]] = lambda _: GATED
) -> KeyMap:
    """Return the key map of a LLaMA-like ``model``; ``norm``: the layout of the weights of norms; ``feed_forward``
    gives the keys of a layer's feed-forward by its config."""
    first = model["layers"][0]
    names = {"mixer_residual.norm": "input_layernorm", "feed_forward_residual.norm": "post_attention_layernorm"}
    if first["residual"] in ("sandwich", {"kind": "sandwich"}):
        names = {
            "mixer_residual.inner_norm": "input_layernorm",
            "mixer_residual.norm": "post_attention_layernorm",
            "feed_forward_residual.inner_norm": "pre_feedforward_layernorm",
            "feed_forward_residual.norm": "post_feedforward_layernorm",
        }
    normed = first["mixer"]["projection"]["kind"] == "normalised"
    head = "head.output" if model["head"].get("softcap") is None else "head.inner.output"
    projection = "mixer.projection.inner" if normed else "mixer.projection"
    if normed:
        names |= {f"mixer.projection.{one}": f"self_attn.{one}" for one in ("q_norm", "k_norm")}
    attention = (
        *(key(ours, theirs, layout=norm) for ours, theirs in names.items()),
        key(f"{projection}.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", layout=QKV),
        key("mixer.out", "self_attn.o_proj"),
    )
    return KeyMap(
        model=(key("input.embedding", "embed_tokens"), key("norm", "norm", layout=norm), key(head, "lm_head")),
        layer=lambda layer: (*attention, *feed_forward(layer["feed_forward"])),
    )


def _llama(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_act", ("silu",))
    biases = switch(full, place, "attention_bias")
    return like_llama(full, place, biases=(biases, biases))


def _mistral(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_act", ("silu",))
    kinds = [FULL if full["sliding_window"] is None else WINDOW] * full["num_hidden_layers"]
    return like_llama(full, place, kinds if full["layer_types"] is None else layer_types(full, place, (FULL, WINDOW)))


def _qwen2(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_act", ("silu",))
    return like_llama(full, place, kinds=_kinds(full, place), biases=(True, False))


def _qwen3(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_act", ("silu",))
    biases = switch(full, place, "attention_bias")
    return like_llama(full, place, kinds=_kinds(full, place), biases=(biases, biases), normed=True)


def _kinds(full: Settings, place: Path) -> list[str]:
    """Return each layer's kind of attention in a Qwen model."""
    depth = full["num_hidden_layers"]
    if not switch(full, place, "use_sliding_window") or full["sliding_window"] is None:
        return [FULL] * depth
    if full["layer_types"] is not None:
        return layer_types(full, place, (FULL, WINDOW))
    first = integer(full, place, "max_window_layers", minimum=0)
    return [WINDOW if layer >= first else FULL for layer in range(depth)]


def _gemma(full: Settings, place: Path) -> ConfigData:
    activation = "hidden_act" if full.get("hidden_activation") is None else "hidden_activation"
    choice(full, place, activation, ("gelu_pytorch_tanh",))
    return _as_gemma(like_llama(full, place, biases=(switch(full, place, "attention_bias"),) * 2))


def _gemma2(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_activation", ("gelu_pytorch_tanh",))
    kinds = _alternating(full, place, 2)
    model = like_llama(full, place, kinds, biases=(switch(full, place, "attention_bias"),) * 2)
    return _as_gemma(model, _gemma_score(full, place), full, place)


def _gemma3(full: Settings, place: Path) -> ConfigData:
    choice(full, place, "hidden_activation", ("gelu_pytorch_tanh",))
    pattern = full.get("sliding_window_pattern", full.get("_sliding_window_pattern", 6))
    kinds = _alternating(full, place, integer({"sliding_window_pattern": pattern}, place, "sliding_window_pattern"))
    local = {**full, "rope_theta": full.get("rope_local_base_freq", 10_000.0), "rope_scaling": None}
    positions = {FULL: rope(full, place, FULL, base=1e6), WINDOW: rope(local, place, WINDOW)}
    biases = (switch(full, place, "attention_bias"),) * 2
    model = like_llama(full, place, kinds, biases, normed=True, positions=positions)
    return _as_gemma(model, _gemma_score(full, place), full, place)


def _gemma_score(full: Settings, place: Path) -> ConfigData:
    """Return the settings of the score from Gemma 2 on."""
    score: ConfigData = {"scale": positive(full, place, "query_pre_attn_scalar") ** -0.5}
    if full["attn_logit_softcapping"] is None:
        return score
    return score | {"kind": "capped", "cap": positive(full, place, "attn_logit_softcapping")}


def _as_gemma(
    model: ConfigData, score: Mapping[str, object] | None = None, full: Settings | None = None, place: Path = Path()
) -> ConfigData:
    """Return a LLaMA-like ``model`` with Gemma's scaled embeddings and feed-forward; with a ``score``, as from Gemma 2
    on, also with a norm on either side of each sublayer."""
    model["input"]["scale"] = True
    for layer in model["layers"]:
        layer["feed_forward"] = layer["feed_forward"] | {"kind": "geglu", "activation": "gelu_tanh"}
        if score is not None:
            layer["residual"] = "sandwich"
            layer["mixer"]["score"] = {"kind": "scaled_dot", **score}
    if full is not None and full["final_logit_softcapping"] is not None:
        model["head"]["softcap"] = positive(full, place, "final_logit_softcapping")
    return model


def _alternating(full: Settings, place: Path, pattern: int) -> list[str]:
    """Return each layer's kind of attention: a window, but in every layer whose number ``pattern`` divides."""
    if full["layer_types"] is not None:
        return layer_types(full, place, (FULL, WINDOW))
    return [WINDOW if (layer + 1) % pattern else FULL for layer in range(full["num_hidden_layers"])]


def layer_types(full: Settings, place: Path, kinds: Sequence[str]) -> list[str]:
    """Return the setting ``layer_types``, a list of ``kinds``, one for each layer."""
    value, depth = full["layer_types"], full["num_hidden_layers"]
    if not isinstance(value, list) or len(value) != depth or not all(one in kinds for one in value):
        raise KinformerError(
            f"{place}: layer_types must be a list of {depth} kinds of attention, of which only {', '.join(kinds)} can "
            "be imported."
        )
    return value


def like_llama(
    full: Settings,
    place: Path,
    kinds: Sequence[str] | None = None,
    biases: tuple[bool, bool] = (False, False),
    normed: bool = False,
    positions: Mapping[str, Mapping[str, object]] | None = None,
) -> ConfigData:
    """Return the model config, as data, of a LLaMA-like config with all its settings.

    ``kinds``: each layer's kind of attention, all FULL if not given; ``biases``: whether the products before attention
    and behind it have one; ``normed``: whether queries and keys are normed; ``positions``: those of each kind of
    attention, where they differ.
    """
    depth, dim = full["num_hidden_layers"], integer(full, place, "hidden_size")
    norm = {"kind": "rms_norm", "eps": number(full, place, "rms_norm_eps")}
    mixer = attention(full, place, dim, biases) | ({} if positions else {"position": rope(full, place)})
    if normed:
        mixer["projection"] = {"kind": "normalised", "inner": mixer["projection"], "eps": norm["eps"]}
    layer = {
        "kind": "decoder",
        "feed_forward": {
            "kind": "swiglu",
            "hidden_dim": integer(full, place, "intermediate_size"),
            "bias": switch(full, place, "mlp_bias"),
        },
        "norm": norm,
        "residual": "pre",
    }
    mixers: dict[str, ConfigData] = {FULL: mixer | {"pattern": {"kind": "causal"}}}
    if kinds is not None and WINDOW in kinds:
        mixers[WINDOW] = mixer | {"pattern": {"kind": "local", "window": integer(full, place, "sliding_window")}}
    for kind, position in (positions or {}).items():
        if kind in mixers:
            mixers[kind]["position"] = position
    return {
        "kind": "decoder",
        "input": {"kind": "tokens", "vocab_size": integer(full, place, "vocab_size")},
        "dim": dim,
        "layers": [layer | {"mixer": dict(mixers[kind])} for kind in kinds or [FULL] * depth],
        "position": "none",
        "norm": norm,
        "head": {"kind": "language", "tied": switch(full, place, "tie_word_embeddings")},
    }


def attention(full: Settings, place: Path, dim: int, biases: tuple[bool, bool]) -> ConfigData:
    """Return the config, as data, of softmax attention with grouped queries, without its position."""
    heads = integer(full, place, "num_attention_heads")
    shared = full.get("num_key_value_heads")
    kv_heads = heads if shared is None else integer(full, place, "num_key_value_heads")
    width = dim // heads if full.get("head_dim") is None else integer(full, place, "head_dim")
    projection: ConfigData = {"kind": "multi_head", "bias": biases[0]}
    if kv_heads != heads:
        projection |= {"kind": "grouped", "num_kv_heads": kv_heads}
    return {
        "kind": "softmax",
        "num_heads": heads,
        "head_dim": width,
        "projection": projection,
        "bias": biases[1],
        "dropout": number(full, place, "attention_dropout"),
    }


ARCHITECTURES = {
    "llama": Architecture(title="LLaMA", member="rope", defaults=DEFAULTS, model=_llama, keys=keys),
    "mistral": Architecture(title="Mistral", member="rope", defaults=MISTRAL, model=_mistral, keys=keys),
    "qwen2": Architecture(title="Qwen2", member="rope", defaults=QWEN, model=_qwen2, keys=keys),
    "qwen3": Architecture(title="Qwen3", member="rope", defaults={**QWEN, "head_dim": 128}, model=_qwen3, keys=keys),
    **{
        kind: Architecture(
            title=title,
            member="rope",
            defaults=defaults,
            required=ENCODES,
            model=model,
            keys=partial(keys, norm=ONE_PLUS),
        )
        for kind, title, defaults, model in (
            ("gemma", "Gemma", GEMMA, _gemma),
            ("gemma2", "Gemma 2", GEMMA2, _gemma2),
            ("gemma3_text", "Gemma 3", GEMMA3, _gemma3),
        )
    },
}
