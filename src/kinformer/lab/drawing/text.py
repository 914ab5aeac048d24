"""A model in plain text: the formulas of its parts from docstrings, its sizes in symbols, and its patterns."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypedDict, get_args

import torch
from torch import nn

from kinformer.core.config import Config, field_types, parts_in
from kinformer.core.pattern import Pattern
from kinformer.core.stack import ModelConfig
from kinformer.lab.drawing.panels import FullSequence, global_token_words, in_text

SLOTS = (
    "mixer", "encoder_mixer", "projection", "position", "embedding", "pattern", "score", "span", "feature_map", "decay",
    "feed_forward", "stack", "exit_rule", "halting", "head",
)  # fmt: skip
"""The slots of the parts whose formulas are shown, in this order."""
PLAIN = {
    ("position", "none"), ("stack", "sequential"), ("feed_forward", "mlp"), ("head", "language"),
    ("embedding", "lookup"),
}  # fmt: skip
"""Plain parts of many members, whose formulas are left out."""
SYMBOLS = (
    ("d_model", "dim"), ("h", "num_heads"), ("d_k", "head_dim"), ("d_v", "value_dim"), ("d_ff", "hidden_dim"),
    ("w", "window"), ("segment", "segment"), ("memory", "memory"), ("C", "rate"), ("k", "num_kv_heads"),
)  # fmt: skip
"""Symbols of papers, each with the name of its setting."""


class Formula(NamedTuple):
    """The formula of one part: its ``slot`` and ``kind``, a sentence, and formulas, a line each."""

    slot: str
    kind: str
    says: str
    lines: tuple[str, ...]


def formulas(config: Config) -> list[Formula]:
    """Return the formulas, indented lines of docstrings, of every different part of a model's config, mixers first."""
    formulas_by_name: dict[tuple[str, str], Formula] = {}
    for part in parts_in(config):
        key = (part.slot, part.kind)
        if part.slot not in SLOTS or key in PLAIN or key in formulas_by_name:
            continue
        text = described(type(part))
        if text:
            lines = (line[4:] for line in text.splitlines() if line.startswith("    "))
            first, *more = re.split(r"(?<!\bal)\. (?=[A-Z(])", " ".join(text.split("\n\n")[0].split()), maxsplit=1)
            formulas_by_name[key] = Formula(*key, f"{first}." if more else first, tuple(_formulas_of(part, lines)))
    return sorted(formulas_by_name.values(), key=lambda formula: SLOTS.index(formula.slot))


def _formulas_of(part: Config, lines: Iterable[str]) -> Iterator[str]:
    """Yield the formulas that hold with the settings of ``part``, without their conditions. A condition stands two
    spaces before its formula: a setting and its value (``rule delta``), a setting that is not zero, false or none
    (``balance``), or a value that names its setting (``trigonometric``)."""
    types, unset, holds = field_types(type(part)), ("none", "false", "0", "0.0"), True
    values = {name: str(getattr(value := getattr(part, name), "kind", value)).lower() for name in types}
    choices = {value: name for name, kind in types.items() for value in get_args(kind)}
    for line in lines:
        if not line.startswith(" "):  # other lines continue a formula
            condition, _, formula = line.partition("  ")
            name, _, value = f"{choices.get(condition, '')} {condition}".strip().partition(" ")
            holds = values[name] == value if value and name in values else values.get(condition) not in unset
            line = formula.lstrip() if name in values else line
        if holds:
            yield line


def described(config: type[Config]) -> str:
    """Return the text about the part that ``config`` builds: the docstring of its file, or of a class among several."""
    module = sys.modules.get(config.__module__)
    if module is None:
        return ""
    classes = [item for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__]
    parts = [item for item in classes if issubclass(item, Config) or isinstance(vars(item).get("Config"), type)]
    return inspect.getdoc(built_by(config)) or "" if len(parts) > 1 else inspect.cleandoc(module.__doc__ or "")


def built_by(config: type[Config]) -> type:
    """Return the class that a nested config belongs to, or the config itself."""
    outer, _, inner = config.__qualname__.rpartition(".")
    return getattr(sys.modules[config.__module__], outer) if inner == "Config" and outer else config


def symbols(config: ModelConfig) -> list[tuple[str, str, int | list[int]]]:
    """Return (symbol in papers, name of the setting, value) of each size; a size that differs by layer has a list."""
    sizes: dict[str, set[int]] = {"dim": {config.dim}}
    for layer in config.layers:
        for part in parts_in(layer):
            for _, name in SYMBOLS:
                value = getattr(part, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    sizes.setdefault(name, set()).add(value)
        mixer = getattr(layer, "mixer", None)
        heads = getattr(mixer, "num_heads", None)
        if heads and getattr(mixer, "head_dim", None) is None:
            sizes.setdefault("head_dim", set()).add(config.dim // heads)
    present = ((symbol, name, sorted(sizes[name])) for symbol, name in SYMBOLS if name in sizes)
    values = ((symbol, name, size[0] if len(size) == 1 else size) for symbol, name, size in present)
    return [("N", "layers", len(config.uses)), *values]


# A softmax pattern as a small picture in text: row i is a query, column j a key, and a filled cell is a visible key.

CELLS = 16
MOST_TOKENS = 256
SEEN, UNSEEN = "■", "·"


class TextPicture(TypedDict):
    """The picture of a ``pattern``, given by name: ``rows`` of cells, each for ``tokens_per_cell`` tokens."""

    pattern: str
    tokens_per_cell: int
    rows: list[str]


def draw(pattern: Pattern, tokens_per_cell: int = 1, cells: int = CELLS) -> list[str]:
    """Return ``cells`` lines of ``cells`` characters. A cell is filled if the last query among the tokens of its row
    sees any key among the tokens of its column."""
    index = torch.arange(cells * tokens_per_cell)
    pattern = pattern.sized(len(index))
    last = index[tokens_per_cell - 1 :: tokens_per_cell]
    seen = pattern.allowed(last[:, None], index[None]).view(cells, cells, tokens_per_cell).any(dim=-1)
    return [" ".join(SEEN if cell else UNSEEN for cell in row) for row in seen.tolist()]


def scale(pattern: Pattern, cells: int = CELLS) -> int:
    """Return the tokens per cell at which the window of ``pattern`` fills about a third of the picture or, without a
    window, the first power of two at which the picture has an unseen cell."""
    if pattern.behind is not None:
        return max(1, 3 * pattern.behind // cells)
    powers = (2**power for power in range(MOST_TOKENS.bit_length()))
    return next((tokens for tokens in powers if any(UNSEEN in row for row in draw(pattern, tokens, cells))), 1)


def pictures(model: nn.Module) -> list[TextPicture]:
    """Return the pictures of the different patterns of the model's mixers and heads, in order."""
    pictures_by_name: dict[tuple[str, ...], TextPicture] = {}
    patterns = (getattr(module, "pattern", None) for module in model.modules())
    config = getattr(model, "config", None)
    for in_model in (in_text(item, config) for item in patterns if isinstance(item, Pattern)):
        for pattern in map(in_model.at, range(in_model.num_heads or 1)):
            name, cell = _name(pattern), scale(pattern)
            rows = draw(pattern, cell)
            picture: TextPicture = {"pattern": name, "tokens_per_cell": cell, "rows": rows}
            pictures_by_name.setdefault((name, str(cell), *rows), picture)
    return list(pictures_by_name.values())


def _name(pattern: Pattern) -> str:
    if isinstance(pattern, FullSequence):
        return f"{_name(pattern.inner)}, {global_token_words(pattern)}"
    return getattr(pattern, "name", type(pattern).__name__.lower())
