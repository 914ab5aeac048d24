"""What two processes do, for the tests of distributed training. Prints what became of them.

    python -m tests.training.two_processes FOLDER DATA

Processes are forks of this one, which has computed nothing before and loaded all that they need.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kinformer.family.kinds import kinds
from kinformer.lab.data import open_corpus
from kinformer.lab.training.distributed import Group
from kinformer.runtime.errors import KinformerError
from tests.training.sharded import together
from tests.training.tiny import rewound, train, trainer

LINEAR = {"member": "linear-transformer", "layers": 1}
MASKED = {"model": {"member": "bert", "layers": 1}, "objective": "masked-language", "validation_tokens": 700}
LABELS = {"model": {"member": "bert", "layers": 1}, "objective": "classification", "length": 32}
SPANS = {"member": "adaptive-span", "layers.*.mixer.span.penalty": 0.05}
HIGH_RATE = {"optimizer": "radam", "lr": 0.3, "warmup": 0, "steps": 10, "validate_every": 5, "double": True}
"""Rectified from the sixth step on; the rate amplifies what float32 rounds to some 1e-3 in the weights."""
HYBRID = {
    "member": "gated-deltanet", "layers": 2, "layers.1.mixer": {"kind": "softmax", "position": "rope"},
}  # fmt: skip
PAIRS = {
    "model": {"member": "vanilla", "layers": 1, "encoder.layers": 1}, "objective": "translation",
    "batch_size": 8, "validation_tokens": 300,
}  # fmt: skip
FRESH: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp accumulated": ("ddp", {"accumulate": 2}),
    "fsdp accumulated": ("fsdp", {"accumulate": 2}),
    "fsdp segments": ("fsdp", {"segments": True, "model": LINEAR}),
    "fsdp muon": ("fsdp", {"optimizer": "muon"}),
    "fsdp mean": ("fsdp", {"average": 2}),
    "fsdp spans": ("fsdp", {"segments": True, "model": SPANS, "optimizer": "adagrad", "lr": 0.07, "clip": 0.03}),
    "ddp sparse": ("ddp", {"model": {"member": "pkm"}, "accumulate": 2}),
    "ddp clusters": ("ddp", {"model": {"member": "routing"}, "accumulate": 2}),
    "fsdp clusters": ("fsdp", {"model": {"member": "routing"}, "segments": True}),
    "fsdp masked": ("fsdp", MASKED),
    "ddp labels": ("ddp", LABELS | {"accumulate": 2, "batch_size": 8}),
    "fsdp deep": ("fsdp", {"model": {"member": "deep-char", "layers": 3}, "objective": "deep-supervision"}),
    "ddp radam": ("ddp", HIGH_RATE),
    "fsdp hybrid": ("fsdp", {"segments": True, "model": HYBRID}),
    "fsdp pairs": ("fsdp", PAIRS),
    "fsdp bf16": ("fsdp", {"precision": "bf16-mixed", "segments": True, "model": LINEAR}),
}
"""Plain shards, tied tables and a moving mean are those of ``sharded``, a memory is that of ``tensor_parallel``."""
AGAIN = (
    "ddp sparse",
    "ddp clusters",
    "ddp labels",
    "fsdp segments",
    "fsdp muon",
    "fsdp deep",
    "fsdp hybrid",
    "fsdp pairs",
)
"""One of every kind of state that a checkpoint holds."""
OPTIONS = {"steps": 4, "checkpoint_every": 2, "validate_every": 2}


def work(place: Path, text: str) -> Callable[[Group], object]:
    """Every run of ``FRESH``; those of ``AGAIN`` resumed by two; runs of one process resumed by two; a fault."""

    def work(group: Group) -> None:
        corpus, told = open_corpus(text), {}
        for name, (strategy, options) in FRESH.items():
            result = train(corpus, place / name, replace(group, strategy=strategy), **OPTIONS | options)
            told[name] = [result.steps, result.best_step]
        for name in AGAIN:
            strategy, options = FRESH[name]
            group.on_first(lambda name=name: rewound(place / name, place / f"{name} again"))
            train(corpus, place / f"{name} again", replace(group, strategy=strategy), **OPTIONS | options)
            train(corpus, place / f"one to {name}", replace(group, strategy=strategy), **OPTIONS | options)
        told |= {"rows": _rows(corpus, place, group), "fault": _fault(group)}
        group.on_first(lambda: (place / "told.json").write_text(json.dumps(told)))

    return work


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


if __name__ == "__main__":
    signal.alarm(300)
    kinds()
    print(json.dumps(together(2, Path(sys.argv[1]), work(Path(sys.argv[1]), sys.argv[2]))))
