"""Runs of DiLoCo in two processes, in one, and simulated in one. Prints what became of them.

    python -m tests.training.diloco FOLDER DATA

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
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import SGD

from kinformer.family.kinds import kinds
from kinformer.lab.data import open_corpus
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.loop import Trainer
from tests.training.measured import Collectives
from tests.training.sharded import together
from tests.training.tiny import CPU, rewound, train, trainer

AVERAGED: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "lr": 0.05, "steps": 6}
PLAIN: dict[str, Any] = {"diloco_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
ROUNDS: dict[str, Any] = {"steps": 8, "diloco_steps": 3, "checkpoint_every": 4, "validate_every": 4, "segments": True}
ROUNDS |= {"model": {"member": "linear-transformer", "layers.*.dropout": 0.1}}


def in_two(place: Path, text: str) -> Callable[[Group], object]:
    """All runs of two processes, in float64."""

    def work(group: Group) -> None:
        torch.set_default_dtype(torch.float64)
        corpus = open_corpus(text)
        apart, copies = replace(group, strategy="diloco"), replace(group, strategy="ddp")
        train(corpus, place / "ddp", copies, **AVERAGED)
        train(corpus, place / "averaged", apart, **AVERAGED | PLAIN)
        followed = _followed(trainer(corpus, _made(place / "rounds"), apart, **ROUNDS), apart)
        group.on_first(lambda: rewound(place / "rounds", place / "again"))
        train(corpus, place / "again", apart, **ROUNDS)
        group.on_first(lambda: rewound(place / "ddp", place / "from ddp"))
        train(corpus, place / "from ddp", apart, **AVERAGED | PLAIN)
        found = {"gaps": followed, "bytes": _exchanged(trainer(corpus, _made(place / "bytes"), apart, **ROUNDS))}
        group.on_first(lambda: (place / "found.json").write_text(json.dumps(found)))

    return work


def alone(place: Path, text: str) -> Callable[[Group], object]:
    """The rounds of two processes simulated in one, and their run continued by one, as diloco and as ddp."""

    def work(group: Group) -> None:
        torch.set_default_dtype(torch.float64)
        corpus = open_corpus(text)
        save_file(_simulated(corpus, place), place / "simulated.safetensors")
        for strategy in ("diloco", "ddp"):
            folder = rewound(place / "rounds", place / f"rounds by {strategy}")
            one = trainer(corpus, folder, replace(CPU, strategy=strategy), **ROUNDS)
            save_file(_weights(one), folder / "begun.safetensors")
            one.run()

    return work


def _followed(run: Trainer, group: Group) -> list[float]:
    """Train; return how far the weights of both processes are apart after every step."""
    gaps, after = [], run.rounds.after

    def watched(step: int, ends: bool) -> None:
        after(step, ends)
        if len(gaps) < step:
            parts = group.collect(list(run.rounds.inner.values()))
            gaps.append(max(float((a - b).abs().max()) for a, b in zip(*parts, strict=True)) if parts else 0.0)

    run.rounds.after = watched  # type: ignore[method-assign]
    run.run()
    return gaps


def _exchanged(run: Trainer) -> dict[str, Any]:
    """The bytes that a round exchanges, and those of the weights."""
    with Collectives() as counted:
        for step in range(ROUNDS["diloco_steps"]):
            run.update(step, 1e-3, 0.0)
            run.rounds.after(step + 1, ends=False)
    return {**counted.bytes, "weights": sum(weight.nbytes for weight in run.model.parameters())}


def _simulated(corpus: Any, place: Path) -> dict[str, Tensor]:
    """The weights after the run ``rounds``: both processes' updates one after the other, PyTorch's SGD between."""
    runs = [
        trainer(corpus, _made(place / f"rank {rank}"), Group(torch.device("cpu"), rank, 2, "diloco"), **ROUNDS)
        for rank in range(2)
    ]
    shared = [item.detach().clone().requires_grad_() for item in runs[0].model.parameters()]
    outer = SGD(shared, runs[0].settings.outer_lr, runs[0].settings.outer_momentum, nesterov=True)
    for step in range(ROUNDS["steps"]):
        for run in runs:
            run.update(step, run.rate(step, ROUNDS["steps"]), step / ROUNDS["steps"])
        if (step + 1) % ROUNDS["diloco_steps"] == 0 or step + 1 == ROUNDS["steps"]:
            everyone = zip(shared, *(run.model.parameters() for run in runs), strict=True)
            for weight, *apart in everyone:
                weight.grad = weight.detach() - torch.stack(apart).detach().mean(0)
            outer.step()
            for run in runs:
                torch._foreach_copy_([item.data for item in run.model.parameters()], [item.data for item in shared])
    return _weights(runs[0])


def _weights(run: Trainer) -> dict[str, Tensor]:
    return {name: item.detach().clone() for name, item in run.model.named_parameters()}


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


if __name__ == "__main__":
    signal.alarm(200)
    kinds()
    folder, data = Path(sys.argv[1]), sys.argv[2]
    print(json.dumps([together(world, folder, job(folder, data)) for world, job in ((2, in_two), (1, alone))]))
