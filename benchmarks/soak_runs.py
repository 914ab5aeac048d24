"""What the soak does to runs: a member trains on a task, is killed again and again, resumes, and must lose no bit.

All lives of a run are forks of this process, which itself computes nothing. A life is killed where it touches the disk
for the k-th time (an audit hook counts what opens, renames, removes or makes something in the run's folder, and fsync),
or after a random time, or finds the disk full. Then weights, metrics, evaluation and what is generated must be those of
the run never killed.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kinformer.family.build import configure
from kinformer.family.table import MEMBERS
from kinformer.lab.cli.main import main
from kinformer.lab.tasks.table import TASKS
from kinformer.testing.subject import require

LIMIT = 1200.0
"""Seconds that a life may last; so many, as a niced soak on a busy machine waits for most of them."""
TRAINING: dict[str, list[str]] = {
    "next-token": ["--length", "16", "--data", "TEXT"],
    "instruct": ["--length", "96", "--data", "ANSWERS", "--chat-template", "chatml"],
    "recall": ["--length", "24", "--pairs", "2,6", "--symbols", "30"],
    "algorithm": ["--length", "32", "--digits", "1-4"],
    "image": [],
    "trajectories": ["--length", "72", "--trajectories", "30"],
    "control": ["--length", "6", "--environments", "4", "--ppo-epochs", "2", "--env", "t-maze:2"],
    "mlm": ["--length", "32", "--data", "TEXT"],
    "classify": ["--length", "32", "--data", "LABELS"],
    "listops": ["--length", "100", "--examples", "64", "--example-tokens", "20-100"],
    "speech": ["--length", "64"],
    "vision": [],
    "dino": ["--prototypes", "16", "--local-views", "2"],
    "mae": [],
    "mpp": [],
    "translate": ["--length", "40", "--tokenizer", "bytes"],
    "super-resolution": ["--factor", "2"],
}
EVALUATION = {
    "next-token": ["--max-bytes", "400"],
    "mlm": ["--max-bytes", "400"],
    "trajectories": ["--episodes", "2", "--cloning-steps", "2"],
    "control": ["--episodes", "2"],
    "image": ["--max-items", "4"],
    "super-resolution": ["--max-items", "4"],
}
GENERATION = {
    "next-token": ["--prompt", "abc", "--max-new-tokens", "20"],
    "algorithm": ["--prompt", "12="],
    "image": ["--out", "PICTURE"],
    "super-resolution": ["--out", "PICTURE", "--enlarged", "2"],
    "trajectories": [],
    "control": [],
    "translate": ["--prompt", "one"],
}
VARYING = re.compile(r"seconds|per_second|time|events|tokens_per|speed|memory")
"""Keys of what differs from run to run."""
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "os.chmod"}


class UnfinishedError(AssertionError):
    """A life that ended as none may."""


def combinations() -> list[tuple[str, str]]:
    """Members and the tasks that take them."""
    return [
        (member, task.name)
        for member in MEMBERS
        for task in TASKS.values()
        if task.name in TRAINING and task.takes(configure(member, "tiny"))
    ]


def trial(random_: random.Random, found: dict[str, Any]) -> str:
    """One run beside its killed twin; ``found`` tells all of it. Returns "kept" or "refused", or raises."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        return Trial(random_, found, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Trial:
    """``whole`` is never killed, ``killed`` is; both lie in ``folder``."""

    def __init__(self, random_: random.Random, found: dict[str, Any], folder: Path) -> None:
        self.random, self.found, self.folder = random_, found, folder
        self.whole, self.killed = folder / "whole", folder / "killed"
        found["kills"] = []
        member, task = random_.choice(combinations())
        self.task = found["task"] = task
        found["member"] = member
        self.words = ["train", member, "--task", task, *self._settings(task)]
        found["command"] = " ".join(self.words)

    def _settings(self, task: str) -> list[str]:
        draw = self.random
        words = ["--recipe", "tiny", "--steps", str(draw.randint(4, 9)), "--batch-size", str(draw.choice((2, 4)))]
        words += ["--set", "training.log_every=1", "--checkpoint-every", str(draw.randint(1, 4)), "--threads", "1"]
        words += ["--validate-every", str(draw.choice((0, 2, 3, 5))), "--validation-tokens", "128"]
        words += [
            "--set",
            f"training.keep={draw.choice((1, 2, 3))}",
            "--seed",
            str(draw.randrange(1000)),
            "--device",
            "cpu",
        ]
        words += draw.choice(([], [], ["--ema", "0.2"], ["--average", "2"], ["--accumulate", "2"]))
        words += ["--segments"] if task == "next-token" and draw.random() < 0.3 else []
        return words + [self._made(word) for word in TRAINING[task]]

    def _made(self, word: str) -> str:
        """The word, or the path of data that is made for it; the same at every call."""
        draw, path = random.Random(1), self.folder / "data.txt"
        names = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
        if word == "TEXT":
            path.write_text(" ".join(draw.choices(names, k=1500)), encoding="utf-8")
        elif word == "ANSWERS":
            path = path.with_suffix(".jsonl")
            rows = ({"prompt": name, "completion": name[::-1]} for name in names)
            path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        elif word == "LABELS":
            path = path.with_suffix(".tsv")
            lines = (
                f"{('good', 'bad')[i % 2]}\t{' '.join(draw.choices(names, k=draw.randint(2, 9)))}" for i in range(60)
            )
            path.write_text("\n".join(lines), encoding="utf-8")
        else:
            return word
        return str(path)

    def run(self) -> str:
        code, said, calls, seconds = self._live(self.whole)
        if code == 2:
            self.found["why"] = said.strip()[-300:]
            return "refused"
        require(code == 0, f"the run that nobody kills ended with {code}: {said[-3000:]}")
        for _ in range(self.random.randint(1, 4)):
            end = self.random.choices(("call", "after", "full"), (5, 3, 2))[0]
            when = self.random.uniform(0.0, seconds) if end == "after" else self.random.randint(1, max(1, calls))
            code, said, *_ = self._live(self.killed, **{end: when})
            self.found["kills"].append({end: when, "ended": code})
            meant = (0, 2) if end == "full" else (0, -signal.SIGKILL)
            sentence = code != 2 or ("kinformer: " in said and "Traceback" not in said)
            require(code in meant and sentence, f"a life ended with {code}: {said[-3000:]}")
        code, said, *_ = self._live(self.killed)
        require(code == 0, f"the last life ended with {code}: {said[-3000:]}")
        self._compare()
        return "kept"

    def _live(self, out: Path, call: int = 0, after: float = 0.0, full: int = 0) -> tuple[int, str, int, float]:
        """A process that begins the run in ``out`` or goes on with it, killed at the disk call ``call`` or ``after`` so
        many seconds, or on a disk that is full from the call ``full`` on: how it ended, what it said, how often it
        touched the disk, how long it took."""
        words = [*self.words, "--out", str(out)]
        if (out / "config.json").exists():
            words = ["train", self.words[1], "--out", str(out), "--threads", "1", "--resume"]
        begun = time.monotonic()
        count = self.folder / "calls"
        code, said = forked(lambda: main(words), self.folder, lambda: _count(out, count, call, full), after)
        return code, said, int(count.read_text() or 0), time.monotonic() - begun

    def _compare(self) -> None:
        """Weights, metrics, evaluation and generation of both."""
        files = [sorted(_kept(folder)) for folder in (self.whole, self.killed)]
        require(files[0] == files[1], f"the folders hold {files[0]} and {files[1]}.")
        for name in files[0]:
            if name.endswith(".safetensors"):
                left, right = (load_file(folder / name) for folder in (self.whole, self.killed))
                require(left.keys() == right.keys(), f"{name} holds other tensors.")
                for key in left:
                    same = left[key].dtype == right[key].dtype and torch.equal(left[key], right[key])
                    require(same, f"{name}: {key} is not the same bit for bit.")
        metrics = [_metrics(folder) for folder in (self.whole, self.killed)]
        require(metrics[0] == metrics[1], f"the metrics are {metrics[0]} and {metrics[1]}.")
        commands = [["evaluate", *EVALUATION.get(self.task, [])]]
        if self.task in GENERATION:
            commands.append(["generate", "--seed", "3", *GENERATION[self.task]])
        for command in commands:
            said = [self._said(folder, command) for folder in (self.whole, self.killed)]
            require(said[0] == said[1], f"{command} says {said[0]} and {said[1]}.")

    def _said(self, run: Path, command: list[str]) -> Any:
        """What a command prints of a run, without times and names; what it refuses in its own words."""
        picture = self.folder / f"{run.name}.png"
        words = [str(picture) if word == "PICTURE" else word for word in command]
        words = [words[0], str(run), *words[1:], "--threads", "1", "--device", "cpu", "--json"]
        code, said = forked(lambda: main(words), self.folder)
        require(code in (0, 2), f"{words} ended with {code}: {said[-3000:]}")
        self.found.setdefault("said", []).append(f"{command[0]} {code}")
        if code:
            return said.replace(str(run), "RUN")
        told = _plain(json.loads((self.folder / "stdout").read_text().replace(str(run), "RUN")))
        return told, picture.read_bytes().hex() if picture.exists() else ""


