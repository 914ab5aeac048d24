from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kinformer.lab.cli.main import main
from kinformer.lab.data import Corpus
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.distributed import launch
from kinformer.runtime.errors import KinformerError
from tests.training import launched
from tests.training.tiny import curve, gap, rewound, train, weights
from tests.training.two_processes import AGAIN, FRESH, OPTIONS

SETTINGS = "--recipe tiny --length 16 --batch-size 4 --validate-every 0 --device cpu --threads 1"
SETTINGS += " --set training.log_every=1"
COMMAND = ["train", "gpt", *SETTINGS.split()]
# Muon orthogonalises in bfloat16 on most processors, where sharded sums round otherwise.
ROUNDING = {"fsdp muon": 2e-5, "fsdp bf16": 2e-3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, text: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with the runs of two processes (see ``two_processes``) and, as "one ...", the same with one process."""
    place = tmp_path_factory.mktemp("runs")
    alone = {
        f"one {name}": train(corpus, place / f"one {name}", **OPTIONS | options) for name, (_, options) in FRESH.items()
    }
    for name in AGAIN:
        rewound(place / f"one {name}", place / f"one to {name}")
    command = [sys.executable, "-m", "tests.training.two_processes", str(place), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1]) == [0, 0], done.stderr[-4000:]
    told = {name: [result.steps, result.best_step] for name, result in alone.items()}
    return place, told | json.loads((place / "told.json").read_text())


@pytest.mark.parametrize("name", FRESH)
def test_two_processes_train_as_one(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    place, told = runs
    tolerance = ROUNDING.get(name, 1e-6)
    assert curve(place / name) == pytest.approx(curve(place / f"one {name}"), rel=tolerance)
    assert told[name] == told[f"one {name}"] and told[name][0] == FRESH[name][1].get("steps", 4)
    assert weights(place / name).keys() == weights(place / f"one {name}").keys()
    validated = [_validations(folder) for folder in (place / name, place / f"one {name}")]
    assert len(validated[0]) == 2 and validated[0] == pytest.approx(validated[1], rel=tolerance)


def test_at_a_high_rate_they_differ_by_rounding_alone(runs: tuple[Path, dict[str, Any]]) -> None:
    assert gap(runs[0] / "ddp radam", runs[0] / "one ddp radam") < 1e-10


def test_two_processes_average_as_one(runs: tuple[Path, dict[str, Any]]) -> None:
    means = [_validations(runs[0] / name, "averaged_loss") for name in ("fsdp mean", "one fsdp mean")]
    assert len(means[0]) == 1 and means[0] == pytest.approx(means[1], rel=1e-6)


def _validations(folder: Path, name: str = "validation_loss") -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


@pytest.mark.parametrize("name", AGAIN)
def test_resumed_by_two(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    place, _ = runs
    assert gap(place / name, place / f"{name} again") == 0.0
    assert curve(place / f"{name} again") == curve(place / name)


@pytest.mark.parametrize("name", AGAIN)
def test_begun_by_one_resumed_by_two(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    place, _ = runs
    assert curve(place / f"one to {name}") == pytest.approx(curve(place / f"one {name}"), rel=ROUNDING.get(name, 1e-6))


@pytest.mark.parametrize("name", AGAIN)
def test_begun_by_two_resumed_by_one(runs: tuple[Path, dict[str, Any]], corpus: Corpus, name: str) -> None:
    place, _ = runs
    again = rewound(place / name, place / f"{name} to one")
    train(corpus, again, **OPTIONS | FRESH[name][1])
    assert curve(again) == pytest.approx(curve(place / f"one {name}"), rel=ROUNDING.get(name, 1e-6))


def test_processes_see_disjoint_rows_of_one_batch(runs: tuple[Path, dict[str, Any]], corpus: Corpus) -> None:
    from kinformer.lab.data import RandomWindows

    first, second = runs[1]["rows"]
    whole = RandomWindows(corpus.splits["train"], 4, 16, 7).batch(0).tolist()
    assert first + second == whole and not [row for row in first if row in second]


def test_a_fault_of_the_first_process_reaches_all(runs: tuple[Path, dict[str, Any]]) -> None:
    assert runs[1]["fault"] == "the disk is full."


def test_ctrl_c_with_two_processes_then_torchruns_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    program = [sys.executable, "-m", "kinformer", *COMMAND, "--out", str(out)]
    begun = [*program, "--data", str(text), "--steps", "100000", "--devices", "2", "--strategy", "fsdp"]
    process = subprocess.Popen(begun, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len(curve(out)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.count("kinformer: stopped after step") == 1 and "--resume" in said, said
    (step,) = Checkpoints(out / "checkpoints", 2).steps()

    resumed = [*COMMAND, "--out", str(out), "--resume", "--steps", str(step + 3), "--json"]
    assert main(["launch", "--processes", "2", "--", *resumed]) == 0
    line = ["bash", "-c", f"PATH={Path(sys.executable).parent}:$PATH {capsys.readouterr().out}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == step + 3
    assert len(curve(out)) == step + 3


def test_a_mistake_in_other_processes_is_one_sentence() -> None:
    with pytest.raises(KinformerError, match="^it is a mistake; mend it.$"):
        launch(launched.mistake, (), 1)


def test_a_killed_process_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own words are kept for who asks with --verbose."""
    with pytest.raises(KinformerError) as raised:
        launch(launched.killed, (), 1)
    assert re.fullmatch("process 0 of 1 was killed by SIGKILL .* with resume.", str(raised.value))
    assert any("exitcode: -9" in note for note in raised.value.__notes__)
    assert "Traceback" not in "".join(capfd.readouterr())
