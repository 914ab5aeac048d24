"""What two processes do in one launch, for the tests of distributed training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kinformer.lab.data import open_corpus
from kinformer.lab.training.distributed import Group, join
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import rewound, train, trainer

LINEAR = {"member": "linear-transformer"}
MASKED = {"model": {"member": "bert"}, "objective": "masked-language", "validation_tokens": 700}
LABELS = {"model": {"member": "bert"}, "objective": "classification", "length": 32}
SPANS = {"member": "adaptive-span", "layers.*.mixer.span.penalty": 0.05}
HIGH_RATE = {"optimizer": "radam", "lr": 0.3, "warmup": 0, "steps": 10, "validate_every": 5, "double": True}
"""Rectified from the sixth step on; the rate amplifies what float32 rounds to some 1e-3 in the weights."""
HYBRID = {
    "member": "gated-deltanet", "layers": 2, "layers.1.mixer": {"kind": "softmax", "position": "rope"},
}  # fmt: skip
PAIRS = {"model": {"member": "vanilla"}, "objective": "translation", "batch_size": 8, "validation_tokens": 300}
FRESH: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "ddp accumulated": ("ddp", {"accumulate": 2}),
    "fsdp accumulated": ("fsdp", {"accumulate": 2}),
    "ddp segments": ("ddp", {"segments": True, "model": LINEAR}),
    "fsdp segments": ("fsdp", {"segments": True, "model": LINEAR}),
    "fsdp muon": ("fsdp", {"optimizer": "muon"}),
    "fsdp average": ("fsdp", {"ema": 0.5}),
    "fsdp mean": ("fsdp", {"average": 2}),
    "fsdp shared": ("fsdp", {"model": {"member": "t5"}}),
    "fsdp spans": ("fsdp", {"segments": True, "model": SPANS, "optimizer": "adagrad", "lr": 0.07, "clip": 0.03}),
    "ddp sparse": ("ddp", {"model": {"member": "pkm"}, "accumulate": 2}),
    "ddp clusters": ("ddp", {"model": {"member": "routing"}, "accumulate": 2}),
    "fsdp clusters": ("fsdp", {"model": {"member": "routing"}, "segments": True}),
    "fsdp masked": ("fsdp", MASKED),
    "ddp labels": ("ddp", LABELS | {"accumulate": 2, "batch_size": 8}),
    "fsdp deep": ("fsdp", {"model": {"member": "deep-char", "layers": 3}, "objective": "deep-supervision"}),
    "ddp radam": ("ddp", HIGH_RATE),
    "fsdp hybrid": ("fsdp", {"segments": True, "model": HYBRID}),
    "fsdp recurrence": ("fsdp", {"segments": True, "model": {"member": "transformer-xl"}}),
    "fsdp pairs": ("fsdp", PAIRS),
    "fsdp bf16": ("fsdp", {"precision": "bf16-mixed", "segments": True, "model": LINEAR}),
}
AGAIN = (
    "ddp sparse",
    "ddp clusters",
    "ddp labels",
    "fsdp segments",
    "fsdp muon",
    "fsdp average",
    "fsdp shared",
    "fsdp deep",
    "fsdp hybrid",
    "fsdp pairs",
)
"""One of every kind of state that a checkpoint holds."""
OPTIONS = {"steps": 4, "checkpoint_every": 2, "validate_every": 2}


def work(place: str, text: str) -> dict[str, Any]:
    """Every run of ``FRESH``; those of ``AGAIN`` resumed by two; runs of one process resumed by two; a fault."""
    torch.set_num_threads(1)
    with join("cpu", "ddp") as group:
        return _work(Path(place), text, group)


def _work(place: Path, text: str, group: Group) -> dict[str, Any]:
    corpus = open_corpus(text)
    told = {}
    for name, (strategy, options) in FRESH.items():
        told[name] = train(corpus, place / name, replace(group, strategy=strategy), **OPTIONS | options)
    for name in AGAIN:
        strategy, options = FRESH[name]
        group.on_first(lambda name=name: rewound(place / name, place / f"{name} again"))
        train(corpus, place / f"{name} again", replace(group, strategy=strategy), **OPTIONS | options)
        train(corpus, place / f"one to {name}", replace(group, strategy=strategy), **OPTIONS | options)
    return told | {"rows": _rows(corpus, place, group), "fault": _fault(group)}


def _rows(corpus: Any, place: Path, group: Group) -> list[list[list[int]]]:
    """The rows that each process sees in step 0."""
    batch = trainer(corpus, place / "unused", group).update._batch(0)
    return [parts[0].tolist() for parts in group.collect([batch.tokens])]


def _fault(group: Group) -> str:
    """What every process is told when something fails on the first: the second's words."""

    def fail() -> None:
        raise KinformerError("the disk is full.")

    told = ""
    try:
        group.on_first(fail)
    except KinformerError as error:
        told = str(error)
    heard = group.collect([torch.tensor(list(told.encode()))])
    return bytes(heard[1][0].tolist()).decode() if heard else ""
