"""Encoder-decoders of the library transformers: T5, T5 1.1 and mT5 (Raffel et al. 2020), BART (Lewis et al. 2019), and
Marian (Opus-MT).

T5 has biases by buckets of distance, with one table for all layers of a side. Its scores are not scaled; RMSNorm stands
before each sublayer, and nothing has a bias. A tied head takes hidden states times dim ** -0.5. BART and Marian have
norms behind sublayers. BART has learned positions; two rows of their table belong to no token. Marian has sinusoids in
the split layout, and may have one table of ids for each side. A target begins with ``decoder_start_token_id``, which is
our BOS; a source ends with EOS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kinformer.interop.architecture import ACTIVATIONS, Architecture, Padding, Tensors
from kinformer.interop.key_map import CROSS_KV, GATE_UP, QKV, Behind, ConfigData, ConfigView, Key, KeyMap, key
from kinformer.interop.settings import CONFIG, DEPTH, Settings
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

T5_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MT5: Mapping[str, object] = {
    **T5_DEFAULTS,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "scale_decoder_outputs": False,
}
SIDES: Mapping[str, object] = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
}
BART: Mapping[str, object] = {
    **SIDES,
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
MARIAN: Mapping[str, object] = {**SIDES, "vocab_size": 58101, "eos_token_id": 0, "decoder_start_token_id": 58100}
"""The values that transformers has for missing settings."""
T5_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
}
FEED_FORWARDS: Mapping[str, Mapping[str, object]] = {
    "relu": {"kind": "mlp", "activation": "relu"},
    "gelu": {"kind": "mlp", "activation": "gelu"},
    "gated-gelu": {"kind": "geglu", "activation": "gelu_tanh"},
    "gated-silu": {"kind": "swiglu"},
}
SIDE_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
MARIAN_REQUIRED = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "extra_pos_embeddings": 0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "tie_word_embeddings": True,
}
"""The only values with which our model computes the same; old files have the first five settings."""
MARIAN_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu", "gelu_new": "gelu_tanh"}
SHARED, SOURCE, TARGET = (f"{one}.weight" for one in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
OUTPUT, BIAS = "lm_head.weight", "final_logits_bias"
"""The names of tables of ids, of the output matrix, and of the bias of each id."""


# The keys of one side.


def _t5_keys(model: ConfigView, side: str) -> KeyMap:
    """Return the key map of one side of T5."""
    gated = model["layers"][0]["feed_forward"]["kind"] != "mlp"
    last = 1 if side == "encoder" else 2
    inner = ("wi_0", "wi_1") if gated else ("wi",)
    layer = [
        key("mixer_residual.norm", "layer.0.layer_norm"),
        key("mixer.projection.qkv", *(f"layer.0.SelfAttention.{one}" for one in "qkv"), layout=QKV),
        key("mixer.out", "layer.0.SelfAttention.o"),
        key("feed_forward_residual.norm", f"layer.{last}.layer_norm"),
        key("feed_forward.down", f"layer.{last}.DenseReluDense.wo"),
    ]
    names = [f"layer.{last}.DenseReluDense.{one}" for one in inner]
    layer.append(key("feed_forward.gate_up", *names, layout=GATE_UP) if gated else key("feed_forward.up", *names))
    if side == "decoder":
        layer += _cross_keys("layer.1.layer_norm", *(f"layer.1.EncDecAttention.{one}" for one in "qkvo"))
    outside = (
        key("norm", "final_layer_norm"),
        key("stack.shared.0.table", "relative_attention_bias.weight", tensors=("",)),
        *((key("head.output", "lm_head"),) if side == "decoder" else ()),
    )
    unused = re.compile(r"block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight")
    return KeyMap(model=outside, layer=tuple(layer), layers="block", prefix=f"{side}.", left_out=unused)


def _side_keys(side: str, *outside: Key, left_out: str = "") -> KeyMap:
    """Return the key map of one side of BART or Marian; ``outside``: the keys beside the layers."""
    layer = [
        key("mixer.projection.qkv", *(f"self_attn.{one}_proj" for one in "qkv"), layout=QKV),
        key("mixer.out", "self_attn.out_proj"),
        key("mixer_residual.norm", "self_attn_layer_norm"),
    ]
    if side == "decoder":
        names = [f"encoder_attn.{one}_proj" for one in ("q", "k", "v", "out")]
        layer += _cross_keys("encoder_attn_layer_norm", *names)
    layer += [
        key("feed_forward.up", "fc1"),
        key("feed_forward.down", "fc2"),
        key("feed_forward_residual.norm", "final_layer_norm"),
    ]
    return KeyMap(model=outside, layer=tuple(layer), layers=f"{side}.layers", left_out=re.compile(left_out))


def _cross_keys(norm: str, query: str, keys: str, values: str, out: str) -> list[Key]:
    """Return the keys of cross-attention."""
    return [
        key("further_residuals.0.norm", norm),
        key("further_mixers.0.query", query),
        key("further_mixers.0.key_value", keys, values, layout=CROSS_KV),
        key("further_mixers.0.out", out),
    ]


# From settings to our model.


def _t5(full: Settings) -> ConfigData:
    dim = full.integer("d_model")
    scaled = full.get("scale_decoder_outputs", full.get("tie_word_embeddings") is not False)
    start = Settings({"decoder_start_token_id": full["pad_token_id"], **full}, full.place)
    norm = {"kind": "rms_norm", "eps": full.number("layer_norm_epsilon")}
    projection = full.choice("feed_forward_proj", *FEED_FORWARDS)
    feed_forward, gate, activation = FEED_FORWARDS[projection], *projection.rpartition("-")[::2]
    activation = "gelu_new" if projection == "gated-gelu" else activation
    full.require({"is_gated_act": bool(gate), "dense_act_fn": activation})
    dropout = full.number("dropout_rate")
    layer = {
        "feed_forward": {**feed_forward, "hidden_dim": full.integer("d_ff"), "bias": False},
        "norm": norm,
        "residual": "pre",
        "dropout": dropout,
    }
    mixer = {
        "num_heads": full.integer("num_heads"),
        "head_dim": full.integer("d_kv"),
        "score": "dot",
        "bias": False,
    }
    mixers = {side: mixer | _buckets(full, side == "encoder", dropout) for side in ("encoder", "decoder")}
    encoder = layer | {"kind": "encoder", "mixer": {**mixers["encoder"], "kind": "bidirectional"}}
    decoder = layer | {"kind": "decoder", "mixer": {**mixers["decoder"], "kind": "softmax"}}
    decoder["further_mixers"] = [{**mixer, "kind": "cross"}]
    depth = full.integer("num_layers", maximum=DEPTH)
    has_depth = full.get("num_decoder_layers") is not None
    decoder_depth = full.integer("num_decoder_layers", maximum=DEPTH) if has_depth else depth
    return {
        "kind": "encoder_decoder",
        "input": _tokens(start),
        "dim": dim,
        "layers": [decoder] * decoder_depth,
        "position": "none",
        "head": {"kind": "language", "tied": True, "scale": dim**-0.5 if scaled else None},
        "norm": norm,
        "dropout": dropout,
        "encoder": {
            "layers": [encoder] * depth,
            "position": "none",
            "embedding_norm": None,
            "norm": norm,
            "dropout": dropout,
        },
    }


def _buckets(full: Settings, bidirectional: bool, dropout: float) -> ConfigData:
    """Return the parts of self-attention that cross-attention does not have."""
    position = {
        "kind": "t5",
        "num_buckets": full.integer("relative_attention_num_buckets"),
        "max_distance": full.integer("relative_attention_max_distance"),
        "bidirectional": bidirectional,
    }
    return {"position": position, "projection": {"kind": "multi_head", "bias": False}, "dropout": dropout}


def _tokens(full: Settings) -> ConfigData:
    """Return the input of both sides."""
    tokens = {"kind": "tokens", "vocab_size": full.integer("vocab_size")}
    names = {"bos_token": "decoder_start_token_id", "eos_token": "eos_token_id"}
    return tokens | {ours: full.integer(theirs, minimum=0) for ours, theirs in names.items()}


def _bart(full: Settings) -> ConfigData:
    activation = full.named("activation_function", ACTIVATIONS)
    dropout, norm = full.number("dropout"), {"kind": "layer_norm", "eps": 1e-5}
    layers: dict[str, list[ConfigData]] = {}
    for side, kind in (("encoder", "bidirectional"), ("decoder", "softmax")):
        heads = full.integer(f"{side}_attention_heads")
        hidden_dim = full.integer(f"{side}_ffn_dim")
        layer = {
            "kind": side,
            "mixer": {
                "kind": kind,
                "num_heads": heads,
                "projection": {"kind": "multi_head"},
                "dropout": full.number("attention_dropout"),
            },
            "feed_forward": {"kind": "mlp", "hidden_dim": hidden_dim, "activation": activation},
            "norm": norm,
            "residual": "post",
            "dropout": dropout,
        }
        layers[side] = [layer] * full.integer(f"{side}_layers", maximum=DEPTH)
    cross = {"kind": "cross", "num_heads": full.integer("decoder_attention_heads")}
    position = {"kind": "learned", "max_length": full.integer("max_position_embeddings")}
    entrance = {"position": position, "embedding_norm": norm, "dropout": dropout}
    return {
        "kind": "encoder_decoder",
        "input": _tokens(full) | {"scale": full.switch("scale_embedding")},
        "dim": full.integer("d_model"),
        "layers": [layer | {"further_mixers": [cross]} for layer in layers["decoder"]],
        "head": {"kind": "language", "tied": True, "bias": True},
        "norm": None,
        **entrance,
        "encoder": {"layers": layers["encoder"], **entrance},
    }


def _marian(full: Settings) -> ConfigData:
    size = full.integer("vocab_size")
    shared = bool(full.get("share_encoder_decoder_embeddings", True))
    named = not shared and full.get("decoder_vocab_size") is not None
    target = full.integer("decoder_vocab_size") if named else size
    full.choice("activation_function", *MARIAN_ACTIVATIONS)
    position = {"kind": "sinusoidal", "layout": "split"}
    dropout, end = full.number("dropout"), full.integer("eos_token_id", minimum=0)
    tokens = {"kind": "tokens", "scale": bool(full.get("scale_embedding", False)), "eos_token": end}
    begin = full.integer("decoder_start_token_id", minimum=0)
    mixer = {"kind": "softmax", "dropout": full.number("attention_dropout")}
    encoder = _marian_layer(full, "encoder") | {"kind": "encoder"}
    encoder["mixer"] = {**mixer, "kind": "bidirectional", "num_heads": encoder.pop("num_heads")}
    decoder = _marian_layer(full, "decoder") | {"kind": "decoder"}
    heads = decoder.pop("num_heads")
    decoder |= {
        "mixer": {**mixer, "num_heads": heads},
        "further_mixers": [{"kind": "cross", "num_heads": heads}],
    }
    return {
        "kind": "encoder_decoder",
        "input": {**tokens, "vocab_size": target, "bos_token": begin},
        "dim": full.integer("d_model"),
        "layers": [decoder] * full.integer("decoder_layers", maximum=DEPTH),
        "position": position,
        "head": {"kind": "language", "tied": True, "bias": True},
        "norm": None,
        "dropout": dropout,
        "encoder": {
            "input": None if shared else {**tokens, "vocab_size": size},
            "layers": [encoder] * full.integer("encoder_layers", maximum=DEPTH),
            "position": position,
            "dropout": dropout,
        },
    }


def _marian_layer(full: Settings, side: str) -> ConfigData:
    """Return the settings of the layers of both sides, and the number of heads."""
    return {
        "feed_forward": {
            "kind": "mlp",
            "hidden_dim": full.integer(f"{side}_ffn_dim"),
            "activation": MARIAN_ACTIVATIONS[full["activation_function"]],
        },
        "residual": "post",
        "dropout": full.number("dropout"),
        "num_heads": full.integer(f"{side}_attention_heads"),
    }


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(Architecture):
    """An encoder-decoder, with one key map for each side."""

    member: str = "vanilla"
    kind: str = "encoder_decoder"
    auto_class: str = "AutoModelForSeq2SeqLM"
    biased: ClassVar[bool] = True
    """Whether the head has a bias."""

    def side_keys(self, data: ConfigView, side: str) -> KeyMap:
        """Return the key map of a ``side`` with the config ``data``."""
        raise NotImplementedError

    def plain(self, name: str) -> str:
        """Return a tensor's name within its side's key map."""
        return name

    def read_tensors(
        self, tensors: Tensors, model: ConfigView, folder: Path, config: Mapping[str, object] | None = None
    ) -> dict[str, Tensor]:
        import torch

        parts: dict[str, dict[str, Tensor]] = {"encoder": {}, "decoder": {}}
        tables: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            name = name.removeprefix("model.")
            if name in (SHARED, SOURCE, TARGET) or (name == OUTPUT and model["head"]["tied"]):
                tables[name] = tensor
            elif name != BIAS or not self.biased:
                parts["encoder" if name.startswith("encoder.") else "decoder"][self.plain(name)] = tensor
        weights = self._tables(tables, model, folder)
        if model["head"].get("bias"):
            bias = tensors.get(BIAS)
            weights["head.bias"] = torch.zeros(model["input"]["vocab_size"]) if bias is None else bias.flatten()
        for side, some in parts.items():
            data, before = _side(model, side), "encoder." if side == "encoder" else ""
            part = self.side_keys(data, side).read(some, data, folder, f"{self.title} {side}")
            weights |= {f"{before}{name}": weight for name, weight in part.items()}
        return weights

    def _tables(self, tables: Tensors, model: ConfigView, folder: Path) -> dict[str, Tensor]:
        """Return the table of ids of each side; the decoder's table is also the output matrix."""
        import torch

        groups: dict[str, tuple[str, ...]] = {"": (SHARED, SOURCE, TARGET, OUTPUT)}
        if model["encoder"].get("input") is not None:
            groups = {"encoder.": (SHARED, SOURCE), "": (TARGET, OUTPUT)}
        weights = {}
        for before, names in groups.items():
            group = {name: tables[name] for name in names if name in tables}
            if not group:
                raise KinformerError(f"{folder}: lacks {names[0]}; restore it from a copy.")
            first, *others = group.values()
            if not all(torch.equal(first, other) for other in others):
                raise KinformerError(
                    f"{folder}: {' and '.join(group)} differ, but config.json says that they are one table of ids; "
                    "only tied tables can be imported."
                )
            weights[f"{before}input.embedding.weight"] = first
        return weights


