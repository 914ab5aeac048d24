"""Encoder-decoders of the library transformers: T5, T5 1.1, mT5 and UMT5 (Raffel et al. 2020), BART (Lewis et al.
2019), mBART, and Marian (Opus-MT).

T5 has biases by buckets of distance, with one table for all layers of a side; UMT5 has a table for each layer. Their
scores are not scaled; RMSNorm stands before each sublayer, and nothing has a bias. A tied head takes hidden states
times dim ** -0.5. BART and Marian have norms behind sublayers, mBART before them. BART and mBART have learned
positions; two rows of their table belong to no token. Marian has sinusoids in the split layout, and may have one table
of ids for each side. A target begins with ``decoder_start_token_id``, which is our BOS; a source ends with EOS.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kinformer.interop.architecture import ACTIVATIONS, Architecture, ConfigFile, Padding, Tensors, Weights
from kinformer.interop.key_map import CROSS_KV, GATE_UP, QKV, ConfigData, ConfigView, Key, KeyMap, behind, key
from kinformer.interop.settings import CONFIG, DEPTH, At, Settings, Table
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

MIXERS = ("layers.mixer", "encoder.layers.mixer", "layers.further_mixers")
"""The paths of self-attention of both sides and of cross-attention."""


def _in_mixers(name: str, count: int = 3) -> str:
    return " ".join(f"{mixer}.{name}" for mixer in MIXERS[:count])


EVERY_DROPOUT = "dropout encoder.dropout layers.dropout encoder.layers.dropout"
T5_TABLE = Table(
    vocab_size=At(32128, "input.vocab_size"),
    d_model=At(512, "dim"),
    d_kv=At(64, _in_mixers("head_dim")),
    d_ff=At(2048, "layers.feed_forward.hidden_dim"),
    num_layers=6,
    num_heads=At(8, _in_mixers("num_heads")),
    relative_attention_num_buckets=At(32, _in_mixers("position.num_buckets", 2)),
    relative_attention_max_distance=At(128, _in_mixers("position.max_distance", 2)),
    dropout_rate=At(0.1, f"{EVERY_DROPOUT} {_in_mixers('dropout', 2)}"),
    layer_norm_epsilon=At(1e-6, "norm.eps"),
    feed_forward_proj="relu",
    pad_token_id=0,
    eos_token_id=At(1, "input.eos_token", Settings.count),
)
MT5 = T5_TABLE.changed(
    vocab_size=250112, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu", scale_decoder_outputs=False
)
MARIAN_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu", "gelu_new": "gelu_tanh"}


def _sides(activations: Mapping[str, str]) -> Table:
    """Return the settings that BART and Marian share; ``activations``: our activations by theirs."""
    both = "layers.feed_forward.activation encoder.layers.feed_forward.activation"
    return Table(
        d_model=At(1024, "dim"),
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=At(16, "encoder.layers.mixer.num_heads"),
        decoder_attention_heads=At(16, "layers.mixer.num_heads layers.further_mixers.num_heads"),
        encoder_ffn_dim=At(4096, "encoder.layers.feed_forward.hidden_dim"),
        decoder_ffn_dim=At(4096, "layers.feed_forward.hidden_dim"),
        activation_function=At("gelu", both, activations),
        dropout=At(0.1, EVERY_DROPOUT),
        attention_dropout=At(0.0, _in_mixers("dropout", 2)),
    )


BART = Table(
    _sides(ACTIVATIONS),
    vocab_size=At(50265, "input.vocab_size"),
    max_position_embeddings=1024,
    scale_embedding=At(False, "input.scale"),
    eos_token_id=At(2, "input.eos_token", Settings.count),
    decoder_start_token_id=At(2, "input.bos_token", Settings.count),
)
MARIAN = Table(
    _sides(MARIAN_ACTIVATIONS),
    vocab_size=58101,
    eos_token_id=At(0, "input.eos_token", Settings.count),
    decoder_start_token_id=At(58100, "input.bos_token", Settings.count),
)
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
SHARED, SOURCE, TARGET = (f"{one}.weight" for one in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
OUTPUT, BIAS, TABLE = "lm_head.weight", "final_logits_bias", "relative_attention_bias.weight"
"""The names of tables of ids, of the output matrix, of the bias of each id, and of T5's biases by distance."""


# The keys of one side.


