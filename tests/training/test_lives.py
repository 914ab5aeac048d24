from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from kinformer.runtime.files import load_tensors
from tests.training.tiny import curve, gap, weights

DRIVER = Path(__file__).with_name("lives.py")


def test_kills_and_a_ctrl_c_change_no_bit(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(tmp_path), str(text), "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["whole"] == outcome["finished"] == 0, outcome["stderr"]
    assert outcome["partial"] == [True] * 2
    assert outcome["interrupted"] == outcome["interrupted_twice"] == 130
    assert "continue with: kinformer train linear-transformer --out" in outcome["said"]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert gap(whole, killed) == 0.0
    assert curve(killed) == curve(whole)
    best, also = load_file(whole / "model.safetensors"), load_file(killed / "model.safetensors")
    assert all(torch.equal(best[name], also[name]) for name in best)
    names = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (whole / "checkpoints").iterdir()) and len(names) == 2


def test_the_end_survives_a_kill_at_each_of_its_disk_calls(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.kills", str(tmp_path), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    for name, outcome in json.loads(done.stdout).items():
        whole = tmp_path / name / "whole"
        killed = sorted((tmp_path / name).glob("killed-*"))
        assert outcome["calls"] > 15 and len(killed) > 10, name
        assert outcome["codes"] == [0, -9, 0, *[0] * len(killed)], name
        for folder in [tmp_path / name / "copied", *killed]:
            assert gap(whole, folder) == 0.0 and records(folder) == records(whole), folder
            assert kept(folder) == kept(whole), folder
            assert names(folder) == names(whole), folder
    whole = tmp_path / "mean of checkpoints" / "whole"
    assert any("averaged_bits_per_byte" in each for each in records(whole))
    assert gap_to_best(whole) > 0  # the mean is what is kept
    assert gap_to_best(tmp_path / "never validated" / "whole") == 0


def records(folder: Path) -> list[dict[str, float]]:
    """What was logged, except for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: each for name, each in line.items() if "second" not in name} for line in lines]


def kept(folder: Path) -> tuple[dict[str, str], bytes]:
    """The best weights and what is noted of them."""
    tensors, notes = load_tensors(folder / "model.safetensors")
    return notes, b"".join(tensor.numpy().tobytes() for _, tensor in sorted(tensors.items()))


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.parent.name != "events")


def gap_to_best(folder: Path) -> float:
    """Largest difference of the last weights to those that are kept as the best."""
    best, last = load_file(folder / "model.safetensors"), weights(folder)
    return max(float((best[name] - last[name]).abs().max()) for name in last)
