from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from kinformer.family.build import configure
from kinformer.lab.data import Corpus
from kinformer.lab.estimation.cluster import Mesh, Part, Shared
from kinformer.lab.training.checkpoint import Checkpoints
from tests.training.measured import FOUR, LENGTH, MEMBERS, MESHES, ROWS
from tests.training.tensor_parallel import BY_TWO, RUNS
from tests.training.tiny import curve, gap, weights

SAME_AS = {f"{many} {name}": f"one {name}" for many, names in (("two", BY_TWO), ("four", RUNS)) for name in names} | {
    "one to two hybrid": "one hybrid",
    "four to one hybrid": "one hybrid",
    "two to one t5": "one t5",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, text: Path) -> Path:
    place = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.training.tensor_parallel", str(place), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[0] * world for world in (1, 2, 4, 1)], done.stderr[-4000:]
    return place


@pytest.mark.parametrize("name", SAME_AS)
def test_divided_heads_learn_what_one_process_does(runs: Path, name: str) -> None:
    """After three steps in float64; losses are those of every step, which gradients before have decided."""
    assert gap(runs / name, runs / SAME_AS[name]) < 1e-10
    shares = name in ("four encoder", "four pairs")  # of unlike numbers of tokens, whose losses are joined in float32
    assert curve(runs / name) == pytest.approx(curve(runs / SAME_AS[name]), rel=1e-6 if shares else 1e-12)


def test_checkpoints_hold_every_row_once(runs: Path) -> None:
    saved = Checkpoints(runs / "two t5" / "checkpoints", 1).load()
    assert saved is not None and saved.shards is not None
    forms = {name: form.shape for name, form in saved.shards.group("model").items()}
    assert forms == {name: weight.shape for name, weight in weights(runs / "one t5").items()}
    assert {name.partition("-model")[0] for name in saved.shards.files} == {"shard-00001", "shard-00002"}


@pytest.mark.parametrize(("member", "mesh"), [*product(MEMBERS, MESHES), *product(MEMBERS[:1], FOUR)])
def test_the_estimate_is_what_processes_hold_and_exchange(runs: Path, member: str, mesh: str) -> None:
    world = 2 if mesh in MESHES else 4
    counted = json.loads((runs / f"measured by {world}.json").read_text())[f"{member} {mesh}"]
    strategy, tensor = (MESHES | FOUR)[mesh]
    part, devices = (
        Part(configure(member, "tiny", 256), Shared(tensor), LENGTH, "adamw", "fp32"),
        Mesh(tensor, world // tensor, strategy),
    )
    rows = ROWS // devices.replicas
    memory, payload = part.memory(devices, rows), part.payload(devices, rows)
    assert counted["weights"] == pytest.approx(memory["weights"], rel=0.05)
    assert counted["optimizer"] == pytest.approx(memory["optimizer"], rel=0.05)
    assert counted.get("all_reduce", 0) == pytest.approx(payload.all_reduce + payload.tensor, rel=0.05)
    assert counted.get("all_gather", 0) == pytest.approx(payload.all_gather, rel=0.05)
    assert counted.get("reduce_scatter", 0) == pytest.approx(payload.reduce_scatter, rel=0.05)
    if devices.strategy == "ddp":
        assert counted["activations"] == pytest.approx(memory["activations"], rel=0.05)
