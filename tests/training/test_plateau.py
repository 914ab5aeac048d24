"""A learning rate that falls at plateaus: PyTorch's rule, exact when resumed, and the published training of speech."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from kinformer.family.build import build
from kinformer.family.table import MEMBERS
from kinformer.lab.data import Corpus
from kinformer.lab.estimation.estimate import optimizer_bytes
from kinformer.lab.training.schedule import Plateau
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import curve, gap, rewound, train


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("patience", [0, 2])
def test_it_falls_when_pytorchs_does(lower: bool, patience: int) -> None:
    torch.manual_seed(patience)
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    mode: Any = "min" if lower else "max"
    scheduler = ReduceLROnPlateau(optimiser, mode=mode, factor=0.5, patience=patience, min_lr=0.05)
    plateau = Plateau(0.5, patience, 0.05, lower)
    rates = []
    for value in (2 + torch.randn(60) / 4).tolist():
        scheduler.step(value)
        before = plateau.share
        assert plateau.see(value) == (optimiser.param_groups[0]["lr"] < before)
        rates.append(plateau.share)
        assert plateau.share == optimiser.param_groups[0]["lr"]
        resumed = Plateau(0.5, patience, 0.05, lower)
        resumed.load(json.loads(json.dumps(plateau.state)))
        assert resumed == plateau
    assert rates[-1] == 0.05 and len(set(rates)) > 4


def test_a_resumed_run_falls_where_one_that_was_not_does(corpus: Corpus, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "optimizer": "radam", "schedule": "plateau", "plateau_patience": 0, "lr": 0.1, "min_lr_ratio": 0.0, "warmup": 0,
        "steps": 12, "checkpoint_every": 1, "validate_every": 1,
    }  # fmt: skip
    train(corpus, tmp_path / "whole", **options)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    rates = [line["lr"] for line in map(json.loads, lines) if "lr" in line]
    assert rates[0] == 0.1 and 0.1 > rates[-1] > 0 and rates == sorted(rates, reverse=True)
    train(corpus, rewound(tmp_path / "whole", tmp_path / "again"), **options)
    assert gap(tmp_path / "whole", tmp_path / "again") == 0.0
    assert curve(tmp_path / "whole") == curve(tmp_path / "again")


def test_without_validations_there_is_no_plateau() -> None:
    with pytest.raises(KinformerError, match="`?schedule`? plateau: `?validate_every`? 0 makes no validations"):
        Settings(schedule="plateau", validate_every=0)


def test_speech_is_trained_as_published() -> None:
    """Katharopoulos et al. 2020, section 4.3."""
    for name in ("speech-linear", "speech-softmax", "speech-lsh", "speech-lstm"):
        lstm = name == "speech-lstm"
        settings = Settings(steps=100, **MEMBERS[name].training["paper"])
        assert (settings.optimizer, settings.lr) == (("adamw", 1e-3) if lstm else ("radam", 1e-4))
        assert (settings.schedule, settings.plateau_factor, settings.min_lr_ratio) == ("plateau", 0.5, 0.0)
    assert optimizer_bytes(build("gpt", "tiny", 23), "radam") == optimizer_bytes(build("gpt", "tiny", 23), "adamw")
