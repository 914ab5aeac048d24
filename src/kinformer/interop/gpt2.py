"""GPT-2 and the other decoders with LayerNorm of the library transformers: OPT, GPT-NeoX (Pythia), BLOOM and MPT, and
Decision Transformer (Chen et al. 2021), which is GPT-2 over returns, states and actions.

GPT-2 and OPT have learned positions. The products of GPT-2 are stored as [in, out]; two rows of OPT's table of
positions belong to no token. GPT-NeoX turns a share of each head by its position, and adds attention and feed-forward
side by side. BLOOM and MPT have ALiBi; BLOOM leaves out a constant per query, which changes no softmax. MPT has no
biases. Decision Transformer adds the first row of a table of positions to every position there, which is a bias behind
the norm of the input here; its outputs of states and returns are left out, as nothing trains them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kinformer.interop.architecture import (
    ACTIVATIONS,
    MASKS,
    Architecture,
    ConfigFile,
    Decoder,
    Padding,
    Tensors,
    Weights,
    decoder_of,
)
from kinformer.interop.key_map import (
    BY_HEAD,
    QKV,
    SAME,
    TRANSPOSED,
    ConfigData,
    ConfigView,
    Key,
    KeyMap,
    Layout,
    behind,
    ends_of_model,
    key,
)
from kinformer.interop.settings import COMMON, At, Settings, Table, rope, rope_parameters, sizes
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

GPT2 = Table(
    sizes("vocab_size", "n_embd", "n_layer", "n_head"),
    n_positions=At(1024, "position.max_length"),
    n_inner=At(None, "layers.feed_forward.hidden_dim", Settings.integer),
    activation_function=At("gelu_new", "layers.feed_forward.activation", ACTIVATIONS),
    resid_pdrop=At(0.1, "layers.dropout"),
    embd_pdrop=At(0.1, "dropout"),
    attn_pdrop=At(0.1, "layers.mixer.dropout"),
    layer_norm_epsilon=At(1e-5, "layers.norm.eps"),
    tie_word_embeddings=At(True, "head.tied"),
)
DECISION = Table(
    GPT2.changed(vocab_size=1, n_layer=3, n_head=1, activation_function="relu"),
    hidden_size=At(128, "dim"),
    state_dim=At(17, "input.state_dim"),
    act_dim=At(4, "input.action_dim head.action_dim"),
    max_ep_len=At(4096, "input.timesteps"),
)
NEOX = Table(
    COMMON,
    hidden_act=At("gelu", "layers.feed_forward.activation", ACTIVATIONS),
    attention_dropout=At(0.0, "layers.mixer.dropout"),
    hidden_dropout=At(0.0, "layers.dropout dropout"),
    max_position_embeddings=2048,
    layer_norm_eps=At(1e-5, "layers.norm.eps"),
    tie_word_embeddings=At(False, "head.tied"),
    use_parallel_residual=True,
    attention_bias=At(True, "layers.mixer.bias layers.mixer.projection.bias"),
    rotary_emb_base=10_000.0,
    rotary_pct=0.25,
)
OPT = Table(
    sizes("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"),
    max_position_embeddings=At(2048, "position.max_length"),
    activation_function=At("relu", "layers.feed_forward.activation", ACTIVATIONS),
    dropout=At(0.1, "layers.dropout dropout"),
    attention_dropout=At(0.0, "layers.mixer.dropout"),
    tie_word_embeddings=At(True, "head.tied"),
    do_layer_norm_before=True,
    _remove_final_layer_norm=False,
)
BLOOM = Table(
    sizes("vocab_size", "hidden_size", "n_layer", "n_head"),
    layer_norm_epsilon=At(1e-5, "layers.norm.eps"),
    hidden_dropout=At(0.0, "layers.dropout"),
    attention_dropout=At(0.0, "layers.mixer.dropout"),
    tie_word_embeddings=At(True, "head.tied"),
    slow_but_exact=False,
    pretraining_tp=1,
)
MPT = Table(
    sizes("vocab_size", "d_model", "n_layers", "n_heads"),
    expansion_ratio=4,
    resid_pdrop=At(0.0, "layers.dropout"),
    emb_pdrop=At(0.0, "dropout"),
    layer_norm_epsilon=At(1e-5, "layers.norm.eps"),
    tie_word_embeddings=At(True, "head.tied"),
)
REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""The only values with which our attention computes the same.

``reorder_and_upcast_attn`` concerns half precision alone, where our softmax runs in float32 anyway.
"""


