"""Curves for TensorBoard: read back by its own reader, whatever becomes of their folder meanwhile."""

import json
import shutil

import pytest

from kinformer.lab.cli.output import print_json
from kinformer.lab.training.logging import EVENTS, METRICS, EventFile, Log

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def curve(folder):
    found = accumulators.EventAccumulator(str(folder)).Reload()
    return [(point.step, round(point.value, 4)) for point in found.Scalars("loss")]


def test_curves_are_read_back_and_a_resumed_run_voids_what_lies_beyond(tmp_path):
    log = Log(tmp_path, 0)
    for step in range(1, 6):
        log.write(step, {"loss": 1 / step, "lr": 0.5})
    log.close()
    log.close()
    assert curve(tmp_path / EVENTS) == [(step, round(1 / step, 4)) for step in range(1, 6)]
    log = Log(tmp_path, 3)
    log.write(4, {"loss": 7.0})
    log.close()
    assert curve(tmp_path / EVENTS) == [(1, 1.0), (2, 0.5), (3, 0.3333), (4, 7.0)]


def test_numbers_that_are_not_finite_are_null(tmp_path, capsys):
    log = Log(tmp_path, 0)
    log.write(1, {"loss": float("nan"), "lr": 0.5})
    log.close()
    assert (tmp_path / METRICS).read_text() == '{"step": 1, "loss": null, "lr": 0.5}\n'
    print_json({"facts": [(float("inf"), "é")]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"facts": [[None, "é"]]}


@pytest.mark.parametrize("do", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("moved"))])
def test_training_goes_on_when_the_folder_goes(tmp_path, do):
    log = Log(tmp_path, 0)
    log.write(1, {"loss": 1.0})
    do(tmp_path / EVENTS)
    log.write(2, {"loss": 2.0})
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()] == [1, 2]
    moved = tmp_path / "moved"
    assert not moved.exists() or curve(moved) == [(1, 1.0), (2, 2.0)]


def test_training_goes_on_when_the_disk_is_full(tmp_path, caplog):
    caplog.set_level("INFO")
    events = EventFile(tmp_path, 0)
    events._records._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    events.scalars({"loss": 1.0}, 1)
    events.scalars({"loss": 1.0}, 2)
    events.close()
    events._records._writer.close()
    assert len(caplog.messages) == 1 and "TensorBoard's curves end here" in caplog.messages[0]
