"""The tensors of the encoders of texts of the library transformers, and ours: key maps that are read both ways.

Queries, keys and values are three products there and one here. The masked-language head is tied to the embedding. Old
files have other names of norms, buffers among the weights, and a pooler that nothing here reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop import images
from kinformer.interop.architecture import Settings, choice, complete, integer, number, require
from kinformer.interop.key_map import QKV, Behind, ConfigData, ConfigView, Key, KeyMap, key
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor


PREFIX = re.compile(r"(bert|roberta|longformer)\.")
BUFFERS = re.compile(r".*embeddings\.(position_ids|token_type_ids)")
"""Ranges of whole numbers, which old checkpoints keep among the weights."""
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


@dataclass(frozen=True)
class HeadKeys:
    """The keys of the heads of one family: for masked tokens, and for classes of texts (those of tokens are alike)."""

    language: tuple[Key, ...]
    classes: tuple[Key, ...]

    def of(self, kind: str) -> tuple[Key, ...]:
        """Return the keys of the head ``kind``."""
        per_token = (key("head.output", "classifier"),)
        return {"masked_language": self.language, "classification": self.classes}.get(kind, per_token)

    def left_out(self, kind: str) -> re.Pattern[str]:
        """Return the names of what guesses the next sentence, which no model here does."""
        reads_pooler = any(name.startswith("pooler.") for one in self.of(kind) for name in one.theirs)
        return re.compile(NEXT_SENTENCE if reads_pooler else f"{POOLER}|{NEXT_SENTENCE}")


def _language(dense: str, norm: str, of_all: str) -> tuple[Key, ...]:
    """Return the keys of a head for masked tokens; ``of_all`` is before the names of the output and of its bias."""
    bias = key("head.bias", f"{of_all}.bias", tensors=("",))
    return (key("head.dense", dense), key("head.norm", norm), key("head.output", f"{of_all}.decoder"), bias)


CLS = _language("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
LM_HEAD = _language("lm_head.dense", "lm_head.layer_norm", "lm_head")
POOLED = (key("head.dense", "pooler.dense"), key("head.output", "classifier"))
CLASSIFIER = (key("head.dense", "classifier.dense"), key("head.output", "classifier.out_proj"))


def plain(name: str) -> str:
    """Return a tensor's name without that of the model before it, and with the names that norms have today."""
    name = PREFIX.sub("", name, count=1)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def has_language_head(names: Collection[str]) -> bool:
    """Return whether ``names``, made plain, hold a masked-language head."""
    return bool({"cls.predictions.transform.dense.weight", "lm_head.dense.weight"} & set(names))


def key_map(heads: HeadKeys, prefix: str, kind: str, skipped: int) -> KeyMap:
    """Return the key map of an encoder with the head ``kind``.

    ``skipped``: how many rows of their table of positions stand before that of the first token.
    """
    position = key("position.table", POSITIONS, layout=Behind(skipped), tensors=("",))
    return KeyMap(
        model=(*EMBEDDINGS, position, *heads.of(kind)),
        layer=LAYER,
        layers="encoder.layer",
        prefix=prefix,
        left_out=heads.left_out(kind),
    )


def read(keys: KeyMap, tensors: Mapping[str, Tensor], model: ConfigView, folder: Path, title: str) -> dict[str, Tensor]:
    """Return the weights, by their plain names, under ours; an unknown one is an error, one left out is named by
    ``notes``."""
    kind = model["head"]["kind"]
    if not model["input"]["types"]:
        tensors = {name: tensor for name, tensor in tensors.items() if name != TYPES}
    weights = keys.read(tensors, model, folder, f"{title} with the head {kind!r}")
    return _with_head(weights, model, tensors, folder)


def write(keys: KeyMap, weights: Mapping[str, Tensor], model: ConfigView) -> dict[str, Tensor]:
    """Return our ``weights`` under their names: the inverse of :func:`read`.

    Theirs always add a vector of a type; for a model without types that is zero.
    """
    import torch

    full = dict(weights)
    if not model["input"]["types"]:
        full["input.types.weight"] = torch.zeros(1, model["dim"])
    if "head.output.weight" in full and "head.bias" in full:
        full["head.output.bias"] = full["head.bias"].clone()
    return keys.write(full, model)


