"""How fast contestants train and generate, measured in turns, and how much memory they take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kinformer.comparison import works
from kinformer.comparison.cache import Cache, key_of
from kinformer.comparison.options import CompareOptions
from kinformer.comparison.plan import Contestant, guarded, planned, still_in
from kinformer.comparison.timing import Peak, in_fresh_process, in_turns
from kinformer.runs.options import TrainOptions
from kinformer.training.distributed import Group
from kinformer.training.loop import Trainer

BATCHES = (1, 16)
PROMPT = 128


def stepper(options: TrainOptions, folder: Path, device: torch.device) -> Callable[[], object]:
    """Training steps as the trainer makes them, which change no weight."""
    task, plan = planned(options)
    torch.manual_seed(plan.settings.seed)
    model = plan.config.build()
    data = task.data_module(plan)
    trainer = Trainer(model, data, task.objective(plan.settings.objective, model, data), plan.settings, folder,
                      Group(device), quiet=True)  # fmt: skip
    numbers = iter(range(1 << 30))
    return lambda: float(trainer.update(next(numbers), 0.0, 0.0).loss)


def training_speeds(found: Sequence[Contestant], options: CompareOptions, cache: Cache) -> None:
    """``found["training"]`` of each: seconds of a step, those of the anchor (the first contestant) in the same rounds,
    and when. Those that are kept stay as they are; the others are measured in turns, together with the anchor."""
    device = options.usable_device()
    sizes = ["training", options.length, options.batch_size, options.optimizer, options.precision, device.type]
    keys = {each.name: key_of([sizes, each.model_key, torch.get_num_threads()]) for each in still_in(found)}
    for each in still_in(found):
        each.found["training"] = cache.get("speed", keys[each.name])
    missing = [each for each in still_in(found) if each.found["training"] is None]
    if not missing:
        return
    anchor = still_in(found)[0]
    with tempfile.TemporaryDirectory() as folder:
        steps = {}
        for each in missing if anchor in missing else [anchor, *missing]:
            with guarded(each, "its first training steps"):
                job = each.options(Path(folder), options.middle, options.seed, 1)
                first = stepper(job, Path(folder), device)
                first()
                steps[each.name] = first
        seconds = in_turns(steps, options.rounds, str(device))
    for each in missing:
        if each.name not in seconds:
            each.error = each.error or "its first training steps failed."
        else:
            each.found["training"] = {"seconds": seconds[each.name]} | _round(anchor, seconds.get(anchor.name))
            cache.put("speed", keys[each.name], each.found["training"])


def _round(anchor: Contestant, value: Any) -> dict[str, Any]:
    return {"anchor": anchor.name, "anchor_value": value, "date": time.strftime("%Y-%m-%d")}


def generation_speeds(found: Sequence[Contestant], options: CompareOptions, cache: Cache) -> None:
    """``found["generation"]``: seconds of a token for all rows, by the number of rows, behind a prompt of 128."""
    able = [each for each in still_in(found) if works.generates(each.config)]
    _measured(able, "generation", [("decode", batch, PROMPT) for batch in BATCHES], options, cache)


def length_speeds(found: Sequence[Contestant], options: CompareOptions, cache: Cache) -> None:
    """``found["lengths"]``: seconds of a forward and of a training step of one row by its length."""
    able = [each for each in still_in(found) if works.reads_tokens(each.config)]
    points = [(kind, 1, length) for length in options.measured_lengths for kind in ("forward", "step")]
    _measured(able, "lengths", points, options, cache)


def _measured(
    able: Sequence[Contestant],
    stage: str,
    points: Sequence[tuple[str, int, int]],
    options: CompareOptions,
    cache: Cache,
) -> None:
    """Each point of all contestants that lack it, in turns, with the anchor among them."""
    device = options.usable_device()
    content = [stage, list(map(list, points)), options.rounds, device.type, torch.get_num_threads(), options.precision]
    keys = {each.name: key_of([content, each.model_key]) for each in able}
    for each in able:
        each.found[stage] = cache.get("speed", keys[each.name])
    missing = [each for each in able if each.found[stage] is None]
    if not missing:
        return
    chosen = missing if able[0] in missing else [able[0], *missing]
    models: dict[str, Any] = {}
    for each in chosen:
        with guarded(each, f"measuring {stage}"):
            torch.manual_seed(options.seed)
            model = each.config.build().to(device)
            works.check_correct(model)
            models[each.name] = model
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for kind, batch, length in points:
        each_work: dict[str, works.Work] = {}
        for each in chosen:
            if each.name in models and works.room_for(models[each.name], kind, length, options.rounds):
                with guarded(each, f"{kind} of {length} tokens"):
                    each_work[each.name] = works.WORKS[kind](models[each.name], batch, length)
        for name, seconds in in_turns(each_work, options.rounds, str(device)).items():
            share = works.DECODED if kind == "decode" else 1
            rows[name].append({"kind": kind, "batch": batch, "length": length, "seconds": seconds / share})
    for each in missing:
        if each.name in rows:
            each.found[stage] = {"points": rows[each.name]} | _round(able[0], rows.get(able[0].name))
            cache.put("speed", keys[each.name], each.found[stage])


def memory_of(contestant: Contestant, options: CompareOptions, cache: Cache) -> dict[str, Any]:
    """Peak bytes of training as it is done here, and by length of one row, above an empty process."""
    device = options.usable_device()
    job = contestant.options(Path(), options.middle, options.seed, 1)
    content = ["memory", options.lengths, options.length, options.batch_size, options.optimizer, device.type]
    key = key_of([content, options.precision, contestant.model_key, torch.get_num_threads()])
    return cache.once("memory", key, lambda: in_fresh_process(peaks, job, options.measured_lengths, str(device)))


def peaks(options: TrainOptions, lengths: Sequence[int], device: str) -> dict[str, Any]:
    """For a process of its own: see :func:`memory_of`."""
    _, plan = planned(options)
    empty, by_length = Peak(device), []
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
