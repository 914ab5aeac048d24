"""The description of a member or run, without computing anything: its record, config, sizes, formulas and pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from kinformer.core.config import to_dict
from kinformer.core.feed_forward import active_parameters
from kinformer.core.model import Model
from kinformer.core.model_config import ModelConfig
from kinformer.core.overrides import override
from kinformer.core.stack import Stack
from kinformer.estimation.state_size import state_bytes
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.record import Member, MemberFacts
from kinformer.family.table import FAMILY, member
from kinformer.figures.formulas import formulas, symbols
from kinformer.figures.text_picture import TextPicture, pictures
from kinformer.runs.run import open_run
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.fields import require_path
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.unallocated import unallocated
from kinformer.training.settings import Settings

if TYPE_CHECKING:
    from torch import nn

LENGTHS = (1, 128, 1024, 8192, 65536)
"""Tokens at which the bytes of the state are computed."""


class FormulaFacts(TypedDict):
    """The formula of a part: a sentence and lines of mathematics."""

    slot: str
    kind: str
    says: str
    lines: tuple[str, ...]


class ParameterFacts(TypedDict):
    """The numbers of parameters: in all, those that one token uses, and by part."""

    total: int
    active: int
    parts: dict[str, int]


class DescriptionFacts(MemberFacts):
    """A member's record and all that follows from a config. ``training``: the options of training that differ from the
    usual ones; ``computes``: formulas; ``symbols``: by a size's name here, the papers' symbol and the value;
    ``state_bytes``: of one row, by the tokens absorbed."""

    recipe: str
    training: JsonObject
    computes: list[FormulaFacts]
    symbols: dict[str, list[object]]
    config: JsonObject
    parameters: ParameterFacts
    max_length: int | None
    state_bytes: dict[str, int]
    patterns: list[TextPicture]


@dataclass(frozen=True, kw_only=True)
class Description:
    """A member in a recipe, or the model of a run: the member's record, the model's recipe and config, and the
    ``facts`` as data for JSON."""

    member: Member
    recipe: str
    config: ModelConfig
    facts: DescriptionFacts


def describe(
    name: str, recipe: str | None = None, vocab_size: int | None = None, changes: Mapping[str, object] | None = None
) -> Description:
    """Describe a member or a run; the public form is :func:`kinformer.show`."""
    record, recipe, config, training = subject_of(name, recipe, vocab_size, changes or {})
    with unallocated():
        model = config.build()
    facts: DescriptionFacts = {
        **record.facts,
        "recipe": recipe,
        "training": dict(record.training.get(recipe, {})) if training is None else training_of(training),
        "computes": [
            {"slot": item.slot, "kind": item.kind, "says": item.says, "lines": item.lines} for item in formulas(config)
        ],
        "symbols": {name: [symbol, value] for symbol, name, value in symbols(config)},
        "config": to_dict(config),
        "parameters": {
            "total": sum(parameter.numel() for parameter in model.parameters()),
            "active": active_parameters(model),
            "parts": _parameters(model),
        },
        "max_length": model.max_length,
        "state_bytes": {str(length): state_bytes(model, length) for length in _lengths(model)},
        "patterns": pictures(model),
    }
    return Description(member=record, recipe=recipe, config=config, facts=facts)


class Subject(NamedTuple):
    """The ``member``, ``recipe`` and ``config`` that a name stands for; ``training`` are a run's settings, None of a
    member."""

    member: Member
    recipe: str
    config: ModelConfig
    training: JsonObject | None


def training_of(settings: Mapping[str, object]) -> dict[str, object]:
    """Return a run's settings of training that are not the usual ones."""
    plain = {item.name: item.default for item in fields(Settings)}
    return {name: value for name, value in settings.items() if value != plain.get(name) and value not in ([], None)}


def subject_of(name: str, recipe: str | None, vocab_size: int | None, changes: Mapping[str, object]) -> Subject:
    """Return what a name of the family or a run folder stands for, with ``changes``."""
    require_path("member", name)
    if name not in FAMILY and "/" in name and not Path(name).is_dir():
        raise KinformerError(f"{name}: is no run folder, and no member has such a name; see: kinformer list.")
    if name in FAMILY or not Path(name).is_dir():
        record, recipe = member(name), recipe or "small"
        return Subject(record, recipe, configure(record.name, recipe, vocab_size, changes), None)
    run = open_run(name)
    for option, value in (("recipe", recipe), ("vocab_size", vocab_size)):
        if value is not None:
            raise KinformerError(f"{marked(option)} {value}: the run in {run.folder} has its own; leave it out.")
    config = override(run.config, changes, kinds())
    return Subject(member(run.member), run.recipe, config, run.training)


def _parameters(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters by part; equal parts of all layers are counted together."""
    parts: dict[str, int] = {}
    for name, child in model.named_children():
        inner = [(name, child)]
        if isinstance(child, Stack):
            inner = [(f"layers.*.{part}", item) for unit in child.units for part, item in unit.named_children()]
            inner.append(("shared", child.shared))
        for part, module in inner:
            parts[part] = parts.get(part, 0) + sum(parameter.numel() for parameter in module.parameters())
    return {part: count for part, count in parts.items() if count}


def _lengths(model: Model) -> list[int]:
    ends = (model.max_length, getattr(model, "max_source_length", None))
    limit = min((end for end in ends if end is not None), default=None)
    return [length for length in LENGTHS if limit is None or length < limit] + ([limit] if limit else [])
