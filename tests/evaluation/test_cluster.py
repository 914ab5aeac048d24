"""Estimates for many devices: meshes, exchanged bytes and errors. What processes hold and exchange is counted in
``tests/training/test_tensor_parallel.py``."""

from __future__ import annotations

from typing import Any

import pytest

from kinformer.family.build import configure
from kinformer.lab.cli.studying import Estimate
from kinformer.lab.estimation.cluster import Cluster, Mesh, Part, Payload, Shared, meshes, serving_costs
from kinformer.lab.estimation.estimate import estimate, peak
from kinformer.lab.estimation.options import DEVICES, device_of, numbers_of
from kinformer.lab.runs.options import parallel_of
from kinformer.runtime.errors import KinformerError

SIZES: dict[str, Any] = {"length": 64, "optimizer": "adamw", "precision": "fp32"}


def test_meshes_share_rows_and_devices_evenly() -> None:
    every = list(meshes(16, 8, 4))
    assert every == [Mesh(2, 8, "ddp"), Mesh(2, 8, "fsdp"), Mesh(4, 4, "ddp"), Mesh(4, 4, "fsdp")]
    assert [mesh.text for mesh in every] == ["tp=2,dp=8", "tp=2,fsdp=8", "tp=4,dp=4", "tp=4,fsdp=4"]
    assert list(meshes(1, 3, 8)) == [Mesh(1, 1, "ddp")]


def test_meshes_of_stretches_are_what_parallel_takes() -> None:
    every = [mesh.text for mesh in meshes(8, 2, 8, context=4, ring=True)]
    assert every == ["ring=4,dp=2", "ring=4,fsdp=2", "tp=2,ring=4", "tp=2,ring=4,fsdp=1"]
    assert all(parallel_of(text).devices == 8 for text in every)


def test_rings_send_what_they_must() -> None:
    payload = Payload(all_reduce=800, tensor=100)
    assert payload.sent(Mesh(2, 4, "ddp")) == (2 * 800 * 3 / 4, 2 * 100 / 2, 0)
    assert Payload(all_gather=800, reduce_scatter=400).sent(Mesh(1, 4, "fsdp")) == (900, 0, 0)


def test_parts_together_hold_the_model_once() -> None:
    config = configure("gated-deltanet", "tiny", 64)
    whole, half = (Part(config, Shared(parts), **SIZES) for parts in (1, 2))
    assert whole.of_rows("flops_step", 3) == estimate(config, batch=3, **SIZES).flops_step
    assert half.of_rows("flops_step", 2) == pytest.approx(whole.of_rows("flops_step", 2) / 2, rel=0.02)
    assert half.inference()["state"] == pytest.approx(whole.inference()["state"] / 2, rel=0.02)
    division = half.division
    assert division is not None
    twice = sum(item.numel() for name, item in half.model.named_parameters() if name not in division.cuts)
    assert 2 * half.memory(Mesh(2, 1, "ddp"), 1)["weights"] - 4 * twice == whole.memory(Mesh(1, 1, "ddp"), 1)["weights"]


def test_logits_of_a_shared_vocabulary_are_held_at_once() -> None:
    """Of a whole vocabulary so large, a process makes the logits in pieces."""
    vocabulary, tokens = 1 << 16, 2 * 64
    config = configure("rope", "tiny", vocabulary)
    whole, half = (Part(config, Shared(parts), **SIZES).of_rows("activations", 2) for parts in (1, 2))
    gradient = 4 * vocabulary * config.dim  # of the table, ready with the loss of pieces
    assert half > 4 * tokens * vocabulary / 2 and gradient < whole < half + gradient


def test_rows_come_in_parts_where_memory_is_small() -> None:
    config = configure("gpt", "tiny", 64)
    memory = estimate(config, batch=8, **SIZES).train_bytes
    small = device_of(f"h100,memory={memory // 2},link=1e12")
    (alone,) = Cluster(config, small, 0.5, batch=8, **SIZES).costs(1)
    assert alone.fits and alone.accumulate == 4 and alone.train_bytes <= memory // 2 and alone.data_bytes == 0


