"""The training loop: updates, validations and checkpoints, in a folder from which a run can be resumed at any moment.

A step depends on the weights, the optimiser's state, the carried states and the step's number alone. A checkpoint
holds them all, so a run that was killed and resumed ends with the same weights as an undisturbed run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.learning import OnlineLearner, Regularized, Resampled, due_for_resampling, regularization_metrics
from kinformer.core.model import modules_of
from kinformer.core.stack import units_of
from kinformer.core.state import State
from kinformer.lab.data.sampling import mix
from kinformer.lab.training import schedule
from kinformer.lab.training.checkpoint import (
    CHECKPOINTS,
    CONFIG,
    REGULAR,
    SHARDED,
    WEIGHTS,
    Best,
    Checkpoint,
    Checkpoints,
    Saves,
    removed,
)
from kinformer.lab.training.data_module import (
    PREDICTED,
    Batch,
    DataModule,
    Objective,
    ObjectiveModule,
    map_fields,
    require_metrics,
    rows_of,
    take_rows,
)
from kinformer.lab.training.distributed import (
    Group,
    Interrupt,
    average_gradients,
    check_divided,
    wrapped,
)
from kinformer.lab.training.layouts import UNDIVIDED
from kinformer.lab.training.logging import ENVIRONMENT_STEPS, Log, Metric, Result, Smoothing, TrainingProgress
from kinformer.lab.training.optimisers import MovingAverage, Optimiser, finite, gather, mean_weights, replaced
from kinformer.lab.training.settings import Settings
from kinformer.lab.training.shards import Part, part_of
from kinformer.runtime.compiling import is_sharded
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import is_here, reading
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import note

if TYPE_CHECKING:
    from kinformer.lab.runs.report import Reporter


# States carried from step to step: one per accumulated part of each process, stored in checkpoints by row.


class Carried:
    """The states of this process's ``parts`` accumulated parts; None before the first step. A checkpoint holds the
    leaves of all processes' parts, in the order of the global batch's rows, so that any number of processes can read
    them."""

    def __init__(self, parts: int) -> None:
        self.states: list[State] = [None] * parts
        self.cuts: list[int | None] = []

    def clear(self) -> None:
        """Reset all parts to the initial state."""
        self.states = [None] * len(self.states)

    def divide(self, whole: State, model: Any, group: Group) -> None:
        """Keep this process's heads of the carried states; leaves without heads are the same in all parts. ``whole`` is
        a state of the undivided model, ``model`` this process's part of the model."""
        pairs = zip(states.tensors(whole), states.tensors(model.initial_state(1)), strict=True)
        for leaf, fewer in pairs:
            dims = [dim for dim, (a, b) in enumerate(zip(leaf.shape, fewer.shape, strict=True)) if a != b]
            self.cuts.append(dims[0] if dims else None)
        if any(getattr(module, "context", 0) and hasattr(module, "combine") for module in model.modules()):
            raise KinformerError(
                "`parallel` tp: the state of the projections 'convolved' and 'kv_shift' holds heads of queries, keys "
                "and values side by side, so it cannot be carried by heads; train without `segments`, or leave tp out."
            )
        part = group.rank % group.tensor
        for index, state in enumerate(self.states):
            if state is not None:
                leaves = zip(states.tensors(state), self.cuts, strict=True)
                ours = [leaf if dim is None else leaf.chunk(group.tensor, dim)[part].clone() for leaf, dim in leaves]
                self.states[index] = rebuilt(state, ours)

    def tensors(self, group: Group) -> dict[str, Tensor]:
        """Return every leaf of every part on the first process, called ``"part.leaf"``; all processes take part."""
        if self.states[0] is None:
            return {}
        leaves_here = [leaf for state in self.states for leaf in states.tensors(state)]
        everyone = group.collect(leaves_here)
        per_part = len(leaves_here) // len(self.states)
        if self.cuts:
            cuts = self.cuts * len(self.states)
            parts = [everyone[begin : begin + group.tensor] for begin in range(0, len(everyone), group.tensor)]
            everyone = [
                [same[0] if dim is None else torch.cat(same, dim) for dim, *same in zip(cuts, *part, strict=True)]
                for part in parts
            ]
        # Processes that share the time of rows have the same states.
        flat = [leaf for leaves in everyone[:: group.context] for leaf in leaves]
        return {f"{i // per_part:04d}.{i % per_part:04d}": leaf.clone() for i, leaf in enumerate(flat)}

    def load(self, tensors: Mapping[str, Tensor], template: object, group: Group) -> None:
        """Restore this process's share of the tensors of :meth:`tensors`. ``template`` is any state of the model."""
        if not tensors:
            return
        rows: dict[str, list[Tensor]] = {}
        for name in sorted(tensors):
            rows.setdefault(name.split(".")[0], []).append(tensors[name])
        all_states = [rebuilt(template, leaves) for leaves in rows.values()]
        wanted = group.replicas * len(self.states)
        if len(all_states) != wanted:
            joint = states.join_rows(all_states)
            rows_of_all = torch.arange(next(states.tensors(joint)).shape[0])
            all_states = [states.select_rows(joint, some) for some in rows_of_all.chunk(wanted)]
        rank_states = all_states[group.replica * len(self.states) : (group.replica + 1) * len(self.states)]
        # Copied: the alignment of a tensor in memory can change the rounding of its sums, and files align otherwise.
        self.states = [states.fork(states.to(state, device=group.device)) for state in rank_states]