def _kept(folder: Path) -> list[str]:
    """The names of the files of a run, but for events that only pictures are made of."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in found if path.parts[0] != "events"]


def _metrics(folder: Path) -> list[Any]:
    return [_plain(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _plain(value: Any) -> Any:
    """``value`` without what differs from run to run."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not VARYING.search(key)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _count(out: Path, file: Path, call: int, full: int) -> None:
    """Count how often this process touches the disk in ``out``, and die at the call ``call``; tells by ``file``. From
    the call ``full`` on there is no space for new files and for what is flushed."""
    told, place = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), str(out)
    done, flush = [0], os.fsync

    def touch(writes: bool) -> None:
        done[0] += 1
        os.pwrite(told, str(done[0]).encode(), 0)
        if done[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        if writes and full and done[0] >= full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(isinstance(each, (str, os.PathLike)) and place in str(each) for each in arguments):
            touch(event == "open" and bool(set("wxa") & set(arguments[1] or "")))

    def flushed(handle: int) -> None:
        touch(True)
        flush(handle)

    os.fsync = flushed
    sys.addaudithook(hook)


def forked(
    work: Callable[[], int], folder: Path, first: Callable[[], None] | None = None, after: float = 0.0
) -> tuple[int, str]:
    """How a fork of this process that does ``work`` ended, and what it said; killed ``after`` so many seconds."""
    child = os.fork()
    if not child:
        _quiet(folder)
        code = 70
        try:
            if first is not None:
                first()
            code = work()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + (after or LIMIT)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if not after:
                raise UnfinishedError(f"a life lasted more than {LIMIT:g} s: {(folder / 'stderr').read_text()[-2000:]}")
            break
        time.sleep(0.003)
    return os.waitstatus_to_exitcode(status), (folder / "stderr").read_text(errors="replace")


def _quiet(folder: Path) -> None:
    """Let what this process prints go to files in ``folder``."""
    os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", str(Path(tempfile.gettempdir()) / "soak-cache"))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
