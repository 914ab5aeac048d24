"""One architecture of the library transformers: how its configs and its tensors are read and written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from reprlib import repr as excerpt
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, head_rows
from kinformer.interop.settings import CONFIG, DEPTH, GENERATION, Settings, Table, bound_positions, optional_table
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors by their names, ours or those in a folder."""
Weights: TypeAlias = dict[str, Tensor]
ConfigFile: TypeAlias = Mapping[str, object] | None
"""The settings of a ``config.json``."""
EVERYWHERE: Mapping[str, object] = {"per_layer_config": None}
CAUSAL: Mapping[str, object] = {
    "is_causal": True,
    "layer_types": None,
    "sliding_window": None,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
}
"""Settings that transformers reads in every architecture, and in every causal architecture.

An architecture that does not read such a setting is imported with this value only.
"""
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""The activations of transformers to ours."""
BUFFERS = re.compile(r".*embeddings\.(position_ids|token_type_ids)")
"""The ranges of whole numbers that old checkpoints hold among the weights."""
MASKS = re.compile(r"(.*\.)?attn\.(bias|masked_bias)")
"""The causal masks that old checkpoints of decoders hold among the weights, in any dtype."""


@dataclass(frozen=True)
class Padding:
    """The token that a tokenizer pads with: its ``id``, and its ``text`` where the tokenizer has a text for it."""

    id: int
    text: str = ""


@dataclass(frozen=True)
class Architecture:
    """One ``model_type``: the conversion of its ``config.json`` and of its tensors, in both directions.

    ``title``: the name in messages. ``member``: the member of the family that a folder is imported as.
    ``kind`` and ``reads``: the kinds of our model config and of its input.
    ``model_class`` and ``auto_class``: the class of transformers, and the class that loads it. Without a
    ``model_class`` an architecture is imported only.
    ``defaults``: the table of settings, with the values of missing ones; ``required``: the only values with which our
    model computes the same; ``names``: further names of settings; ``causal``: whether the model is causal.
    ``read`` returns our model config, as data, of complete settings.
    ``write`` is its inverse, by default the settings of ``defaults`` that our config has; it may raise ``KeyError``,
    ``TypeError`` or ``AttributeError`` for a model of another architecture.
    ``keys`` maps tensors in both directions; it may depend on our model config.
    A subclass may override the methods in place of these three.
    ``buffers``: the names of tensors beside the weights. ``processor``: the class that prepares images.
    """

    title: str
    member: str
    model_class: str = ""
    defaults: Table = field(default_factory=Table)
    read: Callable[[Settings], ConfigData] | None = None
    write: Callable[[ConfigView], JsonObject] | None = None
    keys: KeyMap | Callable[[ConfigView], KeyMap] | None = None
    _: KW_ONLY
    kind: str = "decoder"
    reads: str = "tokens"
    auto_class: str = "AutoModelForCausalLM"
    required: Mapping[str, object] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    causal: bool = True
    buffers: re.Pattern[str] = BUFFERS
    processor: str | None = None
    of: ClassVar[str] = " language model"
    """What follows the title in messages about tensors."""
    reordered: ClassVar[str] = ""
    """What :meth:`reorder` changes, for the user."""

    @property
    def exported(self) -> bool:
        """Return whether our models are written as this architecture."""
        return bool(self.model_class)

    # From a folder to our model.

    def complete(self, config: Mapping[str, object], place: Path) -> Settings:
        """Return the checked settings of the ``config.json`` at ``place``, with defaults for missing settings.

        Every setting that transformers reads must be in ``defaults``, or must have its only value in ``required``.
        Transformers prefers the further ``names``.
        """
        full = Settings({**self.defaults.defaults(), **config}, place)
        full |= {ours: config[theirs] for theirs, ours in self.names.items() if config.get(theirs) is not None}
        full |= bound_positions(full)[0]
        shared = {**EVERYWHERE, **(CAUSAL if self.causal else {})}
        full.require({name: value for name, value in shared.items() if name not in self.defaults} | dict(self.required))
        for name in ("num_hidden_layers", "n_layer", "n_layers"):
            if name in full:
                full.integer(name, maximum=DEPTH)
        return full

    def read_config(self, config: Mapping[str, object], place: Path) -> ConfigData:
        """Return our model config, as data, of the ``config.json`` at ``place``."""
        assert self.read is not None
        return self.read(self.complete(config, place))

    def with_tensors(self, model: ConfigData, tensors: Tensors, config: ConfigView, folder: Path) -> ConfigData:
        """Return our ``model`` config with the settings that follow from ``tensors`` and other files in ``folder``."""
        return model

    def read_tensors(self, tensors: Tensors, model: ConfigView, folder: Path, config: ConfigFile = None) -> Weights:
        """Return the weights of our ``model``; ``config``: the ``config.json``."""
        weights = self.key_map(model).read(tensors, model, folder, f"{self.title}{self.of}") | _slopes(model)
        return without_tied_output(weights, folder) if model["head"].get("tied") else weights

    def notes(self, tensors: Tensors, model: ConfigView, folder: Path) -> tuple[str, ...]:
        """Return notes for the user on tensors that the import left out or added."""
        return ()

    # From our model to a folder.

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        """Return the ``config.json`` of our ``model``.

        ``length``: the longest text of training, for positions that do not end; ``padding``: the padding token.
        """
        return self.defaults.written(model) if self.write is None else self.write(model)

    def reread(self, settings: JsonObject, model: ConfigView) -> ConfigData:
        """Return the config of our ``model`` as the import reads it from the written ``settings``."""
        return self.read_config(settings, Path(CONFIG))

    def write_tensors(self, weights: Tensors, model: ConfigView, settings: JsonObject) -> dict[str, Tensor]:
        """Return the ``weights`` of our ``model`` under their names and in their layouts."""
        stored = _slopes(model)
        return self.key_map(model).write({name: one for name, one in weights.items() if name not in stored}, model)

    def classes(self, model: ConfigView) -> tuple[str, str]:
        """Return the class of transformers for our ``model``, and the class that loads it."""
        return self.model_class, self.auto_class

    def order(self, model: ConfigView) -> ConfigView:
        """Return our ``model`` with features in the order of transformers; the same object where the order is equal."""
        return model

    def reorder(self, weights: Tensors, model: ConfigView) -> dict[str, Tensor]:
        """Return the ``weights`` of our ``model`` for the config that :meth:`order` returns."""
        return dict(weights)

    def differences(self, model: ConfigView) -> list[str]:
        """Return sentences on what transformers does otherwise than our ``model``."""
        return []

    def key_map(self, model: ConfigView) -> KeyMap:
        """Return the key map of our ``model``."""
        assert self.keys is not None
        return self.keys if isinstance(self.keys, KeyMap) else self.keys(model)


def without_tied_output(weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return ``weights`` without the output matrix, which must be the embedding where there is one."""
    output = weights.pop("head.output.weight", weights.pop("head.inner.output.weight", None))
    if output is not None and not torch.equal(output, weights.get("input.embedding.weight", output)):
        raise KinformerError(
            f"{folder}: the output matrix differs from the embedding, but config.json ties them; set "
            "tie_word_embeddings to false there if the two were trained separately."
        )
    return weights


