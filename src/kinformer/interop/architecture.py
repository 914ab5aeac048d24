"""A causal architecture of the library transformers: a map of its config and a map of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as excerpt
from typing import TYPE_CHECKING, TypeAlias

from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import read_json
from kinformer.runtime.parsing import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

# Settings of a ``config.json``, each checked: a wrong one is one sentence that names the file and the setting.


Settings: TypeAlias = JsonObject
"""The settings of a ``config.json``, with the defaults of those that it leaves out."""

EVERYWHERE: Mapping[str, object] = {"per_layer_config": None}
CAUSAL: Mapping[str, object] = {
    "is_causal": True,
    "layer_types": None,
    "sliding_window": None,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
}
"""Settings that transformers reads in every architecture, and in every one that generates, with the only values that
can be imported where an architecture here does not read them itself."""
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""What the setting ``layer_types`` calls the kinds of layers."""


def complete(
    config: Mapping[str, object],
    place: Path,
    defaults: Mapping[str, object],
    required: Mapping[str, object] | None = None,
    names: Mapping[str, str] | None = None,
    causal: bool = True,
) -> Settings:
    """Return the settings of the ``config.json`` at ``place``, with ``defaults`` for settings that it leaves out.

    Every setting that transformers reads must be a default here, which the caller reads, or have its only value in
    ``required``. ``names``: further names of settings, which transformers prefers. ``causal``: whether the model
    generates.
    """
    full = {**defaults, **config}
    full |= {ours: config[theirs] for theirs, ours in (names or {}).items() if config.get(theirs) is not None}
    shared = {**EVERYWHERE, **(CAUSAL if causal else {})}
    require(full, place, {name: value for name, value in shared.items() if name not in defaults} | dict(required or {}))
    return full