def _t5_keys(model: ConfigView, side: str) -> KeyMap:
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
    if not model["layers"][0]["mixer"]["position"]["shared"]:
        layer.append(key("mixer.position.table", f"layer.0.SelfAttention.{TABLE}", tensors=("",)))
    if side == "decoder":
        layer += _cross_keys("layer.1.layer_norm", *(f"layer.1.EncDecAttention.{one}" for one in "qkvo"))
    outside = (
        key("norm", "final_layer_norm"),
        key("stack.shared.0.table", TABLE, tensors=("",)),
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
    return [
        key("further_residuals.0.norm", norm),
        key("further_mixers.0.query", query),
        key("further_mixers.0.key_value", keys, values, layout=CROSS_KV),
        key("further_mixers.0.out", out),
    ]


# From settings to our model.


def _t5(full: Settings, shared: bool = True) -> ConfigData:
    """Return the config of a T5; ``shared``: whether all layers of a side have one table of biases."""
    scaled = full.get("scale_decoder_outputs", full.get("tie_word_embeddings") is not False)
    start = Settings({"decoder_start_token_id": full["pad_token_id"], **full}, full.place)
    projection = full.choice("feed_forward_proj", *FEED_FORWARDS)
    gate, _, activation = projection.rpartition("-")
    activation = "gelu_new" if projection == "gated-gelu" else activation
    full.require({"is_gated_act": bool(gate), "dense_act_fn": activation})
    norm = {"kind": "rms_norm"}
    parts = {"feed_forward": {**FEED_FORWARDS[projection], "bias": False}, "norm": norm, "residual": "pre"}
    mixer = {"score": "dot", "bias": False}
    mixers = {
        kind: mixer
        | {
            "kind": kind,
            "position": {"kind": "t5", "bidirectional": kind == "bidirectional", "shared": shared},
            "projection": {"kind": "multi_head", "bias": False},
        }
        for kind in ("bidirectional", "softmax")
    }
    encoder = parts | {"kind": "encoder", "mixer": mixers["bidirectional"]}
    decoder = parts | {"kind": "decoder", "mixer": mixers["softmax"], "further_mixers": [mixer | {"kind": "cross"}]}
    outside = {"position": "none", "norm": norm}
    model = _both(encoder, decoder, {**outside, "embedding_norm": None}) | outside
    T5_TABLE.fill(model, full)
    model["input"]["bos_token"] = start.count("decoder_start_token_id")
    model["head"] = {"kind": "language", "tied": True, "scale": model["dim"] ** -0.5 if scaled else None}
    of_decoder = "num_layers" if full.get("num_decoder_layers") is None else "num_decoder_layers"
    return _deepened(model, full, "num_layers", of_decoder)


def _both(encoder: ConfigData, decoder: ConfigData, outside: ConfigData) -> ConfigData:
    """Return an encoder-decoder of one layer on each side; ``outside``: the encoder's settings beside its layers."""
    return {
        "kind": "encoder_decoder",
        "input": {"kind": "tokens"},
        "layers": [decoder],
        "encoder": {"layers": [encoder], **outside},
    }


def _deepened(model: ConfigData, full: Settings, of_encoder: str, of_decoder: str) -> ConfigData:
    """Return ``model`` with as many layers on each side as these settings say."""
    for name, side in ((of_encoder, model["encoder"]), (of_decoder, model)):
        side["layers"] = side["layers"] * full.integer(name, maximum=DEPTH)
    return model


def _like_bart(full: Settings, table: Table, residual: str = "post") -> ConfigData:
    """Return the config, as data, of an encoder-decoder with norms behind sublayers, or with ``residual`` "pre" before
    sublayers and behind the last one of each side."""
    norm = {"kind": "layer_norm", "eps": 1e-5}
    parts = {"feed_forward": {"kind": "mlp"}, "norm": norm, "residual": residual}
    encoder = copy.deepcopy(parts) | {"kind": "encoder", "mixer": {"kind": "bidirectional"}}
    decoder = copy.deepcopy(parts) | {"kind": "decoder", "mixer": {"kind": "softmax"}}
    decoder["further_mixers"] = [{"kind": "cross"}]
    last = norm if residual == "pre" else None
    model = _both(encoder, decoder, {"norm": last} if last else {})
    model |= {"norm": last, "head": {"kind": "language", "tied": True, "bias": True}}
    return _deepened(table.fill(model, full), full, "encoder_layers", "decoder_layers")


def _bart(full: Settings, residual: str = "post") -> ConfigData:
    model = _like_bart(full, BART, residual)
    position = {"kind": "learned", "max_length": full.integer("max_position_embeddings")}
    entrance = {"position": position, "embedding_norm": model["layers"][0]["norm"]}
    return {**model, **entrance, "encoder": model["encoder"] | entrance}


def _marian(full: Settings) -> ConfigData:
    model, size = _like_bart(full, MARIAN), full.integer("vocab_size")
    shared = bool(full.get("share_encoder_decoder_embeddings", True))
    target = size if shared else full.optional("decoder_vocab_size") or size
    source = {"kind": "tokens", "scale": full.truth("scale_embedding"), "eos_token": model["input"]["eos_token"]}
    position = {"kind": "sinusoidal", "layout": "split"}
    encoder = {"input": None if shared else source | {"vocab_size": size}, "position": position}
    return {
        **model,
        "input": model["input"] | source | {"vocab_size": target},
        "position": position,
        "encoder": model["encoder"] | encoder,
    }


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(Architecture):
    """An encoder-decoder, with one key map for each side."""

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

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        if any(name.startswith("classification_head.") for name in tensors):
            raise KinformerError(
                f"{folder}: has a head for classes; of {self.title} only a model that writes texts can be imported "
                "(ForConditionalGeneration)."
            )
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
    """T5, mT5 and UMT5, whose config does not say whether the output matrix is the table of ids."""

    biased = False

    def side_keys(self, data: ConfigView, side: str) -> KeyMap:
        return _t5_keys(data, side)

    def plain(self, name: str) -> str:
        """Return ``name``; the table of all layers stands in the first layer there, and outside the layers here."""
        return re.sub(r"block\.0\.layer\.0\.SelfAttention\.(relative_attention_bias\.weight)$", r"\1", name)

    def with_tensors(self, model: ConfigData, tensors: Tensors, config: ConfigView, folder: Path) -> ConfigData:
        tables = [tensors[name] for name in (SHARED, SOURCE, TARGET) if name in tensors]
        output = tensors.get(OUTPUT)
        if output is not None and not any(torch.equal(output, table) for table in tables):
            model["head"]["tied"] = False
        return model


class Umt5(T5):
    """UMT5, in which each layer has a table of biases."""

    def plain(self, name: str) -> str:
        return name


class Bart(EncoderDecoder):
    """BART and mBART, which have learned positions and a norm behind the embedding."""

    def side_keys(self, data: ConfigView, side: str) -> KeyMap:
        return _side_keys(
            side,
            key("embedding_norm", f"{side}.layernorm_embedding"),
            key("norm", f"{side}.layer_norm"),
            key("position.table", f"{side}.embed_positions.weight", layout=behind(2), tensors=("",)),
        )


class Marian(EncoderDecoder):
    """Marian, which is also written.

    Sines stand before cosines there. Our layout "interleaved" alternates them, so the export changes the order of the
    features of hidden states.
    """

    reordered = "the features of hidden states change their order"

    def side_keys(self, data: ConfigView, side: str) -> KeyMap:
        return _side_keys(side, left_out=rf"{side}\.embed_positions\.weight")

    def with_tensors(self, model: ConfigData, tensors: Tensors, config: ConfigView, folder: Path) -> ConfigData:
        """Return our ``model`` with a bias in its head only where the bias is not zero."""
        bias = tensors.get(BIAS)
        return {**model, "head": {**model["head"], "bias": bias is not None and bool(bias.any())}}

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        begin, encoder = model["input"]["bos_token"], model["encoder"]
        size = model["input"]["vocab_size"]
        return MARIAN.written(model) | {
            "vocab_size": size if encoder["input"] is None else encoder["input"]["vocab_size"],
            "decoder_vocab_size": size,
            "share_encoder_decoder_embeddings": encoder["input"] is None,
            "encoder_layers": len(encoder["layers"]),
            "decoder_layers": len(model["layers"]),
            "max_position_embeddings": max(1024, 2 * (length or 0)),
            "scale_embedding": model["input"]["scale"],
            "tie_word_embeddings": True,
            "bos_token_id": begin,
            "pad_token_id": begin,
            "forced_eos_token_id": None,
        }

    def reread(self, settings: JsonObject, model: ConfigView) -> ConfigData:
        read = self.read_config(settings, Path(CONFIG))
        return {**read, "head": {**read["head"], "bias": model["head"]["bias"]}}  # without a bias, zeros are written

    def write_tensors(self, weights: Tensors, model: ConfigView, settings: JsonObject) -> dict[str, Tensor]:
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
        order = torch.cat([torch.arange(0, model["dim"], 2), torch.arange(1, model["dim"], 2)])
        changed = {}
        for name, weight in weights.items():
            axis = -1 if READS_FEATURES.fullmatch(name) else 0 if MAKES_FEATURES.fullmatch(name) else None
            changed[name] = weight if axis is None else weight.index_select(axis, order)
        return changed


READS_FEATURES = re.compile(r".*(embedding|qkv|query|key_value|up)\.weight")
MAKES_FEATURES = re.compile(r".*(out|down|norm)\.(weight|bias)")
"""The weights whose columns are features of hidden states, and the weights whose rows are."""
BART_REQUIRED = {"tie_word_embeddings": True, "normalize_before": False, "add_final_layer_norm": False}
TIED = {"tie_word_embeddings": True}
MBART = BART.changed(decoder_start_token_id=None)


def _umt5(full: Settings) -> ConfigData:
    # transformers ties the head and scales, whatever the file says
    return _t5(full.changed(scale_decoder_outputs=True), shared=False)


ARCHITECTURES = {
    "marian": Marian("Marian", "vanilla", "MarianMTModel", MARIAN, _marian, required=MARIAN_REQUIRED, names=SIDE_NAMES),
    "t5": T5("T5", "vanilla", "", T5_TABLE, _t5, names=T5_NAMES),
    "mt5": T5("mT5", "vanilla", "", MT5, lambda full: _t5(full.changed(scale_decoder_outputs=False)), names=T5_NAMES),
    "umt5": Umt5("UMT5", "vanilla", "", MT5, _umt5, names=T5_NAMES),
    "bart": Bart("BART", "vanilla", "", BART, _bart, required=BART_REQUIRED, names=SIDE_NAMES),
    "mbart": Bart("mBART", "vanilla", "", MBART, partial(_bart, residual="pre"), required=TIED, names=SIDE_NAMES),
}