def _layer_keys(
    norm: str, qkv: Key, out: str, second_norm: str, up: str, down: str, layout: Layout = SAME
) -> tuple[Key, ...]:
    """Return the keys of a layer; ``layout``: the layout of its products."""
    return (
        key("mixer_residual.norm", norm),
        qkv,
        key("mixer.out", out, layout=layout),
        key("feed_forward_residual.norm", second_norm),
        key("feed_forward.up", up, layout=layout),
        key("feed_forward.down", down, layout=layout),
    )


def _qkv(*theirs: str, layout: Layout = SAME) -> Key:
    return key("mixer.projection.qkv", *theirs, layout=layout)


UNUSED = re.compile(r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)|.*rotary_emb\.inv_freq")
"""The masks and angles that old checkpoints hold among the weights."""
GPT2_LAYER = _layer_keys(
    "ln_1", _qkv("attn.c_attn", layout=TRANSPOSED), "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", TRANSPOSED
)
GPT2_KEYS = KeyMap(
    model=(*ends_of_model("wte", "ln_f"), key("position.table", "wpe.weight", tensors=("",))),
    layer=GPT2_LAYER,
    layers="h",
    prefix="transformer.",
    left_out=re.compile(r"h\.\d{1,5}\.attn\.(bias|masked_bias)"),
)
NEOX_KEYS = KeyMap(
    model=(
        *ends_of_model("embed_in", "final_layer_norm", "embed_out"),
        key("head.output", "lm_head"),  # in files of other versions
    ),
    layer=_layer_keys(
        "input_layernorm",
        _qkv("attention.query_key_value", layout=BY_HEAD),
        "attention.dense",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    prefix="gpt_neox.",
    left_out=UNUSED,
)
OPT_KEYS = KeyMap(
    model=(
        *ends_of_model("embed_tokens", "final_layer_norm"),
        key("position.table", "embed_positions.weight", layout=behind(2), tensors=("",)),
    ),
    layer=_layer_keys(
        "self_attn_layer_norm",
        _qkv(*(f"self_attn.{one}_proj" for one in "qkv"), layout=QKV),
        "self_attn.out_proj",
        "final_layer_norm",
        "fc1",
        "fc2",
    ),
    prefix="model.decoder.",
    left_out=UNUSED,
)
BLOOM_KEYS = KeyMap(
    model=(*ends_of_model("word_embeddings", "ln_f"), key("embedding_norm", "word_embeddings_layernorm")),
    layer=_layer_keys(
        "input_layernorm",
        _qkv("self_attention.query_key_value", layout=BY_HEAD),
        "self_attention.dense",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    layers="h",
    prefix="transformer.",
    left_out=UNUSED,
)
TABLE, PROJECTIONS = "embed_tokens.weight", ("project_in.weight", "project_out.weight")
"""OPT's vectors of tokens, and the products that widen and narrow them."""
MPT_KEYS = KeyMap(
    model=ends_of_model("wte", "norm_f"),
    layer=_layer_keys("norm_1", _qkv("attn.Wqkv"), "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj"),
    layers="blocks",
    prefix="transformer.",
)


# From settings to our model.


def _layer(
    mixer: ConfigView | None = None, feed_forward: ConfigView | None = None, norm: ConfigView | None = None
) -> ConfigData:
    """Return a layer with LayerNorm before its sublayers, without the settings of a table."""
    return {
        "kind": "decoder",
        "mixer": {"kind": "softmax", "projection": {"kind": "multi_head"}, **(mixer or {})},
        "feed_forward": {"kind": "mlp", **(feed_forward or {})},
        "norm": {"kind": "layer_norm", **(norm or {})},
        "residual": "pre",
    }


def _gpt2(full: Settings) -> ConfigData:
    if full.get("pruned_heads"):
        raise full.error("heads are pruned; import the checkpoint before pruning.")
    if full["n_inner"] is None:
        full = full.changed(n_inner=4 * full.integer("n_embd"))
    return decoder_of(full, GPT2, _layer(), position={"kind": "learned"})


def _decision(full: Settings) -> ConfigData:
    model = _gpt2(full.changed(n_embd=full["hidden_size"]))
    model |= {"input": {"kind": "steps"}, "position": "none", "head": {"kind": "continuous_actions"}}
    return OF_STEPS.fill(model, full)


def _neox(full: Settings) -> ConfigData:
    outside = {"rope_theta": full["rotary_emb_base"], "partial_rotary_factor": full["rotary_pct"]}
    layer = _layer({"position": rope(full.changed(**outside), partial=True)})
    layer["kind"] = "parallel" if full.switch("use_parallel_residual") else "decoder"
    return decoder_of(full, NEOX, layer)


def _opt(full: Settings) -> ConfigData:
    layer, before = _layer(norm={"eps": 1e-5}), full.switch("do_layer_norm_before")
    outside = {} if before and not full.switch("_remove_final_layer_norm") else {"norm": None}
    layer["residual"] = "pre" if before else "post"
    model = decoder_of(full, OPT, layer, position={"kind": "learned"}, **outside)
    if full.get("word_embed_proj_dim") is not None and full.integer("word_embed_proj_dim") != model["dim"]:
        model["head"]["tied"] = False
    return model


def _bloom(full: Settings) -> ConfigData:
    if full["slow_but_exact"] and full.integer("pretraining_tp") > 1:
        raise full.error(
            f"slow_but_exact is true with a pretraining_tp of {full['pretraining_tp']}, where transformers "
            "leaves out biases; only a pretraining_tp of 1, or slow_but_exact false, can be imported."
        )
    feed_forward = {"hidden_dim": 4 * full.integer("hidden_size"), "activation": "gelu_tanh"}
    layer = _layer({"position": "alibi"}, feed_forward)
    return decoder_of(full, BLOOM, layer, embedding_norm=layer["norm"])


def _mpt(full: Settings) -> ConfigData:
    settings = Settings({"attn_pdrop": 0.0, **full.table("attn_config")}, full.place)
    wanted = {"clip_qkv": None, "softmax_scale": None, "qk_ln": False, "prefix_lm": False, "alibi_bias_max": 8}
    settings.require({"alibi": True, "attn_type": "multihead_attention", **wanted})
    heads = full.integer("n_heads")
    if heads & (heads - 1):
        raise full.error(f"n_heads is {heads}, for which MPT has other slopes; only powers of 2 can be imported.")
    mixer = {"projection": {"kind": "multi_head", "bias": False}, "position": "alibi", "bias": False}
    # transformers reads no expansion_ratio: its layers are always four times as wide.
    feed_forward = {"hidden_dim": 4 * full.integer("d_model"), "activation": "gelu", "bias": False}
    layer = _layer(mixer | {"dropout": settings.number("attn_pdrop")}, feed_forward, {"bias": False})
    return decoder_of(full, MPT, layer)


# From our model to settings.


def _write_gpt2(model: ConfigView) -> JsonObject:
    return GPT2.written(model) | {"n_ctx": model["position"]["max_length"]}  # read by llama.cpp


def _write_neox(model: ConfigView) -> JsonObject:
    layer = model["layers"][0]
    position = layer["mixer"]["position"]
    share = {"partial_rotary_factor": position["fraction"]}
    return NEOX.written(model) | {
        "use_parallel_residual": layer["kind"] == "parallel",
        "rotary_pct": position["fraction"],
        "rope_parameters": rope_parameters(position) | share,
    }


def _write_opt(model: ConfigView) -> JsonObject:
    settings = OPT.written(model)
    if settings["activation_function"] != "relu":
        raise KeyError("activation_function")
    before = model["layers"][0]["residual"]["kind"] == "pre"
    settings |= {"word_embed_proj_dim": model["dim"], "do_layer_norm_before": before}
    return settings | {"_remove_final_layer_norm": before and model["norm"] is None}


def _write_mpt(model: ConfigView) -> JsonObject:
    layer = model["layers"][0]
    return MPT.written(model) | {
        "max_seq_len": 2048,
        "no_bias": True,
        "attn_config": {"alibi": True, "attn_pdrop": layer["mixer"]["dropout"] or 0},
    }


class Opt(Decoder):
    """OPT. Vectors of tokens may be narrower than the model, as in OPT-350m. The products that widen and narrow them
    become a part of the embedding and a part of the output matrix, which are not tied here."""

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        by_name = {name.split("decoder.")[-1]: name for name in tensors}
        if any(name in by_name for name in PROJECTIONS):
            if missing := [name for name in (*PROJECTIONS, TABLE) if name not in by_name]:
                raise KinformerError(f"{folder}: lacks {missing[0]}; restore it from a copy.")
            tensors = dict(tensors)
            into, out = (tensors.pop(by_name[name]).double() for name in PROJECTIONS)
            table = tensors[by_name[TABLE]]
            output = tensors.get("lm_head.weight", table)
            if table.shape[1:] != into.shape[1:] or output.shape[1:] != out.shape[:1]:
                raise KinformerError(f"{folder}: project_in or project_out is not as wide as the vectors of tokens.")
            tensors |= {
                by_name[TABLE]: (table.double() @ into.mT).float(),
                "lm_head.weight": (output.double() @ out).float(),
            }
        return super().read_tensors(tensors, model, folder, config)

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        if not any(name.endswith(PROJECTIONS) for name in tensors):
            return ()
        return ("project_in is part of the embedding and project_out of the output matrix, which are not tied here",)


# Decision Transformer.

POSITIONS = "encoder.wpe.weight"
UNTRAINED = re.compile(r"predict_(state|return)\.(weight|bias)")
OF_STEPS = Table({name: DECISION[name] for name in ("hidden_size", "state_dim", "act_dim", "max_ep_len")})
"""The settings of Decision Transformer that GPT-2 does not have."""
DECISION_KEYS = KeyMap(
    model=(
        key("input.returns", "embed_return"),
        key("input.states", "embed_state"),
        key("input.actions", "embed_action"),
        key("input.timesteps", "embed_timestep"),
        key("input.norm", "embed_ln"),
        key("norm", "ln_f"),
        key("head.output", "predict_action.0"),
    ),
    layer=GPT2_LAYER,
    layers="h",
    prefix="encoder.",
    beside=("embed_return", "embed_state", "embed_action", "embed_timestep", "embed_ln", "predict_action"),
    left_out=re.compile(rf"wte\.weight|{UNTRAINED.pattern}"),  # a model of numbers reads no table of ids
)

NORMALISED = {"return_scale": 1.0, "state_mean": [], "state_std": []}
"""The settings of an input that takes plain values."""


def _normalisation(model: ConfigView) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    steps = model["input"]
    return steps["return_scale"], tuple(steps["state_mean"]), tuple(steps["state_std"])


@dataclass(frozen=True, kw_only=True)
class DecisionTransformer(Architecture):
    """Decision Transformer, which takes plain returns and states and gives actions from -1 to 1."""

    reads: str = "steps"
    of = ""
    reordered = "the normalisation of returns and states is part of its products, so that it takes plain values"

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        others = {name: tensor for name, tensor in tensors.items() if name != POSITIONS}
        weights = super().read_tensors(others, model, folder, config)
        bias, table = weights.get("input.norm.bias"), tensors.get(POSITIONS)
        if bias is None or table is None or table.shape[1:] != bias.shape or not len(table):
            raise KinformerError(
                f"{folder}: lacks embed_ln.bias or {POSITIONS}, or they are not as wide as config.json says; restore "
                "both from a copy."
            )
        weights["input.norm.bias"] = bias + table[0]
        return weights

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        out = sorted(name for name in tensors if UNTRAINED.fullmatch(name))
        scale = (
            "it does not say how returns and states are normalised: give `set` input.return_scale, input.state_mean "
            "and input.state_std, or normalised values"
        )
        return (f"{', '.join(out)} left out: nothing trains them", scale) if out else (scale,)

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        positions = {"max_length": max(1024, length or 0)}
        gpt2 = GPT2.written({**model, "input": {"vocab_size": 1}, "position": positions, "head": {"tied": True}})
        del gpt2["n_embd"], gpt2["tie_word_embeddings"]
        ends = {"bos_token_id": None, "eos_token_id": None}
        return gpt2 | OF_STEPS.written(model) | {"action_tanh": True} | ends

    def write_tensors(self, weights: Tensors, model: ConfigView, settings: JsonObject) -> dict[str, Tensor]:
        """Return the ``weights`` of our ``model`` under their names; what our model does not have is zero."""
        tensors = super().write_tensors(weights, model, settings)
        steps, dim, zeros = model["input"], model["dim"], weights["norm.weight"].new_zeros
        tensors |= {POSITIONS: zeros(settings["n_positions"], dim), "encoder.wte.weight": zeros(1, dim)}
        for name, size in {"state": steps["state_dim"], "return": 1}.items():
            tensors |= {f"predict_{name}.weight": zeros(size, dim), f"predict_{name}.bias": zeros(size)}
        return tensors

    def order(self, model: ConfigView) -> ConfigView:
        steps, head = dict(model["input"]) | NORMALISED, dict(model["head"])
        if all(abs(value) == 1 for value in (*head.get("low", ()), *head.get("high", ()))):
            head |= {name: [] for name in ("low", "high") if name in head}  # low lies below high
        plain = {**model, "input": steps, "head": head}
        return model if _normalisation(model) == _normalisation(plain) and head == model["head"] else plain

    def reorder(self, weights: Tensors, model: ConfigView) -> dict[str, Tensor]:
        """Return ``weights`` whose products take plain returns and states."""
        scale, mean, std = _normalisation(model)
        changed = dict(weights)
        returns, states = (weights[f"input.{name}.weight"].double() for name in ("returns", "states"))
        states = states / torch.tensor(std or 1.0, dtype=torch.float64)
        changed["input.returns.weight"] = (returns / scale).to(weights["input.returns.weight"])
        changed["input.states.weight"] = states.to(weights["input.states.weight"])
        if mean:
            bias = weights["input.states.bias"]
            changed["input.states.bias"] = (bias.double() - states @ torch.tensor(mean, dtype=torch.float64)).to(bias)
        return changed

    def differences(self, model: ConfigView) -> list[str]:
        return ["its outputs of states and returns are zero, as nothing trained them"]


OPT_REQUIRED = {"enable_bias": True, "layer_norm_elementwise_affine": True}
BLOOM_REQUIRED = {"apply_residual_connection_post_layernorm": False}
LAYERS_AND_HEADS = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
GPT2_NAMES = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions"} | LAYERS_AND_HEADS
BLOOM_NAMES = {"n_embed": "hidden_size"} | LAYERS_AND_HEADS
MPT_NAMES = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
ARCHITECTURES = {
    # OPT stands before GPT-2, which its models would be, too. OPT with another activation than ReLU is a GPT-2.
    "opt": Opt("OPT", "gpt", "OPTForCausalLM", OPT, _opt, _write_opt, OPT_KEYS, required=OPT_REQUIRED),
    "gpt2": Decoder(
        "GPT-2", "gpt", "GPT2LMHeadModel", GPT2, _gpt2, _write_gpt2, GPT2_KEYS, required=REQUIRED, names=GPT2_NAMES
    ),
    "gpt_neox": Decoder(
        "GPT-NeoX", "rope", "GPTNeoXForCausalLM", NEOX, _neox, _write_neox, NEOX_KEYS, required={"head_dim": None}
    ),
    "bloom": Decoder(
        "BLOOM", "alibi", "BloomForCausalLM", BLOOM, _bloom, keys=BLOOM_KEYS, required=BLOOM_REQUIRED, names=BLOOM_NAMES
    ),
    "mpt": Decoder(
        "MPT", "alibi", "MptForCausalLM", MPT, _mpt, _write_mpt, MPT_KEYS, required={"no_bias": True}, names=MPT_NAMES
    ),
    "decision_transformer": DecisionTransformer(
        "Decision Transformer",
        "decision",
        "DecisionTransformerModel",
        DECISION,
        _decision,
        keys=DECISION_KEYS,
        auto_class="AutoModel",
        required={**REQUIRED, "action_tanh": True},
        names=LAYERS_AND_HEADS,
        buffers=MASKS,
    ),
}