def _slopes(model: ConfigView) -> dict[str, Tensor]:
    """Return the slopes that our layers with ALiBi store and transformers computes."""
    from kinformer.nn import AlibiBias

    stored: dict[str, Tensor] = {}
    for number, layer in enumerate(model["layers"]):
        mixer = layer["mixer"]
        if mixer.get("position") in ("alibi", {"kind": "alibi"}):
            position = AlibiBias().build_heads(1, mixer["num_heads"], 1)
            stored |= {
                f"stack.layers.{number}.mixer.position.{name}": one for name, one in position.state_dict().items()
            }
    return stored


@dataclass(frozen=True, kw_only=True)
class Decoder(Architecture):
    """A decoder of tokens.

    Rotary positions of transformers pair feature i of a head with feature i + width / 2. Our layout "interleaved" pairs
    2i with 2i + 1, so the export changes the order of the rows of queries and keys.
    """

    buffers: re.Pattern[str] = MASKS
    reordered = "the rows of queries and keys change their order"

    def write_config(self, model: ConfigView, length: int | None, padding: Padding | None) -> JsonObject:
        settings = {**super().write_config(model, length, padding), **ends_of(model), "pad_token_id": None}
        positions = [layer["mixer"].get("position", {}) for layer in model["layers"]]
        if (rotary := next((one for one in positions if one.get("kind") == "rope"), None)) is not None:
            # Rotary positions do not end; transformers still wants the longest text.
            scaled = rotary["original_length"] is not None
            longest = int(rotary["original_length"] * rotary["factor"]) if scaled else length or 2048
            settings["max_position_embeddings"] = longest
        return settings

    def order(self, model: ConfigView) -> ConfigView:
        layers = [_with_half_layout(layer) for layer in model["layers"]]
        same = all(a is b for a, b in zip(layers, model["layers"], strict=True))
        return model if same else {**model, "layers": layers}

    def reorder(self, weights: Tensors, model: ConfigView) -> dict[str, Tensor]:
        changed = dict(weights)
        for number, layer in enumerate(model["layers"]):
            if _with_half_layout(layer) is layer:
                continue
            rows = head_rows({"dim": model["dim"], **layer})
            head_dim = rows[0] // layer["mixer"]["num_heads"]
            width = int(layer["mixer"]["position"]["fraction"] * head_dim)
            order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2), torch.arange(width, head_dim)])
            for kind in ("weight", "bias"):
                name = f"stack.layers.{number}.mixer.projection.qkv.{kind}"
                if name in changed:
                    q, k, v = changed[name].split(list(rows))
                    q, k = (part.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1) for part in (q, k))
                    changed[name] = torch.cat([q, k, v])
        return changed


