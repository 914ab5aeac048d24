"""Checkpoints: folders of safetensors and a JSON plan. A checkpoint exists whole or not at all, even after a crash.

``checkpoints/step-00000100/`` is filled under another name, flushed to the disk and renamed. The plan holds each file's
sha256 and the numbers of the run. One process writes whole tensors; processes that share the weights write a part each
(``lab/training/shards.py``). Any number of processes reads both. Nothing is a pickle.

With ``training.async_saves`` training pauses only for the copy to host memory, between two steps. A thread writes the
copy and commits it by the same rename. At most the saves of one step are in flight: the next save, the end of the run,
a signal and an error wait for them, and a failed save ends the run. The setting is off by default, because the copy
takes memory and the thread takes time from training where every core trains (``benchmarks/sharded_checkpoint.py``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kinformer.lab.training.lora import merge
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import (
    DIGEST,
    load_tensors,
    load_weights,
    read_json,
    reading,
    require_weights,
    save_tensors,
    sync_folder,
    write_json,
)
from kinformer.runtime.parsing import JsonObject, dump_json, parse_json, with_finite_numbers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kinformer.lab.training.distributed import Group
    from kinformer.lab.training.logging import Metric
    from kinformer.lab.training.shards import Part, Shards


T = TypeVar("T")
SCHEMA, SHARDED_SCHEMA = 1, 2
CHECKPOINTS, PLAN = "checkpoints", "plan.json"
CONFIG = "config.json"
"""The file of a run folder with the run's config."""
_NEEDED = frozenset({"model", "optimizer"})
_GROUPS = {"model", "average", "optimizer", "objective", "carried", "rows", "workers", "outer"}
_PREFIX, _PARTIAL = "step-", ".partial"
PAUSE = "KINFORMER_PAUSE"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. ``files``: named groups of whole tensors, on the CPU. ``shards``: the groups that all processes
    wrote together, a part each. ``numbers``: anything that JSON can hold."""

    step: int
    files: Mapping[str, Mapping[str, Tensor]]
    numbers: JsonObject
    shards: Shards | None = None

    def forms(self, name: str) -> Mapping[str, Tensor]:
        """Return the tensors of a group; sharded tensors come without their data."""
        return self.files.get(name, {}) if self.shards is None else self.shards.group(name)

    def into(self, name: str, module: nn.Module, place: str) -> None:
        """Load the group ``name`` into ``module``, whose parameters may be sharded where the checkpoint is."""
        if self.shards is None:
            load_weights(module, self.files.get(name, {}), place)
            return
        tensors = module.state_dict()
        require_weights({key: tuple(tensor.shape) for key, tensor in tensors.items()}, self.forms(name), place)
        self.shards.fill(name, tensors)

    def read(self, name: str, rooms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of a group: whole, or, where the checkpoint is sharded, ``rooms`` filled with them."""
        if self.shards is None:
            return self.files.get(name, {})
        self.shards.fill(name, rooms)
        return rooms


REGULAR = "regular"
"""The name of a checkpoint's number that tells whether the checkpoint was due by its step. Other checkpoints are made
for a signal, by the clock or at the end. The mean at the end takes regular checkpoints only, so that a run that was
stopped and resumed has the same mean as an undisturbed run."""


