"""What goes wrong while a file is read, and what a reader sees beside a writer."""

import shutil
import subprocess
import sys

import pytest
import torch

from kinformer.runtime import files
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors, load_weights, reading, save_tensors


def test_its_contents_are_blamed():
    with pytest.raises(KinformerError, match=r"a\.json: is damaged \(no such key\); restore it"), reading("a.json"):
        raise ValueError("no such key.")


def test_weights_are_floating_point_numbers():
    layer = torch.nn.Linear(2, 3)
    weights = {name: weight.long() for name, weight in layer.state_dict().items()}
    with pytest.raises(KinformerError, match=r"a\.safetensors: weight is torch\.int64, but weights are floating-point"):
        load_weights(layer, weights, "a.safetensors")


def test_a_broken_installation_is_not():
    with pytest.raises(ImportError), reading("a.json"):
        raise ImportError("cannot import name")


WRITER = """
import os, shutil, sys
while True:
    for name in ("small", "large"):
        shutil.copyfile(name, "new")
        os.replace("new", "weights")
"""


def test_tensors_are_of_one_file_while_another_process_replaces_it(tmp_path):
    versions = {"small": {"a": torch.zeros(3)}, "large": {"a": torch.ones(5000), "b": torch.ones(2, 2)}}
    for name, tensors in versions.items():
        save_tensors(tmp_path / name, tensors)
    shutil.copyfile(tmp_path / "small", tmp_path / "weights")
    writer = subprocess.Popen([sys.executable, "-c", WRITER], cwd=tmp_path)
    try:
        for _ in range(2000):
            tensors, _ = load_tensors(tmp_path / "weights")
            assert {name: len(value) for name, value in tensors.items()} in ({"a": 3}, {"a": 5000, "b": 2})
    finally:
        writer.kill()
        writer.wait()


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    path, opened = tmp_path / "weights", []
    save_tensors(path, {"a": torch.zeros(3)})
    save_tensors(tmp_path / "new", {"a": torch.ones(3)})
    real = sys.modules["safetensors"].safe_open

    def replaced(*arguments, **options):
        opened.append(arguments)
        if len(opened) == 1:
            (tmp_path / "new").replace(path)
            raise ValueError("the head of one file, the tensors of another")
        return real(*arguments, **options)

    monkeypatch.setattr("safetensors.safe_open", replaced)
    assert load_tensors(path)[0]["a"].tolist() == [1, 1, 1] and len(opened) == 2
    path.write_bytes(path.read_bytes()[:-1])
    opened[:] = [None]
    with pytest.raises(KinformerError, match="is truncated or damaged"):
        load_tensors(path)
    assert len(opened) == 2


def test_what_writers_left_when_they_died_is_removed_and_nothing_else(tmp_path):
    left = (".a.json.partial", ".a.json.7.partial", ".tmpQ3x9Zb")
    others = ("a.json", ".b.json.partial", ".tmp", ".tmpQ3x9Zb.txt", "tmpQ3x9Zb")
    for name in (*left, *others):
        (tmp_path / name).write_text("x")
    files.remove_partials(tmp_path, ["a.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_safetensors_fills_a_file_of_the_name_that_is_removed(tmp_path, monkeypatch):
    """What it leaves when it is killed, seen by a full disk's stand-in: a limit on the size of files."""
    script = f"""
import resource, signal, torch
from safetensors.torch import save_file
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
save_file({{"x": torch.zeros(1 << 20)}}, {str(tmp_path / "x.safetensors")!r})
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode
    assert len(list(tmp_path.iterdir())) == 1
    files.remove_partials(tmp_path, [])
    assert not list(tmp_path.iterdir())
