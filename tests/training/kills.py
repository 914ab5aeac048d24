"""The end of a run, killed at each of its disk calls and resumed. Prints what became of it as JSON.

    python kills.py FOLDER DATA

Lives are forks of this process, which has computed nothing before and loaded all that they need. A disk call is
anything that opens a file to write, or makes, renames, removes or flushes one.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401
import torch
import torch._dynamo  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import kinformer
from kinformer.family.kinds import kinds
from kinformer.lab.data import Corpus, open_corpus
from kinformer.lab.training.loop import Updater, UpdateResult
from tests.training.tiny import train

STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "mean of checkpoints": {"validate_every": 2, "average": 3, "lr": 0.03, "warmup": 0.0, "min_lr_ratio": 1.0},
    "never validated": {"validate_every": 0, "keep": 1, "async_saves": True},
}
CALLS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def live(work: Callable[[], object], killed_at: int = 0, calls: Path | None = None) -> int:
    """Do ``work`` in a fork, which is killed at disk call number ``killed_at`` and writes the number of its ``calls``;
    returns its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            counter = watched(killed_at)
            work()
            if calls is not None:
                calls.write_text(str(counter.calls))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def watched(killed_at: int) -> _Counter:
    """Count the disk calls of this process from now on, and kill it at number ``killed_at``."""

    def act(number: int) -> None:
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return _Counter(act)


class _Counter:
    """Calls ``act`` with the number of each disk call before the call; other threads wait meanwhile with theirs."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.calls, self._act, self._acts, self._lock, flush = 0, act, False, threading.RLock(), os.fsync

        def fsync(handle: int) -> None:
            self._call()
            flush(handle)

        os.fsync = fsync
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CALLS:
            self._call()

    def _call(self) -> None:
        with self._lock:
            if self._acts:  # a disk call of ``act`` itself
                return
            self.calls += 1
            self._acts = True
            try:
                self._act(self.calls)
            finally:
                self._acts = False


def contents(folder: Path) -> dict[str, bytes | None]:
    """The files of a folder by their paths; None for a folder in it."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def kill_everywhere(place: Path, corpus: Corpus, options: dict[str, Any]) -> dict[str, Any]:
    """Kill a run before its last update, and resume it from every state of the disk between two disk calls of what
    follows, which a kill at that moment would leave; the folders ``whole`` and ``killed-N`` are left in ``place``.
    Returns the number of disk calls and the exit codes of all lives."""

    def run(folder: Path) -> Callable[[], object]:
        return lambda: train(corpus, folder, steps=STEPS, checkpoint_every=1, log_every=1, **options)

    def begin() -> None:
        update = Updater.__call__

        def killed(self: Updater, step: int, rate: float, progress: float) -> UpdateResult:
            if step == STEPS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, step, rate, progress)

        Updater.__call__ = killed  # type: ignore[method-assign]
        run(place / "begun")()

    def copy(number: int) -> None:
        shutil.copytree(place / "copied", place / f"killed-{number}")

    def copied() -> None:
        _Counter(copy)
        run(place / "copied")()

    codes = [live(run(place / "whole")), live(begin)]
    shutil.copytree(place / "begun", place / "copied")
    codes.append(live(copied))
    folders = list(place.glob("killed-*"))
    seen: list[dict[str, bytes | None]] = []
    for folder in folders:
        if (state := contents(folder)) in seen:
            shutil.rmtree(folder)
            continue
        seen.append(state)
        codes.append(live(run(folder)))
    return {"calls": len(folders), "codes": codes}


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds()
    with torch.device("meta"):
        kinformer.build("gpt", recipe="tiny")  # which imports the modules of the model before the forks
    gc.freeze()  # what is loaded is not searched for garbage in every life
    text = open_corpus(sys.argv[2])
    outcomes = {}
    for name, chosen in OPTIONS.items():
        (folder := Path(sys.argv[1]) / name).mkdir()
        outcomes[name] = kill_everywhere(folder, text, chosen)
    print(json.dumps(outcomes))
