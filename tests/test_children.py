"""Processes that the package starts: they do not run the files of the current folder."""

import os
import subprocess
import sys

import pytest

import kinformer
from kinformer.lab.comparison.speed import in_fresh_process
from kinformer.lab.control.environments import Environments
from kinformer.lab.estimation import estimate
from kinformer.lab.training.distributed import launch

SHADOWED = ("queue", "signal", "socket", "pickle", "struct", "selectors", "tempfile", "torch", "numpy")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A current folder whose files have the names of modules that every process imports."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    yield folder
    assert not (tmp_path / "ran").exists(), f"were run: {(tmp_path / 'ran').read_text()}"
    assert "PYTHONSAFEPATH" not in os.environ


def estimates(folder, monkeypatch):
    monkeypatch.setattr(estimate, "PROBE", "import queue, signal; print(2048)")
    uncached = estimate.interpreter_bytes.__wrapped__
    assert uncached() == 1024 * 2048 + estimate.LOADED_LATER


def steps_environments(folder, monkeypatch):
    several = Environments("t-maze", 2, processes=2)
    several.reset([0, 1])
    several.close()


def measures(folder, monkeypatch):
    assert in_fresh_process(os.getpid) != os.getpid()


def packs(folder, monkeypatch):
    text = folder.parent / "text.txt"
    text.write_text("a line of text\n" * 200_000)
    assert kinformer.pack(text, folder.parent / "packed", shard_mb=1, workers=2).tokens["train"] > 2_000_000


def trains(folder, monkeypatch):
    assert launch(os.getpid, (), 1) != os.getpid()


@pytest.mark.parametrize("starts", [estimates, steps_environments, measures, packs, trains])
def test_a_process_does_not_run_files_of_the_current_folder(hostile, monkeypatch, starts):
    starts(hostile, monkeypatch)


def test_a_worker_ends_with_its_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=dict(os.environ))
    assert parent.stdout.readline() == b"begun\n"
    parent.kill()
    assert parent.communicate(timeout=30)[0] == b""  # the worker has the other end of the pipe too


PARENT = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from kinformer.lab.children import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    pool.submit(abs, 1).result()
    print("begun", flush=True)
    time.sleep(60)
"""
