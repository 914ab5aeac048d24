"""Runs whose weights are sharded over two and four processes, and saves that are killed. Prints what became of them.

    python -m tests.training.sharded FOLDER DATA

Processes are forks of this one, which has computed nothing before and loaded all that they need.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256 as hashed
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
from torch import Tensor, distributed

from kinformer.family.kinds import kinds
from kinformer.lab.data import open_corpus
from kinformer.lab.training.checkpoint import Best, Checkpoint, Checkpoints, best_of, best_weights
from kinformer.lab.training.distributed import Group, shutdown
from kinformer.lab.training.logging import Metric
from kinformer.lab.training.shards import part_of
from kinformer.runtime.compiling import local_part
from kinformer.runtime.errors import KinformerError
from tests.training.kills import live, watched
from tests.training.tiny import CPU, rewound, train, trainer

RUNS: dict[str, dict[str, Any]] = {"plain": {}, "tied": {"model": {"member": "t5"}, "ema": 0.5, "async_saves": True}}
OPTIONS: dict[str, Any] = {"steps": 4, "checkpoint_every": 2, "validate_every": 2}


def together(world: int, place: Path, work: Callable[[Group], object]) -> list[int]:
    """Do ``work`` in ``world`` processes that train together; returns their exit codes."""
    children = []
    (place / "store").unlink(missing_ok=True)
    gc.freeze()  # what is loaded is not searched for garbage in every process
    for rank in range(world):
        child = os.fork()
        if not child:
            code = 1
            try:
                torch.set_num_threads(1)
                init = f"file://{place / 'store'}"
                distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
                work(Group(torch.device("cpu"), rank, world, "fsdp"))
                shutdown()
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def begun_by_two(place: Path, text: str) -> Callable[[Group], object]:
    """Every run of ``RUNS``, and again from its middle; a disk that is full for the second process."""

    def work(group: Group) -> None:
        corpus = open_corpus(text)
        for name, options in RUNS.items():
            train(corpus, place / name, group, **OPTIONS | options)
            group.on_first(lambda name=name: rewound(place / name, place / f"{name} again"))
            other = {"async_saves": not options.get("async_saves", False)}  # how it saves changes nothing
            train(corpus, place / f"{name} again", group, **OPTIONS | options | other)
        told = _full(place, corpus, group) | {"not finite": _not_finite(place, corpus, group)}
        group.on_first(lambda: (place / "told.json").write_text(json.dumps(told)))

    return work


def resumed_by_four(place: Path, text: str) -> Callable[[Group], object]:
    """A run of two processes, from its middle."""

    def work(group: Group) -> None:
        group.on_first(lambda: rewound(place / "plain", place / "plain in four"))
        train(open_corpus(text), place / "plain in four", group, **OPTIONS)

    return work


def _full(place: Path, corpus: Any, group: Group) -> dict[str, Any]:
    group.on_first(lambda: rewound(place / "plain", place / "full"))
    resumed = trainer(corpus, place / "full", group, async_saves=True, **OPTIONS)
    flush = os.fsync

    def full(handle: int) -> None:
        if group.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    os.fsync = full
    told = ""
    try:
        resumed.run()
    except KinformerError as error:
        told = str(error)
    finally:
        os.fsync = flush
    heard = group.on_all(lambda: told)
    names = sorted(path.name for path in (place / "full" / "checkpoints").iterdir())
    return {"full": heard, "after": names}


def _not_finite(place: Path, corpus: Any, group: Group) -> list[str]:
    """What each process is told when a weight in the shard of the second one is NaN after the second update."""
    (place / "not finite").mkdir(exist_ok=True)
    run, told = trainer(corpus, place / "not finite", group, **OPTIONS | {"checkpoint_every": 1}), ""

    def poison(step: int) -> None:
        if step == 1 and group.rank == 1:
            shards = [local_part(parameter.detach()) for parameter in run.model.parameters()]
            next(shard for shard in shards if shard.numel()).view(-1)[0] = torch.nan

    run.moving.update = poison  # type: ignore[method-assign]
    try:
        run.run()
    except KinformerError as error:
        told = str(error)
    return group.on_all(lambda: told)


def kill_the_second(place: Path, number: int) -> dict[str, Any]:
    """The second process of two dies at its disk call ``number`` in a save; what is there then."""
    folder = place / f"second-{number}"

    def work(group: Group) -> None:
        checkpoints = Checkpoints(folder, 1)
        checkpoints.save_sharded(Checkpoint(1, {}, {}), part_of(tensors_of(1), group), group)
        if group.rank == 1:
            watched(number)
        checkpoints.save_sharded(Checkpoint(2, {}, {}), part_of(tensors_of(2), group), group)

    codes = together(2, place, work)
    return {"codes": codes, "steps": Checkpoints(folder, 1).steps()}


def save(folder: Path, step: int) -> Callable[[], object]:
    """Save a checkpoint and the best weights of ``step`` into a run's folder, in a process alone."""
    folder.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        with world_of_one():
            Checkpoints(folder / "checkpoints", 1).save_sharded(
                Checkpoint(step, {}, {}), part_of(tensors_of(step), CPU), CPU
            )
            best = Best(folder, (Metric("bits", "bits"),))
            best.note({"bits": 1 / step}, step)
            best.write_sharded(part_of({"model/weight": tensors_of(step)["model/weight"]}, CPU), step, CPU)

    return work


