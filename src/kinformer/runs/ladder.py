"""The recipe and rows of ``--minutes M`` where rows are no parts of a running text: images, speech, episodes.

Their rows cannot be cut to suit the time, so the recipe and the number of rows are what is left to choose. Both are
climbed from the cheapest on, each rung measured before the next is tried, as long as a run makes ``STEPS`` steps.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from kinformer.family.table import member
from kinformer.runs.choosing import Choosing, flags_between, measured_update
from kinformer.runs.options import TrainOptions
from kinformer.runtime.errors import KinformerError, spelled
from kinformer.runtime.words import plural
from kinformer.training.pace import FORWARD_SHARE, PROBE_SHARE, Pace
from kinformer.training.settings import WARM_UP_STEPS, Settings

STEPS = 10 * WARM_UP_STEPS
"""The fewest steps for which a dearer rung is taken. A judgement, not measured: ten warm-ups, so that the learning rate
falls for nine tenths of the run."""
RECIPES, ROWS = ("tiny", "small"), (0.25, 1.0)
"""From cheap to dear: recipes, and the share of the usual rows of a step."""
ROOM = 4.0
"""By how much a rung has to exceed ``STEPS`` before another recipe is tried, and measured. A judgement, not measured: a
step of ``small`` takes at least some four times as long as one of ``tiny``, so that with less room it would lose."""


@dataclass(frozen=True)
class Rung:
    """``options`` with a recipe and a number of rows, and what one makes with them in the time: this many ``steps``."""

    options: TrainOptions
    flags: tuple[str, ...]
    steps: int

    @property
    def text(self) -> str:
        """How many steps fit into the time here, and the flags that choose the same."""
        steps = plural(self.steps, "step")
        chosen = f"; chosen for that: {spelled(' '.join(self.flags))}" if self.flags else ""
        return f"kinformer: in {self.options.minutes:g} minutes about {steps} can be made{chosen}"


class Ladder(Choosing):
    """Chooses the recipe and the rows that the options leave open, for tasks that are not running text."""

    def choose(self) -> Rung:
        """The dearest rung that makes ``STEPS`` steps in the time, or the cheapest."""
        best: Rung | None = None
        for options, recipe in self._rungs():
            changes_recipe = best is not None and recipe != (best.options.recipe or "small")
            if best is not None and best.steps < STEPS * (ROOM if changes_recipe else ROWS[1] / ROWS[0]):
                break
            rung = self._measured(options)
            if best is not None and rung.steps < STEPS:
                break
            best = rung
        assert best is not None
        return best

    def _rungs(self) -> list[tuple[TrainOptions, str]]:
        """The options of every rung that can be planned, from cheap to dear, and the names of their recipes; those of
        the last are the usual ones."""
        wanted = self.options
        usual = int(wanted.batch_size or self.task.settings.get("batch_size") or Settings.batch_size)
        share = wanted.replicas * wanted.accumulate
        shares = ROWS if wanted.batch_size is None else (1.0,)
        rows = {max(share, int(usual * part) // share * share) for part in shares}
        recipes = (
            [name for name in RECIPES if name in member(wanted.member).recipes] if self.recipe is not None else [None]
        )
        rungs = []
        for recipe, number in product(recipes, sorted(rows)):
            options = replace(
                wanted,
                recipe=wanted.recipe if recipe in (None, "small") else recipe,
                batch_size=wanted.batch_size if number == usual else number,
            )
            with suppress(KinformerError):
                self.plan(options)
                rungs.append((options, recipe or wanted.recipe or "small"))
        return rungs or [(wanted, wanted.recipe or "small")]

    def _measured(self, options: TrainOptions) -> Rung:
        plan = self.plan(options)
        update, data = measured_update(plan, self.task, self.device)
        seconds = update.seconds_per_step(PROBE_SHARE * self.budget)
        steps = Pace(seconds, FORWARD_SHARE * seconds * data.validations).steps(self.left())
        return Rung(options, tuple(flags_between(self.requested, options)), max(1, steps))
