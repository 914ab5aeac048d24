"""Runs of tensor parallelism in two and four processes. Prints what became of them.

    python -m tests.training.tensor_parallel FOLDER DATA

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
import torch.distributed.tensor.parallel  # noqa: F401

from kinformer.family.kinds import kinds
from kinformer.lab.data import open_corpus
from kinformer.lab.training.distributed import Group
from tests.training.measured import measured
from tests.training.sharded import together
from tests.training.tiny import rewound, train

HYBRID = {
    "member": "gated-deltanet", "layers": 2, "layers.1.mixer": {"kind": "softmax", "position": "rope"},
    "layers.1.feed_forward": {"kind": "channel_mix"},
}  # fmt: skip
CONTINUED = {"checkpoint_every": 2}
"""For runs that are continued from their middle; the others save at their end."""
PAIRS = {"member": "vanilla", "layers": 1, "encoder.layers": 1}
RUNS: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"member": "gpt", "layers": 1}},
    "t5": {"model": {"member": "t5", "layers": 1, "head": "language"}, "ema": 0.5, "async_saves": True} | CONTINUED,
    "hybrid": {"model": HYBRID, "segments": True} | CONTINUED,
    "encoder": {"model": {"member": "bert", "layers": 1}, "objective": "masked-language"},
    "pairs": {"model": PAIRS, "objective": "translation", "batch_size": 8},
    "recurrence": {"model": {"member": "transformer-xl", "layers": 1}, "segments": True},
}
"""One of every kind of what is cut: heads, states, a table that belongs to the stack, the vocabulary and its loss."""
BY_TWO = ("t5", "hybrid")
"""The others are cut by the mesh of four alone, whose two parts of the heads are cut in the same way."""
OPTIONS: dict[str, Any] = {"steps": 3, "checkpoint_every": 3, "validate_every": 3}


def run(corpus: Any, folder: Path, group: Group, name: str, **changes: Any) -> None:
    """Train in float64, in which order of summation does not show."""
    torch.set_default_dtype(torch.float64)
    train(corpus, folder, group, **OPTIONS | RUNS[name] | changes)


def divided(place: Path, text: str) -> Callable[[Group], object]:
    """Runs by two parts of the heads; one of one process continued by two."""

    def work(group: Group) -> None:
        corpus, two = open_corpus(text), replace(group, strategy="ddp", tensor=2)
        for name in BY_TWO:
            run(corpus, place / f"two {name}", two, name)
        run(corpus, place / "one to two hybrid", two, "hybrid")

    return work


def meshed(place: Path, text: str) -> Callable[[Group], object]:
    """Runs by a mesh of two parts of the heads and two shares of the rows, with shards of weights and with copies."""

    def work(group: Group) -> None:
        corpus, four = open_corpus(text), replace(group, strategy="fsdp", tensor=2)
        run(corpus, place / "four hybrid", four, "hybrid")
        run(corpus, place / "four gpt", four, "gpt")
        run(corpus, place / "four t5", replace(four, strategy="ddp"), "t5")
        run(corpus, place / "four recurrence", four, "recurrence")
        run(corpus, place / "four encoder", four, "encoder")
        run(corpus, place / "four pairs", four, "pairs")

    return work


def alone(place: Path, text: str) -> Callable[[Group], object]:
    """The same runs in one process, and one of two and one of four processes continued by it."""

    def work(group: Group) -> None:
        corpus = open_corpus(text)
        for name in RUNS:
            run(corpus, place / f"one {name}", group, name)
        rewound(place / "one hybrid", place / "one to two hybrid")

    return work


def continued(place: Path, text: str) -> Callable[[Group], object]:
    """Runs of two and of four processes, from their middle, in one."""

    def work(group: Group) -> None:
        corpus = open_corpus(text)
        for many, name in (("two", "t5"), ("four", "hybrid")):
            run(corpus, rewound(place / f"{many} {name}", place / f"{many} to one {name}"), group, name)

    return work


if __name__ == "__main__":
    signal.alarm(300)
    kinds()
    folder, data = Path(sys.argv[1]), sys.argv[2]
    jobs = [(1, [alone]), (2, [divided, measured]), (4, [meshed, measured]), (1, [continued])]
    codes = []
    for world, parts in jobs:
        works = [part(folder, data) for part in parts]
        codes.append(together(world, folder, lambda group, works=works: [work(group) for work in works]))
    print(json.dumps(codes))
