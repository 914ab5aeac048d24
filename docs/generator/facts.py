"""The fact sheet of a member: parameters of its recipes, what a token costs by length, how its state grows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kinformer.family.build import configure
from kinformer.family.record import Member
from kinformer.lab.comparison.report import Chart, Series, svg
from kinformer.lab.estimation.estimate import estimate, state_bytes
from kinformer.runtime.errors import KinformerError

RECIPE = "small"
LENGTHS = (256, 1024, 4096)
"""Tokens of a row for which FLOPs and memory are estimated."""
STATE_LENGTHS = (64, 256, 1024, 4096, 16384, 65536)
YARDSTICK = "rope"
"""Plain attention, without an end of its positions."""


@dataclass(frozen=True)
class Costs:
    """Of one row of so many tokens: FLOPs of a forward per token at inference and in ``training``, bytes that training
    keeps, bytes of the state."""

    length: int
    flops: float
    training: float
    activations: int
    state: int


@dataclass(frozen=True)
class Facts:
    """Of the recipe that pages show."""

    limit: int | None
    parameters: int
    costs: tuple[Costs, ...]
    states: tuple[tuple[int, int], ...]


@cache
def config_of(name: str) -> Any:
    """The recipe that pages show."""
    return configure(name, RECIPE)


@cache
def facts(name: str) -> Facts:
    """Estimated on shapes, nothing is computed."""
    config = config_of(name)
    with torch.device("meta"):
        model = config.build()
    ends = (model.max_length, getattr(model, "max_source_length", None))
    limit = min((end for end in ends if end is not None), default=None)
    rows = []
    for length in _within(LENGTHS, config.input.length or limit, only=config.input.length):
        try:
            found = estimate(config, length=length)
        except KinformerError:  # a length that its input does not have
            continue
        rows.append(
            Costs(
                length,
                found.flops_inference / length,
                found.flops_forward / length,
                found.memory["train"]["activations"],
                found.state_bytes,
            )
        )
    lengths = _within(STATE_LENGTHS, limit) if config.protocol.__name__ != "WholeModel" else ()
    states = tuple((length, state_bytes(model, length)) for length in lengths)
    return Facts(limit, sum(each.numel() for each in model.parameters()), tuple(rows), states)


def _within(lengths: tuple[int, ...], limit: int | None, only: int | None = None) -> tuple[int, ...]:
    if only is not None:
        return (only,)
    found = tuple(length for length in lengths if limit is None or length < limit)
    return found if limit is None or limit > max(lengths) else (*found, limit)


def recipe_parameters(member: Member) -> list[tuple[str, int, int, int]]:
    """(recipe, parameters, width, layers) of every recipe."""
    rows = []
    for name, recipe in member.recipes.items():
        config = recipe(None)
        with torch.device("meta"):
            model = config.build()
        rows.append((name, sum(each.numel() for each in model.parameters()), config.dim, len(config.uses)))
    return rows


def state_chart(name: str) -> str:
    """How the state of one row grows, beside plain attention's, as SVG."""
    own = facts(name).states
    if not own:
        return ""
    series = [_series(name, 0, own)]
    if name != YARDSTICK:
        series.append(_series(f"{YARDSTICK} (plain attention)", 1, facts(YARDSTICK).states))
    chart = Chart(f"state-{name}", "State of one row", "tokens absorbed", "bytes", series, log="xy")
    return svg(chart)


def flops_chart(name: str) -> str:
    """What a token costs at inference, by length, beside plain attention, as SVG."""
    own = [(cost.length, cost.flops) for cost in facts(name).costs]
    if len(own) < 2:
        return ""
    series = [_series(name, 0, own)]
    if name != YARDSTICK:
        plain = [(cost.length, cost.flops) for cost in facts(YARDSTICK).costs]
        series.append(_series(f"{YARDSTICK} (plain attention)", 1, plain))
    title = "FLOPs of a forward at inference per token"
    chart = Chart(f"flops-{name}", title, "tokens", "FLOPs per token", series, log="xy")
    return svg(chart)


def _series(name: str, index: int, points: Any) -> Series:
    return Series(name, index, [(float(x), float(y), f"{x:,}: {y:,.0f}") for x, y in points])
