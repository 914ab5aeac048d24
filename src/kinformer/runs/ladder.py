"""What minutes are spent on where rows are no parts of a running text: images, speech, translations, episodes.

Their rows cannot be cut to suit the time, so the recipe and the number of rows are what is left to choose. Both are
climbed from the cheapest on, each rung measured before the next is tried, as long as a run makes ``STEPS`` steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from kinformer.core.model_config import ModelConfig
from kinformer.family.table import member
from kinformer.runs.minutes import flags_between, measured_update
from kinformer.runs.options import TrainOptions
from kinformer.runtime.errors import KinformerError, spelled
from kinformer.runtime.words import plural
from kinformer.tasks.task import Task, TrainingPlan
from kinformer.training.loop import FORWARD_SHARE
from kinformer.training.pace import Pace
from kinformer.training.settings import WARM_UP_STEPS, Settings

STEPS = 10 * WARM_UP_STEPS
"""The fewest steps for which a dearer rung is taken. A judgement, not measured: ten warm-ups, so that the learning rate
falls for nine tenths of the run."""
RECIPES, ROWS = ("tiny", "small"), (0.25, 1.0)
"""From cheap to dear: recipes, and the share of the usual rows of a step."""
ROOM = 4.0
"""By how much a rung has to exceed ``STEPS`` before another recipe is tried, and measured. A judgement, not measured: a
step of ``small`` takes at least some four times as long as one of ``tiny``, so that with less room it would lose."""
PROBE_SHARE = 0.01


@dataclass(frozen=True)
class Rung:
    """``options`` with a recipe and a number of rows, and what one makes with them in the time: so many ``steps``."""

    options: TrainOptions
    flags: tuple[str, ...]
    steps: int

    @property
    def text(self) -> str:
        """What the time is worth here, and the flags that choose the same."""
        steps = plural(self.steps, "step")
        chosen = f"; chosen for that: {spelled(' '.join(self.flags))}" if self.flags else ""
        return f"kinformer: in {self.options.minutes:g} minutes about {steps} can be made{chosen}"


@dataclass
class Ladder:
    """Chooses the recipe and the rows that ``options`` leave open: ``requested``, with a vocabulary.

    plan: gives the training plan of options, or refuses them and their model. recipe: the config that is open to
    changes; None where the model is given. begun: since when the minutes count.
    """

    requested: TrainOptions
    options: TrainOptions
    task: Task
    plan: Callable[[TrainOptions], TrainingPlan]
    recipe: ModelConfig | None
    device: str
    begun: float

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
        option = self.options
        usual = int(option.batch_size or self.task.settings.get("batch_size") or Settings.batch_size)
        share = option.devices * option.accumulate
        shares = ROWS if option.batch_size is None else (1.0,)
        rows = {max(share, int(usual * part) // share * share) for part in shares}
        recipes = (
            [name for name in RECIPES if name in member(option.member).recipes] if self.recipe is not None else [None]
        )
        rungs = []
        for recipe, number in product(recipes, sorted(rows)):
            options = replace(
                option,
                recipe=option.recipe if recipe in (None, "small") else recipe,
                batch_size=option.batch_size if number == usual else number,
            )
            with suppress(KinformerError):
                self.plan(options)
                rungs.append((options, recipe or option.recipe or "small"))
        return rungs or [(option, option.recipe or "small")]

    def _measured(self, options: TrainOptions) -> Rung:
        budget = 60 * (options.minutes or 0)
        plan = self.plan(options)
        update, data = measured_update(plan, self.task, self.device)
        seconds = update.seconds_per_step(PROBE_SHARE * budget)
        left = budget - (time.monotonic() - self.begun)
        steps = Pace(seconds, FORWARD_SHARE * seconds * data.validations).steps(left)
        return Rung(options, tuple(flags_between(self.requested, options)), max(1, steps))
