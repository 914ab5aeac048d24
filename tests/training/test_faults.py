from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kinformer.lab.cli.main import main
from kinformer.lab.data import Corpus
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import rewound, train, trainer, weights

SETTINGS = "--recipe tiny --length 16 --batch-size 4 --steps 4 --validate-every 0 --checkpoint-every 2 --threads 1"
TINY = SETTINGS.split()


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[str, list[str]], str]:
    """What the command says, in one sentence, when it refuses."""

    def run(member: str, arguments: list[str]) -> str:
        assert main(["train", member, *arguments]) == 2
        told = capsys.readouterr().err
        assert told.startswith("kinformer: ") and told.count("\n") == 1, told
        return told

    return run


Said = Callable[[str, list[str]], str]


@pytest.fixture
def run(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished run of gpt."""
    assert main(["train", "gpt", *TINY, "--data", str(text), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("member", "options", "told"),
    [
        ("gtp", [], "'gpt'"),
        ("gpt", ["--recipe", "tinny"], "'tiny'"),
        ("gpt", ["--set", "layers.*.mixer.num_head=2"], "'num_heads'"),
        ("gpt", ["--set", "layers.*.mixer.num_heads=two"], "whole number"),
        ("gpt", ["--set", "layers"], "path=value"),
        ("gpt", ["--set", "input.vocab_size=100"], "256 tokens"),
        ("gpt", ["--lr", "fast"], "--lr"),
        ("gpt", ["--lerning-rate", "1"], "--help"),
        ("gpt", ["--length", "4096"], "positions end at 128"),
        ("gpt", ["--segments"], "--set position=sinusoidal"),
        ("gpt", ["--segments", "--set", "position=sinusoidal"], "grows with every token"),
        ("gpt", ["--steps", "5", "--minutes", "1"], "contradict"),
        ("gpt", ["--batch-size", "5", "--accumulate", "2"], "multiple of 2"),
        ("gpt", ["--devices", "3"], "multiple of 3"),
        ("gpt", ["--device", "moon"], "--device moon"),
        ("gpt", ["--holdout", "2"], "holdout"),
        ("gpt", ["--tokenizer", "no/tokenizer.json"], "no/tokenizer.json"),
        ("gpt", ["--tokenizer", "t.json", "--train-tokenizer", "300"], "contradict"),
        ("gpt", ["--data", "no/such/file"], "does not exist"),
        ("gpt", ["--resume"], "not a run folder"),
    ],
)
def test_mistakes(said: Said, text: Path, tmp_path: Path, member: str, options: list[str], told: str) -> None:
    out = tmp_path / "run"
    assert told in said(member, [*TINY, "--data", str(text), "--out", str(out), *options])
    assert not (out / "config.json").exists() or member == "gpt" and "--device" in options


def test_data_that_is_empty_or_too_short(said: Said, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("ten bytes!")
    for name, told in (("empty", "is empty"), ("short", "smaller --length")):
        assert told in said("gpt", [*TINY, "--data", str(tmp_path / name), "--out", str(tmp_path / "run")])
        assert not (tmp_path / "run").exists()


def test_folders_that_hold_something_else(said: Said, run: Path, text: Path, tmp_path: Path) -> None:
    data = ["--data", str(text), "--out", str(run)]
    assert "add --resume" in said("gpt", [*TINY, *data])
    assert "holds a run of 'gpt'" in said("linear-transformer", [*data, "--resume"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    assert "is not empty" in said("gpt", [*TINY, "--out", str(tmp_path / "full")])
    assert "is a file" in said("gpt", [*TINY, "--out", str(text)])


def test_a_resumed_run_goes_on_as_it_was(said: Said, run: Path, text: Path, tmp_path: Path) -> None:
    resume = ["--out", str(run), "--resume"]
    assert "--batch-size=3" in said("gpt", [*resume, "--batch-size", "3"])
    assert "--set dim=64" in said("gpt", [*resume, "--set", "dim=64"])
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "more")
    assert "is not the data" in said("gpt", [*resume, "--data", str(other)])
    moved = shutil.copy(text, tmp_path / "moved.txt")
    assert main(["train", "gpt", *resume, "--data", str(moved), "--steps", "6", "--set", "layers=2"]) == 0
    assert Checkpoints(run / "checkpoints", 2).steps()[-1] == 6


def damage_by_truncation(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_by_a_flipped_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "plan.json"])
@pytest.mark.parametrize("damage", [damage_by_truncation, damage_by_a_flipped_bit])
def test_damaged_checkpoints(corpus: Corpus, tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    train(corpus, tmp_path)
    newest = max((tmp_path / "checkpoints").iterdir())
    damage(newest / name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(KinformerError) as told:
        trainer(corpus, tmp_path)
    assert str(newest / name) in str(told.value)
    assert f"delete the folder {newest} to resume from step 4" in str(told.value)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    shutil.rmtree(newest)
    assert trainer(corpus, tmp_path).step == 4


def test_files_of_two_checkpoints_do_not_mix(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path)
    older, newer = sorted((tmp_path / "checkpoints").iterdir())
    shutil.copy(older / "optimizer.safetensors", newer / "optimizer.safetensors")
    with pytest.raises(KinformerError, match="differs from the checkpoint's plan"):
        trainer(corpus, tmp_path)


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_in_a_write(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path / "run")
    again = rewound(tmp_path / "run", tmp_path / "again")
    resumed = trainer(corpus, again)
    with small_files(100_000), pytest.raises(KinformerError, match="could not be written") as told:
        resumed.run()
    assert "step 4 is kept, so free space and add resume" in str(told.value)
    assert [path.name for path in (again / "checkpoints").iterdir()] == ["step-00000004"]
    train(corpus, again)
    assert all(torch.equal(a, b) for a, b in zip(weights(again).values(), weights(tmp_path / "run").values()))


def test_a_disk_that_is_full_at_the_flush(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = trainer(corpus, tmp_path)
    flush = os.fsync

    def full(handle: int) -> None:
        if (tmp_path / "checkpoints" / ".step-00000008.partial").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KinformerError, match="No space left on device"):
        resumed.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_divergence_stops_the_run_and_keeps_the_last_good_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    run = trainer(corpus, tmp_path, checkpoint_every=2, log_every=5)
    weight = run.model.input.embedding.weight
    update, poisoned_before = run.update, 4

    def poison(step: int, rate: float, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        if step == poisoned_before:
            with torch.no_grad():
                weight[0, 0] = torch.nan
        return update(step, rate, progress)

    poison.optimiser, poison.carried = update.optimiser, update.carried  # type: ignore[attr-defined]
    run.update = poison  # type: ignore[assignment]
    with pytest.raises(KinformerError, match="nan at step 5; the checkpoint of step 4 is kept"):
        run.run()
    assert Checkpoints(tmp_path / "checkpoints", 2).steps() == [2, 4]
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path).values())


def test_a_learning_rate_beyond_reason(said: Said, text: Path, tmp_path: Path) -> None:
    wild = ["--data", str(text), "--out", str(tmp_path / "run"), "--lr", "1e38", "--optimizer", "sgd", "--clip", "0"]
    told = said("gpt", [*TINY, *wild, "--steps", "20", "--warmup", "0", "--quiet"])
    assert "training diverged" in told and "lower --lr (now 1e+38)" in told and "step 2" in told


def test_compile_without_a_compiler(said: Said, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = said("gpt", [*TINY, "--data", str(text), "--out", str(tmp_path / "run"), "--compile"])
    assert "'no-such-compiler'" in told and "leave --compile out" in told


def test_a_folder_that_cannot_be_written(said: Said, text: Path) -> None:
    assert "/proc/run" in said("gpt", [*TINY, "--data", str(text), "--out", "/proc/run"])


def test_logs_beyond_the_checkpoint_and_half_lines_are_dropped(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path / "run")
    again = rewound(tmp_path / "run", tmp_path / "again")
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    train(corpus, again)
    steps = [json.loads(line)["step"] for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


def test_no_pickle_is_written_or_read(run: Path) -> None:
    assert {path.suffix for path in run.rglob("*") if path.is_file() and path.parent.name != "events"} == {
        ".html",
        ".json",
        ".jsonl",
        ".safetensors",
    }
    sources = Path(sys.modules["kinformer.lab.training.loop"].__file__ or "").parent.glob("*.py")
    assert not any("torch.load" in path.read_text() or "torch.save" in path.read_text() for path in sources)
