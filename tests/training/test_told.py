"""What a training tells on standard error: what it is going to do, and how fast it is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kinformer.lab.cli.main import main
from kinformer.lab.training import logging
from kinformer.lab.training.logging import TrainingProgress

TINY = [
    "--recipe",
    "tiny",
    "--length",
    "16",
    "--batch-size",
    "4",
    "--steps",
    "2",
    "--validation-tokens",
    "256",
    "--threads",
    "1",
    "--device",
    "cpu",
]


def test_it_says_what_it_trains_before_it_begins(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "gpt", *TINY, "--data", str(text), "--out", str(tmp_path / "run")]) == 0
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "kinformer: gpt (tiny), 37,760 parameters, task next-token"
    assert second.startswith(f"kinformer: data {text.name}, ") and " to train on; cpu (1 thread), fp32, " in second
    assert second.endswith("4 x 16 = 64 tokens a step")


def test_the_speed_is_that_since_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(logging.time, "monotonic", lambda: clock[0])
    progress = TrainingProgress(total=40, done=0, stream=stream)
    for done, now, tokens, seconds in ((10, 6, 100, 5.0), (20, 12, 1100, 10.0), (30, 18, 1200, 15.0)):
        clock[0] = now
        progress.update(done, "1.000 bits per byte", tokens, seconds)
    clock[0] = 24
    progress.update(40, "1.000 bits per byte", 2110, 20.0)
    assert [line.split("  ")[2] for line in stream.getvalue().splitlines()] == ["110 tokens/s", "101 tokens/s"]


def test_no_more_time_is_left_than_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(logging.time, "monotonic", lambda: clock[0])
    progress = TrainingProgress(total=4000, done=0, stream=stream, most=30)
    for now in (12.0, 40.0):  # of all steps thousands of seconds would be left
        clock[0] = now
        progress.update(10, "1.000 bits per byte", 100, now)
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == ["0:18 left", "0:00 left"]

    stream.isatty = lambda: True  # type: ignore[method-assign]
    with TrainingProgress(total=4000, done=0, stream=stream, most=30) as progress:
        clock[0] = 52.0
        progress.update(10, "1.000 bits per byte", 100, 12.0)
        assert progress._bar is not None and progress._bar.tasks[0].fields["text"].endswith("0:18 left")
