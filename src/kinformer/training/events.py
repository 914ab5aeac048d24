"""Curves for TensorBoard, written by the thread that trains into a file that stays open.

TensorBoard's own writer opens its file by name in a thread, which fails aloud when the folder is moved or removed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kinformer.runtime.progress import note


class EventFile:
    """One file of events in ``folder``, from behind step ``resumed`` on: points
    of an earlier file beyond it are void."""

    def __init__(self, folder: Path, resumed: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        begun = time.time()
        name = f"events.out.tfevents.{int(begun):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._path = folder / name
        self._file: Any = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=begun, file_version="brain.Event:2"))
        if resumed:
            self._write(Event(wall_time=begun, step=resumed + 1, session_log=SessionLog(status=SessionLog.START)))

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

    def _write(self, event: Any) -> None:
        """Write an event; where that fails, training goes on without curves, as its metrics stand in another file."""
        if self._file.closed:
            return
        try:
            self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            note(f"note: {self._path}: cannot be written ({error.strerror or error}); TensorBoard's curves end here.")
            self.close()