def _side(model: ConfigView, side: str) -> ConfigView:
    """Return the config of a ``side`` of the ``model``, as a key map reads it."""
    return {**model["encoder"], "dim": model["dim"]} if side == "encoder" else model


class T5(EncoderDecoder):
    """T5 and mT5, whose config does not say whether the output matrix is the table of ids."""

    biased = False

    def side_keys(self, data: ConfigView, side: str) -> KeyMap:
        return _t5_keys(data, side)

    def plain(self, name: str) -> str:
        """Return ``name``; the table of all layers stands in the first layer there, and outside the layers here."""
        return re.sub(r"block\.0\.layer\.0\.SelfAttention\.(relative_attention_bias\.weight)$", r"\1", name)

    def with_tensors(
        self, model: ConfigData, tensors: Tensors, config: Mapping[str, object], folder: Path
    ) -> ConfigData:
        import torch

        tables = [tensors[name] for name in (SHARED, SOURCE, TARGET) if name in tensors]
        output = tensors.get(OUTPUT)
        if output is not None and not any(torch.equal(output, table) for table in tables):
            model["head"]["tied"] = False
        return model


class Bart(EncoderDecoder):
    """BART, which has learned positions and a norm behind the embedding."""

    def side_keys(self, data: ConfigView, side: str) -> KeyMap:
        return _side_keys(
            side,
            key("embedding_norm", f"{side}.layernorm_embedding"),
            key("position.table", f"{side}.embed_positions.weight", layout=Behind(2), tensors=("",)),
        )


