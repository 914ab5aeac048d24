"""The record of a member. The command line reads records without importing PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

from kinformer.runtime.errors import spelled

if TYPE_CHECKING:
    from kinformer.core.stack import ModelConfig

Growth = Literal["none", "constant", "window", "linear", "store"]
Cost = Literal["linear", "between", "quadratic"]


class MemberSheet(TypedDict):
    """The facts of a member that reports show, as data for JSON."""

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
    """The record of a member: its paper, its facts and its recipes.

    ``axes`` are the changed parts of the Transformer: projection, position, pattern, score, memory, rank, kernel,
    depth, recurrence, domain. ``growth`` is the growth of the state with the number of absorbed tokens. ``departures``
    are the differences from the paper. ``exact_limit`` is the case in which the member equals exact attention.
    ``parity`` lists other implementations with the same outputs for the same weights, and the test of each.
    ``results`` are files of ``benchmarks/results`` that measured the member but do not contain its name. ``use_when``
    and ``avoid_when`` are clauses, founded on costs and measurements.

    ``recipes``: name -> :class:`~kinformer.family.recipe.Recipe`, or any function of a vocabulary size (None: the
    recipe's own) that returns a model config. ``layer``: the number of the layer that shows the mechanism in the recipe
    ``small``, where layers differ.

    ``objective``: the loss of training, unless set otherwise (see ``lab.training.settings``). ``needs``: options of
    training that the member requires, such as ``{"segments": True}``; a budget of minutes chooses the others (see
    ``lab.runs.minutes``). ``training``: recipe -> the options with which the paper trained it, as defaults. ``cost``:
    how the operations of a whole sequence grow with its length, if not as :attr:`growth_of_cost` derives it. ``task``:
    the usual task, if it is neither the next token nor masked tokens.
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
    recipes: Mapping[str, Callable[[int | None], ModelConfig]]
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
        """Return how the operations of a whole sequence grow with its length; without ``cost``, from ``growth``."""
        return self.cost or ("linear" if self.growth in ("constant", "window") else "quadratic")

    @property
    def sheet(self) -> MemberSheet:
        """Return the facts of the member that reports show."""
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
