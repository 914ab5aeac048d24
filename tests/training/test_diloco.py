"""DiLoCo: two processes that train apart except for an outer step a round, against DDP, a simulation and their
resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD

from kinformer.family.build import build
from kinformer.lab.data import Corpus
from kinformer.lab.runs.options import Parallel, parallel_of, spread
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.diloco import MOMENTUM, WORKERS, check_rounds
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from tests.training.diloco import ROUNDS
from tests.training.tiny import curve, gap, weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    place = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.training.diloco", str(place), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and json.loads(done.stdout) == [[0, 0], [0]], done.stderr[-4000:]
    return place


def found(runs: Path) -> dict[str, Any]:
    return dict(json.loads((runs / "found.json").read_text()))


def test_rounds_of_one_step_with_plain_averaging_are_ddp(runs: Path) -> None:
    assert gap(runs / "averaged", runs / "ddp") < 1e-10
    assert curve(runs / "averaged") == pytest.approx(curve(runs / "ddp"), rel=1e-10)


def test_processes_have_one_model_after_every_round_and_their_own_within(runs: Path) -> None:
    ends = [step % ROUNDS["diloco_steps"] == 0 or step == ROUNDS["steps"] for step in range(1, ROUNDS["steps"] + 1)]
    assert [apart == 0 for apart in found(runs)["gaps"]] == ends


def test_rounds_are_those_of_the_simulation(runs: Path) -> None:
    simulated, trained = load_file(runs / "simulated.safetensors"), weights(runs / "rounds")
    assert max(float((trained[name] - item).abs().max()) for name, item in simulated.items()) < 1e-12


def test_resumed_in_the_midst_of_a_round(runs: Path) -> None:
    assert gap(runs / "rounds", runs / "again") == 0.0 and curve(runs / "rounds") == curve(runs / "again")
    kept = [Checkpoints(runs / name / "checkpoints", 1).read(8).files for name in ("rounds", "again")]
    for group in (WORKERS, MOMENTUM, "optimizer", "carried"):
        assert kept[0][group].keys() == kept[1][group].keys()
        assert all(torch.equal(item, kept[1][group][name]) for name, item in kept[0][group].items())


@pytest.mark.parametrize("strategy", ["diloco", "ddp"])
def test_another_number_of_processes_goes_on_after_an_outer_step(runs: Path, strategy: str) -> None:
    saved = Checkpoints(runs / "again" / "checkpoints", 2).read(4).files
    begun = load_file(runs / f"rounds by {strategy}" / "begun.safetensors")
    for name, weight in begun.items():
        expected: Tensor = saved["model"][name].clone().requires_grad_()
        outer = SGD([expected], 0.7, 0.9, nesterov=True)
        outer.state[expected]["momentum_buffer"] = saved[MOMENTUM][name].clone()
        workers = [saved[WORKERS][f"{rank:04d}/model/{name}"] for rank in range(2)]
        assert not torch.equal(workers[0], workers[1])
        expected.grad = expected.detach() - torch.stack(workers).mean(0)
        outer.step()
        torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-14)
    assert len(curve(runs / f"rounds by {strategy}")) == ROUNDS["steps"]


def test_a_run_of_ddp_goes_on_in_rounds(runs: Path) -> None:
    assert gap(runs / "from ddp", runs / "ddp") < 1e-10


def test_a_round_exchanges_the_weights_once(runs: Path) -> None:
    counted = found(runs)["bytes"]
    assert counted == {"all_reduce": counted["weights"], "weights": counted["weights"]}


def test_the_option(corpus: Corpus) -> None:
    assert parallel_of("diloco=3") == Parallel(1, 3, "diloco")
    assert spread("diloco=2", 1) == {"devices": 2, "strategy": "diloco"}
    with pytest.raises(KinformerError, match="parallel diloco=2,tp=2: each process of diloco .* give diloco alone"):
        parallel_of("diloco=2,tp=2")
    with pytest.raises(KinformerError, match="strategy diloco: each process .* leave parallel out"):
        spread("fsdp=2", 1, "diloco")


@pytest.mark.parametrize(
    ("settings", "member", "sentence"),
    [
        ({"steps": 10, "diloco_steps": 11}, "gpt", "diloco_steps 11: a round is longer than the run .* at most 10"),
        ({"ema": 0.5}, "gpt", "ema 0.5: is a mean over steps"),
        ({}, "routing", "strategy diloco: .* learns from the tokens of all processes in every step"),
    ],
)
def test_what_cannot_be_trained_in_rounds(settings: dict[str, Any], member: str, sentence: str) -> None:
    with pytest.raises(KinformerError, match=sentence):
        check_rounds(
            Settings(**settings), build(member, "tiny", 256), Group(torch.device("cpu"), 0, 2, strategy="diloco")
        )