def rebuilt(template: object, leaves: list[Tensor]) -> State:
    """Return a state of ``leaves`` in the order of ``core.state.tensors``, structured as the ``template``."""
    if len(leaves) != len(list(states.tensors(template))):
        raise KinformerError(
            f"the checkpoint's carried state has {plural(len(leaves), 'tensor')} but this model's has "
            f"{len(list(states.tensors(template)))}; resume with the model that wrote it."
        )
    source: Iterator[Tensor] = iter(leaves)
    return states.map_tensors(lambda _: next(source), template)


# Validation of the present weights, on a fixed piece of the validation split.


def validate(engine: nn.Module, data: DataModule, group: Group) -> dict[str, float]:
    """Return the mean metrics over all predictions of ``engine``, a wrapped ``ObjectiveModule`` in training, on rows of
    ``data``, which are spread over the processes of ``group`` without a change of the result. Where ``data`` carries
    states, a batch begins with the state of the batch before."""
    engine.eval()
    if (means := data.validate()) is not None:
        engine.train()
        return means
    names = (PREDICTED, *data.sums)
    sums = torch.zeros(len(names), dtype=torch.float64, device=group.device)
    state: State = None
    with torch.no_grad():
        for batch in data.validation(group.replica, group.replicas):
            rows = map_fields(group.stretch_of(batch), lambda field: field.to(group.device))
            _, metrics, after = engine(rows, state, 1.0)
            state = after if data.carries else None
            del after  # it may be as large as the activations
            require_metrics(metrics, names)
            for index, name in enumerate(names):
                sums[index] += metrics[name]
    engine.train()
    predicted, *totals = group.sum(sums).tolist()
    return {name: total / predicted for name, total in zip(data.sums, totals, strict=True)}


Tensors = Mapping[str, Tensor]


