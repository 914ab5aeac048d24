"""The speeds at which contestants train and generate, measured in turns, and the memory that they take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from kinformer.comparison import works
from kinformer.comparison.cache import Cache, key_of
from kinformer.comparison.options import CompareOptions
from kinformer.comparison.plan import Contestant, guarded, planned, still_in
from kinformer.comparison.results import LengthBytes, Memory, SpeedPoint
from kinformer.comparison.timing import Peak, in_fresh_process, in_turns
from kinformer.runs.options import TrainOptions
from kinformer.runtime.words import plural
from kinformer.training.distributed import Group
from kinformer.training.loop import Trainer

BATCHES = (1, 16)
PROMPT = 128


def stepper(options: TrainOptions, folder: Path, device: torch.device) -> Callable[[], object]:
    """Return a function that makes a training step as the trainer does, at a learning rate of 0."""
    task, plan = planned(options)
    torch.manual_seed(plan.settings.seed)
    model = plan.config.build()
    data = task.data_module(plan)
    trainer = Trainer(model, data, task.objective(plan.settings.objective, model, data), plan.settings, folder,
                      Group(device), quiet=True)  # fmt: skip
    numbers = iter(range(1 << 30))
    return lambda: float(trainer.update(next(numbers), 0.0, 0.0).loss)


def training_speeds(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache) -> None:
    """Set ``results["training"]`` of each: seconds of a step, those of the anchor (the first contestant) in the same
    rounds, and the date. Cached ones stay as they are; the others are measured in turns, together with the anchor."""
    device = options.usable_device()
    sizes = ["training", options.length, options.batch_size, options.optimizer, options.precision, device.type]
    keys = {item.name: key_of([sizes, item.model_key, torch.get_num_threads()]) for item in still_in(contestants)}
    for contestant in still_in(contestants):
        contestant.results["training"] = cache.get("speed", keys[contestant.name])
    missing = [item for item in still_in(contestants) if item.results["training"] is None]
    if not missing:
        return
    anchor = still_in(contestants)[0]
    with tempfile.TemporaryDirectory() as folder:
        steps = {}
        for contestant in missing if anchor in missing else [anchor, *missing]:
            with guarded(contestant, "its first training steps"):
                job = contestant.options(Path(folder), options.middle, options.seed, 1)
                first = stepper(job, Path(folder), device)
                first()
                steps[contestant.name] = first
        seconds = in_turns(steps, options.rounds, str(device))
    for contestant in missing:
        if contestant.name not in seconds:
            contestant.error = contestant.error or "its first training steps failed."
        else:
            contestant.results["training"] = {
                "seconds": seconds[contestant.name],
                "anchor": anchor.name,
                "anchor_value": seconds.get(anchor.name),
                "date": time.strftime("%Y-%m-%d"),
            }
            cache.put("speed", keys[contestant.name], contestant.results["training"])


def generation_speeds(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache) -> None:
    """Set ``results["generation"]``: seconds of a token for all rows, by the number of rows, behind a prompt of 128."""
    subjects = [contestant for contestant in still_in(contestants) if works.generates(contestant.config)]
    _measured(subjects, "generation", [("decode", batch, PROMPT) for batch in BATCHES], options, cache)


def length_speeds(contestants: Sequence[Contestant], options: CompareOptions, cache: Cache) -> None:
    """Set ``results["lengths"]``: seconds of a forward and of a training step of one row by its length."""
    subjects = [contestant for contestant in still_in(contestants) if works.reads_tokens(contestant.config)]
    points = [(kind, 1, length) for length in options.measured_lengths for kind in ("forward", "step")]
    _measured(subjects, "lengths", points, options, cache)


def _measured(
    subjects: Sequence[Contestant],
    stage: Literal["generation", "lengths"],
    points: Sequence[tuple[str, int, int]],
    options: CompareOptions,
    cache: Cache,
) -> None:
    """Measure each point of all contestants that lack it, in turns, with the anchor among them."""
    device = options.usable_device()
    content = [stage, list(map(list, points)), options.rounds, device.type, torch.get_num_threads(), options.precision]
    keys = {item.name: key_of([content, item.model_key]) for item in subjects}
    for contestant in subjects:
        contestant.results[stage] = cache.get("speed", keys[contestant.name])
    missing = [item for item in subjects if item.results[stage] is None]
    if not missing:
        return
    chosen = missing if subjects[0] in missing else [subjects[0], *missing]
    models: dict[str, works.Timed] = {}
    for contestant in chosen:
        with guarded(contestant, f"measuring {stage}"):
            torch.manual_seed(options.seed)
            model = contestant.config.build().to(device)
            works.check_correct(model)
            models[contestant.name] = model
    rows: dict[str, list[SpeedPoint]] = {name: [] for name in models}
    for kind, batch, length in points:
        work_by_name: dict[str, works.Work] = {}
        for contestant in chosen:
            if contestant.name in models and works.room_for(models[contestant.name], kind, length, options.rounds):
                with guarded(contestant, f"{kind} of {plural(length, 'token')}"):
                    work_by_name[contestant.name] = works.WORKS[kind](models[contestant.name], batch, length)
        for name, seconds in in_turns(work_by_name, options.rounds, str(device)).items():
            share = works.DECODED if kind == "decode" else 1
            rows[name].append({"kind": kind, "batch": batch, "length": length, "seconds": seconds / share})
    for contestant in missing:
        if contestant.name in rows:
            contestant.results[stage] = {
                "points": rows[contestant.name],
                "anchor": subjects[0].name,
                "anchor_value": rows.get(subjects[0].name),
                "date": time.strftime("%Y-%m-%d"),
            }
            cache.put("speed", keys[contestant.name], contestant.results[stage])


def memory_of(contestant: Contestant, options: CompareOptions, cache: Cache) -> Memory:
    """Return peak bytes of training as it is done here, and by length of one row, above an empty process."""
    device = options.usable_device()
    job = contestant.options(Path(), options.middle, options.seed, 1)
    content = ["memory", options.lengths, options.length, options.batch_size, options.optimizer, device.type]
    key = key_of([content, options.precision, contestant.model_key, torch.get_num_threads()])
    return cache.once("memory", key, lambda: in_fresh_process(peaks, job, options.measured_lengths, str(device)))


def peaks(options: TrainOptions, lengths: Sequence[int], device: str) -> Memory:
    """Measure what :func:`memory_of` returns, in a process of its own."""
    _, plan = planned(options)
    empty = Peak(device)
    by_length: list[LengthBytes] = []
    if works.reads_tokens(plan.config):
        model = plan.config.build().to(device)
        built = Peak(device)
        for length in lengths:
            if works.room_for(model, "step", length, 0):
                built.restart()
                works.step(model, 1, length)()
                by_length.append({"length": length, "bytes": max(0, built.bytes)})
        del model
    empty.restart()
    with tempfile.TemporaryDirectory() as folder:
        step = stepper(options, Path(folder), torch.device(device))
        for _ in range(2):
            step()
    return {"training": empty.bytes, "lengths": by_length}
