"""A causal architecture of the library transformers: a map of its config and a map of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as excerpt
from typing import TYPE_CHECKING

from kinformer.interop.key_map import KeyMap
from kinformer.interop.layouts import ConfigData, ConfigView
from kinformer.interop.settings import Settings, complete, integer
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

GENERATION = "generation_config.json"
DEPTH = 10_000
"""More layers than any model has; a config that names more is damaged."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``model_type``: ``title`` in messages, and the ``member`` here.

    ``defaults``: transformers' values of settings that a config leaves out; ``required``: the only values of settings
    with which our model computes the same; ``names``: a further name of a setting to its name in ``defaults``;
    ``causal``: whether the model generates; :func:`complete` takes all four. ``model`` returns our model config, as
    data, of the full settings; ``keys`` maps tensors.
    """

    title: str
    member: str
    defaults: Mapping[str, object]
    model: Callable[[Settings, Path], ConfigData]
    keys: KeyMap | Callable[[ConfigView], KeyMap]
    required: Mapping[str, object] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    causal: bool = True

    def model_config(self, config: Mapping[str, object], place: Path) -> ConfigData:
        """Return our model config, as data, of the ``config.json`` at ``place``."""
        full = complete(config, place, self.defaults, self.required, self.names, self.causal)
        for name in ("num_hidden_layers", "n_layer", "n_layers"):
            if name in full:
                integer(full, place, name, maximum=DEPTH)
        return self.model(full, place)

    def key_map(self, model: Mapping[str, object]) -> KeyMap:
        """Return the key map of a ``model`` config, as data."""
        return self.keys if isinstance(self.keys, KeyMap) else self.keys(model)

    def convert(self, tensors: Mapping[str, Tensor], model: ConfigView, folder: Path) -> dict[str, Tensor]:
        """Return the weights under our names; a tensor that such a language model does not have is an error."""
        import torch

        weights = self.key_map(model).read(tensors, model, folder, f"{self.title} language model") | _slopes(model)
        if not model["head"]["tied"]:
            return weights
        output = weights.pop("head.output.weight", weights.pop("head.inner.output.weight", None))
        table = weights.get("input.embedding.weight")
        if output is not None and table is not None and not torch.equal(output, table):
            raise KinformerError(
                f"{folder}: the output matrix differs from the embedding, but config.json ties them; set "
                "tie_word_embeddings to false there if the two were trained separately."
            )
        return weights

    def write(self, weights: Mapping[str, Tensor], model: Mapping[str, object]) -> dict[str, Tensor]:
        """Return our ``weights`` under their names: the inverse of :meth:`convert`."""
        stored = _slopes(model)
        return self.key_map(model).write({name: one for name, one in weights.items() if name not in stored}, model)


def _slopes(model: ConfigView) -> dict[str, Tensor]:
    """Return what the layers with ALiBi store beside their weights."""
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


def add_ends(tokens: ConfigData, config: Mapping[str, object], folder: Path) -> tuple[str, ...]:
    """Add the ids that end a text to the ``tokens`` of a decoder, as ``generation_config.json`` or else ``config.json``
    names them; return notes on what was left out."""
    place = folder / GENERATION
    named = read_json(place) if place.is_file() else {}
    if not isinstance(named, dict):
        raise KinformerError(f"{place}: is no table of settings; restore it from a copy, or remove it.")
    if "eos_token_id" not in named:
        place, named = folder / "config.json", dict(config)
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


def context_length(model: Mapping[str, object], config: Mapping[str, object], place: Path) -> int | None:
    """Return the longest text that the model of ``config`` was trained on; None where its positions end there."""
    for name in ("max_position_embeddings", "max_seq_len"):
        if model["position"] == "none" and config.get(name) is not None:
            return integer(config, place, name)
    return None
