"""The settings of a ``config.json`` of the library transformers.

Each setting is checked when it is read. A wrong setting is a ``KinformerError`` of one sentence, which names the file
and the setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from reprlib import repr as excerpt
from typing import Any, NamedTuple, TypeVar

from kinformer.interop.key_map import ConfigData, ConfigView
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import read_json
from kinformer.runtime.parsing import JsonObject

N = TypeVar("N", int, float)
CONFIG, GENERATION, PREPROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"
TOKENIZER, WEIGHTS, INDEX = "tokenizer.json", "model.safetensors", "model.safetensors.index.json"
"""The names of the files in a folder of transformers."""
DEPTH = 10_000
"""The largest number of layers; a config with more layers is damaged."""
LONGEST, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
"""The settings of the longest text, and of the longest text before positions were scaled."""
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""The kinds of layers in the setting ``layer_types``."""


class Settings(dict[str, Any]):
    """The settings of the ``config.json`` at ``place``."""

    def __init__(self, settings: Mapping[str, object], place: Path) -> None:
        super().__init__(settings)
        self.place = place

    def changed(self, **changes: object) -> Settings:
        """Return the settings with ``changes``."""
        return Settings({**self, **changes}, self.place)

    def error(self, reason: str) -> KinformerError:
        """Return the error of a file whose settings cannot be imported for a ``reason``."""
        return KinformerError(f"{self.place}: {reason}")

    def integer(self, name: str, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """Return a whole number between ``minimum`` and ``maximum``."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(f"{name} is {excerpt(value)}, but must be a whole number from {minimum} to {maximum}.")
        return value

    def count(self, name: str) -> int:
        """Return a whole number of 0 or more."""
        return self.integer(name, minimum=0)

    def several(self, name: str) -> int:
        """Return a whole number of 2 or more."""
        return self.integer(name, minimum=2)

    def optional(self, name: str) -> int | None:
        """Return a whole number above 0; None for a missing setting and for null."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        """Return a number of at least 0 and below 1."""
        value = self.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            raise self.error(f"{name} is {excerpt(value)}, but must be a number of 0 or more and below 1.")
        return float(value)

    def positive(self, name: str) -> float:
        """Return a finite number above 0."""
        value = self.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.error(f"{name} is {excerpt(value)}, but must be a number above 0.")
        return float(value)

    def numbers(self, name: str, read: Callable[[Settings, str], N]) -> list[N]:
        """Return a list of numbers, each as ``read`` reads it."""
        values = self.get(name)
        if not isinstance(values, list) or not values:
            raise self.error(f"{name} is {excerpt(values)}, but must be a list of numbers.")
        return [read(self.changed(**{name: value}), name) for value in values]

    def switch(self, name: str) -> bool:
        """Return a setting that must be true or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {excerpt(value)}, but must be true or false.")
        return value

    def truth(self, name: str) -> bool:
        """Return whether a setting is true, or a value that counts as true."""
        return bool(self.get(name))

    def choice(self, name: str, *names: str) -> str:
        """Return the setting ``name``, which must be one of ``names``."""
        value = self.get(name)
        if value not in names:
            raise self.error(f"{name} is {excerpt(value)}, but only {', '.join(names)} can be imported.")
        return str(value)

    def named(self, name: str, values: Mapping[str, str]) -> str:
        """Return the value in ``values`` of the setting ``name``, which must be one of its keys."""
        return values[self.choice(name, *values)]

    def require(self, values: Mapping[str, object]) -> None:
        """Raise an error if a setting differs from its value in ``values``.

        A missing setting has this value, and null equals false.
        """
        for name, value in values.items():
            setting = self.get(name, value)
            if setting != value and (setting is not None or value):
                raise self.error(f"{name} is {excerpt(self[name])}, but only {value!r} can be imported.")

    def table(self, name: str) -> JsonObject:
        """Return the table ``name`` within the settings; a missing table is empty."""
        table = self.get(name) or {}
        if not isinstance(table, Mapping):
            raise self.error(f"{name} is not a table of settings; restore the file from a copy.")
        return dict(table)

    def layer_types(self, *kinds: str) -> list[str]:
        """Return the setting ``layer_types``, a list with one of ``kinds`` for each layer."""
        value, depth = self["layer_types"], self["num_hidden_layers"]
        if not isinstance(value, list) or len(value) != depth or not all(one in kinds for one in value):
            raise self.error(
                f"layer_types must be a list of {depth} kinds of attention; only {', '.join(kinds)} can be imported."
            )
        return value


# Tables of settings, which are read in both directions.


class At(NamedTuple):
    """A setting whose value our config has, too: its ``default`` in transformers, and the ``paths`` of the value here.

    Spaces separate the paths, dots their parts. A path through ``layers`` or ``further_mixers`` leads to the first; the
    path "depth" stands for the number of layers. ``kind``: our values by theirs, or the function that reads the
    setting; by default the type of ``default`` says it.
    """

    default: object
    paths: str
    kind: Mapping[str, str] | Callable[[Settings, str], object] | None = None


class Table(dict[str, object]):
    """Settings by name: an ``At``, or the default of a setting that an architecture reads by itself."""

    def changed(self, **defaults: object) -> Table:
        """Return the table with other or further settings; a plain value replaces the default of a setting."""
        changed = Table(self | defaults)
        for name, default in defaults.items():
            if isinstance(old := self.get(name), At) and not isinstance(default, At):
                changed[name] = old._replace(default=default)
        return changed

    def defaults(self) -> dict[str, object]:
        """Return the default of every setting."""
        return {name: one.default if isinstance(one, At) else one for name, one in self.items()}

    def depth(self) -> str:
        """Return the name of the number of layers."""
        return next(name for name, one in self._places() if one.paths == "depth")

    def fill(self, model: ConfigData, full: Settings) -> ConfigData:
        """Put the settings ``full`` into our ``model``, which has one layer; return the model."""
        for name, one in self._places():
            kind = one.kind or _BY_TYPE[type(one.default)]
            value = kind(full, name) if callable(kind) else full.named(name, kind)
            for path in one.paths.split() if one.paths != "depth" else ():
                *way, last = path.split(".")
                _walk(model, way)[last] = value
        return model

    def written(self, model: ConfigView) -> JsonObject:
        """Return the settings that our ``model`` has: the inverse of :meth:`fill`.

        Errors: ``KeyError`` and ``TypeError`` for a model without them.
        """
        settings: JsonObject = {}
        for name, one in self._places():
            path = one.paths.split()[0]
            value: Any = len(model["layers"]) if path == "depth" else _walk(model, path.split("."))
            settings[name] = {b: a for a, b in one.kind.items()}[value] if isinstance(one.kind, Mapping) else value
        return settings

    def _places(self) -> list[tuple[str, At]]:
        return [(name, one) for name, one in self.items() if isinstance(one, At)]


SIZES = ("input.vocab_size", "dim", "depth", "layers.mixer.num_heads", "layers.feed_forward.hidden_dim")


def sizes(*names: str) -> Table:
    """Return the table of the sizes ``names``, in the order of SIZES; every file names them."""
    return Table({name: At(None, path) for name, path in zip(names, SIZES, strict=False)})


COMMON = sizes("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_BY_TYPE: dict[type, Callable[[Settings, str], object]] = {
    bool: Settings.switch,
    int: Settings.integer,
    float: Settings.number,
    type(None): Settings.integer,  # a size, which every file names
}


def _walk(node: Any, way: Iterable[str]) -> Any:
    for step in way:
        node = node[step][0] if step in ("layers", "further_mixers") else node[step]
    return node


def read_table(path: Path) -> JsonObject:
    """Return the table in a JSON file."""
    table = read_json(path)
    if not isinstance(table, dict):
        raise KinformerError(f"{path}: is not a table of settings; restore it from a copy.")
    return table


def optional_table(path: Path) -> JsonObject:
    """Return the table in a JSON file; an empty table if the file is missing."""
    return read_table(path) if path.is_file() else {}


# The names of classes.


def class_names(config: Mapping[str, object], place: Path) -> tuple[str, ...]:
    """Return the names of the classes, in order; the names that transformers uses where the config has none."""
    full, names = Settings({"num_labels": 2, **config}, place), config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{number}" for number in range(full.integer("num_labels")))
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        raise full.error("id2label does not name the classes 0, 1, 2, ...; restore it from a copy.")
    return tuple(str(names[str(number)]) for number in range(len(names)))


SINGLE_LABEL, MULTI_LABEL = "single_label_classification", "multi_label_classification"
"""The kinds of classes in the setting ``problem_type``: they exclude each other, or a text may have several."""


def count_classes(full: Settings, *kinds: str) -> int:
    """Return the number of classes, two or more, which exclude each other or are of another of the ``kinds``."""
    if full.get("problem_type") is not None:
        full.choice("problem_type", SINGLE_LABEL, *kinds)
    if (count := len(class_names(full, full.place))) < 2:
        raise full.error(
            f"the head has {plural(count, 'class')}, so it predicts a number (regression), which no model here does; "
            "import a classifier of 2 classes or more."
        )
    return count


def labels_of(names: Iterable[str]) -> JsonObject:
    """Return the settings of classes with these ``names``."""
    numbered = list(enumerate(names))
    return {
        "id2label": {str(number): name for number, name in numbered},
        "label2id": {name: number for number, name in numbered},
    }


def labels(classes: int) -> JsonObject:
    """Return the settings of ``classes`` without names."""
    return labels_of(f"LABEL_{number}" for number in range(classes))


# Rotary positions: ``rope_parameters`` in new files, ``rope_theta`` and ``rope_scaling`` in older files.

SCALINGS: dict[str, dict[str, str]] = {
    "linear": {},
    "yarn": {
        "original_length": ORIGINAL,
        **{name: name for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")},
    },
    "llama3": {"original_length": ORIGINAL, **{name: name for name in ("low_freq_factor", "high_freq_factor")}},
    "longrope": {"original_length": ORIGINAL, "factors": "short_factor", "attention_factor": "attention_factor"},
}
"""The type of scaled rotary positions to our names of its settings and their names in ``rope_parameters``."""
READERS: dict[str, Callable[[Settings, str], object]] = {
    "original_length": Settings.integer,
    "truncate": Settings.switch,
    "factors": lambda settings, name: settings.numbers(name, Settings.positive),
}
"""The readers of settings other than positive numbers."""


def rope(full: Settings, kind: str | None = None, base: float = 10000.0, partial: bool = False) -> ConfigData:
    """Return our config of rotary positions.

    ``kind``: the kind of layer, where kinds have positions of different bases; ``base``: the default base; ``partial``:
    whether the architecture reads ``partial_rotary_factor``, which most do not.
    """
    outside = {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
    outside |= rope_table(full, kind) | {LONGEST: full.get(LONGEST)}
    settings = Settings({"rope_theta": base, **outside}, full.place)
    if kind is None and ORIGINAL in full:
        settings[ORIGINAL] = full[ORIGINAL]
    position: ConfigData = {"kind": "rope", "base": settings.positive("rope_theta")}
    if partial and settings.get("partial_rotary_factor", 1.0) != 1:
        position["fraction"] = settings.positive("partial_rotary_factor")
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling in ("default", None):
        return position
    follows = scaling == "dynamic" or (
        scaling == "longrope" and settings.get("short_factor") != settings.get("long_factor")
    )
    if not isinstance(scaling, str) or scaling not in SCALINGS or follows:
        length = ", as they follow the length of the text" if follows else ""
        raise full.error(
            f"rotary positions are of the type {scaling!r}, whose frequencies the position 'rope' does not have"
            f"{length}; the types that it has: default, {', '.join(SCALINGS)}."
        )
    return position | _scaling(settings, scaling)


def rope_parameters(position: ConfigView) -> JsonObject:
    """Return the ``rope_parameters`` of a ``position`` config: the inverse of :func:`rope`.

    The position "none" gives parameters without a base.

    Errors: ``KeyError`` for positions other than rotary, or scaled in a way that transformers does not have.
    """
    if position["kind"] == "none":
        return {"rope_type": "default", "rope_theta": None}
    scaling = position["scaling"]
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": position["base"]}
    named = {theirs: position[ours] for ours, theirs in SCALINGS[scaling].items() if position[ours] is not None}
    if scaling == "longrope":  # one table for texts of every length
        named["short_factor"] = named["long_factor"] = list(position["factors"])
    return {"rope_type": scaling, "rope_theta": position["base"], "factor": position["factor"], **named}


def _scaling(settings: Settings, scaling: str) -> ConfigData:
    """Return the settings of scaled positions; an empty table for a factor of 1, which changes nothing."""
    scaled: dict[str, Any] = {
        ours: READERS.get(ours, Settings.positive)(settings, theirs)
        for ours, theirs in SCALINGS[scaling].items()
        if settings.get(theirs) is not None
    }
    if "original_length" in SCALINGS[scaling] and "original_length" not in scaled:
        scaled["original_length"] = settings.integer("max_position_embeddings")
    if settings.get("factor") is None and "original_length" in scaled:
        factor = settings.integer("max_position_embeddings") / scaled["original_length"]
    else:
        factor = settings.positive("factor")
    if scaling == "longrope":
        if "attention_factor" not in scaled:
            scaled["attention_factor"] = math.sqrt(1 + math.log(max(factor, 1)) / math.log(scaled["original_length"]))
        return {"scaling": scaling} | scaled
    if scaling == "yarn" and "attention_factor" not in scaled:
        # DeepSeek's files give the factor of cosines and sines as a quotient of two magnitudes.
        names = ("mscale", "mscale_all_dim")
        if all(settings.get(name) for name in names) and factor > 1:
            above, below = (yarn_magnitude(settings, name, factor) for name in names)
            scaled["attention_factor"] = above / below
    if factor == 1 and scaled.get("attention_factor", 1.0) == 1:
        return {}
    return {"scaling": scaling, "factor": factor} | scaled


def bound_positions(full: Settings) -> tuple[JsonObject, int | None, tuple[str, ...]]:
    """Return the changes of settings whose rotary positions follow the length of the text, the longest text for which
    transformers then computes the same, and a note; none of the three for other positions.

    Transformers reads a whole text with other frequencies once the text is longer, which a state of keys cannot do.
    """
    table = rope_table(full)
    kind, short = table.get("rope_type", table.get("type")), table.get("short_factor")
    settings = Settings({ORIGINAL: full.get(LONGEST), **table, **full}, full.place)
    changes: dict[str, Any]
    if kind == "dynamic":
        settings.positive("factor")
        length, changes, remedy = settings.integer(LONGEST), {"rope_type": "default"}, ""
    elif kind == "longrope" or (kind in ("su", "yarn") and short is not None):  # its names in old files of Phi-3
        length, changes = settings.integer(ORIGINAL), {"rope_type": "longrope", "long_factor": short}
        remedy = "; to import the frequencies of longer texts, copy long_factor to short_factor in config.json"
    else:
        return {}, None, ()
    changed: JsonObject = {"rope_parameters": table | changes, "rope_scaling": None}
    if kind != "dynamic" and short == table.get("long_factor"):
        return changed, None, ()
    note = f"rotary positions are of the type {kind!r}, whose frequencies change in texts of more than {length} tokens"
    return changed, length, (f"{note}; the run keeps the frequencies of shorter texts{remedy}",)


def yarn_magnitude(settings: Settings, name: str, factor: float) -> float:
    """Return YaRN's magnitude, 0.1 m ln(factor) + 1, where m is the setting ``name``; 1 for a factor of 1 or less."""
    return 0.1 * settings.positive(name) * math.log(factor) + 1 if factor > 1 else 1.0


def rope_table(full: Settings, kind: str | None = None) -> JsonObject:
    """Return the table of rotary settings; an empty table where the file has none.

    ``rope_scaling`` replaces ``rope_parameters``, as in transformers. Where each ``kind`` of layer has its own table,
    ``rope_scaling`` adds to it.
    """
    parameters, scaling = full.table("rope_parameters"), full.table("rope_scaling")
    if kind is None:
        return scaling or parameters
    of_kind = parameters.get(kind)
    return {**(of_kind if isinstance(of_kind, Mapping) else {}), **scaling}
