"""Timing of members in turns with plain attention at several lengths: forward, step, reading a prompt, decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, TypeVar

import torch
from torch import nn

from kinformer.core.config import field_types
from kinformer.core.stack import ModelConfig
from kinformer.family.build import configure, model_config, storable
from kinformer.family.table import member
from kinformer.lab.comparison import words, works
from kinformer.lab.comparison.options import BenchOptions
from kinformer.lab.comparison.record import MachineFacts
from kinformer.lab.comparison.speed import Floor, in_fresh_process, in_turns, machine, measure_floor, step_peaks
from kinformer.lab.comparison.works import PeerModel, installed, shape_of
from kinformer.lab.estimation.estimate import estimate, state_bytes
from kinformer.runtime.draws import seeding
from kinformer.runtime.errors import KinformerError, memory_sentence, plural
from kinformer.runtime.progress import note

M = TypeVar("M", bound=nn.Module)
PLAIN = "gpt"
MEMBERS = ("linear-transformer", "fast-weights", "local")
WORK_NAMES = {"forward": "a forward", "step": "a training step", "prefill": "reading a prompt", "decode": "decoding"}


@dataclass(frozen=True)
class Timing:
    """The time of one work of one member at one length: the ``seconds`` of a call or, in decoding, of one token of all
    rows; and the reached ``share`` of the machine's measured limit, None if the operations are unknown."""

    member: str
    work: str
    length: int
    seconds: float
    share: float | None


class BenchFacts(TypedDict):
    """The settings of a benchmark, its ``date``, and the versions of the ``peers`` by name."""

    recipe: str
    batch: int
    rounds: int
    set: dict[str, object]
    date: str
    peers: dict[str, str]


@dataclass(frozen=True)
class Bench:
    """The results of a benchmark: ``failed`` has the reasons of members that fail the check of correctness, ``memory``
    bytes by member and length, and ``crossings`` sentences about the lengths at which members overtake plain
    attention."""

    members: tuple[str, ...]
    timings: tuple[Timing, ...]
    failed: dict[str, str]
    memory: dict[str, dict[int, int]]
    floor: Floor
    crossings: tuple[str, ...]
    machine: MachineFacts
    facts: BenchFacts

    @property
    def as_json(self) -> dict[str, object]:
        """The benchmark as data that JSON can hold."""
        return asdict(self)


@seeding
def bench(members: Sequence[str], options: BenchOptions) -> Bench:
    """Time ``members`` beside plain attention (gpt of the same recipe, with as many positions as the lengths need)."""
    options.prepare(options.seed)
    torch.manual_seed(options.seed)
    device = str(options.usable_device())
    names = list(dict.fromkeys([PLAIN, *(member(name).name for name in (members or MEMBERS))]))
    configs = {name: _config(name, options) for name in names}
    models, failed = _checked({name: config.build for name, config in configs.items()}, options.seed, device)
    if PLAIN in failed:
        raise KinformerError(f"{PLAIN}, beside which all are timed, cannot be timed here: {failed[PLAIN]}")
    floor = measure_floor(device)
    builders = installed() if options.peers else {}
    if options.peers and not builders:
        note("no peer is installed; pip install transformers, or x-transformers, gives one.")
    as_large = {name: lambda build=build: build(shape_of(configs[PLAIN])) for name, build in builders.items()}
    peers, refused = _checked(as_large, options.seed, device)
    timings: list[Timing] = []
    for work in options.works:
        for length in options.sizes:
            timings += _timed(models | peers, work, length, options, device, floor)
    sizes = options.sizes, options.batch_size, device
    stored = {name: storable(configs[name]) for name in models if options.memory}
    memory = {name: dict(in_fresh_process(peaks_of, config, *sizes)) for name, config in stored.items()}
    timed = (*models, *peers)
    return Bench(
        members=timed, timings=tuple(timings), failed=failed | refused, memory=memory, floor=floor,
        crossings=tuple(_crossings(timed, timings, options)), machine=machine(device),
        facts={"recipe": options.recipe, "batch": options.batch_size, "rounds": options.rounds,
               "set": dict(options.set), "date": time.strftime("%Y-%m-%d"),
               "peers": {name: peer.version for name, peer in peers.items()}},
    )  # fmt: skip


