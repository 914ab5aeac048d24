"""Recurrent decoders as flash-linear-attention saves them: Gated DeltaNet, DeltaNet, GLA and RetNet.

All have RMSNorm, a gated feed-forward, and a norm of each head of kernel attention; layers that ``attn`` names are
softmax attention with rotary positions. Read in flash-linear-attention 0.6.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from reprlib import repr as excerpt

from kinformer.interop.architecture import Decoder, decoder_of
from kinformer.interop.key_map import DELTA, GATED, KERNEL_QKV, QKV, TAPS, ConfigData, ConfigView, Key, KeyMap, key
from kinformer.interop.llama import attention
from kinformer.interop.settings import Settings

DEFAULTS: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attn": None,
    "conv_size": 4,
    "expand_k": 1.0,
    "num_kv_heads": None,
}
GATED_DELTANET: Mapping[str, object] = {
    **DEFAULTS,
    "num_hidden_layers": 21,
    "num_heads": 6,
    "num_v_heads": None,
    "head_dim": 256,
    "expand_v": 2.0,
    "use_gate": True,
    "allow_neg_eigval": False,
    "output_gate_activation": "swish",
}
DELTA_NET: Mapping[str, object] = {
    **DEFAULTS,
    "num_heads": 16,
    "expand_v": 1.0,
    "use_gate": False,
    "allow_neg_eigval": False,
}
GLA: Mapping[str, object] = {
    **DEFAULTS,
    "num_heads": 4,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "use_short_conv": False,
    "use_output_gate": True,
}
RETNET: Mapping[str, object] = {**DEFAULTS, "hidden_ratio": 2, "num_heads": 8, "expand_v": 2.0, "use_output_gate": True}
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
UNUSED: Mapping[str, object] = {"attnres_block_size": None}
"""Attention over the outputs of layers, which no model here computes."""
SHORT = {"use_short_conv": True, "conv_bias": False}
SUMS = {"feature_map": None, "elementwise_affine": True, "conv_bias": False}
"""The only values of settings with which the mixers here compute the same."""


def _mixer(full: Settings, gate: str, **more: object) -> ConfigData:
    """Return the config, as data, of kernel attention; ``gate``: the switch of its gate; ``more``: its own settings."""
    heads = full.integer("num_heads")
    mixer = {
        "kind": "linear",
        "num_heads": heads,
        "normaliser": "none",
        "scale": True,
        "head_norm": "rms",
        "norm_eps": full.number("norm_eps"),
        "gate": full.switch(gate),
        "bias": False,
    }
    return mixer | more


def _widths(full: Settings) -> dict[str, int]:
    """Return the widths of a head whose keys and values are shares of ``hidden_size``."""
    dim, heads = full.integer("hidden_size"), full.integer("num_heads")
    if full["num_kv_heads"] not in (None, heads):
        raise full.error(
            f"num_kv_heads is {excerpt(full['num_kv_heads'])}, but only as many as num_heads, {heads}, can be imported."
        )
    return {
        ours: _share(full, theirs, dim, heads) for ours, theirs in (("head_dim", "expand_k"), ("value_dim", "expand_v"))
    }


def _share(full: Settings, name: str, of: int, heads: int = 1) -> int:
    """Return how wide a head is whose ``heads`` are together the share ``name`` ``of`` a width."""
    width = of * full.positive(name)
    if width < heads or round(width) % heads or abs(width - round(width)) > 1e-5 * width:
        parts = f", a multiple of {heads} heads" if heads > 1 else ""
        raise full.error(f"{name} is {excerpt(full[name])}, but {of} times it must be a whole number{parts}.")
    return round(width) // heads


def _delta(full: Settings, **more: object) -> ConfigData:
    """Return kernel attention with the delta rule behind short convolutions."""
    rule = {
        "feature_map": {"kind": "unit"},
        "rule": "delta",
        "negative_eigenvalues": full.switch("allow_neg_eigval"),
        "convolution": full.integer("conv_size", minimum=2),
    }
    return _mixer(full, "use_gate", **rule, **more)


def _gated_deltanet(full: Settings) -> ConfigData:
    mixer = _delta(full, decay={"kind": "softplus"}, head_dim=full.integer("head_dim"))
    keys = mixer["num_heads"]
    heads = keys if full["num_v_heads"] is None else full.integer("num_v_heads")
    if heads % keys:
        raise full.error(f"num_v_heads is {heads}, but must be a multiple of num_heads, {keys}.")
    mixer |= {"num_heads": heads, "key_heads": None if heads == keys else keys}
    mixer["value_dim"] = _share(full, "expand_v", mixer["head_dim"])
    if mixer["gate"]:
        mixer["gate_activation"] = GATES[full.choice("output_gate_activation", *GATES)]
    return mixer


def _delta_net(full: Settings) -> ConfigData:
    return _delta(full, **_widths(full))


def _gla(full: Settings) -> ConfigData:
    width = full.integer("conv_size", minimum=2) if full.switch("use_short_conv") else 0
    parts = {"feature_map": {"kind": "identity"}, "decay": {"kind": "low_rank"}, "convolution": width}
    return _mixer(full, "use_output_gate", **parts, **_widths(full))


def _retnet(full: Settings) -> ConfigData:
    parts = {"feature_map": {"kind": "identity"}, "decay": {"kind": "fixed"}, "position": {"kind": "rope"}}
    return _mixer(full, "use_output_gate", **parts, **_widths(full))


def _model(mixer: Callable[[Settings], ConfigData]) -> Callable[[Settings], ConfigData]:
    """Return the function to the model config, as data, of decoders with this ``mixer``."""

    def model(full: Settings) -> ConfigData:
        full.choice("hidden_act", "swish")
        dim = full.integer("hidden_size")
        norm = {"kind": "rms_norm", "eps": full.number("norm_eps")}
        feed_forward = {"kind": "swiglu", "hidden_dim": _hidden_dim(full, dim), "bias": False}
        layer = {"kind": "decoder", "feed_forward": feed_forward, "norm": norm, "residual": "pre"}
        recurrent, exact = mixer(full), _exact(full)
        mixers = (exact.get(layer, recurrent) for layer in range(full["num_hidden_layers"]))
        return decoder_of(full, dim, [layer | {"mixer": one} for one in mixers], norm)

    return model


def _hidden_dim(full: Settings, dim: int) -> int:
    """Return the feed-forward's width: a share of the model's, up to a multiple of 256, where a file names none."""
    if full["intermediate_size"] is not None:
        return full.integer("intermediate_size")
    ratio = 4 if full["hidden_ratio"] is None else full.positive("hidden_ratio")
    return -(-int(dim * ratio * 2 / 3) // 256) * 256


def _exact(full: Settings) -> dict[int, ConfigData]:
    """Return the softmax attention of layers by the layers' numbers."""
    groups = full["attn"] if isinstance(full["attn"], list) else [full["attn"]] if full["attn"] is not None else []
    exact: dict[int, ConfigData] = {}
    for one in groups:
        if not isinstance(one, Mapping) or not isinstance(one.get("layers"), list):
            raise full.error("attn does not name a list of layers with softmax attention; restore the file.")
        group = Settings({"window_size": None, "rope_theta": 10000.0, "qkv_bias": False, **one}, full.place)
        heads = {"num_attention_heads": group.get("num_heads"), "num_key_value_heads": group.get("num_kv_heads")}
        theirs = Settings({**heads, "attention_dropout": 0.0}, full.place)
        mixer = attention(theirs, full.integer("hidden_size"), (group.switch("qkv_bias"), False))
        mixer["position"] = {"kind": "rope", "base": group.positive("rope_theta")}
        if group["window_size"] is not None:
            mixer["pattern"] = {"kind": "local", "window": group.integer("window_size")}
        last = full["num_hidden_layers"] - 1
        for layer in group["layers"]:
            number = Settings({"layers of attn": layer}, full.place).integer("layers of attn", minimum=0, maximum=last)
            exact[number] = mixer
    return exact


