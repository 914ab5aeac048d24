"""A process that dies under torchrun: all are started again, go on from the last checkpoint, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore

from kinformer.lab.cli.main import main
from kinformer.lab.training.distributed import of_this_start
from tests.training.tiny import curve, rewound

OPTIONS = "--recipe tiny --length 16 --batch-size 4 --steps 8 --checkpoint-every 2 --validate-every 0 --seed 3"
OPTIONS += " --device cpu --threads 1 --set training.log_every=1 --quiet"


def test_the_curve_goes_on_after_a_process_was_killed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among two processes, and where torchrun then has one machine, which it starts without counting (2 -> 1)."""
    out, alone = tmp_path / "elastic", tmp_path / "alone"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    arguments = [str(out), str(text), *OPTIONS.split(), "--strategy", "fsdp"]
    command = [sys.executable, "-m", "tests.training.elastic", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    killed, again = json.loads(done.stdout)
    assert -9 in killed and 0 not in killed and again == [0, 0], done.stderr
    assert main(["train", "gpt", "--data", str(text), "--out", str(alone), *OPTIONS.split()]) == 0
    assert curve(out) == pytest.approx(curve(alone), rel=1e-6) and len(curve(out)) == 8
    fewer, again = rewound(out, tmp_path / "fewer"), [*OPTIONS.split(), "--strategy", "fsdp"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another job")
    assert main(["train", "gpt", "--data", str(text), "--out", str(fewer), *again]) == 2
    assert "holds a run already" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert main(["train", "gpt", "--data", str(text), "--out", str(fewer), *again]) == 0
    assert curve(fewer) == pytest.approx(curve(alone), rel=1e-6) and len(curve(fewer)) == 8


def test_a_start_finds_nothing_of_the_one_before() -> None:
    """Three processes, again and again on one store; also where one of an earlier start asked and died unanswered."""
    kept = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def join(rank: int) -> Store:
        store = of_this_start(TCPStore("localhost", kept.port, is_master=False), rank, 3)
        assert not store.check(["address"])
        return store

    kept.set("ask/2", "the word of the dead")
    with ThreadPoolExecutor(3) as processes:
        for start in range(3):
            stores = list(processes.map(join, range(3)))
            stores[0].set("address", str(start))
            assert [store.get("address") for store in stores] == [str(start).encode()] * 3
