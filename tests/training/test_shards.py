"""Checkpoints of which every process writes a part."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kinformer
from kinformer.lab.data import Corpus
from kinformer.lab.training.checkpoint import (
    Best,
    Checkpoint,
    Checkpoints,
    _digest,
    best_of,
    best_weights,
    place_of_best,
)
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.logging import Metric
from kinformer.lab.training.shards import part_of
from kinformer.runtime import files
from kinformer.runtime.errors import KinformerError
from tests.training import sharded
from tests.training.sharded import OPTIONS, tensors_of, world_of_one
from tests.training.tiny import CPU, curve, gap, rewound, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, text: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with runs of one process ("one ...") and of two, what four processes made of these, and what the
    driver tells."""
    place = tmp_path_factory.mktemp("sharded")
    for name, options in sharded.RUNS.items():
        train(corpus, place / f"one {name}", **OPTIONS | options)
    command = [sys.executable, "-m", "tests.training.sharded", str(place), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["codes"] == {"two": [0, 0], "four": [0, 0, 0, 0]}, done.stderr
    return place, told


def test_parts_are_not_read_or_sent_in_excess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "digest", None)  # the sha256 of the file says enough
    (digest,) = part_of({"a": torch.ones(3, 2)}, CPU).write(tmp_path, 0).values()
    assert digest == files.sha256_of(next((tmp_path / "shards").iterdir()))
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "gather_object", lambda tensors, everyone: sent.extend(tensors))
    assert Group(torch.device("cpu"), rank=1, world=2).collect([torch.arange(1000.0)[-3:]]) == []
    assert sent[0].tolist() == [997, 998, 999] and sent[0].untyped_storage().nbytes() == 12


@pytest.mark.parametrize("name", sharded.RUNS)
def test_no_process_writes_the_part_of_another(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    place, _ = runs
    newest = max((place / name / "checkpoints").glob("step-*"))
    files = sorted(path.name for path in newest.rglob("*") if path.is_file())
    assert files == ["plan.json", *(f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2))]
    sizes = [path.stat().st_size for path in (newest / "shards").iterdir()]
    assert max(sizes) < 1.2 * min(sizes)
    assert curve(place / name) == pytest.approx(curve(place / f"one {name}"), rel=1e-6)


@pytest.mark.parametrize("name", sharded.RUNS)
def test_two_began_and_one_two_or_four_go_on(runs: tuple[Path, dict[str, Any]], corpus: Corpus, name: str) -> None:
    place, _ = runs
    assert gap(place / name, place / f"{name} again") == 0.0
    alone = rewound(place / name, place / f"{name} alone")
    train(corpus, alone, **OPTIONS | sharded.RUNS[name])
    for other in (alone, place / f"{name} in four") if name == "plain" else (alone,):
        assert curve(other) == pytest.approx(curve(place / f"one {name}"), rel=1e-6)