class Storage:
    """The checkpoints and the best weights in a run's ``folder``, for the processes of ``group``, which call every
    method together.

    The first of ``metrics`` decides which weights are the best. The first process writes whole tensors; where the
    weights are sharded over processes, every process writes its part. With ``async_saves`` a thread writes copies while
    training continues: the same files, only later.
    """

    def __init__(self, folder: Path, settings: Settings, metrics: Sequence[Metric], group: Group) -> None:
        self.folder, self.settings, self.group = folder, settings, group
        self.layouts = UNDIVIDED
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, settings.keep, settings.average)
        self.best = Best(folder, metrics)
        self.home = folder.stat() if folder.exists() else None
        self.has_config = (folder / CONFIG).exists()
        self.saves = Saves(settings.async_saves)
        self.writers = group.with_new_channel() if settings.async_saves else group

    def save(self, step: int, groups: Mapping[str, Tensors], files: Mapping[str, Tensors], numbers: JsonObject) -> None:
        """Write a checkpoint of ``groups``, sharded as the weights are, and of ``files``, whole on the first process. A
        weight of NaN or infinity is an error, and nothing is written. Without best weights, these become the best."""
        self.saves.begin(step)
        if not self.group.sharded:
            gathered = {name: gather(tensors.items(), self.group.first) for name, tensors in groups.items()}
            whole = {name: tensors for name, tensors in {**gathered, **files}.items() if tensors or name == "optimizer"}
            self.group.on_first(lambda: self._require_finite_weights(step, whole["model"]))
            if self.best.step is None:
                self._add_best(step, {**gathered["model"], **gathered.get("average", {})})
            checkpoint = Checkpoint(step, whole, numbers)
            self.saves.add(lambda: self.writers.on_first(lambda: self.checkpoints.save(checkpoint)))
            return
        rows = {name: self.layouts.in_rows(tensors) for name, tensors in groups.items() if tensors}
        self.group.on_all(lambda: self._require_finite_weights(step, rows["model"]))
        if self.best.step is None:
            self._add_best_part(step, {**rows["model"], **rows.get("average", {})})
        named = {f"{group}/{name}": item for group, tensors in rows.items() for name, item in tensors.items()}
        parts, head = self._part(named), Checkpoint(step, {name: item for name, item in files.items() if item}, numbers)
        self.saves.add(lambda: self.checkpoints.save_sharded(head, parts, self.writers))

    def save_best(self, step: int, weights: Tensors) -> None:
        """Write ``weights``, with the sharding of the model's weights, as the best weights."""
        self.saves.begin(step)
        if self.group.sharded:
            self.group.on_all(self.require_home)
            self._add_best_part(step, self.layouts.in_rows(weights))
        else:
            self._add_best(step, gather(weights.items(), self.group.first))

    def require_finite(self, step: int, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Raise for a loss or a gradient norm of NaN or infinity; the first loss and norm belong to ``step``."""
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=step):
            if not (isfinite(loss) and isfinite(norm)):
                raise self.diverged(f"the loss is {loss:g} and the gradient's norm {norm:g} at step {number}")

    def diverged(self, what: str) -> KinformerError:
        """Return the error that ends a run with NaN or infinite numbers: ``what`` says where they appeared."""
        with suppress(KinformerError):
            self.saves.wait()
        steps = self.checkpoints.steps()
        remedy = f"the checkpoint of step {steps[-1]} is kept" if steps else "no checkpoint was written yet"
        return KinformerError(
            f"training diverged: {what}; {remedy}; start again with a lower `lr` (now {self.settings.lr:g}), "
            "a longer `warmup` or a smaller `clip`."
        )

    def _add_best(self, step: int, whole: Tensors) -> None:
        best = copy(self.best)  # the metrics of now

        def write() -> None:
            with self.checkpoints.reporting_failure(self.folder / WEIGHTS):
                best.write(whole, step)

        self.saves.add(lambda: self.writers.on_first(write))

    def _add_best_part(self, step: int, rows: Tensors) -> None:
        best, part = copy(self.best), self._part({f"model/{name}": tensor for name, tensor in rows.items()})

        def write() -> None:
            with self.checkpoints.reporting_failure(self.folder / SHARDED):
                best.write_sharded(part, step, self.writers)

        self.saves.add(write)

    def _part(self, tensors: Tensors) -> Part:
        part = part_of(tensors, self.group)
        if not self.saves.in_thread:
            return part
        # Under a mesh ``part_of`` has already copied sharded tensors, to put their rows in order: no second copy.
        return part.staged([name for name, item in tensors.items() if is_sharded(item)] if self.layouts.mesh else ())

    def _require_finite_weights(self, step: int, weights: Tensors) -> None:
        self.require_home()
        if not finite(weights):
            raise self.diverged(f"a weight is not finite after step {step}")

    def require_home(self) -> None:
        """Raise if the folder was moved or removed during training: writing would begin a second folder. A removal that
        meets a save leaves a folder without the config."""
        here = self.home is None or is_here(self.folder, self.home)
        if not here or (self.has_config and not (self.folder / CONFIG).exists()):
            raise removed(self.folder)


# One update: rows in, forward and backward in parts, gradients clipped, weights moved.

_FEATURES = 0x46454154
"""The constant in the seed of random features, which therefore differs from the seed of masks."""


class UpdateResult(NamedTuple):
    """The result of an update: ``loss`` and ``norm`` of the gradient, scalars; the means of the data's ``metrics`` over
    predictions; the ``size`` of all processes' rows."""

    loss: Tensor
    norm: Tensor
    metrics: Tensor
    size: int


class Updater:
    """The updates of the weights in ``engine``, an ``ObjectiveModule`` wrapped by ``lab.training.distributed``."""

    def __init__(
        self,
        engine: nn.Module,
        optimiser: Optimiser,
        carried: Carried,
        data: DataModule,
        settings: Settings,
        group: Group,
    ) -> None:
        self.engine, self.optimiser, self.carried, self.data = engine, optimiser, carried, data
        self.settings, self.group = settings, group
        settings.rows(group.replicas)  # raises where the replicas cannot share the rows
        self.resampled, self.online = modules_of(engine, Resampled), modules_of(engine, OnlineLearner)
        self.regularized = modules_of(engine, Regularized)

    def forget(self) -> None:
        """Reset the optimiser's state and the carried states, as before the first step."""
        self.optimiser.forget()
        self.carried.clear()

    def seconds_per_step(self, limit: float, clock: Callable[[], float] = time.monotonic) -> float:
        """Return the seconds of an update, measured for about ``limit`` seconds of ``clock``. The measured updates have
        the learning rate 0, and their other effects are undone."""
        buffers = [(buffer, buffer.clone()) for buffer in self.engine.buffers()]

        def clock_of_all() -> float:
            return self.group.largest(clock())[0]

        seconds = schedule.seconds_per_step(lambda step: float(self(step, 0.0, 0.0).loss), limit, clock_of_all)
        self.forget()
        for buffer, before in buffers:
            buffer.copy_(before)
        return seconds

    def __call__(self, step: int, rate: float, progress: float) -> UpdateResult:
        """Make update number ``step``; return the results of this process's rows, still on the device."""
        for number, module in due_for_resampling(self.resampled, step):  # random features, which all processes share
            module.draw(int(mix(self.settings.seed, _FEATURES, number, step)[0] >> np.uint64(1)))
            self.carried.clear()  # states made with the old features
        # The step's random masks depend on no earlier step, so that a resumed run draws the same.
        seed = int(mix(self.settings.seed, step, self.group.rank // self.group.tensor)[0])
        torch.default_generator.manual_seed(seed)
        if self.group.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        batch = self._batch(step)
        parts = self.settings.accumulate
        costs = []
        for part in range(parts):
            with self.group.exchange(self.engine, part == parts - 1):
                costs.append(self._part(part, batch, progress))
        average_gradients(self.engine)
        norm = self.optimiser.clip(self.settings.clip)
        self.optimiser.step(rate)
        for learner in self.online:
            learner.learn(self.group.sum)
        for bounded in self.regularized:
            bounded.constrain()
        loss, *metrics = torch.stack(costs).mean(dim=0)
        return UpdateResult(loss, norm.detach(), torch.stack(metrics), batch.size * self.group.copies)

    def _part(self, part: int, batch: Batch, progress: float) -> Tensor:
        size = rows_of(batch) // self.settings.accumulate
        rows = take_rows(batch, slice(part * size, (part + 1) * size))
        loss, metrics, state = self.engine(rows, self.carried.states[part], progress)
        if self.data.carries:
            self.carried.states[part] = states.detach(state)
        del state  # before the backward: it may be as large as the activations
        (loss / self.settings.accumulate).backward()
        require_metrics(metrics, self.data.sums)
        means = [metrics[name] / metrics[PREDICTED].clamp_min(1) for name in self.data.sums]
        return torch.stack([loss.detach(), *means])

    def _batch(self, step: int) -> Batch:
        batch = self.group.stretch_of(self.data.batch(step, self.group.replica, self.group.replicas))
        if self.group.device.type == "cuda":
            batch = map_fields(batch, Tensor.pin_memory)
        return map_fields(batch, lambda field: field.to(self.group.device, non_blocking=True))


class Window:
    """The updates since the last reading, whose results stay on the device until the next reading, so that a step does
    not wait. ``speed``: tokens per second between the last two readings; ``overall``: over all, ``tokens`` in
    ``seconds``."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.updates: list[UpdateResult] = []
        self.speed = self.overall = self.seconds = 0.0
        self.tokens = 0
        self.restart()

    def read(self) -> tuple[list[float], list[float], list[list[float]]]:
        """Return the losses, norms and mean metrics of the steps since the last reading; this waits for the device."""
        if not self.updates:
            return [], [], []
        ours = torch.stack([torch.cat([done.loss[None], done.metrics]) for done in self.updates])
        losses, *metrics = self.group.mean(ours).T.tolist()
        norms = torch.stack([done.norm for done in self.updates])
        seconds, tokens = time.monotonic() - self._mark, sum(done.size for done in self.updates)
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        self.speed, self.overall = tokens / seconds, self.tokens / self.seconds
        self.updates = []
        self.restart()
        return losses, norms.tolist(), metrics

    def restart(self) -> None:
        """Restart the clock after work other than a step."""
        self._mark = time.monotonic()


class Trainer:
    """The trainer of ``model`` on ``data`` for ``objective``. It continues from the newest checkpoint in ``folder`` to
    the end of that checkpoint's stage (``lab.training.schedule``), to which ``model`` and ``data`` belong.

    ``model`` is any module that the objective can call; where the data carries states, it has ``initial_state(batch)``.
    The trainer changes ``model`` in place; with several processes the model belongs to the trainer from then on.
    ``quiet``: the trainer reports nothing. ``started_at``: when its minutes began, by ``time.monotonic()``; now if
    None. ``reporter`` draws samples, and writes the page with every checkpoint.
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
        reporter: Reporter | None = None,
    ) -> None:
        self.data, self.folder, self.group, self.reporter = data, folder, group, reporter
        self.smooth = Smoothing()
        self.silent = quiet or not group.first
        self.model = model.to(group.device).train()
        self.storage = Storage(folder, settings, data.metrics, group)
        self.checkpoints, self.best = self.storage.checkpoints, self.storage.best
        saved = self.checkpoints.load(group)
        place = str(self.checkpoints.path(saved.step)) if saved else ""
        self.stage = schedule.stage_at(settings, saved.step if saved else 0)
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
        data.begin(self.model, saved.files.get("rows", {}) if saved else {})
        if settings.compile:
            # By layers where engines or the objective look between them, else as a whole.
            by_layer = (group.world > 1 and group.strategy == "fsdp") or getattr(objective, "reads_hidden", False)
            for module in units_of(self.model) if by_layer else (self.model,):
                module.compile()
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
        self._restore(saved, started_at)

    def _restore(self, saved: Checkpoint | None, started_at: float | None) -> None:
        numbers = saved.numbers if saved else {}
        self.best.forget(self.stage.since)
        self.step = self.first_step = saved.step if saved else 0
        self.spent: float = numbers.get("seconds", 0.0)
        self.step_seconds: float = numbers.get("each_step", self.spent / max(1, self.step))
        self.saved_at = time.monotonic()
        self.started_at = self.saved_at if started_at is None else started_at
        self.rate = schedule.LearningRate(self.settings, self.stage, self.data.metrics[0], numbers, self.step)
        course = (numbers.get("total", 0), numbers.get("since", 0), numbers.get("share", 0.0))
        self.course = schedule.Course(self.settings.steps) if self.settings.steps else schedule.Course(*course)
        if saved and self.settings.steps and self.group.first:
            before = numbers["total"]
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
        most = 60 * (self.settings.minutes or math.inf) - self.seconds
        self.window = Window(self.group)
        self.group.on_first(self.checkpoints.tidy)
        self.log = Log(self.folder, self.step) if self.group.first else None
        with (
            Interrupt(self.group.world > 1, self.silent) as interrupt,
            TrainingProgress(self.total, self.step, quiet=self.silent, most=most) as progress,
            self.storage.saves,
        ):
            self.progress = progress
            try:
                if self.stage.count > 1 and self.step == self.stage.begin:
                    self.progress.say(str(self.stage))
                    if self.log:
                        self.log.write(self.step + 1, self.stage.record)
                self._steps(pace, interrupt)
            finally:
                if self.log:
                    self.log.close()
        self.group.on_first(self.storage.require_home)
        validation: dict[str, Any] = self.best.metrics or {self.data.metrics[0].name: None}
        speed, best_step = self.window.overall, self.best.step
        return Result(self.step, self.total, self.seconds, speed, validation, best_step, interrupt.signal)

    def _steps(self, pace: schedule.Pace | None, interrupt: Interrupt) -> None:
        validation = schedule.FORWARD_SHARE * self.data.validations
        validate_every, checkpoint_every = pace.every if pace else self.settings.cadences(self.total, validation)
        look, border = self.step + 1, self.stage.end
        if self._out_of_patience(validate_every):  # it had ended before it was resumed
            self.course.revise(self.step, self.step)
        while self.step < self.total:
            rate = self.rate(at := self.course.at(self.step), self.total)
            self.window.updates.append(self.update(self.step, rate, at / self.total))
            self.moving.update(self.step)
            self.step += 1
            if pace and self.step >= look:
                look = self._look(pace)
            stopped, over, old = self._agree(interrupt, pace.end if pace else 0.0)
            last = over or self.step >= self.total
            validates = validate_every and (last or self.step % validate_every == 0)
            due = bool(checkpoint_every) and self.step % checkpoint_every == 0
            saves = last or stopped or old or due or self.step == border
            if validates or saves or self.step % self.settings.log_every == 0:
                self._report(rate)
            validating = schedule.seconds_of(self._validate) if validates else 0.0
            if self.settings.sample_every and (last or self.step % self.settings.sample_every == 0):
                validating += schedule.seconds_of(self._sample)
            if validates and not last and self._out_of_patience(validate_every):
                last = saves = True
            if last:
                self._finish(bool(validate_every))
            saving = schedule.seconds_of(self._save, due) if saves else 0.0
            if validating or saves:
                self.window.restart()
                if pace:
                    pace.spent(validating, saving, self.storage.saves.seconds)
            if stopped or last or self.step == border:
                interrupt.signal = stopped
                break

    def _look(self, pace: schedule.Pace) -> int:
        """Update the estimate of the steps that fit in the minutes; return the step of the next estimate: after a tenth
        of the rest, but at most ``LOOKS`` times."""
        pace.look(self.step, time.monotonic())
        total = self.group.on_first(lambda: self.step + pace.steps(60 * (self.settings.minutes or 0) - self.seconds))
        self.course.revise(self.step, max(self.step, total))
        self.progress.expect(self.total)
        return self.step + max(1, (self.total - self.step) // 10, self.total // schedule.LOOKS)

    def _out_of_patience(self, validate_every: int) -> bool:
        """Return whether the last ``patience`` validations were not better than the best."""
        patience, best = self.settings.patience, self.best.step
        if not patience or best is None or self.step - best < patience * validate_every:
            return False
        self.progress.say(f"the run ends: {plural(patience, 'validation')} since step {best}, none better")
        return True

    def _agree(self, interrupt: Interrupt, end: float) -> tuple[int, bool, bool]:
        """Return the received signal, whether the time is over, and whether to save: the same in all processes."""
        if self.group.world > 1 and self.step % self.settings.log_every:
            return 0, False, False
        limit = 60 * (self.settings.minutes or math.inf) - end
        age = 60 * (self.settings.checkpoint_minutes or math.inf)
        signal, over, old, failed = self.group.largest(
            interrupt.signal, self.seconds >= limit, time.monotonic() - self.saved_at >= age, self.storage.saves.failed
        )
        if failed:
            self.storage.saves.wait()
        return int(signal), bool(over), bool(old)

    def _report(self, rate: float) -> None:
        """Report the losses since the last report; a loss of NaN or infinity ends the run."""
        losses, norms, sums = self.window.read()
        self.storage.require_finite(self.step - len(losses) + 1, losses, norms)
        if not losses:
            return
        mean = sum(losses) / len(losses)
        means = {name: sum(item) / len(item) for name, item in zip(self.data.sums, sums, strict=True)}
        metrics = {**self.data.measured(means, "train"), **regularization_metrics(self.regularized)}
        text = f"train, smoothed {self._text(self.smooth(metrics))}"
        self.progress.update(self.step, text, self.window.tokens, self.window.seconds)
        if self.log:
            values = {"loss": losses[-1], "mean_loss": mean, **metrics, "lr": rate, "gradient_norm": norms[-1]}
            self.log.write(self.step, values | {"tokens_per_second": self.window.speed, "seconds": self.seconds})

    def _text(self, metrics: Mapping[str, float]) -> str:
        texts = [metric.text(metrics[metric.name]) for metric in self.data.metrics]
        acted = [f"{metrics[ENVIRONMENT_STEPS]:,.0f} environment steps"] if ENVIRONMENT_STEPS in metrics else []
        return ", ".join(texts + acted)

    def _finish(self, measures: bool) -> None:
        """Do all work before the last checkpoint, which marks the run as finished. A run killed here repeats it."""
        if self.step < self.total:  # the time or the patience is over
            self.course.revise(self.step, self.step)
        self.storage.saves.wait()
        earlier = self.checkpoints.regular_steps()[-(self.settings.average - 1) :] if self.settings.average > 1 else []
        if measures and earlier:
            with replaced(self.model, mean_weights(self.model, self.checkpoints, earlier, self.layouts)):
                self._measure(f"mean of {plural(len(earlier) + 1, 'checkpoint')}", "averaged")

    def _sample(self) -> None:
        """Log and show a sample of the present weights."""
        if self.reporter is None or self.group.world > 1:
            return
        with self.moving.applied():
            sample = self.reporter.sample(self.step)
        if sample and self.log:
            self.log.write(self.step, sample)
            self.progress.say(f"step {self.step}/{self.total}  sample: {sample['sample'].strip()}")

    def _validate(self) -> None:
        with self.moving.applied():
            metrics = self._measure("validation", "validation")
        if self.rate.falls(metrics):
            self.progress.say(f"the learning rate falls by the factor {self.settings.plateau_factor:g}")

    def _measure(self, what: str, prefix: str) -> dict[str, float]:
        """Validate the present weights, write them if they are the best, and return their metrics."""
        means = validate(self.engine, self.data, self.group)
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
        groups["optimizer"] = dict(self.update.optimiser.tensors())
        if self.window.seconds:
            self.step_seconds = self.window.seconds / (self.step - self.first_step)
        times = {"seconds": self.seconds, "each_step": self.step_seconds, REGULAR: due}
        numbers = vars(self.course) | self.rate.state | times
        self.storage.save(self.step, groups, files, numbers)
        self.saved_at = time.monotonic()
        if self.reporter:
            self.reporter.write()

    def _pace(self) -> schedule.Pace:
        """Return the pace of the run: how many steps fit in the minutes, and how often to validate and to save."""
        budget = 60 * (self.settings.minutes or 0)
        seconds = self.step_seconds if self.step else self.update.seconds_per_step(schedule.PROBE_SHARE * budget)
        per_step = self.group.on_first(lambda: seconds)
        pace = schedule.Pace(per_step, schedule.FORWARD_SHARE * per_step * self.data.validations)
        if self.step >= self.total:  # a new run, or a finished run with more minutes
            left = self.group.on_first(lambda: (budget - self.seconds, budget - self.spent))
            more = pace.steps(left[0]) or min(1, pace.steps(left[1]))  # at least one step after a slow start
            self.course = schedule.Course(max(1, self.step + more))
        validate_every, checkpoint_every = self.settings.cadences(self.total)
        if self.settings.validate_every is None:
            validate_every = -(-self.total // pace.validations(budget))
        pace.every = (validate_every, checkpoint_every)
        return pace