def _config(name: str, options: BenchOptions) -> ModelConfig:
    config = configure(name, options.recipe, None, options.set)
    if not works.reads_tokens(config):
        raise KinformerError(f"{name}: reads no tokens, and only what does is timed here; choose another member.")
    longest = max(options.sizes) + works.WARM + works.DECODED * (options.rounds + 1)
    position: Any = getattr(config, "position", None)
    if name == PLAIN and "max_length" in field_types(type(position)) and position.max_length < longest:
        config = config.replace(position=position.replace(max_length=longest))
    return config


def _checked(builders: Mapping[str, Callable[[], M]], seed: int, device: str) -> tuple[dict[str, M], dict[str, str]]:
    """Return the models that pass the check of correctness, and the reasons of the failures, by name."""
    models, failed = {}, {}
    for name, build in builders.items():
        torch.manual_seed(seed)
        try:
            model = build().to(device)
            works.check_correct(model)
        except Exception as error:
            failed[name] = memory_sentence(error) or " ".join(str(error).split())[:300]
            if name != PLAIN:
                note(f"{name} is not timed: {failed[name]}")
        else:
            models[name] = model
    return models, failed


def _timed(
    models: Mapping[str, Any], work: str, length: int, options: BenchOptions, device: str, floor: Floor
) -> list[Timing]:
    ready = {}
    for name, model in models.items():
        measures = model.works if isinstance(model, PeerModel) else works.works_of(model.config)
        if work not in measures:
            continue
        if not works.room_for(model, work, length, options.rounds):
            text = f"{work} of {plural(length, 'token')}"
            note(f"{name}: its positions end at {model.max_length}, so {text} is left out.")
            continue
        ready[name] = measures[work](model, options.batch_size, length)
    seconds_by_name = in_turns(ready, options.rounds, device)
    share = works.DECODED if work == "decode" else 1
    return [
        Timing(name, work, length, item, _share(models[name], work, (options.batch_size, length), item, floor))
        for name, item in ((name, seconds_by_name[name] / share) for name in models if name in seconds_by_name)
    ]


def _share(model: Any, work: str, sizes: tuple[int, int], seconds: float, floor: Floor) -> float | None:
    """Return the reached share of the machine's limit: FLOPs per second or, in decoding, bytes per second, because
    every token reads all weights and states once."""
    batch, length = sizes
    if not isinstance(model.config, ModelConfig):  # a peer's
        return None
    if work == "decode":
        weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        return (weights + batch * state_bytes(model, length)) / seconds / floor.bandwidth
    with suppress(Exception):
        cost = estimate(model.config, length=length, batch=batch)
        return (cost.flops_step if work == "step" else cost.flops_inference) / seconds / floor.flops
    return None


def peaks_of(data: Mapping[str, object], lengths: Sequence[int], batch: int, device: str) -> list[tuple[int, int]]:
    """Return each length and its peak bytes of a training step of the config ``data``; for a fresh process."""
    return list(step_peaks(model_config(data).build().to(device), lengths, batch, device))


def seconds_of(timings: Sequence[Timing], name: str, work: str) -> dict[int, float]:
    """Return the seconds of one member's work by length."""
    return {timing.length: timing.seconds for timing in timings if (timing.member, timing.work) == (name, work)}


def _crossings(names: Sequence[str], timings: Sequence[Timing], options: BenchOptions) -> Iterator[str]:
    """Yield a sentence about each member and work that were timed at two lengths or more beside plain attention."""
    for work in options.works:
        base = seconds_of(timings, PLAIN, work)
        for name in names:
            ours = seconds_of(timings, name, work)
            if name != PLAIN and len(ours.keys() & base.keys()) > 1:
                always, text = words.crossover(PLAIN, ours, base)
                yield f"In {WORK_NAMES[work]}, {name} is {', '.join(filter(None, (always, text)))}."
