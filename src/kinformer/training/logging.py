"""The reports of a run: ``metrics.jsonl`` always, TensorBoard events where it is installed, a bar on a terminal."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kinformer.runtime.files import write_atomic
from kinformer.runtime.parsing import parse_json
from kinformer.runtime.progress import note, tolerant

if TYPE_CHECKING:
    from rich.progress import Progress
    from tensorboard.compat.proto.event_pb2 import Event

METRICS, EVENTS = "metrics.jsonl", "events"
QUIET_SECONDS = 10.0


class EventFile:
    """A file of TensorBoard events in ``folder`` that begins after step ``resumed``; later points of an earlier file
    are void.

    The training thread writes it, and the file stays open. TensorBoard's own writer opens its file by name in a thread,
    which fails loudly when the folder is moved or removed.
    """

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
        """Write an event; where that fails, training goes on without curves, as its metrics stand in another file."""
        if self._file.closed:
            return
        try:
            self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            note(f"note: {self._path}: cannot be written ({error.strerror or error}); TensorBoard's curves end here.")
            self.close()


class Log:
    """The log of a run folder, which records are appended to; a resumed run first drops
    those beyond the step that it resumes."""

    def __init__(self, folder: Path, resumed: int) -> None:
        path = folder / METRICS
        lines = [line for line in _lines(path) if _step(line) <= resumed]
        write_atomic(path, lambda target: _fill(target, lines))
        self._file = path.open("a", encoding="utf-8")
        self._events = None if find_spec("tensorboard") is None else EventFile(folder / EVENTS, resumed)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one line of JSON and one point per curve."""
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        if self._events is not None:
            self._events.scalars(values, step)

    def close(self) -> None:
        """Flush and close all files of the log."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def _fill(path: Path, lines: list[str]) -> None:
    path.write_text("".join(lines), encoding="utf-8")


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [
        line
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if line[-1] == "\n"
    ]


def _step(line: str) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return float("inf")


class TrainingProgress:
    """The display of metrics, tokens per second and the time left: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self.total, self.done, self._done_before = total, done, done
        self._stream = tolerant(stream or sys.stderr)
        self._start = self._last_line_at = time.monotonic()
        self._last_rate = (0, 0.0)
        self._bar = _bar(self._stream) if self._stream.isatty() else None
        self._task = self._bar.add_task("", total=total, completed=done, text="") if self._bar else None

    def __enter__(self) -> TrainingProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, metrics: str, tokens: int, seconds: float) -> None:
        """Show that ``done`` steps are done, the last with ``metrics``, and this many ``tokens`` in ``seconds`` so far;
        the speed is that since it was last shown."""
        self.done = done
        now = time.monotonic()
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, text=f"{metrics}  {self._speed(tokens, seconds)}")
        elif now - self._last_line_at >= QUIET_SECONDS or done == self.total:
            self._last_line_at = now
            left = (now - self._start) / max(1, done - self._done_before) * (self.total - done)
            self.say(f"step {done}/{self.total}  {metrics}  {self._speed(tokens, seconds)}  {_clock(left)} left")

    def expect(self, total: int) -> None:
        """Expect this many steps in all from now on."""
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
        else:
            print(text, file=self._stream, flush=True)


class Silence(TrainingProgress):
    """The display of processes that are not the first, and of quiet runs: it shows nothing."""

    def __init__(self) -> None:
        self._bar = None

    def update(self, done: int, metrics: str, tokens: int, seconds: float) -> None:
        """Show nothing where progress would be shown."""

    def say(self, text: str) -> None:
        """Print nothing where a line would be printed."""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=stream))
