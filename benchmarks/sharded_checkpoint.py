"""What does a checkpoint of weights that are sharded over two processes cost, in memory and time?

    gathered   the first process collects all tensors and writes them, one file a group
    sharded    every process writes its part (lab/training/shards.py)
    beside     every process copies its part, and a thread writes the copy (`training.async_saves`)

Told are, for each process, the bytes of its part of weights and optimiser (AdamW), the most memory that a save takes
beyond what was there before it, and the seconds of a save and those in which training stands still, the medians over
the rounds. The gate: weights and optimiser that are read from the shards, by two processes and by one, are those that
were written.

And a run of one process, saved every few steps in both ways: the seconds of all of it, where every core trains.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kinformer
from common import arguments, memory, prepare, save, show
from kinformer.family.build import configure
from kinformer.lab.tasks.next_token import NextTokenLoss
from kinformer.lab.training.checkpoint import Checkpoint, Checkpoints, Saves
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.lab.training.distributed import Group, join, launch, wrapped
from kinformer.lab.training.optimisers import Optimiser, gather
from kinformer.lab.training.settings import Settings
from kinformer.lab.training.shards import part_of
from kinformer.runtime.compiling import is_sharded

PROCESSES = 2
SHAPES = ((6, 768, 32_000), (12, 768, 32_000))
"""Layers, dim, vocabulary."""
WAYS = ("gathered", "sharded", "beside")


def work(place: str, shape: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    """The measurements of both ways, of every process in order of rank."""
    torch.set_num_threads(1)
    with join("cpu", "fsdp") as group:
        groups = tensors(shape, group)
        part = sum(local(tensor).nbytes for tensors in groups.values() for tensor in tensors.values())
        found: dict[str, Any] = {"part": part}
        for way in WAYS:
            peaks, stood, seconds = [], [], []
            for number in range(1, rounds + 1):
                stands: list[float] = []
                peak, took = measured(
                    lambda way=way, number=number, at=stands: write(way, Path(place), number, groups, group, at)
                )
                peaks.append(peak)
                seconds.append(took)
                stood.append(*stands or [took])
            found[way] = {"bytes": max(peaks), "stood": statistics.median(stood), "seconds": statistics.median(seconds)}
        for way in ("sharded", "beside"):
            gate(Path(place) / way, groups, group)
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


def write(
    way: str, place: Path, number: int, groups: dict[str, dict[str, torch.Tensor]], group: Group, stood: list[float]
) -> None:
    """One save, to its end; for how long training stands still, if not for all of it, goes into ``stood``."""
    checkpoints, begun = Checkpoints(place / way, 1), time.perf_counter()
    if way == "gathered":
        files = {key: gather(part.items(), group.first) for key, part in groups.items()}
        group.on_first(lambda: checkpoints.save(Checkpoint(number, files, {})))
        return
    named = {f"{key}/{name}": tensor for key, part in groups.items() for name, tensor in part.items()}
    if way == "sharded":
        checkpoints.save_sharded(Checkpoint(number, {}, {}), part_of(named, group), group)
        return
    with Saves(in_thread=True) as saves:
        part, writers = part_of(named, group).staged(), group.with_new_channel()
        saves.add(lambda: checkpoints.save_sharded(Checkpoint(number, {}, {}), part, writers))
        stood.append(time.perf_counter() - begun)


def runs(place: Path, options: Any) -> list[list[Any]]:
    """The seconds of a run of one process on all cores, by how it saves: none but the last, and every fifth step."""
    steps, sizes = (5, {}) if options.quick else (16, {"layers": 4, "dim": 512, "layers.*.mixer.num_heads": 8})
    rows = []
    for beside in (False, False, True, False, True):  # the first one warms up
        begun = time.perf_counter()
        kinformer.train(
            "gpt", recipe="small", steps=steps, length=64, batch_size=2, out=place / f"{len(rows)}", device="cpu",
            validate_every=0, checkpoint_every=steps // 8 or 1, async_saves=beside, set=sizes,
        )  # fmt: skip
        rows.append(["beside" if beside else "at once", round(time.perf_counter() - begun, 2)])
    return rows[1:]


def measured(step: Callable[[], object]) -> tuple[int, float]:
    """The most memory that ``step`` takes beyond what was resident before it, and its seconds."""
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier way has freed would be taken for the next one's
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
            row["beside, stood still"] = round(each["beside"]["stood"], 3)
            rows.append(row)
    show("a save: the most memory beyond what was there, and its time", list(rows[0]), [list(r.values()) for r in rows])
    with tempfile.TemporaryDirectory() as place:
        whole = runs(Path(place), options)
    show("a run of one process that saves 8 times", ["saves", "seconds"], whole)
    save(options, "sharded_checkpoint", {"processes": PROCESSES, "shapes": rows, "runs": whole})


if __name__ == "__main__":
    main()