def kill_everywhere(place: Path) -> list[dict[str, Any]]:
    """Kill the second save of a folder at each of its disk calls; what is there then, and after the save again."""
    codes = [live(save(place / "begun", 1))]
    shutil.copytree(place / "begun", place / "counted")
    codes.append(live(save(place / "counted", 2), calls=place / "calls"))
    outcomes = []
    for number in range(1, int((place / "calls").read_text()) + 1):
        folder = shutil.copytree(place / "begun", place / f"killed-{number}")
        killed = live(save(folder, 2), killed_at=number)
        read = Checkpoints(folder / "checkpoints", 1).load()
        assert read is not None and read.shards is not None
        best = best_of(folder)
        assert best is not None
        outcome = {"killed": killed, "step": read.step, "best": best[1]}
        outcome["weight"] = read.shards.whole("model")["weight"].unique().tolist()
        outcome["best weight"] = best_weights(folder)[0]["weight"].unique().tolist()
        if number % 5 == 0:
            code = live(save(folder, 2))
            outcome["again"] = [code, sorted(path.name for path in (folder / "checkpoints").iterdir())]
        outcomes.append(outcome)
    return [{"codes": codes}, *outcomes]


@contextmanager
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def tensors_of(step: int) -> dict[str, Tensor]:
    """Tensors of a checkpoint, with all that may be strange about them."""
    weight = torch.full((5, 3), float(step))
    return {
        "model/weight": weight,
        "model/tied": weight,
        "model/view": torch.arange(12.0).view(3, 4)[:, 1:3],
        "model/half": torch.ones(1, 3, dtype=torch.bfloat16),
        "model/mask": torch.tensor([True, False]),
        "model/none": torch.zeros(0, 4),
        "optimizer/weight:step": torch.tensor(float(step)),
        "optimizer/weight:count": torch.tensor(step),
    }


def sha256(path: Path) -> str:
    return hashed(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    signal.alarm(300)
    kinds()
    folder, data = Path(sys.argv[1]), sys.argv[2]
    codes = {"two": together(2, folder, begun_by_two(folder, data))}
    codes["four"] = together(4, folder, resumed_by_four(folder, data))
    (folder / "kills").mkdir()
    told = json.loads((folder / "told.json").read_text())
    seconds = [kill_the_second(folder / "kills", number) for number in (1, 2, 3)]
    print(json.dumps(told | {"codes": codes, "kills": kill_everywhere(folder / "kills"), "second": seconds}))
