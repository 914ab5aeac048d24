"""BERT, RoBERTa, Longformer and Big Bird of the library transformers, with their heads, and ModernBERT (Warner et al.
2024).

The first four have post-norm layers, learned positions, types of tokens and a norm behind the embedding. Queries, keys
and values are three products there and one product here. The head for masked tokens is tied to the embedding. A config
need not name the head, but the tensors of the head do. Old files have other names of norms, buffers among the weights,
and a pooler that no model here reads.

RoBERTa and Longformer count positions from behind the number of the padding token. There a padding token within a text
does not have a position; here ``valid`` alone says which tokens are padding.

ModernBERT's layers have norms before sublayers, rotary positions, a gated feed-forward and no biases. Every third layer
has full attention, the others have a window and another base of positions. The first mixer is without a norm, as
embeddings have one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinformer.interop.architecture import (
    ACTIVATIONS,
    Architecture,
    ConfigFile,
    Padding,
    Tensors,
    Weights,
    ends_of,
    model_of,
    without_tied_output,
)
from kinformer.interop.key_map import QKV, ConfigData, ConfigView, Key, KeyMap, behind, key
from kinformer.interop.settings import (
    COMMON,
    CONFIG,
    FULL,
    MULTI_LABEL,
    WINDOW,
    At,
    Settings,
    Table,
    class_names,
    count_classes,
    labels,
    rope,
)
from kinformer.interop.tokenizer_files import special_tokens
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

PREFIX = re.compile(r"(bert|roberta|longformer)\.")
PRODUCTS = ("query", "key", "value")
LAYER = (
    key("mixer.projection.qkv", *(f"attention.self.{name}" for name in PRODUCTS), layout=QKV),
    *(key(f"mixer.projection.of_global.{name}", f"attention.self.{name}_global") for name in PRODUCTS),
    key("mixer.out", "attention.output.dense"),
    key("mixer_residual.norm", "attention.output.LayerNorm"),
    key("feed_forward.up", "intermediate.dense"),
    key("feed_forward.down", "output.dense"),
    key("feed_forward_residual.norm", "output.LayerNorm"),
)
EMBEDDINGS = (
    key("input.embedding", "embeddings.word_embeddings"),
    key("input.types", "embeddings.token_type_embeddings"),
    key("embedding_norm", "embeddings.LayerNorm"),
)
TYPES = "embeddings.token_type_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
POOLER, NEXT_SENTENCE = r"pooler\b.*", r"cls\.seq_relationship\b.*"


def _language(dense: str, norm: str, of_all: str) -> tuple[Key, ...]:
    """Return the keys of a head for masked tokens; ``of_all``: the module of the output and of its bias."""
    bias = key("head.bias", f"{of_all}.bias", tensors=("",))
    return (key("head.dense", dense), key("head.norm", norm), key("head.output", f"{of_all}.decoder"), bias)


CLS = _language("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
LM_HEAD = _language("lm_head.dense", "lm_head.layer_norm", "lm_head")
POOLED = (key("head.dense", "pooler.dense"), key("head.output", "classifier"))
CLASSIFIER = (key("head.dense", "classifier.dense"), key("head.output", "classifier.out_proj"))
SPAN = "qa_outputs.weight"
"""The product of the head for question answering."""


def _plainly(tensors: Tensors) -> dict[str, Tensor]:
    """Return ``tensors`` by their names without the prefix, and with the names that norms have today."""
    norms = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    plain = {}
    for name, tensor in tensors.items():
        name = PREFIX.sub("", name, count=1)
        for before, after in norms.items():
            name = name.replace(before, after)
        plain[name] = tensor
    return plain


def _has_language_head(names: Collection[str]) -> bool:
    """Return whether the plain ``names`` hold a head for masked tokens."""
    return bool({"cls.predictions.transform.dense.weight", "lm_head.dense.weight"} & set(names))


REQUIRED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
ENCODER = Table(
    hidden_size=At(768, "dim"),
    num_hidden_layers=At(12, "depth"),
    num_attention_heads=At(12, "layers.mixer.num_heads"),
    intermediate_size=At(3072, "layers.feed_forward.hidden_dim"),
    hidden_act=At("gelu", "layers.feed_forward.activation", ACTIVATIONS),
    hidden_dropout_prob=At(0.1, "layers.dropout dropout"),
    attention_probs_dropout_prob=At(0.1, "layers.mixer.dropout"),
    layer_norm_eps=At(1e-12, "layers.norm.eps"),
)
"""The settings that encoders of texts and of images share."""
TEXT = Table(
    ENCODER,
    vocab_size=At(30522, "input.vocab_size"),
    type_vocab_size=At(2, "input.types", Settings.count),
    max_position_embeddings=512,
)
HEAD_CLASSES = {
    "masked_language": "MaskedLM",
    "classification": "SequenceClassification",
    "token_classification": "TokenClassification",
    "span": "QuestionAnswering",
}
"""Our kinds of heads to the ends of the names of classes."""


def _with_language_head(
    weights: dict[str, Tensor], model: ConfigView, names: Collection[str], folder: Path
) -> dict[str, Tensor]:
    """Return ``weights`` with one bias of the head for masked tokens, and without an output matrix if it is tied."""
    if not _has_language_head(names):
        return weights | new_head(model)
    tied = model["head"]["tied"]
    bias = weights.pop("head.output.bias", None)
    if bias is not None:
        if tied and not torch.equal(bias, weights.get("head.bias", bias)):
            raise KinformerError(f"{folder}: the head's two biases differ, but config.json ties them.")
        weights["head.bias"] = bias
    return without_tied_output(weights, folder) if tied else weights


NEW_HEAD = "it does not have a head, so the masked-language head is a new one; hidden states do not change"


def new_head(model: ConfigView) -> dict[str, Tensor]:
    """Return a head for masked tokens without products: norm(gelu(hidden)) times the embedding."""
    dim = model["dim"]
    weights = {"head.dense.weight": torch.eye(dim), "head.norm.weight": torch.ones(dim)}
    if model["head"].get("bias", True):
        weights |= {"head.dense.bias": torch.zeros(dim), "head.norm.bias": torch.zeros(dim)}
    return weights | {"head.bias": torch.zeros(model["input"]["vocab_size"])}


@dataclass(frozen=True, kw_only=True)
class TextEncoder(Architecture):
    """An encoder of texts.

    ``prefix``: the beginning of the names of tensors. ``language`` and ``classifier``: the keys of the heads for masked
    tokens and for classes of texts; the head for classes of tokens has the same keys everywhere.
    ``shifted``: positions are counted from behind the padding token's number; ``activated``: the kinds of heads with
    the activation of the layers; ``first_is_global``: the first token is global where a text is classified;
    ``tokens``: our roles of special tokens to the settings of their ids, for folders without a tokenizer.
    """

    kind: str = "encoder"
    causal: bool = False
    required: Mapping[str, object] = field(default_factory=REQUIRED.copy)
    prefix: str
    language: tuple[Key, ...]
    classifier: tuple[Key, ...]
    shifted: bool = False
    activated: Collection[str] = ()
    first_is_global: bool = False
    tokens: Mapping[str, str] = field(default_factory=dict)

    def mixers(self, full: Settings) -> list[ConfigData]:
        """Return the settings of each layer's mixer that not all encoders share."""
        return [{}] * full["num_hidden_layers"]

    def write_mixers(self, model: ConfigView) -> JsonObject:
        """Return the settings of the mixers of our ``model``: the inverse of :meth:`mixers`."""
        return {}

    def complete(self, config: Mapping[str, object], place: Path) -> Settings:
        full = super().complete(config, place)
        if config.get("pruned_heads"):
            raise full.error("heads are pruned; import the checkpoint before pruning.")
        return full

    def read_config(self, config: Mapping[str, object], place: Path) -> ConfigData:
        """Return our model config, as data and without its head, of the ``config.json`` at ``place``."""
        full = self.complete(config, place)
        skipped, norm = self._skipped(full), {"kind": "layer_norm", "bias": True}
        mixer = {"kind": "bidirectional"}
        layer = {"kind": "encoder", "mixer": mixer, "feed_forward": {"kind": "mlp"}, "norm": norm, "residual": "post"}
        length = full.integer("max_position_embeddings", minimum=skipped + 1) - skipped
        model = {
            "kind": "encoder",
            "input": {"kind": "tokens"},
            "layers": [layer],
            "position": {"kind": "learned", "max_length": length},
            "embedding_norm": norm,
        }
        model = TEXT.fill(model, full)
        return model | {"layers": [layer | {"mixer": mixer | special} for special in self.mixers(full)]}

    def with_tensors(self, model: ConfigData, tensors: Tensors, config: ConfigView, folder: Path) -> ConfigData:
        """Return our ``model`` with its head, its special tokens and its types.

        One type whose vector is zero stands for no types, as in RoBERTa.
        """
        tensors, place = _plainly(tensors), folder / CONFIG
        full = self.complete(config, place)
        model = model | self.head(config, place, tensors)
        model["input"] = model["input"] | special_tokens(folder, full, self.tokens)
        types = tensors.get(TYPES)
        if types is not None and len(types) == 1 and not bool(types.any()):
            model["input"]["types"] = 0
        return model

    def head(self, config: Mapping[str, object], place: Path, names: Collection[str]) -> ConfigData:
        """Return the head of a model with tensors of the plain ``names``, and the settings that depend on the head.

        A model without a head gets a head for masked tokens.
        """
        full = self.complete(config, place)
        architectures = " ".join(map(str, full.get("architectures") or ()))
        activation = full.named("hidden_act", ACTIVATIONS)
        if SPAN in names and not _has_language_head(names):
            head: ConfigData = {"kind": "span"}
        elif any(name.startswith("qa_") for name in names):
            raise full.error("the head for question answering is not a product alone, or not the only head.")
        elif "classifier.weight" in names or "classifier.out_proj.weight" in names:
            kind = "token_classification" if "TokenClassification" in architectures else "classification"
            if kind == "classification" and "classifier.weight" in names and "SequenceCl" not in architectures:
                raise full.error(
                    f"the head is a classifier, but architectures ({architectures or 'none'}) does not say "
                    "ForSequenceClassification or ForTokenClassification, which alone can be imported."
                )
            of_texts = kind == "classification"
            count = count_classes(full, MULTI_LABEL) if of_texts else len(class_names(full, place))
            dropout = "hidden_dropout_prob" if full.get("classifier_dropout") is None else "classifier_dropout"
            head = {"kind": kind, "classes": count, "dropout": full.number(dropout)}
            if of_texts:
                head["multi_label"] = full.get("problem_type") == MULTI_LABEL
            if kind in self.activated:
                head["activation"] = activation
        else:
            kind, like_layers = "masked_language", "masked_language" in self.activated
            if like_layers and activation == "relu":
                raise full.error("hidden_act is 'relu', which the head for masked tokens cannot have here.")
            tied = not _has_language_head(names) or bool(full.get("tie_word_embeddings", True))
            tanh_gelu = like_layers and activation == "gelu_tanh"
            head = {"kind": kind, "tied": tied, "eps": full.number("layer_norm_eps"), "tanh_gelu": tanh_gelu}
        count = int(self.first_is_global and head["kind"] == "classification")
        if "global_tokens" in full:  # which our exports alone have
            count = full.count("global_tokens")
        return {"head": head, "global_tokens": count}

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        assert config is not None
        tensors, kind = _plainly(tensors), model["head"]["kind"]
        if not model["input"]["types"]:
            tensors = {name: tensor for name, tensor in tensors.items() if name != TYPES}
        keys = self._keys(model, self.complete(config, folder / CONFIG))
        weights = keys.read(tensors, model, folder, f"{self.title} with the head {kind!r}")
        return _with_language_head(weights, model, tensors, folder) if kind == "masked_language" else weights

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        names, kind = _plainly(tensors), model["head"]["kind"]
        notes, left_out = [], self._left_out(kind)
        if out := sorted(name for name in names if left_out.fullmatch(name)):
            notes.append(f"{', '.join(out)} left out: no model here predicts a next sentence")
        if kind == "masked_language" and not _has_language_head(names):
            notes.append(NEW_HEAD)
        if kind == "masked_language" and model["input"].get("mask_token") is None:
            notes.append("no file of its tokenizer has the mask's id; to train it give `set` input.mask_token=ID")
        return tuple(notes)

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        head, pad_token = model["head"], None if padding is None else padding.id
        if self.shifted and pad_token is None:
            raise KeyError("pad_token")
        skipped = 1 + (pad_token or 0) if self.shifted else 0
        settings = TEXT.written(model) | {
            "max_position_embeddings": model["position"]["max_length"] + skipped,
            "type_vocab_size": model["input"]["types"] or 1,
            "pad_token_id": pad_token,
            "tie_word_embeddings": head.get("tied", True),
        }
        if "classes" in head:
            settings |= labels(head["classes"]) | {"classifier_dropout": head["dropout"]}
        if head.get("multi_label"):
            settings["problem_type"] = MULTI_LABEL
        settings |= self.write_mixers(model)
        return {**settings, **ends_of(model), "architectures": [self.classes(model)[0]]}

    def reread(self, settings: JsonObject, model: ConfigView) -> ConfigData:
        (name,), place = settings["architectures"], Path(CONFIG)
        kind = next(kind for kind, end in HEAD_CLASSES.items() if name.endswith(f"For{end}"))
        head = {"masked_language": "lm_head.dense.weight", "span": SPAN}.get(kind, "classifier.weight")
        read = self.read_config(settings, place) | self.head(settings, place, [head])
        if settings["type_vocab_size"] == 1 and not model["input"]["types"]:
            read["input"]["types"] = 0  # the vector of the only type is written as zero
        return read

    def write_tensors(self, weights: Tensors, model: ConfigView, settings: JsonObject) -> dict[str, Tensor]:
        """Return the ``weights`` of our ``model`` under their names.

        A model of transformers always adds the vector of a type, which is zero for a model without types.
        """
        full = dict(weights)
        if not model["input"]["types"]:
            full["input.types.weight"] = torch.zeros(1, model["dim"])
        if "head.output.weight" in full and "head.bias" in full:
            full["head.output.bias"] = full["head.bias"].clone()
        return self._keys(model, self.complete(settings, Path(CONFIG))).write(full, model)

    def classes(self, model: ConfigView) -> tuple[str, str]:
        end = HEAD_CLASSES[model["head"]["kind"]]
        return f"{self.model_class}For{end}", f"AutoModelFor{end}"

    def differences(self, model: ConfigView) -> list[str]:
        return ["padding is known there by its id, which may stand nowhere else in a text"] if self.shifted else []

    def _head_keys(self, kind: str) -> tuple[Key, ...]:
        per_token = (key("head.output", "qa_outputs" if kind == "span" else "classifier"),)
        return {"masked_language": self.language, "classification": self.classifier}.get(kind, per_token)

    def _left_out(self, kind: str) -> re.Pattern[str]:
        """Return the names of the tensors that predict the next sentence, which no model here does."""
        reads_pooler = any(name.startswith("pooler.") for one in self._head_keys(kind) for name in one.theirs)
        return re.compile(NEXT_SENTENCE if reads_pooler else f"{POOLER}|{NEXT_SENTENCE}")

    def _skipped(self, full: Settings) -> int:
        """Return how many rows of the table of positions stand before the row of the first token."""
        return 1 + full.count("pad_token_id") if self.shifted else 0

    def _keys(self, model: ConfigView, full: Settings) -> KeyMap:
        position = key("position.table", POSITIONS, layout=behind(self._skipped(full)), tensors=("",))
        kind = model["head"]["kind"]
        return KeyMap(
            model=(*EMBEDDINGS, position, *self._head_keys(kind)),
            layer=LAYER,
            layers="encoder.layer",
            prefix=self.prefix,
            left_out=self._left_out(kind),
        )


