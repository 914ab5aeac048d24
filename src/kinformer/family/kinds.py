"""The registry of parts: every kind of part by its slot and name, and every config by its name in ``kinformer.nn``.

A page of parts ends with ``PARTS``, a table from the name in ``kinformer.nn`` to the config class. The registry lists
the pages alone, so a new part is an entry of its page. A page is imported when one of its parts is looked up. The
registry serves ``set``, the readers of configs, ``kinformer.nn``, the site's pages of parts and the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path

from kinformer.core.config import Config, field_types, parts_in
from kinformer.runtime.errors import field_docs
from kinformer.runtime.parsing import parse_toml
from kinformer.runtime.plugins import KINFORMER, PARTS, Pages, Registry, entry_points_of

_ATTENTION = (
    "softmax", "memory", "compressive", "sinkhorn", "chosen_blocks", "linear", "recurrent", "buckets",
    "tensorized", "cross", "path", "latent", "ttt", "convolutions",
)  # fmt: skip
_ENCODERS = ("bidirectional", "encoders", "buckets", "recurrent", "tensorized", "sinkhorn", "convolutions")
PAGES: Mapping[str, tuple[str, ...]] = {
    "model": ("models.decoder", "models.encoder"),
    "input": ("inputs.tokens", "inputs.images", "inputs.signals"),
    "embedding": ("inputs.tokens", "parts.positions"),
    "stack": ("stacks.sequential", "stacks.reversible", "adaptive.stack"),
    "halting": ("stacks.sequential",),
    "exit_rule": ("adaptive.rules",),
    "head": ("heads.language", "heads.images", "heads.classes"),
    "encoder_layer": ("blocks.layer",),
    "global_input": ("inputs.tokens",),
    "encoder_mixer": tuple(f"mixers.{page}" for page in _ENCODERS),
    "projection": ("parts.projections",),
    "layer": ("blocks.layer",),
    "residual": ("blocks.residual",),
    "feed_forward": ("blocks.feed_forward", "mixers.convolutions"),
    "norm": ("blocks.residual",),
    "mixer": tuple(f"mixers.{page}" for page in _ATTENTION),
    "compression": ("mixers.compressive",),
    "position": ("parts.positions", "parts.relative_positions"),
    "pattern": ("parts.patterns.sequence", "parts.patterns.blocks"),
    "score": ("parts.scores",),
    "span": ("parts.scores",),
    "feature_map": ("parts.feature_maps",),
    "decay": ("parts.decays",),
}
"""The pages of every slot. A page may have parts of several slots."""


def parts_of(page: str) -> Mapping[str, type[Config]]:
    """Return the configs of a page by their names in ``kinformer.nn``; the page is imported."""
    parts: Mapping[str, type[Config]] = import_module(f"kinformer.{page}").PARTS
    return parts


def named_parts() -> Iterator[tuple[str, type[Config]]]:
    """Yield the name in ``kinformer.nn`` and the config of every part, page by page."""
    for page in dict.fromkeys(page for pages in PAGES.values() for page in pages):
        yield from parts_of(page).items()


def _kinds_of(slot: str, page: str) -> dict[str, type[Config]]:
    return {config.kind: config for config in parts_of(page).values() if config.slot == slot}


BUILTIN = {slot: Pages(pages, partial(_kinds_of, slot)) for slot, pages in PAGES.items()}
"""Kinformer's parts: slot -> kind -> config class. The recipes of members are made of these parts."""


def kinds() -> dict[str, Registry[type[Config]]]:
    """Return the table slot -> kind -> config class; kinds of other packages are imported when they are looked up."""
    added = [name.partition(".")[0] for name in entry_points_of(PARTS)]
    return {slot: _registry(slot) for slot in dict.fromkeys([*PAGES, *added])}


@cache
def _registry(slot: str) -> Registry[type[Config]]:
    def fits(kind: str, record: object) -> bool:
        return isinstance(record, type) and issubclass(record, Config) and (record.slot, record.kind) == (slot, kind)

    def expected(kind: str) -> str:
        return f"a config class with the slot {slot!r} and the kind {kind!r}"

    return Registry(slot, BUILTIN.get(slot, {}), PARTS, fits=fits, expected=expected, prefix=f"{slot}.")


# The meanings of the settings of all parts, one sentence each, from the table ``settings.toml`` beside this file.

TABLE = Path(__file__).with_name("settings.toml")
ALL = "*"


@cache
def meanings() -> Mapping[str, Mapping[str, str]]:
    """Return the table: name of a group of parts -> setting -> meaning."""
    return parse_toml(TABLE.read_text(encoding="utf-8"))


def groups(config: type[Config]) -> Iterator[str]:
    """Yield the names of the groups of the table that a config class belongs to, the most special group first."""
    if not config.kind:
        yield config.__qualname__
        return
    yield from (f"{config.slot}.{config.kind}", f"{ALL}.{config.kind}", config.slot, ALL)


def group_of(config: type[Config], name: str) -> str | None:
    """Return the first group with a meaning of the setting ``name`` of a config class, or None."""
    return next((group for group in groups(config) if name in meanings().get(group, {})), None)


def meaning(config: type[Config], name: str) -> str:
    """Return the meaning of the setting ``name`` of a config class: its unit, and the effect of special values.

    For a part of another package, return the text under the field in its source, or "".
    """
    if config.__module__.partition(".")[0] != KINFORMER:
        return field_docs(config).get(name, "")
    group = group_of(config, name)
    return "" if group is None else meanings()[group][name]


def meanings_in(config: object) -> dict[str, dict[str, str]]:
    """Return the meanings of all settings of a config and of all configs inside it: part -> setting -> meaning. A part
    is named "slot.kind", or by its class if it does not have a kind."""
    return {
        next(groups(part)): {name: meaning(part, name) for name in field_types(part)}
        for part in dict.fromkeys(map(type, parts_in(config)))
    }
