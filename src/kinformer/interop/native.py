"""The architecture of the library transformers that a model of ours is exactly, and its ``config.json``.

Every architecture's settings are computed from our config and then read again by the import. A model *is* an
architecture if that gives our config back, so export and import cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinformer.core.config import find, from_dict, to_dict
from kinformer.core.model import CausalModel, SourceModel, WholeModel
from kinformer.core.stack import ModelConfig
from kinformer.interop import encoder_routes, images, routes, trajectory_routes, translator_routes
from kinformer.interop.architecture import Settings
from kinformer.interop.key_map import ConfigView
from kinformer.interop.routes import Padding, Weights
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

# The uses that transformers has classes for, and what a model of ours is used for.
#
# A use ends the name of a class: ``CausalLM`` is that of ``AutoModelForCausalLM``, and of our
# ``KinformerForCausalLM``.


GENERATE = ("CausalLM", "Seq2SeqLM")
"""The uses that generate."""


def use_of(config: ModelConfig) -> str | None:
    """Return the use of a model of ``config``; None for one that transformers has no class for."""
    model: Any = config
    reads_ids = model.input.kind == "tokens"
    if model.input.kind == "frames":
        return "CTC" if model.head.kind == "ctc" else None
    if model.protocol is CausalModel:
        return "CausalLM" if reads_ids else None
    if model.protocol is SourceModel:
        source = model.encoder.input
        return "Seq2SeqLM" if reads_ids and (source is None or source.kind == "tokens") else None
    if model.protocol is not WholeModel:
        return None
    if model.head.kind == "masked_language":
        return "MaskedLM" if reads_ids else None
    if not hasattr(model.head, "classes") or not (reads_ids or model.input.whole):
        return None
    if model.head.per_position:
        return "TokenClassification" if reads_ids else None
    return "SequenceClassification" if reads_ids else "ImageClassification"


def auto_class_of(use: str) -> str:
    """Return the class of transformers that loads models of a ``use``."""
    return f"AutoModelFor{use}"


def model_class_of(use: str) -> str:
    """Return our class for a ``use``."""
    return f"KinformerFor{use}"


ROUTES = routes.ROUTES | encoder_routes.ROUTES | translator_routes.ROUTES | trajectory_routes.ROUTES
UNCOMPUTED = {"dropout", "initialisation", "impl", "std", "checkpoint", "chunks"}
UNCOMPUTED |= {"mask_token", "bos_token", "eos_token", "mean", "form", "balance", "stochastic_depth"}
"""Settings that change no output of a trained model; mean and std of images stand in a file beside ``config.json``."""


@dataclass(frozen=True)
class Native:
    """A model as an architecture: its ``model_type``, the ``config.json`` and our ``model`` config, as data.

    ``original``: our config where features stand in another order there, or products take other values; otherwise it
    is ``model``. ``notes``: what transformers does otherwise.
    """

    model_type: str
    config: Settings
    model: ConfigView
    original: ConfigView
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, str]:
        """Return the class of transformers, and the one that loads it."""
        return ROUTES[self.model_type].classes(self.model)

    @property
    def reordered(self) -> str:
        """Return what stands in another order there; empty where nothing does."""
        return "" if self.model is self.original else ROUTES[self.model_type].reordered

    @property
    def preprocessor(self) -> Settings | None:
        """Return the ``preprocessor_config.json`` of a model of images, None of others."""
        kind = ROUTES[self.model_type].processor
        return None if kind is None else images.preprocessor(self.model["input"], kind)

    def tensors(self, weights: Weights) -> dict[str, Tensor]:
        """Return the ``weights`` of our model under their names and in their layouts."""
        route = ROUTES[self.model_type]
        if self.model is not self.original:
            weights = route.reorder(weights, self.original)
        return route.write(weights, self.model, self.config)


def native_form(config: ModelConfig, length: int | None = None, padding: Padding | None = None) -> Native | str:
    """Return ``config`` as an architecture of transformers, or a sentence that says why it is none.

    ``length``: how many positions ``config.json`` names where those of the model do not end. ``padding``: the token
    that texts are padded with, if there is one.
    """
    data = to_dict(_explicit(config))
    differences: dict[str, list[tuple[str, object]]] = {}
    for kind in _candidates(data, padding):
        route = ROUTES[kind]
        try:
            model = route.order(data)
            written = route.settings(model, length, padding)
            read = from_dict(ModelConfig, route.read(written, model), find())
        except (KinformerError, KeyError, TypeError, ValueError, AttributeError):
            continue
        ours, theirs = dict(_leaves(model)), dict(_leaves(to_dict(read)))
        names = [name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)]
        if not names:
            written |= {"model_type": kind, "architectures": [route.classes(model)[0]]}
            return Native(kind, written, model, data, tuple(route.notes(model)))
        names.sort(key=lambda name: not name.endswith("kind"))
        differences[route.title] = [(name, ours.get(name)) for name in names]
    if not differences:
        kinds = [f"the mixer {layer['mixer']['kind']!r}" for layer in data["layers"] if "mixer" in layer]
        return f"no architecture that is written natively has {', '.join(dict.fromkeys(kinds)) or 'such layers'}"
    title = min(differences, key=lambda name: len(differences[name]))
    path, value = differences[title][0]
    return f"{title}, the nearest architecture that is written natively, does not have {path} = {value!r}"


def _candidates(model: ConfigView, padding: Padding | None) -> list[str]:
    """Return the types that a ``model`` may be; RoBERTa before BERT where padding is spelled as there."""
    names = [name for name, one in ROUTES.items() if (one.kind, one.reads) == (model["kind"], model["input"]["kind"])]
    return sorted(names, key=lambda name: name != "roberta") if padding and padding.text == "<pad>" else names


def _explicit(config: ModelConfig) -> ModelConfig:
    """Return the config of a decoder whose layers name all sizes that follow from its width."""
    if config.protocol is not CausalModel:
        return config
    layers = [
        layer.replace(
            **{
                name: part.explicit(config.dim)
                for name in ("mixer", "feed_forward")
                if hasattr(part := getattr(layer, name, 0), "explicit")
            }
        )
        for layer in config.layers
    ]
    return config.replace(layers=tuple(layers))


def _leaves(node: object, path: str = "", dim: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the settings that an output depends on, by their paths."""
    if isinstance(node, Mapping):
        dim = node.get("dim", dim)
        for name, value in node.items():
            if name == "head_dim" and value is None:
                value = dim // node["num_heads"]
            if name == "bias_rate":
                value = bool(value)  # how fast it learns; whether experts have a bias shows
            if name not in UNCOMPUTED:
                yield from _leaves(value, f"{path}.{name}" if path else name, dim)
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _leaves(item, f"{path}.{index}", dim)
    else:
        yield path, node
