"""The settings that all encoder configs of the library transformers share (BERT, RoBERTa, Longformer, Big Bird).

All have post-norm layers, learned positions, token types and a norm after the embedding. A config need not name the
head; its tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop import encoder_keys, images
from kinformer.interop.encoder_keys import TYPES, HeadKeys, has_language_head, plain
from kinformer.interop.layouts import ConfigData, ConfigView
from kinformer.interop.settings import Settings, choice, complete, integer, number
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.interop.key_map import KeyMap

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
        return encoder_keys.key_map(self.heads, self.prefix, kind, self.skipped(self.settings(config, place), place))

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
