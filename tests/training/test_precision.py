"""How a process computes: in all of its threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from kinformer.runtime import process

SCRIPT = """
import torch
from kinformer.runtime.process import flush_subnormals
flush_subnormals()
torch.set_num_threads(2)
small = torch.full((1 << 20,), 1e-30) * 1e-10
print(int((small != 0).sum()), int((torch.full((1 << 20,), -100.0).exp() != 0).sum()))
"""
FAULTS = """
import resource, torch
from kinformer.runtime.process import keep_memory
keep_memory()
for step in range(13):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(1 << 22) for _ in range(4)]
    del made
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="elsewhere nothing is flushed")
def test_no_thread_leaves_subnormal_numbers() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "0"]


def test_only_commands_flush_them(cli, tmp_path, monkeypatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "set_flush_denormal", lambda flushed: calls.append(flushed))
    kinformer.train("gpt", recipe="tiny", steps=1, length=32, out=tmp_path / "own", quiet=True)
    arguments = ["train", "gpt", "--recipe", "tiny", "--steps", "1", "--length", "32", "--out"]
    cli(*arguments, tmp_path / "run")
    assert calls == [] and not process.is_command()
    monkeypatch.setattr(process, "_set_up", False)
    monkeypatch.setattr(process, "keep_memory", lambda: None)
    monkeypatch.setattr("sys.argv", ["kinformer", *arguments, str(tmp_path / "command")])
    assert main() == 0
    assert calls == [True] and process.is_command()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_freed_memory_is_not_asked_for_again() -> None:
    """Forty tensors of 4,096 pages: otherwise most of those, and with it at most what the memory has yet to grow by."""
    found = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(found.stdout) <= 4 * 4096