def _layer_keys(layer: ConfigView) -> tuple[Key, ...]:
    """Return the keys of a layer, whose kernel attention may have any of the parts."""
    common = (
        key("mixer_residual.norm", "attn_norm"),
        key("feed_forward_residual.norm", "mlp_norm"),
        *GATED,
        key("mixer.out", "attn.o_proj"),
    )
    if layer["mixer"]["kind"] == "softmax":
        return (*common, key("mixer.projection.qkv", *PRODUCTS, layout=QKV))
    delta = layer["mixer"].get("rule") == "delta"
    products = (*PRODUCTS, "attn.b_proj") if delta else PRODUCTS
    return (*common, *KERNEL, key("mixer.qkv", *products, layout=DELTA if delta else KERNEL_QKV))


PRODUCTS = tuple(f"attn.{one}_proj" for one in "qkv")
KERNEL = (
    key("mixer.convolution", *(f"attn.{one}_conv1d" for one in "qkv"), layout=TAPS),
    key("mixer.decay.gate", "attn.a_proj"),
    key("mixer.decay.log_rate", "attn.A_log", tensors=("",)),
    key("mixer.decay.step", "attn.dt_bias", tensors=("",)),
    key("mixer.decay.down", "attn.gk_proj.0"),
    key("mixer.decay.up", "attn.gk_proj.1"),
    key("mixer.gate", "attn.g_proj"),
    *(key("mixer.norm", f"attn.{name}") for name in ("o_norm", "g_norm_swish_gate", "g_norm")),
)
KEYS = KeyMap(
    model=(key("input.embedding", "embeddings"), key("norm", "norm"), key("head.output", "lm_head")),
    layer=_layer_keys,
)
ARCHITECTURES = {
    kind: Decoder(
        title=title,
        member=member,
        defaults=defaults,
        required={**UNUSED, **required},
        exported=False,
        read=_model(mixer),
        keys=KEYS,
    )
    for kind, title, member, defaults, required, mixer in (
        ("gated_deltanet", "Gated DeltaNet", "gated-deltanet", GATED_DELTANET, SHORT, _gated_deltanet),
        (
            "delta_net",
            "DeltaNet",
            "fast-weights",
            DELTA_NET,
            SHORT | {"use_beta": True, "qk_norm": "l2", "qk_activation": "silu"},
            _delta_net,
        ),
        ("gla", "GLA", "gla", GLA, SUMS | {"clamp_min": None}, _gla),
        ("retnet", "RetNet", "retnet", RETNET, SUMS, _retnet),
    )
}