class Checkpoints:
    """The last ``keep`` checkpoints of a run, in ``folder``, and its last ``regular`` checkpoints that were due."""

    def __init__(self, folder: Path, keep: int, regular: int = 0) -> None:
        self.folder, self.keep, self.regular = folder, keep, regular

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order."""
        plans = self.folder.glob(f"{_PREFIX}*/{PLAN}")
        names = [plan.parent.name.removeprefix(_PREFIX) for plan in plans if plan.is_file()]
        return sorted(int(name) for name in names if name.isdigit())

    def regular_steps(self) -> list[int]:
        """Return the last ``regular`` steps whose checkpoint was due, in order."""
        result: list[int] = []
        for step in reversed(self.steps()):
            if len(result) == self.regular:
                break
            with reading(self.path(step) / PLAN):
                if read_json(self.path(step) / PLAN)["numbers"].get(REGULAR, True):
                    result.insert(0, step)
        return result

    def path(self, step: int) -> Path:
        """Return the folder of step ``step``."""
        return self.folder / f"{_PREFIX}{step:08d}"

    def save(self, checkpoint: Checkpoint) -> None:
        """Write ``checkpoint``, then remove all checkpoints but the newest ``keep`` and the regular checkpoints. A
        failure leaves the earlier checkpoints unchanged and is reported in one sentence."""
        partial = self._partial(checkpoint.step)
        try:
            with self.reporting_failure(self.path(checkpoint.step)):
                self._make(partial)
                self._commit(partial, checkpoint)
        except KinformerError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.tidy()

    def save_sharded(self, checkpoint: Checkpoint, part: Part, group: Group) -> None:
        """Write the first process's ``checkpoint`` and the ``part`` of each of ``group``; all must call together."""
        from kinformer.lab.training.shards import SHARDS, Shards

        place, partial = self.path(checkpoint.step), self._partial(checkpoint.step)

        def report(work: Callable[[], T]) -> T:
            with self.reporting_failure(place):
                return work()

        def commit() -> None:
            sync_folder(partial / SHARDS)
            written = {name: digest for files in digests for name, digest in files.items()}
            self._commit(partial, checkpoint, Shards(partial / SHARDS, written, part.aliases))

        try:
            group.on_first(lambda: report(lambda: self._make(partial)))
            digests = group.on_all(lambda: report(lambda: part.write(partial, group.rank)))
            group.on_first(lambda: report(commit))
        except KinformerError:
            group.on_first(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise
        group.on_first(self.tidy)

    def _make(self, partial: Path) -> None:
        """Create the folder ``partial``, but not the run folder, which may have been removed during training."""
        self.folder.mkdir(exist_ok=True)
        self.clean()
        partial.mkdir()

    def _partial(self, step: int) -> Path:
        return self.folder / f".{_PREFIX}{step:08d}{_PARTIAL}"

    def _commit(self, partial: Path, checkpoint: Checkpoint, shards: Shards | None = None) -> None:
        """Fill the folder ``partial`` with all but the ``shards`` there, and rename it."""
        final = self.path(checkpoint.step)
        files = checkpoint.files.items()
        digests = {name: save_tensors(partial / f"{name}.safetensors", tensors) for name, tensors in files}
        plan = {"schema": SCHEMA, "step": checkpoint.step, "files": digests, "numbers": dict(checkpoint.numbers)}
        if shards is not None:
            plan |= {"schema": SHARDED_SCHEMA, "shards": shards.plan}
        plan = with_finite_numbers(plan)
        write_json(partial / PLAN, plan | {"sha256": _digest(plan)})
        _pause("before-fsync")
        sync_folder(partial)
        _pause("before-rename")
        self._remove(final)
        partial.rename(final)
        sync_folder(self.folder)

    def load(self, group: Group | None = None) -> Checkpoint | None:
        """Return the newest checkpoint, verified to the last byte; None if there is none. The processes of ``group``
        share the work of verifying shards, so all must call together."""
        steps = self.steps()
        if not steps:
            return None
        folder = self.path(steps[-1])
        try:
            return self.read(steps[-1], group)
        except KinformerError as error:
            remedy = f"from step {steps[-2]}" if len(steps) > 1 else "from the beginning"
            reason = str(error).rstrip(".")
            raise KinformerError(f"{reason}; or delete the folder {folder} to resume {remedy}.") from None

    def read(
        self, step: int, group: Group | None = None, required: frozenset[str] = _NEEDED, verified: bool = True
    ) -> Checkpoint:
        """Return the checkpoint of step ``step`` with the groups ``required``; ``verified``: by all bytes of shards."""
        folder = self.path(step)
        with reading(folder / PLAN):
            plan = read_json(folder / PLAN)
            if not isinstance(plan, dict) or plan.get("schema") not in (SCHEMA, SHARDED_SCHEMA):
                raise KinformerError(f"{folder / PLAN}: is not of schema {SHARDED_SCHEMA} or before, as it must be")
            if plan.pop("sha256") != _digest(plan):
                raise KinformerError(f"{folder / PLAN}: is damaged (it does not match its checksum)")
            shards = None
            if plan["schema"] != SCHEMA:
                from kinformer.lab.training.shards import open_shards

                shards = open_shards(folder, plan["shards"])
            names = plan["files"].keys() | ({path.split("/")[0] for path in shards.forms} if shards else set())
            _check(plan, step, names, required)
            files = {}
            for name, digest in plan["files"].items():
                files[name], metadata = load_tensors(folder / f"{name}.safetensors")
                if metadata.get(DIGEST) != digest:
                    raise KinformerError(
                        f"{folder / name}.safetensors: differs from the checkpoint's plan; restore it from a copy."
                    )
        if shards and group and verified:
            group.on_all(lambda: shards.verify(group.rank, group.world))
        elif shards and verified:
            shards.verify()
        return Checkpoint(step, files, plan["numbers"], shards)

    def weights(self, step: int, model: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights of step ``step``: whole tensors, or shards with the sharding of the tensors ``model``."""
        import torch

        with reading(self.path(step) / PLAN):
            whole = read_json(self.path(step) / PLAN)["schema"] == SCHEMA
        if whole:
            return load_tensors(self.path(step) / "model.safetensors")[0]
        rooms = {name: torch.empty_like(weight, requires_grad=False) for name, weight in model.items()}
        return self.read(step, verified=False).read("model", rooms)

    def tidy(self) -> None:
        """Remove checkpoints older than the ones to keep, and the remains of an interrupted write or removal."""
        self.clean()
        older = self.steps()[: -self.keep]
        for step in sorted(set(older) - set(self.regular_steps() if older else ())):
            self._remove(self.path(step))

    def clean(self) -> None:
        """Remove the remains of an interrupted write or removal; only one process may write at a time."""
        for path in self.folder.glob(f".{_PREFIX}*{_PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint, renamed first, so that half of one is never taken for a checkpoint."""
        if folder.exists():
            doomed = folder.with_name(f".{folder.name}.old{_PARTIAL}")
            folder.rename(doomed)
            _pause("before-removal")
            shutil.rmtree(doomed, ignore_errors=True)

    @contextmanager
    def reporting_failure(self, place: Path) -> Iterator[None]:
        """Report a failure to write ``place`` within the context, in one sentence that says how to continue."""
        try:
            yield
        except (KinformerError, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, FileNotFoundError):
                raise removed(self.folder.parent) from error
            reason = (cause.strerror if isinstance(cause, OSError) else None) or str(error)
            steps = self.steps()
            remedy = f"step {steps[-1]} is kept, so free space and add `resume`" if steps else "free space, start again"
            raise KinformerError(f"{place}: could not be written ({reason.rstrip('.')}); {remedy}.") from error


def removed(folder: Path) -> KinformerError:
    """Return the error of a run folder that was moved or removed during training."""
    return KinformerError(
        f"{folder}: was moved or removed during training; continue it in its new place with `resume`, or train again."
    )


def _digest(plan: Mapping[str, object]) -> str:
    return sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _check(plan: Mapping[str, object], step: int, groups: set[str], required: frozenset[str]) -> None:
    """Raise unless ``plan``, which holds ``groups``, is the plan of step ``step`` of a run."""
    if type(plan["step"]) is not int or plan["step"] != step:
        raise ValueError(f"its step is {plan['step']!r}, not {step}")
    if missing := required - groups:
        raise ValueError(f"it has no {min(missing)}")
    if strange := groups - _GROUPS:
        raise ValueError(f"it names {min(strange)!r}, which no checkpoint has")
    numbers = plan["numbers"]
    if not isinstance(numbers, dict):
        raise ValueError(f"its numbers are {type(numbers).__name__}, not a table")
    for name, kinds in (("total", (int,)), ("seconds", (int, float))):
        if name in numbers and (not isinstance(numbers[name], kinds) or isinstance(numbers[name], bool)):
            raise ValueError(f"its {name} is {numbers[name]!r}, not a number")


def _pause(point: str) -> None:
    """Stop this process where KINFORMER_PAUSE says so: lets a test kill it just there."""
    if os.environ.get(PAUSE) == point:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Saves:
    """The queue of a run's saves, which are written in order: at once, or by a thread while training continues.

    With ``in_thread`` a save must hold copies of its tensors, because training changes the originals. The saves of one
    step are in the queue at a time. After an error no later save is written, and :meth:`wait` raises the error.
    ``seconds``: how long the last save took to write.
    """

    def __init__(self, in_thread: bool) -> None:
        self.in_thread, self.seconds = in_thread, 0.0
        self._step: int | None = None
        self._last: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "kinformer-saves") if in_thread else None

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all saves; an error that already ends the run is raised before an error of a save."""
        with suppress(*[] if kind is None else [Exception]):
            self.wait()

    @property
    def failed(self) -> bool:
        """Return whether the last save has already failed."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def begin(self, step: int) -> None:
        """Wait until the saves of other steps than ``step`` are written."""
        if step != self._step:
            self.wait()
        self._step = step

    def add(self, work: Callable[[], object]) -> None:
        """Do ``work`` after all earlier work."""
        if self._thread is None:
            self._timed(work, None)
        else:
            self._last = self._thread.submit(self._timed, work, self._last)

    def wait(self) -> None:
        """Wait until all is written; raise the first error."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _timed(self, work: Callable[[], object], before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        started_at = time.monotonic()
        work()
        self.seconds = time.monotonic() - started_at


# The best weights of a run: ``model.safetensors``, whose metadata has their step and their metrics, or, where several
# processes hold parts of the weights, a checkpoint of shards in ``best/``. A run has the later one.
#
# A run that was never validated has its newest weights there, without metrics.

WEIGHTS, SHARDED = "model.safetensors", "best"
_METRICS, _STEP = "figures", "step"
_MODEL = frozenset({"model"})


def best_of(folder: Path) -> tuple[dict[str, float], int] | None:
    """Return the metrics and the step of the best validation in a run folder, the deciding metric first, or None."""
    place = place_of_best(folder)
    if not place.exists():
        return None
    noted: Any
    step: str | int
    if place.name == WEIGHTS:
        metadata = load_tensors(place)[1]
        noted, step = metadata.get(_METRICS), metadata.get(_STEP, "")
    else:
        checkpoint = _sharded(place)
        noted, step = checkpoint.numbers.get(_METRICS), checkpoint.step
    if noted is None:
        return None
    with reading(place):
        pairs = parse_json(noted) if isinstance(noted, str) else noted
        # null is the metric of nothing, such as the accuracy of no pairs
        return {str(name): nan if value is None else float(value) for name, value in pairs}, int(step)


def place_of_best(folder: Path) -> Path:
    """Return the file of the best weights in a run folder, whether it exists or not, or the folder of their shards.
    Both exist only where a process died after it wrote one and before it removed the other: the later one counts."""
    file, sharded = folder / WEIGHTS, Checkpoints(folder / SHARDED, 1)
    if not (steps := sharded.steps()):
        return file
    with reading(file):
        later = file.is_file() and int(load_tensors(file)[1].get(_STEP, 0)) > steps[-1]
    return file if later else sharded.path(steps[-1])


def best_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the best weights in a run folder, whole, and the metadata of their file (of shards none)."""
    place = place_of_best(folder)
    if place.name == WEIGHTS:
        return load_tensors(place)
    shards = _sharded(place).shards
    assert shards is not None
    shards.verify()
    return shards.whole("model"), {}


def _sharded(place: Path) -> Checkpoint:
    step = int(place.name.rpartition("-")[2])
    return Checkpoints(place.parent, 1).read(step, required=_MODEL, verified=False)


class Best:
    """The best validation so far, and its weights: the first of ``metrics_in_order`` decides, the next breaks a tie."""

    def __init__(self, folder: Path, metrics_in_order: Sequence[Metric]) -> None:
        self.folder, self.metrics_in_order = folder, metrics_in_order
        self.metrics: dict[str, float] | None = None
        self.step: int | None = None
        if (best := best_of(folder)) is not None:
            self.metrics, self.step = best

    def forget(self, step: int) -> None:
        """Discard the best validation if it is from ``step`` or before, when the model was different."""
        if step and self.step is not None and self.step <= step:
            self.metrics = self.step = None

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these metrics are better than the best so far."""
        best = self.metrics
        if best is None:
            return isfinite(metrics[self.metrics_in_order[0].name])
        deciding = next((metric for metric in self.metrics_in_order if metrics[metric.name] != best[metric.name]), None)
        return deciding is not None and deciding.better(metrics[deciding.name], best[deciding.name])

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """Record ``metrics`` of step ``step`` as the best so far."""
        self.metrics, self.step = dict(metrics), step

    def write(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Write the weights of ``step`` to the file."""
        noted = {} if self.metrics is None else {_METRICS: dump_json(list(self.metrics.items()))}
        save_tensors(self.folder / WEIGHTS, merge(weights), {_STEP: str(step), **noted})
        shutil.rmtree(self.folder / SHARDED, ignore_errors=True)

    def write_sharded(self, part: Part, step: int, group: Group) -> None:
        """Write the weights of ``step``, called ``"model/name"``; each process of ``group`` writes a ``part``."""
        noted = {} if self.metrics is None else {_METRICS: list(self.metrics.items())}
        Checkpoints(self.folder / SHARDED, 1).save_sharded(Checkpoint(step, {}, noted), part, group)

        def remove_file() -> None:
            with suppress(FileNotFoundError):
                (self.folder / WEIGHTS).unlink()
                sync_folder(self.folder)

        group.on_first(remove_file)
