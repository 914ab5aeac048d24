"""The record of a family member: data that the command line reads without importing PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from kinformer.runtime.errors import spelled

if TYPE_CHECKING:
    from kinformer.core.stack import ModelConfig
    from kinformer.models.decoder import Decoder

Growth = Literal["none", "constant", "window", "linear", "store"]
Cost = Literal["linear", "between", "quadratic"]
Recipe = Callable[[int | None], "ModelConfig"]
DecoderRecipe = Callable[[int | None], "Decoder.Config"]


class MemberSheet(TypedDict):
    """What a report shows of a member, as data for JSON."""

    name: str
    title: str
    paper: str
    year: int
    axes: Sequence[str]
    causal: bool
    growth: str
    departures: Sequence[str]
    exact_limit: str


class MemberFacts(MemberSheet):
    """A member's record as data for JSON."""

    use_when: str
    avoid_when: str
    cost: str
    recipes: list[str]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One page of the family.

    ``axes``: what it changes (projection, position, pattern, score, memory, rank, kernel, depth, recurrence, domain).
    ``growth``: of its state with the number of absorbed tokens. ``departures``: how it differs from its paper.
    ``exact_limit``: where it equals exact attention. ``parity``: implementations of others that it equals with the
    same weights, and the test that says so. ``results``: those of ``benchmarks/results`` that measured it without
    naming it. ``recipes``: name -> function of a vocabulary size (None: the recipe's own) that gives a model config; it
    imports what it assembles when called. ``objective``: what training it minimises unless set otherwise (see
    ``lab.training.settings``). ``needs``: options of training without which it is not itself, such as ``{"segments":
    True}``; a budget of minutes chooses the others (see ``lab.runs.minutes``). ``cost``: how the operations of a whole
    sequence grow with its length, where that does not follow from the growth (see :attr:`growth_of_cost`).
    ``use_when``, ``avoid_when``: clauses that say when to take it and when not, by its cost and by what was measured.
    ``training``: the options of training (``lab.training.settings``) with which the paper trained a recipe, by its
    name; they hold where nothing else is given. ``task``: what it is usually trained for, where that is neither the
    next token nor masked tokens. ``layer``: the number of the layer that shows its mechanism in the recipe ``small``,
    where layers differ.
    """

    name: str
    title: str
    paper: str
    year: int
    axes: tuple[str, ...]
    causal: bool
    growth: Growth
    departures: tuple[str, ...]
    exact_limit: str
    use_when: str = ""
    avoid_when: str = ""
    parity: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    recipes: Mapping[str, Recipe]
    objective: Literal["next-token", "deep-supervision", "exits"] = "next-token"
    needs: Mapping[str, object] = field(default_factory=dict)
    training: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    cost: Cost | None = None
    task: str | None = None
    layer: int = 0

    @property
    def usual_task(self) -> str:
        """Return the task that the member is trained for by default."""
        return self.task or ("next-token" if self.causal else "mlm")

    @property
    def growth_of_cost(self) -> Cost:
        """Return how the operations of a full sequence grow with its length: as
        the state does, unless stated otherwise."""
        return self.cost or ("linear" if self.growth in ("constant", "window") else "quadratic")

    @property
    def sheet(self) -> MemberSheet:
        """Return what a report shows of the member."""
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "year": self.year,
            "axes": self.axes,
            "causal": self.causal,
            "growth": self.growth,
            "departures": tuple(map(spelled, self.departures)),
            "exact_limit": self.exact_limit,
        }

    @property
    def facts(self) -> MemberFacts:
        """Return the record as data for JSON."""
        return {
            **self.sheet,
            "use_when": self.use_when,
            "avoid_when": self.avoid_when,
            "cost": self.growth_of_cost,
            "recipes": list(self.recipes),
        }