def _with_head(
    weights: dict[str, Tensor], model: ConfigView, names: Collection[str], folder: Path
) -> dict[str, Tensor]:
    """Return ``weights`` with one bias of the masked-language head, and no
    output matrix where that is the embedding."""
    import torch

    if model["head"]["kind"] != "masked_language":
        return weights
    if not has_language_head(names):
        return weights | new_head(model)
    tied = model["head"]["tied"]
    bias = weights.pop("head.output.bias", None)
    if bias is not None:
        if tied and not torch.equal(bias, weights.get("head.bias", bias)):
            raise KinformerError(f"{folder}: the head's two biases differ, but config.json ties them.")
        weights["head.bias"] = bias
    if tied:
        output = weights.pop("head.output.weight", None)
        if output is not None and not torch.equal(output, weights.get("input.embedding.weight", output)):
            raise KinformerError(
                f"{folder}: the head's output matrix differs from the embedding, but config.json ties them; "
                "set tie_word_embeddings to false there if the two were trained separately."
            )
    return weights


NEW_HEAD = "it has no head, so the masked-language head is a new one; hidden states are as they were"


def new_head(model: ConfigView) -> dict[str, Tensor]:
    """Return a masked-language head that passes hidden states on: norm(gelu(hidden)) times the embedding."""
    import torch

    dim = model["dim"]
    weights = {"head.dense.weight": torch.eye(dim), "head.norm.weight": torch.ones(dim)}
    if model["head"].get("bias", True):
        weights |= {"head.dense.bias": torch.zeros(dim), "head.norm.bias": torch.zeros(dim)}
    return weights | {"head.bias": torch.zeros(model["input"]["vocab_size"])}


def notes(keys: KeyMap, names: Collection[str], model: ConfigView) -> tuple[str, ...]:
    """Return notes for the user on what was left out of the checkpoint with the plain ``names``, or added to it."""
    kind, notes_ = model["head"]["kind"], []
    if out := sorted(name for name in names if keys.left_out.fullmatch(name)):
        notes_.append(f"{', '.join(out)} left out: no model here predicts a next sentence")
    if kind == "masked_language" and not has_language_head(names):
        notes_.append(NEW_HEAD)
    if kind == "masked_language" and model["input"].get("mask_token") is None:
        notes_.append("no file of its tokenizer has the mask's id; to train it give `set` input.mask_token=ID")
    return tuple(notes_)