class Marian(EncoderDecoder):
    """Marian, which is also written.

    Sines stand before cosines there. Our layout "interleaved" alternates them, so the export changes the order of the
    features of hidden states.
    """

    reordered = "the features of hidden states change their order"

    def side_keys(self, data: ConfigView, side: str) -> KeyMap:
        return _side_keys(side, left_out=rf"{side}\.embed_positions\.weight")

    def with_tensors(
        self, model: ConfigData, tensors: Tensors, config: Mapping[str, object], folder: Path
    ) -> ConfigData:
        """Return our ``model`` with a bias in its head only where the bias is not zero."""
        bias = tensors.get(BIAS)
        return {**model, "head": {**model["head"], "bias": bias is not None and bool(bias.any())}}

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        begin, end, encoder = model["input"]["bos_token"], model["input"]["eos_token"], model["encoder"]
        names = {ours: theirs for theirs, ours in MARIAN_ACTIVATIONS.items()}
        sides = {"encoder": encoder["layers"], "decoder": model["layers"]}
        size = model["input"]["vocab_size"]
        settings = {
            "vocab_size": size if encoder["input"] is None else encoder["input"]["vocab_size"],
            "decoder_vocab_size": size,
            "share_encoder_decoder_embeddings": encoder["input"] is None,
            "d_model": model["dim"],
            "max_position_embeddings": max(1024, 2 * (length or 0)),
            "activation_function": names[model["layers"][0]["feed_forward"]["activation"]],
            "dropout": model["dropout"],
            "attention_dropout": model["layers"][0]["mixer"]["dropout"],
            "scale_embedding": model["input"]["scale"],
            "tie_word_embeddings": True,
            "bos_token_id": begin,
            "eos_token_id": end,
            "pad_token_id": begin,
            "decoder_start_token_id": begin,
            "forced_eos_token_id": None,
        }
        for side, layers in sides.items():
            settings |= {
                f"{side}_layers": len(layers),
                f"{side}_attention_heads": layers[0]["mixer"]["num_heads"],
                f"{side}_ffn_dim": layers[0]["feed_forward"]["hidden_dim"],
            }
        return settings

    def reread(self, settings: JsonObject, model: ConfigView) -> ConfigData:
        read = self.read_config(settings, Path(CONFIG))
        return {**read, "head": {**read["head"], "bias": model["head"]["bias"]}}  # without a bias, zeros are written

    def write_tensors(self, weights: Tensors, model: ConfigView, settings: JsonObject) -> dict[str, Tensor]:
        import torch

        tensors: dict[str, Tensor] = {}
        for side in ("encoder", "decoder"):
            before, data = f"{'encoder.' if side == 'encoder' else ''}stack.", _side(model, side)
            some = {f"stack.{name.removeprefix(before)}": w for name, w in weights.items() if name.startswith(before)}
            tensors |= self.side_keys(data, side).write(some, data)
        table = weights["input.embedding.weight"]
        if model["encoder"]["input"] is None:
            tensors[f"model.{SHARED}"] = table
        else:
            tensors[f"model.{SOURCE}"] = weights["encoder.input.embedding.weight"]
            tensors[f"model.{TARGET}"] = table
        bias = weights.get("head.bias", torch.zeros(len(table)))
        return tensors | {BIAS: bias[None].contiguous()}

    def order(self, model: ConfigView) -> ConfigView:
        if model["position"].get("layout") != "interleaved" or model["encoder"]["position"] != model["position"]:
            return model
        position = {**model["position"], "layout": "split"}
        return {**model, "position": position, "encoder": {**model["encoder"], "position": position}}

    def reorder(self, weights: Tensors, model: ConfigView) -> dict[str, Tensor]:
        """Return ``weights`` for hidden states whose even features come before the odd ones."""
        import torch

        order = torch.cat([torch.arange(0, model["dim"], 2), torch.arange(1, model["dim"], 2)])
        changed = {}
        for name, weight in weights.items():
            axis = -1 if READS_FEATURES.fullmatch(name) else 0 if MAKES_FEATURES.fullmatch(name) else None
            changed[name] = weight if axis is None else weight.index_select(axis, order)
        return changed


READS_FEATURES = re.compile(r".*(embedding|qkv|query|key_value|up)\.weight")
MAKES_FEATURES = re.compile(r".*(out|down|norm)\.(weight|bias)")
"""The weights whose columns are features of hidden states, and the weights whose rows are."""
ARCHITECTURES = {
    "marian": Marian(
        title="Marian",
        model_class="MarianMTModel",
        defaults=MARIAN,
        required=MARIAN_REQUIRED,
        names=SIDE_NAMES,
        read=_marian,
    ),
    "t5": T5(title="T5", defaults=T5_DEFAULTS, names=T5_NAMES, exported=False, read=_t5),
    "mt5": T5(
        title="mT5",
        defaults=MT5,
        names=T5_NAMES,
        exported=False,
        read=lambda full: _t5(full.changed(scale_decoder_outputs=False)),
    ),
    "bart": Bart(
        title="BART",
        defaults=BART,
        required={"tie_word_embeddings": True, "normalize_before": False, "add_final_layer_norm": False},
        names=SIDE_NAMES,
        exported=False,
        read=_bart,
    ),
}
