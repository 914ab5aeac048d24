"""A run's folder has one writer, who loses nothing of anybody's; what dead writers left there goes."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kinformer
from kinformer.lab.runs.inference import generate
from kinformer.lab.runs.options import GenerateOptions
from kinformer.lab.runs.run import writing
from kinformer.lab.training.checkpoint import Best, Checkpoint, Checkpoints, best_of
from kinformer.lab.training.loop import Trainer
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import locked, partial_of, read_json, require_signature, save_tensors, signed, write_json

SMALL = {"recipe": "tiny", "steps": 4, "length": 16, "batch_size": 4, "validation_tokens": 256, "device": "cpu"}

HOLD = """
import sys, time
from pathlib import Path
from kinformer.runtime.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, text_file):
    return kinformer.train("gpt", data=text_file, out=tmp_path_factory.mktemp("runs") / "run", **SMALL)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_lock_ends_with_its_process(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "new")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(KinformerError, match="new: another process is writing there"), locked(tmp_path / "new"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    with locked(tmp_path / "new"):
        pass


def test_a_folder_that_stays_empty_goes(tmp_path):
    with locked(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
    (tmp_path / "own").mkdir()
    with locked(tmp_path / "own"):
        pass
    assert (tmp_path / "own").is_dir()
    with locked(tmp_path / "full"):
        (tmp_path / "full" / "file").touch()
    assert (tmp_path / "full" / "file").exists()
    (tmp_path / "file").touch()
    with pytest.raises(KinformerError, match="is a file; give a folder"), locked(tmp_path / "file"):
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_training_touches_nothing_of_the_first(run, text_file, tmp_path, resume):
    before = contents(run.folder)
    options = {"resume": True} if resume else {"data": text_file, **SMALL}
    with locked(run.folder):
        with pytest.raises(KinformerError, match="another process is writing there"):
            kinformer.train("gpt", out=run.folder, **options)
        assert contents(run.folder) == before
        assert kinformer.evaluate(run.folder, first=300).metrics
        assert generate(run.folder, "a", GenerateOptions(max_new_tokens=2, device="cpu")) is not None


def test_a_creation_that_fails_removes_only_what_it_made(tmp_path, text_file, monkeypatch):
    out = tmp_path / "run"

    def fail(*_):
        (out / "mine.txt").write_text("dear")
        raise KeyboardInterrupt

    monkeypatch.setattr("kinformer.lab.runs.create.staged_rows", fail)
    with pytest.raises(KeyboardInterrupt):
        kinformer.train("gpt", data=text_file, out=out, **SMALL)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_what_dead_writers_left_goes_and_nothing_else(run, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    for name in ("tokenizer.json", "standard-input", ".standard-input.0a.partial", ".config.json.partial", "mine"):
        (new / name).touch()
    with writing(new):
        assert [path.name for path in new.iterdir()] == ["mine"]
    partial_of(run.folder / "config.json").touch()
    (run.folder / "checkpoints" / ".step-00000001.old.partial").mkdir()
    before = contents(run.folder)
    with writing(run.folder):
        assert set(before) - set(contents(run.folder)) == {partial_of(run.folder / "config.json")}
        assert not list((run.folder / "checkpoints").glob(".*"))


def test_a_half_removed_checkpoint_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    for step in (1, 2):
        checkpoints.save(Checkpoint(step, {"model": {"weight": torch.zeros(1)}}, {}))
    child = os.fork()
    if not child:
        os.environ["KINFORMER_PAUSE"] = "before-removal"
        checkpoints.save(Checkpoint(3, {"model": {"weight": torch.zeros(1)}}, {}))
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert checkpoints.steps() == [3] and len(list(tmp_path.iterdir())) == 2
    checkpoints.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_tensors(tmp_path / "tensors", {"a": torch.zeros(1)})
        write_json(tmp_path / "json", {})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_folder_that_is_moved_away_ends_the_training(tmp_path, text_file, monkeypatch):
    out, away = tmp_path / "run", tmp_path / "away"
    steps = Trainer._steps

    def moving(self, *arguments):
        out.rename(away)
        steps(self, *arguments)

    monkeypatch.setattr(Trainer, "_steps", moving)
    with pytest.raises(KinformerError, match=r"run: was moved or removed .* resume"):
        kinformer.train("gpt", data=text_file, out=out, **SMALL)
    assert not out.exists() and (away / "config.json").exists()


@pytest.mark.parametrize("async_saves", [False, True])
@pytest.mark.parametrize("point", ["mkdir", "rename", "rmdir"])
def test_a_folder_that_is_removed_during_a_save_ends_the_training(tmp_path, text_file, monkeypatch, point, async_saves):
    """The last save of a run meets ``rm -rf``: before it, behind it, or between the files and the folder itself."""
    out = tmp_path / "run"

    def removed(path, *arguments, **options):
        if path.name == ".step-00000004.partial":
            if point == "rmdir":  # rm found the new file of the save, and left the folder
                (out / "config.json").unlink()
            else:
                shutil.rmtree(out, ignore_errors=True)
        return real(path, *arguments, **options)

    name = "mkdir" if point == "mkdir" else "rename"
    real = getattr(Path, name)
    monkeypatch.setattr(Path, name, removed)
    options = {"async_saves": async_saves, "checkpoint_every": 1}
    with pytest.raises(KinformerError, match=r"run: was moved or removed .* resume, or train again.$"):
        kinformer.train("gpt", data=text_file, out=out, **options, **SMALL)
    # A report that is written while the folder is removed may be left behind.
    assert point == "rmdir" or {path.name for path in out.rglob("*")} <= {"report.html"}


def test_json_holds_null_for_numbers_that_are_not_finite(tmp_path):
    nan = float("nan")
    write_json(tmp_path / "a.json", signed({"a": nan, "b": [float("inf"), 1.0]}))
    data = read_json(tmp_path / "a.json")
    require_signature(data, tmp_path / "a.json", required=True)
    assert (data["a"], data["b"]) == (None, [None, 1.0])
    best = Best(tmp_path, [])
    best.note({"bits": 1.0, "accuracy": nan}, 3)
    best.write({"weight": torch.zeros(1)}, 3)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(Checkpoint(1, {"model": {}, "optimizer": {}}, {"seconds": 1.0, "share": nan}))
    assert checkpoints.load().numbers["share"] is None
    assert not any(b"NaN" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    metrics, step = best_of(tmp_path)
    assert step == 3 and metrics["bits"] == 1.0 and metrics["accuracy"] != metrics["accuracy"]


def test_settings_that_no_longer_exist_are_dropped(tmp_path, text_file):
    options = {"recipe": "tiny", "length": 16, "batch_size": 2, "threads": 1, "device": "cpu", "quiet": True}
    out = tmp_path / "run"
    kinformer.train("gpt", data=text_file, out=out, steps=1, **options)
    config = json.loads((out / "config.json").read_text())
    del config["checksum"]
    config["training"] |= {"diloco_steps": 100, "outer_lr": 0.7, "outer_momentum": 0.9}
    (out / "config.json").write_text(json.dumps(signed(config)))
    assert "outer_lr" not in kinformer.open_run(out).training
    kinformer.train("gpt", out=out, steps=2, resume=True)
    stored = json.loads((out / "config.json").read_text())["training"]
    assert stored["steps"] == 2 and "diloco_steps" not in stored
    assert kinformer.evaluate(out).metrics["bits_per_byte"] > 0
