"""One training run through many lives: each is killed, the next resumes. Prints what became of it as JSON.

    python lives.py FOLDER DATA SEED

Lives are forks of this process, so each starts in milliseconds; nothing has been computed before the first fork.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch._dynamo  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import kinformer.lab.runs.train  # noqa: F401
import kinformer.lab.training.loop  # noqa: F401
from kinformer.family.kinds import kinds
from kinformer.lab.cli.main import main
from kinformer.lab.training.distributed import Interrupt

STEPS, KILLS, PATIENCE = 60, 5, 120.0
INSIDE_A_WRITE = {1: "before-fsync", 3: "before-rename"}


def live(folder: Path, data: str, pause: str = "") -> int:
    """Fork a process that trains; returns its id."""
    child = os.fork()
    if child:
        return child
    os.environ["KINFORMER_PAUSE"] = pause
    nowhere = os.open(os.devnull, os.O_WRONLY)
    told = os.open(folder.with_suffix(".stderr"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nowhere, 1)
    os.dup2(told, 2)
    arguments = ["train", "linear-transformer", "--data", data, "--out", str(folder), "--threads", "1"]
    if (folder / "config.json").exists():
        os._exit(main([*arguments, "--resume"]))
    settings = f"--recipe tiny --length 16 --batch-size 4 --steps {STEPS} --checkpoint-every 6 --segments"
    settings += " --set training.log_every=1"
    if folder.name == "killed":  # "whole" saves at once
        settings += " --set training.async_saves=true"
    os._exit(main([*arguments, *settings.split(), "--validate-every", "20", "--validation-tokens", "256"]))


def last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    except (OSError, ValueError):
        return 0


def wait_for(folder: Path, step: int, child: int) -> None:
    """Until the run has logged ``step``."""
    deadline = time.monotonic() + PATIENCE
    while last_step(folder) < step:
        ended, status = os.waitpid(child, os.WNOHANG)
        assert not ended, f"ended before step {step} with {status}: {folder.with_suffix('.stderr').read_text()}"
        assert time.monotonic() < deadline, f"step {step} is not reached"
        time.sleep(0.002)


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def killed_in_a_write(folder: Path, data: str, point: str) -> bool:
    """A life that is killed where its first checkpoint write reaches ``point``; whether a partial folder was left."""
    child = live(folder, data, pause=point)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), folder.with_suffix(".stderr").read_text()
    kill(child)
    return any((folder / "checkpoints").glob(".step-*.partial"))


def interrupted(folder: Path, data: str, step: int) -> tuple[int, str]:
    """A life that gets Ctrl-C once it has logged ``step``: its exit code and what it said."""
    child = live(folder, data)
    wait_for(folder, step, child)
    os.kill(child, signal.SIGINT)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), folder.with_suffix(".stderr").read_text()


def signalled_twice() -> int:
    """The exit code of a process that gets Ctrl-C twice while it waits for a step to end."""
    child = os.fork()
    if not child:
        with Interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def run_through(folder: Path, data: str, seed: int) -> dict:
    draw = random.Random(seed)
    partial = []
    for life in range(KILLS):
        if life in INSIDE_A_WRITE:
            partial.append(killed_in_a_write(folder, data, INSIDE_A_WRITE[life]))
            continue
        child = live(folder, data)
        wait_for(folder, STEPS * life // (KILLS + 2) + draw.randint(1, 9), child)
        time.sleep(draw.uniform(0.0, 0.01))
        kill(child)
    step = last_step(folder) + 2
    code, said = interrupted(folder, data, step)
    _, status = os.waitpid(live(folder, data), 0)
    return {
        "partial": partial,
        "interrupted": code,
        "interrupted_twice": signalled_twice(),
        "said": said,
        "finished": os.waitstatus_to_exitcode(status),
        "stderr": folder.with_suffix(".stderr").read_text(),
    }


if __name__ == "__main__":
    kinds()
    gc.freeze()  # what is loaded is not searched for garbage in every life
    place, text, start = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    _, ended = os.waitpid(live(place / "whole", text), 0)
    outcome = {"whole": os.waitstatus_to_exitcode(ended)} | run_through(place / "killed", text, start)
    print(json.dumps(outcome))
