"""What does a checkpoint of weights that are sharded over two processes cost, in memory and time?

    gathered   the first process collects all tensors and writes them, one file a group
    sharded    every process writes its part (training/shards.py)

Told are, for each process, the bytes of its part of weights and optimiser (AdamW), the most memory that a save takes
beyond what was there before it, and the seconds of a save, the median over the rounds. The gate: weights and optimiser
that are read from the shards, by two processes and by one, are those that were written.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import arguments, memory, prepare, save, show
from kinformer.family.build import configure
from kinformer.runtime.sharding import is_sharded
from kinformer.tasks.next_token.rows import NextTokenLoss
from kinformer.training.checkpoint import Checkpoint, Checkpoints
from kinformer.training.distributed import Group, join, launch
from kinformer.training.engines import wrapped
from kinformer.training.objective import ObjectiveModule
from kinformer.training.optimiser import Optimiser, gather
from kinformer.training.settings import Settings

PROCESSES = 2
SHAPES = ((6, 768, 32_000), (12, 768, 32_000))
"""Layers, dim, vocabulary."""
WAYS = ("gathered", "sharded")


def work(place: str, shape: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    """The measurements of both ways, of every process in order of rank."""
    torch.set_num_threads(1)
    with join("cpu", "fsdp") as group:
        groups = tensors(shape, group)
        part = sum(local(tensor).nbytes for tensors in groups.values() for tensor in tensors.values())
        found: dict[str, Any] = {"part": part}
        for way in WAYS:
            peaks, seconds = [], []
            for number in range(1, rounds + 1):
                peak, took = measured(lambda way=way, number=number: write(way, Path(place), number, groups, group))
                peaks.append(peak)
                seconds.append(took)
            found[way] = {"bytes": max(peaks), "seconds": statistics.median(seconds)}
        gate(Path(place) / "sharded", groups, group)
        return group.on_all(lambda: found)


def tensors(shape: tuple[int, int, int], group: Group) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and optimiser of a GPT after one step, sharded."""
    layers, dim, vocabulary = shape
    torch.manual_seed(0)
    changes = {"layers": layers, "dim": dim, "layers.*.mixer.num_heads": dim // 64}
    model = configure("gpt", "small", vocabulary, changes).build()
    wrapped(ObjectiveModule(model, NextTokenLoss(), "fp32"), group)
    optimiser = Optimiser(model, Settings(steps=1))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1e-3 * number)
    optimiser.step(1e-3)
    return {"model": model.state_dict(), "optimizer": dict(optimiser.tensors())}


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def write(way: str, place: Path, number: int, groups: dict[str, dict[str, torch.Tensor]], group: Group) -> None:
    checkpoints = Checkpoints(place / way, 1)
    if way == "sharded":
        named = {f"{key}/{name}": tensor for key, part in groups.items() for name, tensor in part.items()}
        checkpoints.save_sharded(Checkpoint(number, {}, {}), named, group)
        return
    files = {key: gather(part.items(), group.first) for key, part in groups.items()}
    group.on_first(lambda: checkpoints.save(Checkpoint(number, files, {})))


def measured(step: Callable[[], object]) -> tuple[int, float]:
    """The most memory that ``step`` takes beyond what was resident before it, and its seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, begun = memory("VmRSS"), time.perf_counter()
    step()
    return memory("VmHWM") - before, time.perf_counter() - begun


def gate(place: Path, groups: dict[str, dict[str, torch.Tensor]], group: Group) -> None:
    """Stop unless what is read, by all processes and by one, is what was written."""
    read = Checkpoints(place, 1).load(group)
    assert read is not None and read.shards is not None
    for key, part in groups.items():
        rooms = {name: torch.empty_like(tensor) for name, tensor in part.items()}
        read.shards.fill(key, rooms)
        if not all(torch.equal(local(rooms[name]), local(tensor)) for name, tensor in part.items()):
            raise SystemExit(f"{key}: two processes read something else than they wrote.")
        whole = gather(part.items(), group.first)
        if group.first:
            alone = read.shards.whole(key)
            if not all(torch.equal(alone[name], tensor) for name, tensor in whole.items()):
                raise SystemExit(f"{key}: one process reads something else than two wrote.")
        group.on_all(lambda: None)


def main() -> None:
    options = prepare(arguments(__doc__))
    rounds, rows = options.rounds or (1 if options.quick else 3), []
    for shape in ((2, 128, 256),) if options.quick else SHAPES:
        with tempfile.TemporaryDirectory() as place:
            found = launch(work, (place, shape, rounds), PROCESSES)
            shutil.rmtree(place, ignore_errors=True)
            Path(place).mkdir()
        for rank, each in enumerate(found):
            row = dict(zip(("layers", "dim", "vocabulary"), shape, strict=True)) | {"process": rank}
            row["MB of its part"] = round(each["part"] / 1e6, 1)
            for way in WAYS:
                row[f"{way}, MB"] = round(each[way]["bytes"] / 1e6, 1)
                row[f"{way}, of a part"] = round(each[way]["bytes"] / each["part"], 3)
                row[f"{way}, seconds"] = round(each[way]["seconds"], 2)
            rows.append(row)
    show("a save: the most memory beyond what was there, and its time", list(rows[0]), [list(r.values()) for r in rows])
    save(options, "sharded_checkpoint", {"processes": PROCESSES, "shapes": rows})


if __name__ == "__main__":
    main()