def _with_half_layout(layer: ConfigView) -> ConfigView:
    """Return ``layer`` with rotary pairs half a head apart; the same object where they are, or where there are none."""
    mixer = layer.get("mixer", {})
    position = mixer.get("position") or {}
    if position.get("kind") != "rope" or position["layout"] != "interleaved":
        return layer
    if mixer.get("projection", {}).get("kind") not in ("multi_head", "grouped"):
        return layer
    return {**layer, "mixer": {**mixer, "position": {**position, "layout": "half"}}}


def model_of(full: Settings, table: Table, layer: ConfigData, **settings: object) -> ConfigData:
    """Return our config, as data, of a model of tokens with equal layers and with the settings of ``table``.

    ``layer``: the layer without the settings of the table; the model has its norm, too. ``settings``: settings of the
    model.
    """
    model = {"kind": layer["kind"], "input": {"kind": "tokens"}, "position": "none", "norm": layer["norm"], **settings}
    return table.fill(model | {"layers": [layer]}, full) | {"layers": [layer] * full[table.depth()]}


def decoder_of(full: Settings, table: Table, layer: ConfigData, **settings: object) -> ConfigData:
    """Return the config of :func:`model_of` for a decoder that predicts tokens; parallel layers also make a decoder."""
    return model_of(full, table, layer, kind="decoder", head={"kind": "language"}, **settings)


def rms_layer(mixer: ConfigData, feed_forward: ConfigData) -> ConfigData:
    """Return a decoder's layer with RMS norms before its sublayers, without the settings of a table."""
    norm = {"kind": "rms_norm"}
    return {"kind": "decoder", "mixer": mixer, "feed_forward": feed_forward, "norm": norm, "residual": "pre"}


def ends_of(model: ConfigView) -> JsonObject:
    """Return the ids that begin and end a text, None included, as transformers has defaults for them."""
    return {"bos_token_id": model["input"]["bos_token"], "eos_token_id": model["input"]["eos_token"]}


def add_ends(tokens: ConfigData, config: Mapping[str, object], folder: Path) -> tuple[str, ...]:
    """Add the ids that end a text to the input ``tokens`` of a decoder; return notes on the ids it leaves out.

    ``generation_config.json`` names the ids; without it, or without the setting, ``config.json`` does.
    """
    place = folder / GENERATION
    named: Mapping[str, object] = optional_table(place)
    if "eos_token_id" not in named:
        place, named = folder / CONFIG, config
    value = named.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise KinformerError(f"{place}: eos_token_id is {excerpt(value)}, but must be an id or a list of ids.")
    ends = [one for one in dict.fromkeys(ids) if 0 <= one < tokens["vocab_size"]]
    if ends:
        tokens["eos_token"] = ends[0] if len(ends) == 1 else ends
    if len(ends) == len(set(ids)):
        return ()
    return (f"eos_token_id is {excerpt(value)} in {place.name}; ids outside the vocabulary end no text",)