def integer(config: Mapping[str, object], place: Path, name: str, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    """Return a whole number between ``minimum`` and ``maximum``."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise KinformerError(
            f"{place}: {name} is {excerpt(value)}, but must be a whole number from {minimum} to {maximum}."
        )
    return value


def number(config: Mapping[str, object], place: Path, name: str) -> float:
    """Return a number of 0 or more and below 1."""
    value = config.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but must be a number of 0 or more and below 1.")
    return float(value)


def choice(config: Mapping[str, object], place: Path, name: str, names: Iterable[str]) -> str:
    """Return the setting ``name``, which must be one of ``names``."""
    value, names = config.get(name), list(names)
    if value not in names:
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but only {', '.join(names)} can be imported.")
    return str(value)


def require(config: Mapping[str, object], place: Path, values: Mapping[str, object]) -> None:
    """Raise an error if a setting differs from its value in ``values``.

    A setting that ``config`` leaves out has this value, and null equals false.
    """
    for name, value in values.items():
        setting = config.get(name, value)
        if setting != value and (setting is not None or value):
            raise KinformerError(f"{place}: {name} is {excerpt(config[name])}, but only {value!r} can be imported.")


def positive(config: Mapping[str, object], place: Path, name: str) -> float:
    """Return a number above 0 that is finite."""
    value = config.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but must be a number above 0.")
    return float(value)


def switch(config: Mapping[str, object], place: Path, name: str) -> bool:
    """Return a setting that is true or false."""
    value = config.get(name)
    if not isinstance(value, bool):
        raise KinformerError(f"{place}: {name} is {excerpt(value)}, but must be true or false.")
    return value


# Rotary positions as configs of the library transformers name them: ``rope_parameters`` today, ``rope_theta`` and
# ``rope_scaling`` in older files.

SCALINGS: dict[str, dict[str, str]] = {
    "linear": {},
    "yarn": {
        "original_length": "original_max_position_embeddings",
        **{name: name for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")},
    },
    "llama3": {
        "original_length": "original_max_position_embeddings",
        **{name: name for name in ("low_freq_factor", "high_freq_factor")},
    },
}
"""The type of scaled rotary positions to what its settings are called here and in ``rope_parameters``."""
READERS: dict[str, Callable[[Mapping[str, object], Path, str], float]] = {
    "original_length": integer,
    "truncate": switch,
}
"""The settings that are no numbers above 0."""


def rope(
    full: Mapping[str, object], place: Path | str, kind: str | None = None, base: float = 10000.0, partial: bool = False
) -> ConfigData:
    """Return the config, as data, of the rotary positions of the config ``full``, which stands at ``place``.

    ``kind``: the kind of layer, where they differ between kinds; ``base``: where a file has none; ``partial``: whether
    the model heeds ``partial_rotary_factor``, which most do not.
    """
    place = Path(place)
    table = parameters(full, place, kind)
    outside = {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
    settings = {"rope_theta": base, **outside, **table, "max_position_embeddings": full.get("max_position_embeddings")}
    if kind is None and "original_max_position_embeddings" in full:
        settings["original_max_position_embeddings"] = full["original_max_position_embeddings"]
    position: ConfigData = {"kind": "rope", "base": positive(settings, place, "rope_theta")}
    if partial and settings.get("partial_rotary_factor", 1.0) != 1:
        position["fraction"] = positive(settings, place, "partial_rotary_factor")
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling in ("default", None):
        return position
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise KinformerError(
            f"{place}: rotary positions are of the type {scaling!r}, whose frequencies the position 'rope' does not "
            f"have"
            f"{', as they follow the length of the text' if scaling in ('dynamic', 'longrope') else ''}; what it has: "
            f"default, {', '.join(SCALINGS)}."
        )
    return position | _scaled(settings, place, scaling)


def parameters_of(position: ConfigView) -> Settings:
    """Return the ``rope_parameters`` of the config ``position``, as data: the inverse of :func:`rope`; with no base for
    no positions.

    Errors: ``KeyError`` for positions that are not rotary, or scaled in a way that transformers does not know.
    """
    if position["kind"] == "none":
        return {"rope_type": "default", "rope_theta": None}
    scaling = position["scaling"]
    parameters = {"rope_type": "default" if scaling == "none" else scaling, "rope_theta": position["base"]}
    if scaling == "none":
        return parameters
    named = {theirs: position[ours] for ours, theirs in SCALINGS[scaling].items()}
    return (
        parameters
        | {"factor": position["factor"]}
        | {name: value for name, value in named.items() if value is not None}
    )


def _scaled(settings: Mapping[str, object], place: Path, scaling: str) -> ConfigData:
    """Return the settings of positions that are scaled; none where a factor of 1 leaves them as they are."""
    scaled = {
        ours: READERS.get(ours, positive)(settings, place, theirs)
        for ours, theirs in SCALINGS[scaling].items()
        if settings.get(theirs) is not None
    }
    if "original_length" in SCALINGS[scaling] and "original_length" not in scaled:
        scaled["original_length"] = integer(settings, place, "max_position_embeddings")
    if settings.get("factor") is None and "original_length" in scaled:
        factor = integer(settings, place, "max_position_embeddings") / scaled["original_length"]
    else:
        factor = positive(settings, place, "factor")
    if scaling == "yarn" and "attention_factor" not in scaled:
        scaled |= _attention_factor(settings, place, factor)
    if factor == 1 and scaled.get("attention_factor", 1.0) == 1:
        return {}
    return {"scaling": scaling, "factor": factor} | scaled


def _attention_factor(settings: Mapping[str, object], place: Path, factor: float) -> dict[str, float]:
    """Return what multiplies cosines and sines with YaRN where DeepSeek's ``mscale`` and ``mscale_all_dim`` say it."""
    names = ("mscale", "mscale_all_dim")
    if not all(settings.get(name) for name in names) or factor <= 1:
        return {}
    above, below = (magnitude(settings, place, name, factor) for name in names)
    return {"attention_factor": above / below}


def magnitude(settings: Mapping[str, object], place: Path, name: str, factor: float) -> float:
    """Return YaRN's magnitude, 0.1 m ln(factor) + 1, for m the setting ``name``; 1 where nothing is stretched."""
    return 0.1 * positive(settings, place, name) * math.log(factor) + 1 if factor > 1 else 1.0


def parameters(full: Mapping[str, object], place: Path, kind: str | None = None) -> Mapping[str, object]:
    """Return the table of rotary settings, empty where there is none.

    ``rope_scaling`` replaces ``rope_parameters``, as in transformers; where each ``kind`` of layer has its own table,
    ``rope_scaling`` adds to it.
    """
    tables: list[Mapping[str, object]] = []
    for name in ("rope_parameters", "rope_scaling"):
        table = full.get(name) or {}
        if not isinstance(table, Mapping):
            raise KinformerError(f"{place}: {name} is not a table of settings; restore the file from a copy.")
        tables.append(table)
    parameters, scaling = tables
    if kind is None:
        return scaling or parameters
    of_kind = parameters.get(kind)
    return {**(of_kind if isinstance(of_kind, Mapping) else {}), **scaling}


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
