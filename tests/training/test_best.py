"""The best weights are those of the task's deciding figure, in its direction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kinformer.lab.training.checkpoint import Best, best_of
from kinformer.lab.training.logging import ACCURACY, Metric

BITS = Metric("bits", "bits per label")


def test_more_accuracy_is_better_and_fewer_bits_where_it_is_equal(tmp_path: Path) -> None:
    best = Best(tmp_path, (ACCURACY, BITS))
    kept = []
    course = [(0.5, 2.0), (0.4, 1.0), (0.5, 1.5), (0.5, 1.5), (0.6, 3.0), (float("nan"), 0.1)]
    for step, (accuracy, bits) in enumerate(course):
        metrics = {"accuracy": accuracy, "bits": bits}
        if best.improves(metrics):
            best.note(metrics, step)
            best.write({"weight": torch.full((1,), float(step))}, step)
            kept.append(step)
    assert kept == [0, 2, 4]
    assert best_of(tmp_path) == ({"accuracy": 0.6, "bits": 3.0}, 4)
    again = Best(tmp_path, (ACCURACY, BITS))
    assert (again.metrics, again.step) == (best.metrics, 4)


def test_lower_is_better_unless_said_otherwise() -> None:
    assert BITS.better(1.0, 2.0) and not BITS.better(2.0, 1.0) and not BITS.better(float("nan"), 1.0)
    assert ACCURACY.better(0.9, 0.8) and not ACCURACY.better(0.8, 0.9)
    assert BITS.text(1.23456) == "1.2346 bits per label" and ACCURACY.text(0.5) == "accuracy 50.0%"


@pytest.mark.parametrize("metrics", [{"bits": float("inf")}, {"bits": float("nan")}])
def test_what_is_not_finite_is_never_the_best(tmp_path: Path, metrics: dict[str, float]) -> None:
    best = Best(tmp_path, (BITS,))
    assert not best.improves(metrics)
    best.write({"weight": torch.zeros(1)}, 3)
    assert best_of(tmp_path) is None
