"""The reports of a run: ``metrics.jsonl`` always, TensorBoard events where it is installed, a bar on a terminal."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from kinformer.runtime.files import write_atomic
from kinformer.runtime.parsing import dump_json, parse_json
from kinformer.runtime.progress import note, tolerant

if TYPE_CHECKING:
    from rich.progress import Progress
    from tensorboard.compat.proto.event_pb2 import Event

# A metric of a model: its name, its unit, and whether lower is better.

SHARE = "share"


@dataclass(frozen=True)
class Metric:
    """A metric: ``name`` as in records (``bits_per_byte``); ``unit`` in words, or SHARE for a share of 1."""

    name: str
    unit: str
    lower_is_better: bool = True

    def better(self, value: float, than: float) -> bool:
        """Return whether ``value`` is better than another; NaN and infinity are never better."""
        return isfinite(value) and (value < than if self.lower_is_better else value > than)

    def text(self, value: float) -> str:
        """Return ``value`` with its unit: ``1.2345 bits per byte``, ``accuracy 51.2%``."""
        return f"{self.name.replace('_', ' ')} {value:.1%}" if self.unit == SHARE else f"{value:.4f} {self.unit}"


ACCURACY = Metric("accuracy", SHARE, lower_is_better=False)
SEQUENCE_ACCURACY = Metric("sequence_accuracy", SHARE, lower_is_better=False)
CALIBRATION_ERROR = Metric("calibration_error", SHARE)
BITS_PER_BYTE = Metric("bits_per_byte", "bits per byte")
ANSWER_BITS = Metric("answer_bits_per_byte", "bits per byte of the answers")
BITS_PER_LABEL = Metric("bits_per_label", "bits per label")
BITS_PER_ACTION = Metric("bits_per_action", "bits per action")
ACTION_ERROR = Metric("action_error", "mean squared error of actions")
RETURN = Metric("mean_return", "mean return", lower_is_better=False)
BITS_PER_DIM = Metric("bits_per_dim", "bits per dimension")
BITS_PER_SYMBOL = Metric("bits_per_symbol", "bits per symbol")
ERROR_RATE = Metric("error_rate", SHARE)
BLEU = Metric("bleu", "BLEU", lower_is_better=False)
ENVIRONMENT_STEPS = "environment_steps"
"""The entry of the log with the steps of an environment so far, in all its copies together."""
CHRF = Metric("chrf", "chrF2", lower_is_better=False)


def bits_per_masked(unit: str) -> Metric:
    """Return the metric of masked tokens, which depends on the kind of token: a byte, or a tokenizer's token."""
    return Metric(f"bits_per_masked_{unit}", f"bits per masked {unit}")


def flops(count: float) -> str:
    """Return ``count`` operations in thousands, millions, ...: 7.62 M."""
    for unit in ("", "K", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:.3g} P"


