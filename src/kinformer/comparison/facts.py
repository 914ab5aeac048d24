"""The fact sheet of an entrant: its members' records, its formula, its patterns, the bytes of its state."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from kinformer.comparison.entrants import Entrant
from kinformer.core.config import to_dict
from kinformer.estimation.state_size import state_bytes
from kinformer.family.table import member
from kinformer.figures.formulas import Formula, formulas
from kinformer.figures.text_picture import pictures

STATE_LENGTHS = (128, 256, 1024, 4096, 16384, 65536)
MOST_PATTERNS = 6


def facts(entrant: Entrant, config: Any) -> dict[str, Any]:
    """Return an entrant's fact sheet as data that JSON can hold; the model is built on the meta device."""
    with torch.device("meta"):
        model = config.build()
    limit = model.max_length
    lengths = [length for length in STATE_LENGTHS if limit is None or length <= limit] + ([limit] if limit else [])
    names = ("name", "title", "paper", "year", "axes", "causal", "growth", "departures", "exact_limit")
    records = [member(name) for name, _ in entrant.parts]
    return {
        "members": [{name: _plain(record.facts[name]) for name in names} for record in records],
        "config": to_dict(config),
        "formulas": [line for formula in formulas(config) for line in _lines(formula)],
        "max_length": limit,
        "state_bytes": {str(length): state_bytes(model, length) for length in sorted(set(lengths))},
        "patterns": pictures(model)[:MOST_PATTERNS],
        "needs": sorted({f"{name}={value}" for record in records for name, value in record.needs.items()}),
    }


def _lines(formula: Formula) -> list[str]:
    """Return a formula as lines of text, its slot and kind first."""
    return [f"{formula.slot.replace('_', ' ')} {formula.kind}", *(f"    {line}" for line in formula.lines)]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def settings_of(options: Any) -> dict[str, Any]:
    """The settings of a training, as JSON."""
    return {field.name: getattr(options, field.name) for field in fields(type(options))}