# The settings that all encoder configs of the library transformers share (BERT, RoBERTa, Longformer, Big Bird).
#
# All have post-norm layers, learned positions, token types and a norm after the embedding. A config need not name the
# head; its tensors do.

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
REQUIRED = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
DEFAULTS: Mapping[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
"""The defaults of transformers for what a config leaves out."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of encoders, ``title`` in messages, and the ``member`` here.

    ``defaults`` of the config's settings; ``mixers``: the special settings of each layer's mixer; ``prefix`` and
    ``heads``: the names of tensors; ``shifted``: positions are counted from behind the padding token's number;
    ``activated``: the kinds of heads with the activation of the layers; ``first_is_global``: for a classifier of texts
    the first token is global; ``tokens``: the roles of special tokens that settings tell where no tokenizer does;
    ``notes``: notes for the user on a model, as data.
    """

    title: str
    member: str
    prefix: str
    heads: HeadKeys
    mixers: Callable[[Settings, Path], list[ConfigData]]
    defaults: Mapping[str, object]
    shifted: bool = False
    activated: Collection[str] = ()
    first_is_global: bool = False
    tokens: Mapping[str, str] = field(default_factory=dict)
    notes: Callable[[ConfigView], tuple[str, ...]] = lambda model: ()

    def settings(self, config: Mapping[str, object], place: Path) -> Settings:
        """Return ``config`` with its defaults; settings that our model cannot reproduce are an error."""
        full = complete(config, place, {**DEFAULTS, **self.defaults}, REQUIRED, causal=False)
        if config.get("pruned_heads"):
            raise KinformerError(f"{place}: heads are pruned; import the checkpoint before pruning.")
        integer(full, place, "num_hidden_layers", maximum=10_000)
        choice(full, place, "hidden_act", ACTIVATIONS)
        return full

    def model_config(self, config: Mapping[str, object], place: Path) -> ConfigData:
        """Return the model config, as data and without its head, of a ``config.json``."""
        full = self.settings(config, place)
        return self.model(full, place, self.mixers(full, place))

    def special_tokens(self, config: Mapping[str, object], place: Path) -> dict[str, int]:
        """Return the ids of special tokens, by files beside the ``config.json`` at ``place``, or by its settings."""
        return special_tokens(place.parent, self.settings(config, place), self.tokens)

    def key_map(self, config: Mapping[str, object], place: Path, kind: str) -> KeyMap:
        """Return the key map of a model of ``config`` with the head ``kind``."""
        return key_map(self.heads, self.prefix, kind, self.skipped(self.settings(config, place), place))

    def skipped(self, full: Mapping[str, object], place: Path) -> int:
        """Return how many rows of the position table stand before that of the first token."""
        return 1 + integer(full, place, "pad_token_id", minimum=0) if self.shifted else 0

    def model(self, full: Settings, place: Path, mixers: Sequence[ConfigView]) -> ConfigData:
        """Return the model config, as data, without its head; ``mixers`` are the
        special settings of each layer's mixer."""
        dropout = number(full, place, "hidden_dropout_prob")
        norm = {"kind": "layer_norm", "eps": number(full, place, "layer_norm_eps"), "bias": True}
        hidden_dim = integer(full, place, "intermediate_size")
        mixer = {
            "kind": "bidirectional",
            "num_heads": integer(full, place, "num_attention_heads"),
            "dropout": number(full, place, "attention_probs_dropout_prob"),
        }
        layer = {
            "kind": "encoder",
            "feed_forward": {"kind": "mlp", "hidden_dim": hidden_dim, "activation": ACTIVATIONS[full["hidden_act"]]},
            "norm": norm,
            "residual": "post",
            "dropout": dropout,
        }
        skipped = self.skipped(full, place)
        length = integer(full, place, "max_position_embeddings", minimum=skipped + 1) - skipped
        return {
            "kind": "encoder",
            "input": {
                "kind": "tokens",
                "vocab_size": integer(full, place, "vocab_size"),
                "types": integer(full, place, "type_vocab_size", minimum=0),
            },
            "dim": integer(full, place, "hidden_size"),
            "layers": [layer | {"mixer": {**mixer, **special}} for special in mixers],
            "position": {"kind": "learned", "max_length": length},
            "embedding_norm": norm,
            "dropout": dropout,
        }

    def head(self, config: Mapping[str, object], place: Path, names: Collection[str]) -> ConfigData:
        """Return the settings that depend on the head: that of the plain ``names``;
        one for masked tokens if there is none."""
        full = self.settings(config, place)
        architectures = " ".join(map(str, full.get("architectures") or ()))
        activation = ACTIVATIONS[full["hidden_act"]]
        if any(name.startswith("qa_") for name in names):
            raise KinformerError(f"{place}: the head is one for question answering, which no model here has.")
        if "classifier.weight" in names or "classifier.out_proj.weight" in names:
            kind = "token_classification" if "TokenClassification" in architectures else "classification"
            if kind == "classification" and "classifier.weight" in names and "SequenceCl" not in architectures:
                raise KinformerError(
                    f"{place}: the head is a classifier, but architectures ({architectures or 'none'}) does not say "
                    "ForSequenceClassification or ForTokenClassification, which alone can be imported."
                )
            count = images.count(full, place) if kind == "classification" else len(images.classes(full, place))
            chosen = {"kind": kind, "classes": count, "dropout": _head_dropout(full, place)}
            extra = {"activation": activation} if kind in self.activated else {}
            return {"head": chosen | extra, "global_tokens": self._global_tokens(full, place, kind)}
        like_layers = "masked_language" in self.activated
        if like_layers and activation == "relu":
            raise KinformerError(f"{place}: hidden_act is 'relu', which the head for masked tokens cannot have here.")
        tied = not has_language_head(names) or bool(full.get("tie_word_embeddings", True))
        tanh_gelu = like_layers and activation == "gelu_tanh"
        eps = number(full, place, "layer_norm_eps")
        head = {"kind": "masked_language", "tied": tied, "eps": eps, "tanh_gelu": tanh_gelu}
        return {"head": head, "global_tokens": self._global_tokens(full, place, "masked_language")}

    def _global_tokens(self, full: Mapping[str, object], place: Path, kind: str) -> int:
        """Return how many tokens at the beginning are global; ``global_tokens`` is a setting of our exports alone."""
        if "global_tokens" in full:
            return integer(full, place, "global_tokens", minimum=0)
        return int(self.first_is_global and kind == "classification")


def has_no_types(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether there is one type, whose vector is zero: RoBERTa's, which has none."""
    types = tensors.get(TYPES)
    return types is not None and len(types) == 1 and not bool(types.any())


def plainly(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by their plain names."""
    return {plain(name): tensor for name, tensor in tensors.items()}


def _head_dropout(full: Mapping[str, object], place: Path) -> float:
    has_dropout = full.get("classifier_dropout") is not None
    return number(full, place, "classifier_dropout" if has_dropout else "hidden_dropout_prob")


ROLES = {
    "mask_token": (("mask_token",), ("[MASK]", "<mask>")),
    "bos_token": (("cls_token", "bos_token"), ("[CLS]", "<s>")),
    "eos_token": (("sep_token", "eos_token"), ("[SEP]", "</s>")),
}
"""Our name of a role to the names it has in the files, and to the usual texts of such tokens."""


def special_tokens(folder: Path, config: Settings, settings: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of a mask and of a sequence's two ends (ROLES) in ``tokenizer.json`` and its neighbours in
    ``folder``, else by ``settings`` of the config.

    ``settings``: role to the name of the setting of ``config.json`` that holds its id.
    """
    ids = ids_of(_table(folder / "tokenizer.json"))
    named = {**_table(folder / "tokenizer_config.json"), **_table(folder / "special_tokens_map.json")}
    tokens = {}
    for role, (names, usual) in ROLES.items():
        texts = [_text(named[name]) for name in names if named.get(name) is not None] or list(usual)
        present = [ids[text] for text in texts if text in ids]
        setting = config.get(settings.get(role, ""))
        if present:
            tokens[role] = present[0]
        elif isinstance(setting, int) and 0 <= setting < config["vocab_size"]:
            tokens[role] = setting
    return tokens


def ids_of(data: Mapping[str, object]) -> dict[str, int]:
    """Return every token of a ``tokenizer.json`` with its id; the vocabulary is a
    table, or a list of tokens and costs."""
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids |= vocabulary
    elif isinstance(vocabulary, list):
        ids |= {str(entry[0]): number for number, entry in enumerate(vocabulary) if entry}
    added = data.get("added_tokens")
    if isinstance(added, list):
        ids |= {str(one.get("content")): one["id"] for one in added if isinstance(one, dict) and "id" in one}
    return {text: number for text, number in ids.items() if isinstance(number, int)}


def _table(path: Path) -> JsonObject:
    data = read_json(path) if path.is_file() else {}
    return data if isinstance(data, dict) else {}


def _text(token: object) -> str:
    """Return the text of a token as the files have it: its text, or a table that holds it."""
    return str(token.get("content") if isinstance(token, dict) else token)


# BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019) as the library transformers saves them, as our ``bert``.
#
# RoBERTa counts positions from behind the padding token's number and has an exact gelu in its head. There a padding
# token in the middle of a text has no position of its own; here ``valid`` alone says what is padding.


def _mixers(full: Settings, place: Path) -> list[ConfigData]:
    return [{}] * full["num_hidden_layers"]


BERT = Family(
    title="BERT",
    member="bert",
    prefix="bert.",
    heads=HeadKeys(CLS, POOLED),
    mixers=_mixers,
    defaults={"vocab_size": 30522, "pad_token_id": 0},
    activated=("masked_language",),
)
ROBERTA = Family(
    title="RoBERTa",
    member="bert",
    prefix="roberta.",
    heads=HeadKeys(LM_HEAD, CLASSIFIER),
    mixers=_mixers,
    defaults={"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    shifted=True,
    tokens={"bos_token": "bos_token_id", "eos_token": "eos_token_id"},
)


# Big Bird as the library transformers saves it, as our member ``big-bird`` (Zaheer et al. 2020).
#
# The random blocks are those that transformers draws while it trains, the layer's number being the seed, as in the
# paper; when it does not train it takes block 0 for all of them. It counts a block that is listed twice twice, ours
# once, and it has the table of its own lengths, 1024, 3072 and 4096, for 2048 too, as in the paper. There the last
# block of a padded batch is global, here that of each text. Like theirs, block-sparse attention has no dropout.


def _mixers_of_big_bird(full: Settings, place: Path) -> list[ConfigData]:
    require(full, place, {"rescale_embeddings": False})
    projection = {"projection": {"kind": "multi_head", "bias": bool(full["use_bias"])}}
    depth = full["num_hidden_layers"]
    if choice(full, place, "attention_type", ("block_sparse", "original_full")) == "original_full":
        return [projection] * depth
    pattern = {
        "kind": "big_bird",
        "block": integer(full, place, "block_size"),
        "random": integer(full, place, "num_random_blocks", minimum=0),
        "num_heads": integer(full, place, "num_attention_heads"),
    }
    return [projection | {"dropout": 0.0, "pattern": pattern | {"seed": layer}} for layer in range(depth)]


def _notes(model: ConfigView) -> tuple[str, ...]:
    if not model["layers"][0]["mixer"].get("pattern", {}).get("random"):
        return ()
    return (
        "each query reads random blocks, here in training and in evaluation; transformers reads them in training "
        "alone, and the first block in their place in evaluation, so its evaluated outputs differ",
    )


BIG_BIRD = Family(
    title="Big Bird",
    member="big-bird",
    prefix="bert.",
    heads=HeadKeys(CLS, CLASSIFIER),
    mixers=_mixers_of_big_bird,
    defaults={
        "vocab_size": 50358,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "sep_token_id": 66,
        "attention_type": "block_sparse",
        "use_bias": True,
        "block_size": 64,
        "num_random_blocks": 3,
    },
    activated=("masked_language", "classification"),
    notes=_notes,
    tokens={"eos_token": "sep_token_id"},
)


# Longformer as the library transformers saves it, as our member ``longformer`` (Beltagy et al. 2020).
#
# Its ``attention_window`` counts both sides. No token is global unless ``kinds`` mark it, except for the first one of
# a classifier of texts.


def _mixers_of_longformer(full: Settings, place: Path) -> list[ConfigData]:
    return [
        {"projection": {"kind": "multi_head_global"}, "pattern": {"kind": "window", "window": sides // 2}}
        for sides in _windows(full, place)
    ]


def _windows(full: Settings, place: Path) -> list[int]:
    windows, depth = full["attention_window"], full["num_hidden_layers"]
    windows = [windows] * depth if isinstance(windows, int) else windows
    if not isinstance(windows, list) or len(windows) != depth:
        raise KinformerError(f"{place}: attention_window is {windows!r}, but must be one number or one per layer.")
    for window in windows:
        if not isinstance(window, int) or isinstance(window, bool) or window < 2 or window % 2:
            raise KinformerError(f"{place}: attention_window has {window!r}, but must be even numbers of 2 or more.")
    return windows


LONGFORMER = Family(
    title="Longformer",
    member="longformer",
    prefix="longformer.",
    heads=HeadKeys(LM_HEAD, CLASSIFIER),
    mixers=_mixers_of_longformer,
    defaults={
        "vocab_size": 30522,
        "attention_window": 512,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    shifted=True,
    first_is_global=True,
    tokens={"bos_token": "bos_token_id", "eos_token": "eos_token_id"},
)
