"""The formulas of a model: those in the docstrings of its parts' modules, and its sizes in papers' symbols and ours."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from kinformer.core.config import Config, parts_in
from kinformer.core.stack import ModelConfig

SLOTS = (
    "mixer", "encoder_mixer", "projection", "position", "embedding", "pattern", "score", "span", "feature_map", "decay",
    "feed_forward", "stack", "exit_rule", "halting", "head",
)  # fmt: skip
"""The slots of the parts whose formulas are shown, in this order."""
PLAIN = {
    ("position", "none"),
    ("stack", "sequential"),
    ("feed_forward", "mlp"),
    ("head", "language"),
    ("embedding", "lookup"),
}
"""Parts that are not specific to a member."""
SYMBOLS = (
    ("d_model", "dim"), ("h", "num_heads"), ("d_k", "head_dim"), ("d_v", "value_dim"), ("d_ff", "hidden_dim"),
    ("w", "window"), ("segment", "segment"), ("memory", "memory"), ("C", "rate"), ("k", "num_kv_heads"),
)  # fmt: skip
"""Symbols of papers, with the names of the settings here."""


class Formula(NamedTuple):
    """The formula of one part: its ``slot`` and ``kind``, a sentence, and formulas, a line each."""

    slot: str
    kind: str
    says: str
    lines: tuple[str, ...]


def formulas(config: Config) -> list[Formula]:
    """Return the formulas of every different part of a model's config, mixers first; formulas
    stand indented in a module's docstring."""
    formulas_by_name: dict[tuple[str, str], Formula] = {}
    for part in parts_in(config):
        key = (part.slot, part.kind)
        if part.slot not in SLOTS or key in PLAIN or key in formulas_by_name:
            continue
        text = described(type(part))
        if text:
            formulas_by_name[key] = Formula(*key, _first_sentence(text), tuple(_indented(text)))
    return sorted(formulas_by_name.values(), key=lambda formula: SLOTS.index(formula.slot))


def described(config: type[Config]) -> str:
    """Return the text on the part that ``config`` builds: the docstring of its file, or of its class if the file holds
    several parts."""
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
    """Return (symbol of papers, name here, value) of the sizes that all layers have in common."""
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
    present = [(symbol, name, sizes[name]) for symbol, name in SYMBOLS if name in sizes]
    return [
        ("N", "layers", len(config.uses)),
        *(
            (symbol, name, next(iter(values)) if len(values) == 1 else sorted(values))
            for symbol, name, values in present
        ),
    ]


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    first, *more = re.split(r"(?<!\bal)\. (?=[A-Z(])", paragraph, maxsplit=1)
    return f"{first}." if more else first


def _indented(text: str) -> Iterator[str]:
    return (line[4:] for line in text.splitlines() if line.startswith("    "))
