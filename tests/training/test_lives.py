from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.training.tiny import curve, gap

DRIVER = Path(__file__).with_name("lives.py")


def test_a_dozen_kills_and_a_ctrl_c_change_no_bit(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(tmp_path), str(text), "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["whole"] == outcome["finished"] == 0, outcome["stderr"]
    assert outcome["partial"] == [True] * 5
    assert outcome["interrupted"] == outcome["interrupted_twice"] == 130
    assert "continue with: kinformer train linear-transformer --out" in outcome["said"]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert gap(whole, killed) == 0.0
    assert curve(killed) == curve(whole)
    best, also = load_file(whole / "model.safetensors"), load_file(killed / "model.safetensors")
    assert all(torch.equal(best[name], also[name]) for name in best)
    names = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (whole / "checkpoints").iterdir()) and len(names) == 2