class Longformer(TextEncoder):
    """Longformer (Beltagy et al. 2020), our member ``longformer``.

    Its ``attention_window`` counts both sides. A token is global if ``kinds`` mark it, or if it
    is the first token of a text to classify.
    """

    def mixers(self, full: Settings) -> list[ConfigData]:
        return [
            {"projection": {"kind": "multi_head_global"}, "pattern": {"kind": "window", "window": sides // 2}}
            for sides in _windows(full)
        ]

    def write_mixers(self, model: ConfigView) -> JsonObject:
        windows = {"attention_window": [2 * layer["mixer"]["pattern"]["window"] for layer in model["layers"]]}
        usual = model["global_tokens"] == (model["head"]["kind"] == "classification")
        return windows if usual else windows | {"global_tokens": model["global_tokens"]}

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        notes = super().notes(tensors, model, folder)
        return (*notes, QUESTION) if model["head"]["kind"] == "span" else notes

    def differences(self, model: ConfigView) -> list[str]:
        notes = super().differences(model)
        if model["head"]["kind"] == "span":
            notes.append(QUESTION)
        if model["global_tokens"] and model["head"]["kind"] != "classification":
            notes.append("give it a global_attention_mask with 1 at the first token, which is global here")
        return notes


QUESTION = (
    "transformers makes the tokens of a question global, up to the first separator; here `kinds` mark global tokens"
)


def _windows(full: Settings) -> list[int]:
    windows, depth = full["attention_window"], full["num_hidden_layers"]
    windows = [windows] * depth if isinstance(windows, int) else windows
    if not isinstance(windows, list) or len(windows) != depth:
        raise full.error(f"attention_window is {windows!r}, but must be one number or one per layer.")
    for window in windows:
        if not isinstance(window, int) or isinstance(window, bool) or window < 2 or window % 2:
            raise full.error(f"attention_window has {window!r}, but must be even numbers of 2 or more.")
    return windows


class BigBird(TextEncoder):
    """Big Bird (Zaheer et al. 2020), our member ``big-bird``.

    The random blocks are the blocks that transformers draws while it trains, where the layer's number is the seed, as
    in the paper. In evaluation transformers reads block 0 in their place. Transformers counts a block twice if it is
    listed twice, ours once. Its table of lengths (1024, 3072 and 4096) also holds for 2048, as in the paper. The last
    block of a padded batch is global there, the last block of each text here. Block-sparse attention does not have
    dropout.
    """

    def mixers(self, full: Settings) -> list[ConfigData]:
        full.require({"rescale_embeddings": False})
        projection = {"projection": {"kind": "multi_head", "bias": full.truth("use_bias")}}
        depth = full["num_hidden_layers"]
        if full.choice("attention_type", "block_sparse", "original_full") == "original_full":
            return [projection] * depth
        pattern = {
            "kind": "big_bird",
            "block": full.integer("block_size"),
            "random": full.count("num_random_blocks"),
            "num_heads": full.integer("num_attention_heads"),
        }
        return [projection | {"dropout": 0.0, "pattern": pattern | {"seed": layer}} for layer in range(depth)]

    def write_mixers(self, model: ConfigView) -> JsonObject:
        mixer, end = model["layers"][0]["mixer"], model["input"]["eos_token"]
        settings = {"use_bias": mixer["projection"]["bias"]} | ({} if end is None else {"sep_token_id": end})
        if mixer["pattern"]["kind"] == "full":
            return settings | {"attention_type": "original_full"}
        sizes = {"block_size": mixer["pattern"]["block"], "num_random_blocks": mixer["pattern"]["random"]}
        return settings | {"attention_type": "block_sparse", **sizes}

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        return super().write_config(model, length, padding or Padding(0))

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        notes = super().notes(tensors, model, folder)
        if not model["layers"][0]["mixer"].get("pattern", {}).get("random"):
            return notes
        return (
            *notes,
            "each query reads random blocks, here in training and in evaluation; transformers reads them in training "
            "alone, and the first block in their place in evaluation, so its evaluated outputs differ",
        )

    def differences(self, model: ConfigView) -> list[str]:
        if model["layers"][0]["mixer"]["pattern"]["kind"] == "full":
            return []
        return [
            "transformers draws its random blocks only while it trains (train()) and reads the first block instead "
            "where it does not, and it lets padding of a batch be global"
        ]


# ModernBERT.

MODERN = Table(
    COMMON,
    hidden_activation=At("gelu", "layers.feed_forward.activation", {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}),
    norm_eps=At(1e-5, "layers.norm.eps head.eps"),
    attention_bias=At(False, "layers.mixer.bias layers.mixer.projection.bias"),
    attention_dropout=At(0.0, "layers.mixer.dropout"),
    global_attn_every_n_layers=3,
    local_attention=128,
    embedding_dropout=At(0.0, "dropout"),
    mlp_bias=At(False, "layers.feed_forward.bias"),
    tie_word_embeddings=At(True, "head.tied"),
    classifier_pooling="cls",
    classifier_dropout=0.0,
)
MODERN_REQUIRED = {
    "norm_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "classifier_activation": "gelu",
    "head_dim": None,
}
MODERN_TOKENS = {"bos_token": "cls_token_id", "eos_token": "sep_token_id"}
MODERN_KEYS = KeyMap(
    model=(
        key("input.embedding", "embeddings.tok_embeddings"),
        key("embedding_norm", "embeddings.norm"),
        key("norm", "final_norm"),
        key("head.dense", "head.dense"),
        key("head.norm", "head.norm"),
        key("head.output", "decoder", tensors=("weight",)),
        key("head.bias", "decoder.bias", tensors=("",)),
        key("head.output", "classifier"),
    ),
    layer=(
        key("mixer_residual.norm", "attn_norm"),
        key("mixer.projection.qkv", "attn.Wqkv"),
        key("mixer.out", "attn.Wo"),
        key("feed_forward_residual.norm", "mlp_norm"),
        key("feed_forward.gate_up", "mlp.Wi"),
        key("feed_forward.down", "mlp.Wo"),
    ),
)


def _modern(full: Settings) -> ConfigData:
    mixer = {"kind": "bidirectional", "projection": {"kind": "multi_head"}}
    norm = {"kind": "layer_norm", "bias": False}
    layer = {"kind": "encoder", "mixer": mixer, "feed_forward": {"kind": "geglu"}, "norm": norm, "residual": "pre"}
    head = {"kind": "masked_language", "bias": False}
    model = model_of(full, MODERN, layer, embedding_norm=norm, head=head)
    model["input"] |= special_tokens(full.place.parent, full, MODERN_TOKENS)
    mixers: dict[str, ConfigData] = {}
    for kind, older, base in ((FULL, "global_rope_theta", 160_000.0), (WINDOW, "local_rope_theta", 10_000.0)):
        theirs = full if full.get(older) is None else full.changed(rope_theta=full[older])
        mixers[kind] = mixer | {"position": rope(theirs, kind, base=base)}
    side = "sliding_window" if full.get("sliding_window") is not None else "local_attention"
    window = full.integer(side) // (2 if side == "local_attention" else 1)
    mixers[WINDOW]["pattern"] = {"kind": "window", "window": window}
    layers: list[ConfigData] = [layer | {"mixer": mixers[kind]} for kind in _kinds(full)]
    layers[0]["mixer_norm"] = False
    return model | {"layers": layers}


def _kinds(full: Settings) -> list[str]:
    """Return each layer's kind of attention."""
    if full.get("layer_types") is not None:
        return full.layer_types(FULL, WINDOW)
    step = full.integer("global_attn_every_n_layers")
    return [WINDOW if layer % step else FULL for layer in range(full["num_hidden_layers"])]


@dataclass(frozen=True, kw_only=True)
class ModernBert(Architecture):
    """ModernBERT. A model without a head gets a head for masked tokens, which passes hidden states on."""

    kind: str = "encoder"
    causal: bool = False

    def with_tensors(self, model: ConfigData, tensors: Tensors, config: ConfigView, folder: Path) -> ConfigData:
        """Return our ``model``, with a head for classes of texts where the ``tensors`` have one."""
        if "classifier.weight" not in tensors:
            return model
        full = self.complete(config, folder / CONFIG)
        if not any(str(name).endswith("SequenceClassification") for name in full.get("architectures") or ()):
            raise full.error(
                f"the head is a classifier, but architectures is {full.get('architectures')!r}; only "
                "ModernBertForSequenceClassification can be imported."
            )
        norm = {"kind": "layer_norm", "bias": False, "eps": full.number("norm_eps")}
        head = {
            "kind": "classification",
            "classes": count_classes(full, MULTI_LABEL),
            "multi_label": full.get("problem_type") == MULTI_LABEL,
            "pooling": full.named("classifier_pooling", {"cls": "first", "mean": "mean"}),
            "activation": "gelu",
            "dropout": full.number("classifier_dropout"),
            "bias": False,
            "norm": norm,
        }
        return {**model, "head": head}

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        weights = super().read_tensors(tensors, model, folder, config)
        return weights | new_head(model) if self.notes(tensors, model, folder) else weights

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        return () if any(name.startswith(("head.", "decoder.")) for name in tensors) else (NEW_HEAD,)


ROBERTA = TEXT.changed(vocab_size=50265, pad_token_id=1, bos_token_id=0, eos_token_id=2)
LONGFORMER = TEXT.changed(attention_window=512, pad_token_id=1, bos_token_id=0, eos_token_id=2)
BIG_BIRD = TEXT.changed(
    vocab_size=50358,
    hidden_act="gelu_new",
    max_position_embeddings=4096,
    pad_token_id=0,
    sep_token_id=66,
    attention_type="block_sparse",
    use_bias=True,
    block_size=64,
    num_random_blocks=3,
)
LIKE_ROBERTA: dict[str, Any] = {
    "language": LM_HEAD,
    "classifier": CLASSIFIER,
    "shifted": True,
    "tokens": {"bos_token": "bos_token_id", "eos_token": "eos_token_id"},
}
OF_BERT: dict[str, Any] = {"prefix": "bert.", "language": CLS, "classifier": POOLED, "activated": ("masked_language",)}
OF_BIG_BIRD = OF_BERT | {
    "classifier": CLASSIFIER,
    "activated": ("masked_language", "classification"),
    "tokens": {"eos_token": "sep_token_id"},
}
ARCHITECTURES = {
    "bert": TextEncoder("BERT", "bert", "Bert", TEXT.changed(pad_token_id=0), **OF_BERT),
    "roberta": TextEncoder("RoBERTa", "bert", "Roberta", ROBERTA, prefix="roberta.", **LIKE_ROBERTA),
    "longformer": Longformer(
        "Longformer", "longformer", "Longformer", LONGFORMER, prefix="longformer.", first_is_global=True, **LIKE_ROBERTA
    ),
    "big_bird": BigBird("Big Bird", "big-bird", "BigBird", BIG_BIRD, **OF_BIG_BIRD),
    "modernbert": ModernBert("ModernBERT", "bert", "", MODERN, _modern, None, MODERN_KEYS, required=MODERN_REQUIRED),
}
