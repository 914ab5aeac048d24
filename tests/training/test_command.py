from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from kinformer.lab.runs.run import open_run
from tests.training.tiny import curve

SETTINGS = "--recipe tiny --length 16 --batch-size 4 --steps 6 --validation-tokens 256 --threads 1"
TINY = SETTINGS.split()

SPARSE = """
import json, os, resource, sys
import kinformer.lab.training.loop
from kinformer.lab.cli.main import main
import torch._dynamo, torch.utils.tensorboard
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_is_a_folder_that_loads(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    options = ["--set", "layers.*.mixer.num_heads=4", "--set", "dim=16", "--json"]
    assert main(["train", "gpt", *TINY, *options, "--data", str(text), "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == told["total"] == 6 and told["validation_bits_per_byte"] > 0
    run = open_run(out)
    assert (run.member, run.recipe, run.vocabulary, run.training["length"]) == ("gpt", "tiny", "bytes", 16)
    assert run.data["identity"]["bytes"]["train"] > 0 and Path(run.data["spec"]) == text
    model = kinformer.load(out)
    assert not model.training and told["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert model(torch.zeros(1, 4, dtype=torch.int64))[0].shape == (1, 4, 256)
    assert (out / "events").is_dir()


def test_longer_by_resume(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", "gpt", *TINY, "--lr", "0.01", "--data", str(text), *out]) == 0
    capsys.readouterr()
    assert main(["train", "gpt", *out, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert main(["train", "gpt", *out, "--resume", "--steps", "9", "--set", "training.log_every=1"]) == 0
    training = open_run(tmp_path / "run").training
    assert (training["steps"], training["lr"], training["length"]) == (9, 0.01, 16)
    assert "9 steps" in capsys.readouterr().out


def test_begins_with_the_weights_of_another_run(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    assert main(["train", "gpt", *TINY, "--set", "dim=16", "--data", str(text), "--out", str(base)]) == 0
    still = ["--length", "16", "--steps", "1", "--lr", "1e-30", "--data", str(text), "--out", str(out)]
    assert main(["train", "gpt", *still, "--init", str(base)]) == 0
    theirs, ours = kinformer.load(base).state_dict(), kinformer.load(out).state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert main(["train", "gpt", "--out", str(out), "--resume", "--steps", "2"]) == 0
    capsys.readouterr()
    for wrong in (["gpt", "--init", str(base), "--set", "dim=32"], ["gpt", "--init", str(tmp_path / "nothing")]):
        assert main(["train", *wrong, "--data", str(text), "--out", str(tmp_path / "third")]) == 2
        assert "kinformer: " in capsys.readouterr().err and not (tmp_path / "third").exists()


def test_standard_input_and_a_tokenizer_of_its_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    out = tmp_path / "run"
    options = ["--data", "-", "--train-tokenizer", "300", "--out", str(out)]
    assert main(["train", "linear-transformer", *TINY, *options, "--segments"]) == 0
    run = open_run(out)
    assert run.vocabulary == "tokenizer.json" and run.config.input.vocab_size == 300
    assert (out / "tokenizer.json").is_file() and Path(run.data["spec"]).read_bytes() == text.read_bytes()
    assert main(["train", "linear-transformer", "--out", str(out), "--resume", "--steps", "8"]) == 0
    again = tmp_path / "again"
    copied = ["--data", str(text), "--tokenizer", str(out / "tokenizer.json"), "--out", str(again)]
    assert main(["train", "gpt", *TINY, *copied]) == 0
    assert (again / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()


def test_ten_gigabytes_train_in_two(tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(10 << 30)
    command = ["train", "gpt", *TINY, "--data", str(big), "--out", str(tmp_path / "run"), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SPARSE, *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 6


@pytest.mark.slow
def test_compiled_training_follows_eager(text: Path, tmp_path: Path) -> None:
    options = [
        *TINY,
        "--data",
        str(text),
        "--validate-every",
        "0",
        "--set",
        "training.log_every=1",
        "--set",
        "layers=1",
    ]
    assert main(["train", "gpt", *options, "--out", str(tmp_path / "eager")]) == 0
    assert main(["train", "gpt", *options, "--out", str(tmp_path / "compiled"), "--compile"]) == 0
    assert curve(tmp_path / "compiled") == pytest.approx(curve(tmp_path / "eager"), rel=1e-4)


def test_options_are_read_without_torch() -> None:
    program = "import kinformer.lab.cli.train, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_pattern_of_images_is_refused_on_text(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", str(text), "--out", str(tmp_path / "run"), "--length", "16", "--steps", "1"]
    assert main(["train", "image-transformer", "--recipe", "tiny-2d", *options]) != 0
    told = capsys.readouterr().err
    assert "is a sequence of tokens, but this model's attention pattern is for an image" in told
    assert not (tmp_path / "run").exists()
