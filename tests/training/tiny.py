"""Small runs for the tests of training; also imported by their other processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kinformer.data import Corpus
from kinformer.family.build import build
from kinformer.training.distributed import Group
from kinformer.training.loop import Result, Trainer
from kinformer.training.settings import Settings

Overrides = dict[str, Any] | None
CPU = Group(torch.device("cpu"))
SETTINGS = Settings(
    steps=8,
    length=16,
    batch_size=4,
    lr=3e-3,
    log_every=1,
    checkpoint_every=4,
    validate_every=0,
    validation_tokens=256,
    seed=7,
)


def trainer(corpus: Corpus, folder: Path, group: Group = CPU, model: Overrides = None, **changes: Any) -> Trainer:
    """``model`` overrides fields of the tiny recipe; its key ``member`` names the member."""
    overrides = dict(model or {})
    torch.manual_seed(3)
    built = build(overrides.pop("member", "gpt"), "tiny", 256, overrides)
    return Trainer(built, corpus, replace(SETTINGS, **changes), folder, group)


def train(corpus: Corpus, folder: Path, group: Group = CPU, model: Overrides = None, **changes: Any) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    return trainer(corpus, folder, group, model, **changes).run()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    from safetensors.torch import load_file

    return load_file(max((folder / "checkpoints").iterdir()) / "model.safetensors")


def gap(left: Path, right: Path) -> float:
    """Largest difference of two runs' final weights."""
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def curve(folder: Path) -> list[float]:
    """The loss of every logged step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def rewound(folder: Path, to: Path) -> Path:
    """A copy of a run as it was when its last checkpoint but one was the newest."""
    shutil.copytree(folder, to)
    newest = max((to / "checkpoints").iterdir())
    shutil.rmtree(newest)
    return to
