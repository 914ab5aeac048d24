"""The reference of parts: a page for every slot of a config, with every kind, its settings and its module's text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from generator.annotated import page_of
from generator.text import contents, escaped, html, literal, page, papers, table, write
from generator.typeset import typeset
from kinformer.core.config import Config
from kinformer.family.kinds import kinds, meaning, named_parts
from kinformer.family.table import MEMBERS
from kinformer.lab.drawing.text import SLOTS, built_by, described

TITLES = {
    "mixer": "Causal mixers",
    "encoder_mixer": "Mixers of whole texts",
    "position": "Positions",
    "pattern": "Patterns",
    "score": "Scores",
    "span": "Spans",
    "projection": "Projections",
    "feature_map": "Feature maps",
    "decay": "Decays",
    "compression": "Compression of memories",
    "input": "Inputs",
    "embedding": "Embeddings",
    "stack": "Stacks",
    "halting": "Halting",
    "exit_rule": "Exit rules",
    "layer": "Layers of decoders",
    "encoder_layer": "Layers of encoders",
    "residual": "Residuals",
    "feed_forward": "Feed-forwards",
    "norm": "Norms",
    "global_input": "Global inputs",
    "head": "Heads",
    "model": "Models",
}
"""Slot to title; slots without one are called by their name."""


def generate(docs: Path) -> None:
    """Write the pages into ``docs/parts``."""
    slots = sorted(kinds(), key=lambda slot: list(TITLES).index(slot) if slot in TITLES else len(TITLES))
    for slot in slots:
        write(docs / "parts" / f"{slot}.md", slot_page(slot))
    write(docs / "parts" / "index.md", overview(slots))


def slot_page(slot: str) -> str:
    """All kinds of a slot."""
    table = kinds()[slot]
    return page(
        f"# {_title(slot)}",
        f"{len(table)} kinds of the slot `{slot}`.",
        *(block for kind in table for block in _kind(slot, kind, table[kind])),
    )


def _title(slot: str) -> str:
    return TITLES.get(slot, slot.replace("_", " ").capitalize())


def _kind(slot: str, kind: str, config: type[Config]) -> Iterator[str]:
    yield f"(part-{slot}-{kind})=".replace("_", "-") + f"\n## `{kind}`"
    for name in (name for name, named in named_parts() if named is config):
        yield f"```{{eval-rst}}\n.. py:class:: kinformer.nn.{name}\n   :no-contents-entry:\n```"
    path = config.__module__.replace(".", "/")
    yield f"`{config.__module__}.{config.__qualname__}`, in `src/{path}.py`"
    if kind not in MEMBERS and (found := page_of(kind)):
        yield f"**Understand it:** [{found.title}](../annotated/{found.name}.md), one page of plain PyTorch."
    own = inspect.getdoc(built_by(config))
    text = described(config)
    yield from prose(text, typeset_formulas=slot in SLOTS)
    if own and own != text:
        yield from prose(own)
    rows = list(_settings(config))
    if rows:
        yield f"```{{table}}\n:class: settings\n\n{table(('setting', 'meaning', 'default', 'type'), rows)}\n```"


def prose(text: str, typeset_formulas: bool = False) -> Iterator[str]:
    """Paragraphs of a docstring; what is indented is formulas, or stands as it is."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            inner = [line[4:] for line in lines]
            yield html(typeset(inner)) if typeset_formulas else literal("\n".join(inner))
        else:
            yield papers(escaped(" ".join(paragraph.split())))


def _settings(config: type[Config]) -> Iterator[tuple[str, str, str, str]]:
    for each in fields(config):  # type: ignore[arg-type]
        default = each.default
        if isinstance(default, Config):
            shown = f"`{default.kind}`" if default.kind else "as it is"
        elif default is MISSING:
            shown = "needed" if each.default_factory is MISSING else "made"
        else:
            shown = f"`{default}`"
        kind = each.type if isinstance(each.type, str) else each.type.__name__
        yield f"`{each.name}`", escaped(meaning(config, each.name)), shown, f"`{kind}`".replace("|", "\\|")


def overview(slots: list[str]) -> str:
    """Slots with their kinds."""
    rows = [
        (f"[{_title(slot)}]({slot}.md)", f"`{slot}`", ", ".join(f"`{kind}`" for kind in kinds()[slot]))
        for slot in slots
    ]
    return page(
        "# Parts",
        "A model is put together from parts. Each has a *slot*, which says what kind of part it is, and a *kind*, its "
        "name there. `--set layers.*.mixer.position=rope` and `set={...}` in Python put a kind into a slot; with "
        'settings it is written `{"kind": "local", "window": 64}`.',
        table(("slot", "name", "kinds"), rows),
        contents(*slots),
    )
