"""The training loop: updates, validations and checkpoints, in a folder from which it can go on at any moment.

What a step does is a function of the weights, the optimiser's state, the carried states and the step's number alone.
All of that is in a checkpoint, so a run that was killed and resumed ends with the weights of one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from kinformer.core.learning import regularization_metrics
from kinformer.runtime.files import reading
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural
from kinformer.training.averaging import MovingAverage, mean_weights, replaced
from kinformer.training.carried import Carried
from kinformer.training.checkpoint import REGULAR, Checkpoint
from kinformer.training.data_module import DataModule
from kinformer.training.diloco import Rounds
from kinformer.training.distributed import Group
from kinformer.training.engines import check_divided, compile_units, wrapped
from kinformer.training.interrupt import Interrupt
from kinformer.training.logging import Log, Silence, TrainingProgress
from kinformer.training.objective import Objective, ObjectiveModule
from kinformer.training.optimiser import Optimiser
from kinformer.training.pace import FORWARD_SHARE, PROBE_SHARE, Course, Pace, seconds_of
from kinformer.training.result import Result
from kinformer.training.schedule import LearningRate
from kinformer.training.settings import Settings
from kinformer.training.stages import stage_at
from kinformer.training.storage import Storage
from kinformer.training.update import Updater, Window
from kinformer.training.validation import Validation


class Trainer:
    """The trainer of ``model`` on ``data`` for ``objective``; it goes on from the newest checkpoint in ``folder`` to
    the end of that checkpoint's stage (``training.stages``), to which ``model`` and ``data`` belong.

    ``model`` is any module that the objective can call; where the data carries, one with ``initial_state(batch)``. It
    is changed in place; with several processes it belongs to the trainer from then on. ``quiet``: it reports nothing.
    ``started_at``: when its minutes began, by ``time.monotonic()``; now if None.
    """

    def __init__(
        self,
        model: nn.Module,
        data: DataModule,
        objective: Objective,
        settings: Settings,
        folder: Path,
        group: Group,
        quiet: bool = False,
        started_at: float | None = None,
    ) -> None:
        self.data, self.folder, self.group = data, folder, group
        self.silent = quiet or not group.first
        self.model = model.to(group.device).train()
        self.storage = Storage(folder, settings, data.metrics, group)
        self.checkpoints, self.best = self.storage.checkpoints, self.storage.best
        saved = self.checkpoints.load(group)
        place = str(self.checkpoints.path(saved.step)) if saved else ""
        self.stage = stage_at(settings, saved.step if saved else 0)
        self.settings = settings = self.stage.settings
        carried = Carried(settings.accumulate)
        check_divided(data, objective, settings, group)
        whole = ObjectiveModule(self.model, objective, settings.precision)
        self.extras = whole.extras.to(group.device)
        if saved:
            saved.into("model", self.model, place)
            saved.into("objective", self.extras, place)
            if saved.step > self.stage.begin and (states := saved.files.get("carried")):
                with reading(place, "holds states of another model", "use its own run folder"):
                    carried.load(states, model.initial_state(1), group)  # type: ignore[operator]
        self.rounds = Rounds(self.model, self.extras, settings, group)
        saved = self.rounds.begin(saved, place)
        data.begin(self.model, saved.files.get("rows", {}) if saved else {})
        if settings.compile:
            compile_units(self.model, objective, group)
        undivided = self.model.initial_state(1) if group.tensor > 1 and data.carries else None  # type: ignore[operator]
        self.regularized, self.engine = whole.regularized, wrapped(whole, group, data.carries)
        self.layouts = self.storage.layouts = whole.layouts
        if undivided is not None:
            carried.divide(undivided, self.model, group)
        optimiser = Optimiser(self.model, settings, self.extras, self.layouts)
        self.moving = MovingAverage(self.model, settings.ema, self.layouts)
        if saved:
            with reading(place, "holds an optimiser of another model", "use its own run folder"):
                optimiser.load(saved.read("optimizer", optimiser.rooms(saved.forms("optimizer"))), place)
                self.moving.load_state_dict(saved.read("average", self.moving.rooms()))
        self.update = Updater(self.engine, optimiser, carried, data, settings, group)
        self.validation = Validation(data, group)
        self._restore(saved, started_at)

    def _restore(self, saved: Checkpoint | None, started_at: float | None) -> None:
        numbers = saved.numbers if saved else {}
        self.best.forget(self.stage.since)
        self.step = self.first_step = saved.step if saved else 0
        self.spent: float = numbers.get("seconds", 0.0)
        self.step_seconds: float = numbers.get("each_step", self.spent / max(1, self.step))
        self.saved_at = time.monotonic()
        self.started_at = self.saved_at if started_at is None else started_at
        self.rate = LearningRate(self.settings, self.stage, self.data.metrics[0], numbers, self.step)
        course = (numbers.get("total", 0), numbers.get("since", 0), numbers.get("share", 0.0))
        self.course = Course(self.settings.steps) if self.settings.steps else Course(*course)
        if saved and self.settings.steps and self.group.first:
            self._tell_stretched(numbers["total"])

    def _tell_stretched(self, before: int) -> None:
        """Note where the learning rate jumps because the run had ``before`` steps when it was stopped."""
        was, rate = (self.rate(self.step, total) for total in (before, self.total))
        if self.step < self.total and not math.isclose(was, rate, rel_tol=0.01):
            note(
                f"note: the schedule spans {plural(self.total, 'step')} from here on, and spanned {before:,}: the "
                f"learning rate at step {self.step} is {rate:.3g} instead of {was:.3g}."
            )

    @property
    def total(self) -> int:
        """Return the steps of the whole run, as far as they can be foreseen."""
        return self.course.total

    @property
    def seconds(self) -> float:
        """Return the wall time of the run so far, over all times it was resumed."""
        return self.spent + time.monotonic() - self.started_at

    def run(self) -> Result:
        """Train to the end of the stage, or until the time is over or a signal comes."""
        pace = self._pace() if self.settings.minutes else None
        self.window = Window(self.group)
        self.group.on_first(self.checkpoints.tidy)
        self.log = Log(self.folder, self.step) if self.group.first else None
        with (
            Interrupt(self.group.world > 1, self.silent) as interrupt,
            Silence() if self.silent else TrainingProgress(self.total, self.step) as progress,
            self.storage.saves,
        ):
            self.progress = progress
            try:
                self._begin_stage()
                self._steps(pace, interrupt)
            finally:
                if self.log:
                    self.log.close()
        return Result(
            steps=self.step,
            total=self.total,
            seconds=self.seconds,
            tokens_per_second=self.window.overall,
            validation=self.best.metrics or {self.data.metrics[0].name: None},
            best_step=self.best.step,
            signal=interrupt.signal,
        )

    def _steps(self, pace: Pace | None, interrupt: Interrupt) -> None:
        validation = FORWARD_SHARE * self.data.validations
        validate_every, checkpoint_every = pace.every if pace else self.settings.cadences(self.total, validation)
        look, border = self.step + 1, self.stage.end
        if self._out_of_patience(validate_every):  # it had ended before it was resumed
            self.course.revise(self.step, self.step)
        while self.step < self.total:
            rate = self.rate(at := self.course.at(self.step), self.total)
            self.window.add(self.update(self.step, rate, at / self.total))
            self.moving.update(self.step)
            self.step += 1
            if pace and self.step >= look:
                look = self._look(pace)
            stopped, over, old = self._agree(interrupt, pace.end if pace else 0.0)
            last = over or self.step >= self.total
            validates = validate_every and (last or self.step % validate_every == 0)
            due = bool(checkpoint_every) and self.step % checkpoint_every == 0
            saves = last or stopped or old or due or self.step == border
            self.rounds.after(self.step, last or self.step == border)
            if validates or saves or self.step % self.settings.log_every == 0:
                self._report(rate)
            validating = seconds_of(self._validate) if validates else 0.0
            if validates and not last and self._out_of_patience(validate_every):
                last = saves = True
            if last:
                self._finish(bool(validate_every))
            saving = seconds_of(self._save, due) if saves else 0.0
            if validates or saves:
                self.window.restart()
                if pace:
                    pace.spent(validating, saving, self.storage.saves.seconds)
            if stopped or last or self.step == border:
                interrupt.signal = stopped
                break

    def _begin_stage(self) -> None:
        """Report a stage where its first update comes next; the record stands at that update's step."""
        if self.stage.count > 1 and self.step == self.stage.begin:
            self.progress.say(str(self.stage))
            if self.log:
                self.log.write(self.step + 1, self.stage.record)

    def _look(self, pace: Pace) -> int:
        """Estimate again how many steps the minutes buy; return the step after which to do so next."""
        pace.look(self.step, time.monotonic())
        total = self.group.on_first(lambda: self.step + pace.steps(60 * (self.settings.minutes or 0) - self.seconds))
        self.course.revise(self.step, max(self.step, total))
        self.progress.expect(self.total)
        return pace.next_look(self.step, self.total)

    def _out_of_patience(self, validate_every: int) -> bool:
        """Return whether as many validations as the patience were no better than the best one."""
        if ended := self.best.out_of_patience(self.step, self.settings.patience, validate_every):
            validations = plural(self.settings.patience, "validation")
            self.progress.say(f"the run ends: {validations} since step {self.best.step}, none better")
        return ended

    def _agree(self, interrupt: Interrupt, end: float) -> tuple[int, bool, bool]:
        """Return the signal that came, whether the time is over, and whether to save: the same everywhere."""
        if self.group.world > 1 and self.step % self.settings.log_every:
            return 0, False, False
        limit = 60 * (self.settings.minutes or math.inf) - end
        age = 60 * (self.settings.checkpoint_minutes or math.inf)
        signal, over, old, failed = self.group.largest(
            interrupt.signal,
            self.seconds >= limit,
            time.monotonic() - self.saved_at >= age,
            self.storage.saves.failed,
        )
        if failed:
            self.storage.saves.wait()
        return int(signal), bool(over), bool(old)

    def _report(self, rate: float) -> None:
        """Report the losses since the last time; a loss that is not finite ends the run."""
        losses, norms, sums = self.window.read()
        self.storage.require_finite(self.step - len(losses) + 1, losses, norms)
        if not losses:
            return
        mean = sum(losses) / len(losses)
        means = {name: sum(item) / len(item) for name, item in zip(self.data.sums, sums, strict=True)}
        metrics = {**self.data.measured(means, "train"), **regularization_metrics(self.regularized)}
        self.progress.update(self.step, self._text(metrics), self.window.tokens, self.window.seconds)
        if self.log:
            values = {"loss": losses[-1], "mean_loss": mean, **metrics, "lr": rate, "gradient_norm": norms[-1]}
            self.log.write(self.step, values | {"tokens_per_second": self.window.speed, "seconds": self.seconds})

    def _text(self, metrics: Mapping[str, float]) -> str:
        return ", ".join(metric.text(metrics[metric.name]) for metric in self.data.metrics)

    def _finish(self, measures: bool) -> None:
        """Do all that belongs to the end of a run before the last checkpoint, which says that the run is over: a run
        that is killed here repeats its last steps and its end."""
        if self.step < self.total:  # the time or the patience is over
            self.course.revise(self.step, self.step)
        self.rounds.after(self.step, ends=True)
        self.storage.saves.wait()
        earlier = self.checkpoints.regular_steps()[-(self.settings.average - 1) :] if self.settings.average > 1 else []
        if measures and earlier:
            with replaced(self.model, mean_weights(self.model, self.checkpoints, earlier, self.layouts)):
                self._measure(f"mean of {plural(len(earlier) + 1, 'checkpoint')}", "averaged")

    def _validate(self) -> None:
        with self.rounds.applied(), self.moving.applied():
            metrics = self._measure("validation", "validation")
        if self.rate.falls(metrics):
            self.progress.say(f"the learning rate falls by the factor {self.settings.plateau_factor:g}")

    def _measure(self, what: str, prefix: str) -> dict[str, float]:
        """Validate the weights as they are, write them where they are the best, and return their metrics."""
        means = self.validation(self.engine)
        metrics = self.data.measured(means, "validation")
        self.progress.say(f"step {self.step}/{self.total}  {what} {self._text(metrics)}")
        if self.log:
            values = {f"{prefix}_{name}": metric for name, metric in metrics.items()}
            self.log.write(self.step, {f"{prefix}_loss": means[self.data.sums[0]]} | values)
        if self.best.improves(metrics):
            self.best.note(metrics, self.step)
            self.storage.save_best(self.step, self.model.state_dict())
        return metrics

    def _save(self, due: bool) -> None:
        groups = {"model": self.model.state_dict(), "average": self.moving.state_dict()}
        groups["objective"] = self.extras.state_dict()
        files = {"carried": self.update.carried.tensors(self.group), "rows": self.data.state_tensors()}
        files |= self.rounds.tensors(self.update.optimiser)
        groups["optimizer"] = dict(self.update.optimiser.tensors())
        if self.window.seconds:
            self.step_seconds = self.window.seconds / (self.step - self.first_step)
        times = {"seconds": self.seconds, "each_step": self.step_seconds, REGULAR: due}
        numbers = vars(self.course) | self.rate.state | times
        with self.rounds.applied():
            self.storage.save(self.step, groups, files, numbers)
        self.saved_at = time.monotonic()

    def _pace(self) -> Pace:
        """Return the pace of the run: how many steps the minutes buy, and how often to validate and to save."""
        budget = 60 * (self.settings.minutes or 0)
        seconds = self.step_seconds if self.step else self.update.seconds_per_step(PROBE_SHARE * budget)
        per_step = self.group.on_first(lambda: seconds)
        pace = Pace(per_step, FORWARD_SHARE * per_step * self.data.validations)
        if self.step >= self.total:  # none foreseen yet, or all made and minutes given for more
            left = self.group.on_first(lambda: (budget - self.seconds, budget - self.spent))
            more = pace.steps(left[0]) or min(1, pace.steps(left[1]))  # one at least, however slow the start was
            self.course = Course(max(1, self.step + more))
        validate_every, checkpoint_every = self.settings.cadences(self.total)
        if self.settings.validate_every is None:
            validate_every = -(-self.total // pace.validations(budget))
        pace.every = (validate_every, checkpoint_every)
        return pace