def size(count: float) -> str:
    """Return ``count`` bytes in the binary unit that suits it: 512 B, 32.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@dataclass(frozen=True)
class Result:
    """The result of a training run, for its caller and its records.

    ``steps``: the steps done of ``total``. ``signal``: the signal that ended the run early, or 0. ``validation``: the
    metrics of the best validation, such as ``bits_per_byte``; the first is None in a run that was never validated.
    """

    steps: int
    total: int
    seconds: float
    tokens_per_second: float
    validation: Mapping[str, float | None]
    best_step: int | None
    signal: int = 0


METRICS, EVENTS = "metrics.jsonl", "events"
QUIET_SECONDS = 10.0


class EventFile:
    """A file of TensorBoard events in ``folder`` that begins after step ``resumed`` and voids later points of earlier
    files. TensorBoard's own writer opens its file by name in a thread, which fails loudly when the folder is moved or
    removed."""

    def __init__(self, folder: Path, resumed: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        started_at = time.time()
        name = f"events.out.tfevents.{int(started_at):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = folder / name
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=started_at, file_version="brain.Event:2"))
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=started_at, step=resumed + 1, session_log=start))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write a point of every curve."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def close(self) -> None:
        """Write the rest and close the file."""
        with suppress(OSError):
            self._file.close()

    def _write(self, event: Event) -> None:
        """Write an event. If that fails, training continues without curves; the metrics are also in another file."""
        if self._file.closed:
            return
        try:
            self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            note(f"note: {self._path}: cannot be written ({error.strerror or error}); TensorBoard's curves end here.")
            self.close()


class Log:
    """The log of a run folder, to which records are appended. A resumed run drops those after its checkpoint."""

    def __init__(self, folder: Path, resumed: int) -> None:
        path = folder / METRICS
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        lines = [line for line in text.splitlines(keepends=True) if line[-1] == "\n" and _step(line) <= resumed]
        write_atomic(path, lambda target: target.write_text("".join(lines), encoding="utf-8"))
        self._file = path.open("a", encoding="utf-8")
        self._events = None if find_spec("tensorboard") is None else EventFile(folder / EVENTS, resumed)

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write one line of JSON, and a point for the curve of each number."""
        self._file.write(dump_json({"step": step, **values}) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if self._events is not None and numbers:
            self._events.scalars(numbers, step)

    def close(self) -> None:
        """Flush and close all files of the log."""
        self._file.close()
        if self._events is not None:
            self._events.close()


SMOOTH = 0.8
"""The share of the mean so far in the next mean."""


class Smoothing:
    """Smooths metrics: a moving mean without a bias to its beginning. NaN and infinity do not count."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def __call__(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add ``metrics``, and return their means so far."""
        for name, value in metrics.items():
            if isfinite(value):
                total, weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (SMOOTH * total + value, SMOOTH * weight + 1)
        sums = self._sums
        return {name: sums[name][0] / sums[name][1] if name in sums else metrics[name] for name in metrics}


class History(NamedTuple):
    """The log of a run: points (step, value) of ``metric``, in training smoothed, and records of ``samples``."""

    metric: Metric
    steps: int
    training: list[tuple[int, float]]
    validation: list[tuple[int, float]]
    samples: list[Mapping[str, Any]]

    @property
    def unit(self) -> str:
        """The unit of the metric in words."""
        return self.metric.name.replace("_", " ") if self.metric.unit == SHARE else self.metric.unit

    @property
    def range(self) -> tuple[float, float]:
        """The range of the values that a picture shows: without the first steps of training, which fall steeply."""
        later = [point for point in self.training if point[0] >= self.steps / 20]
        values = [value for _, value in [*self.validation, *(later or self.training)]]
        margin = 0.05 * ((max(values) - min(values)) or abs(values[0]) or 1.0)
        return min(values) - margin, max(values) + margin


def history_of(folder: Path, metrics: Sequence[Metric]) -> History:
    """Return the history of the run in ``folder`` by the first of ``metrics`` that its log has, or by its loss."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rows = [parse_json(line) for line in lines if _step(line) < float("inf")]
    names = set().union(*rows) if rows else set()
    metric = next((item for item in metrics if item.name in names), Metric("mean_loss", "mean loss in nats"))
    smooth, validated = Smoothing(), f"validation_{metric.name}"
    return History(
        metric,
        max((row["step"] for row in rows), default=0),
        [(row["step"], smooth({metric.name: row[metric.name]})[metric.name]) for row in rows if _has(row, metric.name)],
        [(row["step"], row[validated]) for row in rows if _has(row, validated)],
        [row for row in rows if isinstance(row.get("sample"), str)],
    )


def _has(row: Mapping[str, Any], name: str) -> bool:
    return isinstance(row.get(name), int | float) and abs(row[name]) < 1e300


def _step(line: str) -> float:
    try:
        step = parse_json(line)["step"]
        return float(step) if type(step) is int else float("inf")
    except (ValueError, KeyError, TypeError, OverflowError):
        return float("inf")


class TrainingProgress:
    """The display of metrics, tokens per second and the time left: a bar on a terminal, else a line now and then. It
    shows nothing in ``quiet`` runs, and in all processes but the first. ``most``: no more seconds are left, whatever
    the total number of steps."""

    def __init__(
        self, total: int, done: int, stream: TextIO | None = None, quiet: bool = False, most: float = float("inf")
    ) -> None:
        self.total, self.quiet, self._done_before = total, quiet, done
        self._stream = tolerant(stream or sys.stderr)
        self._start = self._last_line_at = time.monotonic()
        self._end = self._start + most
        self._last_rate = (0, 0.0)
        self._bar = _bar(self._stream) if self._stream.isatty() and not quiet else None
        self._task = self._bar.add_task("", total=total, completed=done, text="") if self._bar else None

    def __enter__(self) -> TrainingProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, metrics: str, tokens: int, seconds: float) -> None:
        """Show that ``done`` steps are done, the last with ``metrics``, and the speed since the last display."""
        now = time.monotonic()
        left = (now - self._start) / max(1, done - self._done_before) * (self.total - done)
        left = min(left, max(0.0, self._end - now))
        if self._bar and self._task is not None:
            text = f"{metrics}  {self._speed(tokens, seconds)}  {_clock(left)} left"
            self._bar.update(self._task, completed=done, text=text)
        elif not self.quiet and (now - self._last_line_at >= QUIET_SECONDS or done == self.total):
            self._last_line_at = now
            self.say(f"step {done}/{self.total}  {metrics}  {self._speed(tokens, seconds)}  {_clock(left)} left")

    def expect(self, total: int) -> None:
        """Change the expected number of steps to ``total``."""
        self.total = total
        if self._bar and self._task is not None:
            self._bar.update(self._task, total=total)

    def _speed(self, tokens: int, seconds: float) -> str:
        (last_tokens, last_seconds), self._last_rate = self._last_rate, (tokens, seconds)
        return f"{(tokens - last_tokens) / max(seconds - last_seconds, 1e-9):,.0f} tokens/s"

    def say(self, text: str) -> None:
        """Print a line of text beside the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            print(text, file=self._stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    return Progress(*columns, console=Console(file=stream))
