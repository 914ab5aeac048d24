"""A causal architecture of the library transformers: a map of its config and a map of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop.key_map import KeyMap
from kinformer.interop.settings import require, whole
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 10_000
"""More layers than any model has; a config that names more is damaged."""

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``model_type``: ``title`` in messages, and the ``member`` here.

    ``defaults``: transformers' own, for what a config leaves out; ``required``: settings that ours would compute
    otherwise if they had another value; ``names``: a setting to the name that it has in ``defaults``, where a config
    calls it otherwise. ``model`` returns our model config, as data, of the full settings; ``keys`` maps tensors.
    """

    title: str
    member: str
    defaults: Mapping[str, Any]
    model: Callable[[Settings, Path], dict[str, Any]]
    keys: KeyMap | Callable[[Mapping[str, Any]], KeyMap]
    required: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def model_config(self, config: Mapping[str, Any], place: Path) -> dict[str, Any]:
        """Return our model config, as data, of the ``config.json`` at ``place``."""
        full = {**self.defaults, **config}
        full |= {ours: config[theirs] for theirs, ours in self.names.items() if config.get(theirs) is not None}
        require({name: value for name, value in full.items() if value is not None}, place, self.required)
        for name in ("num_hidden_layers", "n_layer", "n_layers"):
            if name in full:
                whole(full, place, name, most=DEPTH)
        return self.model(full, place)

    def key_map(self, model: Mapping[str, Any]) -> KeyMap:
        """Return the key map of a ``model`` config, as data."""
        return self.keys if isinstance(self.keys, KeyMap) else self.keys(model)

    def convert(self, tensors: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
        """Return the weights under our names; a tensor that such a language model does not have is an error."""
        import torch

        weights = self.key_map(model).read(tensors, model, folder, self.title) | _slopes(model)
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

    def write(self, weights: Mapping[str, Tensor], model: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return our ``weights`` under their names: the inverse of :meth:`convert`."""
        stored = _slopes(model)
        return self.key_map(model).write({name: one for name, one in weights.items() if name not in stored}, model)


def _slopes(model: Mapping[str, Any]) -> dict[str, Tensor]:
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