def test_what_cannot_be_divided_is_told_beside_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(configure("performer", "tiny", 64), DEVICES["a100"], 0.5, batch=2, **SIZES)
    assert {cost.mesh for cost in cluster.costs(2)} == {"dp=2", "fsdp=2"} and "redrawn" in cluster.refused
    assert [cost.devices for cost in serving_costs(cluster, 8)] == [1]
    assert Estimate(member="rope", recipe="tiny", length=32, batch_size=4, devices="4").run() == 0
    text = capsys.readouterr().out
    assert "tp=2,fsdp=2" in text and "num_heads = 2 is not a multiple of 4" in text and "tokens/s a device" in text


def test_each_part_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="kinformer"):
        for _ in range(2):
            Cluster(configure("performer", "tiny", 64), DEVICES["a100"], 0.5, batch=2, **SIZES).costs(2)
    lines = [record.getMessage() for record in caplog.records if "estimating" in record.getMessage()]
    assert len(lines) == len(set(lines))


def test_a_model_that_fits_is_not_shared_and_figures_are_ideal(capsys: pytest.CaptureFixture[str]) -> None:
    assert Estimate(member="rope", recipe="tiny", length=32, batch_size=8, devices="2..8").run() == 0
    text = capsys.readouterr().out
    table = [line.split() for line in text.split("ideal step")[1].splitlines()[1:4]]
    assert [row[1] for row in table] == ["dp=2", "dp=4", "dp=8"] and "fits on one device" in text
    assert all(len(row[-1].replace(",", "").rstrip("0")) <= 2 for row in table)
    device = device_of("h100,launch=0.01")
    cluster = Cluster(configure("rope", "tiny", 64), device, 0.5, batch=8, **SIZES)
    whole = cluster.part(Shared(1))
    assert whole is not None and {cost.step for cost in cluster.costs(1)} == {3 * whole.kernels * device.launch}
    assert serving_costs(cluster, 1)[0].seconds == whole.kernels * device.launch


def test_the_costs_of_a_large_batch_follow_from_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sizes = configure("rope", "tiny", 1 << 16), {"batch": 18, "length": 64}
    costs = estimate(config, **sizes)
    process = peak(config, costs, **sizes)
    direct = lambda measure, config, _, *sizes, **more: measure(config, *sizes, pieces=True, **more)  # noqa: E731
    monkeypatch.setattr("kinformer.lab.estimation.estimate.at_batch", direct)
    assert costs == estimate(config, **sizes) and process == peak(config, costs, **sizes)


def test_time_is_shared_where_nothing_else_fits() -> None:
    config = configure("linear-transformer", "tiny", 64)
    needed = estimate(config, **SIZES).train_bytes
    cluster = Cluster(config, device_of(f"h100,memory={needed - 1}"), 0.5, batch=1, **SIZES)
    cluster.tensor = (1,)
    best, *rest = cluster.costs(2)
    assert {best.mesh, *(cost.mesh for cost in rest)} == {"cp=2", "cp=2,fsdp=1"}
    assert best.fits and best.context_bytes > 0 and best.memory["activations"] < needed
    waiting = Cluster(configure("sha-rnn", "tiny", 64), DEVICES["h100"], 0.5, batch=1, **SIZES)
    waiting.tensor = (1,)
    assert not waiting.costs(2) and "waits for the state" in waiting.refused


@pytest.mark.parametrize(
    "text, why",
    [
        ("tpu", "'tpu' is not a described device; valid names are"),
        ("h100,ram=3", "'ram' is none of its numbers"),
        ("h100,link=fast", "link must be a number above 0"),
        ("h100,link=-1", "link must be a number above 0"),
    ],
)
def test_a_wrong_device_is_one_sentence(text: str, why: str) -> None:
    with pytest.raises(KinformerError, match=f"^.?hardware.? {text}: {why}"):
        device_of(text)


def test_numbers_of_devices() -> None:
    assert numbers_of("64") == [64] and numbers_of("8..40") == [8, 16, 32]
    for text in ("0", "8..", "a", "8..9999999", "-4"):
        with pytest.raises(KinformerError, match="must be a number from 1 to"):
            numbers_of(text)
    with pytest.raises(KinformerError, match="batch_size.? 3 cannot be shared by 64 devices.*multiple of 8"):
        Estimate(member="rope", recipe="tiny", length=33, batch_size=3, devices="64").run()
