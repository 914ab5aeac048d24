"""A run of two processes, of which the second is killed, and which is started again as torchrun does it. For a test.

    python -m tests.training.elastic FOLDER DATA OPTION...

This process is the launcher: it forks those that train, with the variables that torchrun sets, and when one dies it
ends the other and starts both again. Its store is there for both lives, as torchrun's is, and in the second one the
process that died comes late, when the other one has looked for it. Prints the exit codes of both lives as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time

import torch._dynamo  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
from torch.distributed import TCPStore

import kinformer.lab.runs.train  # noqa: F401
import kinformer.lab.training.loop  # noqa: F401
from kinformer.family.kinds import kinds
from kinformer.lab.cli.main import main
from kinformer.lab.training.loop import Updater, UpdateResult

KILLED_BEFORE, PROCESSES, LATE = 5, 2, 2


def life(restarts: int, arguments: list[str], port: int) -> list[int]:
    """Train until all are done or one is dead; returns the exit codes."""
    children = []
    for rank in range(PROCESSES):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
                os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
                os.environ |= {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_USE_AGENT_STORE": "True"}
                time.sleep(LATE * rank * restarts)
                if rank == 1 and not restarts:
                    die_before(KILLED_BEFORE)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                code = main(["train", "gpt", *arguments])
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = {}
    while len(codes) < PROCESSES:
        ended, status = os.wait()
        codes[ended] = os.waitstatus_to_exitcode(status)
        if codes[ended]:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
    return [codes[child] for child in children]


def keep_store() -> tuple[int, int]:
    """Fork a process that has a store; returns its id and the store's port."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    return child, int(os.read(reading, 9))


def die_before(number: int) -> None:
    """Kill this process before update ``number``."""
    update = Updater.__call__

    def killed(self: Updater, step: int, rate: float, progress: float) -> UpdateResult:
        if step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, step, rate, progress)

    Updater.__call__ = killed  # type: ignore[method-assign]


if __name__ == "__main__":
    signal.alarm(200)
    kinds()
    gc.freeze()  # what is loaded is not searched for garbage in every life
    words = ["--out", sys.argv[1], "--data", sys.argv[2], *sys.argv[3:]]
    keeper, place = keep_store()
    lives = [life(restarts, words, place) for restarts in (0, 1)]
    os.kill(keeper, signal.SIGKILL)
    print(json.dumps(lives))
