"""What ends the one who watches does not end the run: closed terminals, pipes without readers, signals."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinformer.lab.data import Corpus
from kinformer.lab.runs import train as training
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.distributed import SIGNALS, Interrupt, launch
from kinformer.runtime.progress import Tolerant, tolerant
from tests.process_state import process_state
from tests.training.launched import hang_up
from tests.training.tiny import trainer

COMMAND = [sys.executable, "-m", "kinformer", "train", "gpt", "--recipe", "tiny", "--length", "16", "--batch-size", "4"]


@pytest.fixture(autouse=True)
def hangs_up() -> Iterator[None]:
    """These processes heed SIGHUP, also where the suite itself runs under nohup, whose processes ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_end_the_run_after_the_step_with_a_checkpoint(
    corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    run = trainer(corpus, tmp_path, checkpoint_every=0, steps=50)
    update = run.update

    def hit(step: int, rate: float, progress: float) -> object:
        if step == 4:
            os.kill(os.getpid(), number)
            assert "finishing this step, then saving" in capfd.readouterr().err
        return update(step, rate, progress)

    hit.optimiser, hit.carried = update.optimiser, update.carried  # type: ignore[attr-defined]
    run.update = hit  # type: ignore[assignment]
    result = run.run()
    assert (result.steps, result.signal) == (5, number)
    assert Checkpoints(tmp_path / "checkpoints", 2).steps() == [5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_leaves_no_folder(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(training, "work", lambda *_: os.kill(os.getpid(), number))
    out = tmp_path / "run"
    options = TrainOptions(member="gpt", recipe="tiny", data=str(text), out=str(out), steps=2, length=16, batch_size=4)
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit, match=str(128 + number)):
        training.train(options, quiet=True)
    assert not out.exists() and signal.getsignal(number) == handler
    out.mkdir()
    with pytest.raises(SystemExit), training.clearing(out):
        (out / "config.json").write_text("{}")
        (out / "notes.txt").write_text("mine")
        raise SystemExit
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    (out / "texts").write_text("mine")
    with pytest.raises(SystemExit), training.clearing(out):  # a folder with files, which the plan would refuse
        raise SystemExit
    assert (out / "texts").exists()


def test_a_closing_terminal_may_say_so_twice_and_nohup_keeps_the_run() -> None:
    with Interrupt() as interrupt:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.signal == signal.SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.signal == 0


def test_nohup_also_keeps_a_run_of_several_processes() -> None:
    """PyTorch's launcher handles SIGHUP unless told otherwise, and changes the process that calls it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = process_state()
    assert launch(hang_up, (), 1) == signal.SIG_IGN
    assert process_state() == before


def test_a_stream_without_a_reader_goes_nowhere() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        told = tolerant(stream)
        assert isinstance(told, Tolerant)
        print("a", file=told, flush=True)
        print("b", file=told, flush=True)
    closed = io.StringIO()
    closed.close()
    print("c", file=tolerant(closed), flush=True)
    print("d", file=tolerant(None), flush=True)


@pytest.mark.parametrize("closed", ["pipe", "never open"])
def test_training_goes_on_without_anybody_who_listens(text: Path, tmp_path: Path, closed: str) -> None:
    options = ["--steps", "6", "--threads", "1", "--data", str(text), "--out", str(tmp_path / "run")]
    if closed == "pipe":
        started = subprocess.Popen(
            [*COMMAND, *options, "--validate-every", "1"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert started.stderr is not None
        started.stderr.close()
        code = started.wait(timeout=120)
    else:
        shell = " ".join(["exec", *COMMAND, *options, "0<&-", "1>&-", "2>&-"])
        code = subprocess.run(["sh", "-c", shell], timeout=120, check=False).returncode
    assert code == 0
    assert Checkpoints(tmp_path / "run" / "checkpoints", 2).steps()[-1] == 6