@pytest.mark.parametrize("name", sharded.RUNS)
def test_the_best_weights_of_shards_are_those_of_one_process(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    place, _ = runs
    ours, alone = place / name, place / f"one {name}"
    assert not (ours / "model.safetensors").exists() and place_of_best(ours).parent == ours / "best"
    figures, step = best_of(ours) or ({}, 0)
    assert step == (best_of(alone) or ({}, 0))[1]
    assert figures == pytest.approx((best_of(alone) or ({}, 0))[0], rel=1e-6)
    expected = best_weights(alone)[0]
    if name == "tied":  # where Adam makes whole steps of gradients that are but rounding
        return
    assert all(torch.allclose(weight, expected[name], atol=1e-5) for name, weight in best_weights(ours)[0].items())


def test_a_full_disk_of_the_second_process_reaches_all(runs: tuple[Path, dict[str, Any]]) -> None:
    first, second = runs[1]["full"]
    assert "No space left on device" in first and "step 2 is kept" in first and first == second
    assert runs[1]["after"] == ["step-00000002"]


def test_a_weight_of_nan_in_one_shard_stops_all(runs: tuple[Path, dict[str, Any]]) -> None:
    """Before the checkpoint of its step is written."""
    first, second = runs[1]["not finite"]
    assert "a weight is not finite after step 2; the checkpoint of step 1 is kept" in first and first == second
    assert [path.name for path in (runs[0] / "not finite" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_kill_at_any_disk_call_leaves_a_whole_checkpoint(runs: tuple[Path, dict[str, Any]]) -> None:
    """The second save in a folder that keeps one checkpoint: one of the two is there, whole, whatever the moment."""
    begun, *killed = runs[1]["kills"]
    assert begun["codes"] == [0, 0] and len(killed) > 15
    for outcome in killed:
        assert outcome["killed"] == -9 and outcome.get("again", [0, ["step-00000002"]]) == [0, ["step-00000002"]]
        assert outcome["weight"] == [outcome["step"]] and outcome["best weight"] == [outcome["best"]]
    for name in ("step", "best"):
        steps = [outcome[name] for outcome in killed]
        assert steps == sorted(steps) and set(steps) == {1, 2}


def test_the_second_process_dies_in_a_save(runs: tuple[Path, dict[str, Any]]) -> None:
    for outcome in runs[1]["second"]:
        assert outcome["codes"][1] == -9 and outcome["codes"][0] != 0 and outcome["steps"] == [1]


def test_a_run_of_shards_is_used_as_any_other(text_file: Path, tmp_path: Path) -> None:
    options = {"recipe": "tiny", "steps": 1, "length": 16, "batch_size": 4, "validation_tokens": 64, "device": "cpu"}
    out = kinformer.train("gpt", data=text_file, out=tmp_path / "run", **options).folder
    tokens, metrics = torch.arange(8)[None], kinformer.open_run(out).metrics
    with torch.no_grad():
        logits = kinformer.load(out)(tokens)[0]
    best = Best(out, (Metric("bits_per_byte", "bits per byte"),))
    with world_of_one():
        best.write_sharded(
            part_of({f"model/{name}": tensor for name, tensor in best_weights(out)[0].items()}, CPU), 1, CPU
        )
    assert not (out / "model.safetensors").exists()
    assert kinformer.open_run(out).metrics == metrics and kinformer.evaluate(out, first=99).data["same_as_run"]
    exported = kinformer.export(out, out=tmp_path / "exported")
    imported = kinformer.import_checkpoint(exported.folder, out=tmp_path / "imported").run
    with torch.no_grad():
        assert torch.equal(kinformer.load(out)(tokens)[0], logits)
        assert torch.allclose(imported.model()(tokens)[0][..., :256], logits, atol=1e-5)


def saved(folder: Path) -> Checkpoints:
    """A sharded checkpoint of one process, of step 1."""
    checkpoints = Checkpoints(folder, 2)
    with world_of_one():
        checkpoints.save_sharded(Checkpoint(1, {}, {"total": 1}), part_of(tensors_of(1), CPU), CPU)
    return checkpoints


def test_what_is_written_is_read(tmp_path: Path) -> None:
    read = saved(tmp_path).load()
    assert read is not None and read.shards is not None
    assert read.shards.aliases == {"model/tied": "model/weight"}
    for path, tensor in tensors_of(1).items():
        group, _, name = path.partition("/")
        result = read.shards.whole(group)[name]
        assert result.dtype == tensor.dtype and torch.equal(result, tensor), path


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "add"])
def test_damaged_shards_are_refused(tmp_path: Path, damage: str) -> None:
    checkpoints = saved(tmp_path)
    (shard,) = tmp_path.rglob("shard-*")
    data = bytearray(shard.read_bytes())
    if damage == "truncate":
        shard.write_bytes(data[:-9])
    elif damage == "flip":
        data[-1] ^= 1
        shard.write_bytes(data)
    elif damage == "remove":
        shard.unlink()
    else:
        shutil.copy(shard, shard.with_name("shard-00009-model-00001-of-00001.safetensors"))
    with pytest.raises(KinformerError) as refused:
        checkpoints.load()
    assert "\n" not in str(refused.value) and "delete the folder" in str(refused.value)


HEADS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no begins": lambda head: head["__metadata__"].pop("DCP_SHARDING_INFO"),
    "no JSON": lambda head: head["__metadata__"].update(DCP_SHARDING_INFO="[" * 9999),
    "a gap": lambda head: begin(head, "model/weight", [1, 0]),
    "another axis": lambda head: begin(head, "model/weight", [0, 1]),
    "words": lambda head: begin(head, "model/weight", ["0", 0]),
    "below 0": lambda head: begin(head, "model/weight", [-1, 0]),
    "far": lambda head: begin(head, "model/weight", [10**18, 0]),
    "a strange group": lambda head: head.update({"../x/weight": head.pop("model/weight")}),
}


