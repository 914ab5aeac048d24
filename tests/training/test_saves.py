"""Saves beside training: in order, those of one step at a time, and an error ends the run where it is looked for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kinformer.lab.data import Corpus
from kinformer.lab.training.checkpoint import Checkpoint, Checkpoints, Saves
from kinformer.lab.training.loop import Updater, UpdateResult
from kinformer.lab.training.shards import Shards, part_of
from kinformer.runtime.errors import KinformerError
from tests.training.sharded import tensors_of, world_of_one
from tests.training.tiny import CPU, gap, train, trainer


def test_saves_of_one_step_are_in_flight_and_in_order() -> None:
    saves, done, gate = Saves(in_thread=True), [], threading.Event()
    saves.begin(1)
    saves.add(gate.wait)
    saves.add(lambda: done.append("best"))
    saves.begin(1)  # the same step: nothing is waited for
    assert not done and not saves.failed
    gate.set()
    saves.begin(2)
    assert done == ["best"]
    here = Saves(in_thread=False)
    here.add(lambda: done.append(threading.current_thread()))
    assert done[-1] is threading.main_thread()


def test_an_error_stops_what_comes_after_it() -> None:
    saves, done = Saves(in_thread=True), []

    def full() -> None:
        raise KinformerError("the disk is full")

    with pytest.raises(KinformerError, match="full"), saves:
        saves.add(full)
        saves.add(lambda: done.append("later"))
    assert not done
    with pytest.raises(ZeroDivisionError), saves:  # the run's own error counts
        saves.add(full)
        raise ZeroDivisionError
    saves.wait()


def test_what_is_staged_is_of_its_step(tmp_path: Path) -> None:
    tensors = tensors_of(1)
    with world_of_one():
        staged = part_of(tensors, CPU).staged()
        for tensor in tensors.values():
            tensor.zero_()
        Checkpoints(tmp_path, 1).save_sharded(Checkpoint(1, {}, {}), staged, CPU)
    read = Checkpoints(tmp_path, 1).load()
    assert read is not None and isinstance(read.shards, Shards)
    expected = tensors_of(1)
    for name in ("weight", "tied", "view", "half", "mask"):
        assert torch.equal(read.shards.whole("model")[name], expected[f"model/{name}"])


def test_training_goes_on_while_a_save_is_written(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 4 is not written before step 5 is made; what it holds is what a synchronous one does."""
    options = {"steps": 8, "checkpoint_every": 4, "validate_every": 4, "ema": 0.5}
    train(corpus, tmp_path / "at once", **options)
    update, save, made = Updater.__call__, Checkpoints.save, threading.Event()

    def counted(self: Updater, step: int, rate: float, progress: float) -> UpdateResult:
        done = update(self, step, rate, progress)
        if step == 4:
            made.set()
        return done

    def held(self: Checkpoints, checkpoint: Checkpoint) -> None:
        assert made.wait(60)
        save(self, checkpoint)

    monkeypatch.setattr(Updater, "__call__", counted)
    monkeypatch.setattr(Checkpoints, "save", held)
    train(corpus, tmp_path / "beside", async_saves=True, **options)
    ours, theirs = (Checkpoints(tmp_path / name / "checkpoints", 2) for name in ("beside", "at once"))
    assert ours.steps() == [4, 8] and gap(tmp_path / "beside", tmp_path / "at once") == 0
    for group, tensors in theirs.read(4).files.items():
        assert all(torch.equal(ours.read(4).files[group][name], tensor) for name, tensor in tensors.items())


def test_a_failed_save_ends_the_run_before_the_next_one(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(corpus, tmp_path, steps=2000, checkpoint_every=1000, async_saves=True)

    def full(_: Checkpoints, checkpoint: Checkpoint) -> None:
        raise KinformerError(f"step {checkpoint.step}: the disk is full")

    monkeypatch.setattr(Checkpoints, "save", full)
    monkeypatch.setattr(run.settings.__class__, "cadences", lambda *_: (0, 2))
    with pytest.raises(KinformerError, match="step 2: the disk is full"):
        run.run()
    assert run.step < 2000