def begin(head: dict[str, Any], name: str, offsets: list[Any]) -> None:
    begins = json.loads(head["__metadata__"]["DCP_SHARDING_INFO"])
    begins[name]["saved_offsets"] = offsets
    head["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(begins)


@pytest.mark.parametrize("name", HEADS)
def test_hostile_heads_are_refused_though_all_checksums_hold(tmp_path: Path, name: str) -> None:
    checkpoints = saved(tmp_path)
    (shard,) = tmp_path.rglob("shard-*")
    data = shard.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    HEADS[name](head)
    text = json.dumps(head).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    plan = json.loads((checkpoints.path(1) / "plan.json").read_text())
    plan.pop("sha256")
    plan["shards"]["files"][shard.name] = sharded.sha256(shard)
    (checkpoints.path(1) / "plan.json").write_text(json.dumps(plan | {"sha256": _digest(plan)}))
    with pytest.raises(KinformerError) as refused:
        checkpoints.load()
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_plans_of_other_files_are_refused(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    place = checkpoints.path(1) / "plan.json"
    whole = json.loads(place.read_text())
    whole.pop("sha256")
    draw = random.Random(1)
    for value in (None, [], {}, 7, "x", {"../../etc/passwd": "0"}, {"shard-00001": 3}, {"a": "b"}):
        for key in ("files", "aliases"):
            plan = json.loads(json.dumps(whole))
            plan["shards"][key] = value
            if draw.random() < 0.2:
                plan["shards"] = value
            place.write_text(json.dumps(plan | {"sha256": _digest(plan)}))
            if plan["shards"] == whole["shards"] or (key == "aliases" and value == {}):
                continue
            with pytest.raises(KinformerError):
                checkpoints.load()


def test_the_later_of_two_forms_of_the_best_weights_counts(tmp_path: Path) -> None:
    best = Best(tmp_path, (Metric("bits", "bits"),))
    for step, form in ((1, "whole"), (2, "shards"), (3, "whole")):
        best.note({"bits": 1 / step}, step)
        before = shutil.copytree(tmp_path, tmp_path.with_name(f"before-{step}"))
        with world_of_one():
            if form == "shards":
                best.write_sharded(part_of({"model/weight": tensors_of(step)["model/weight"]}, CPU), step, CPU)
            else:
                best.write({"weight": tensors_of(step)["model/weight"]}, step)
        assert best_of(tmp_path) == ({"bits": 1 / step}, step)
        assert torch.equal(best_weights(tmp_path)[0]["weight"], tensors_of(step)["model/weight"])
        shutil.copytree(before, tmp_path, dirs_exist_ok=True)  # the other form, that a killed process left
        assert best_of(tmp_path) == ({"bits": 1 / step}, step)
        shutil.rmtree(tmp_path / "best", ignore_errors=True) if form == "whole" else None
        (tmp_path / "model.safetensors").unlink(missing_ok=True) if form == "shards" else None
