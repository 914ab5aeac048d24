"""A small comparison, made once by the command line, and a made-up one."""

import json

import pytest

from kinformer.lab.cli.main import main
from kinformer.lab.comparison import compare as comparing
from kinformer.lab.comparison import speed
from kinformer.lab.comparison.record import Comparison, EntrantRecord, Point, SeedRun, Trial

MEMORY = {"training": 1 << 20, "lengths": []}
SIZES = {
    "recipe": "tiny", "steps": 4, "sweep-steps": 2, "length": 16, "batch-size": 2, "parameters": 30000, "rounds": 1,
    "lengths": "16,32", "first": 400, "seeds": 2, "contexts": "1x,2x", "threads": 1, "device": "cpu",
}  # fmt: skip
FLAGS = ["--quiet", *(word for name, value in SIZES.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(scope="session")
def compared(tmp_path_factory, text_file):
    """(folder, flags, what it wrote) of gpt, a hybrid and a member that fails, compared once; memory (in this process),
    which takes longest, of one of them."""
    folder = tmp_path_factory.mktemp("compare")
    flags = ["--data", str(text_file), *FLAGS, "--out", str(folder)]
    members = ["gpt", "linear-transformer:1,gpt:1", "short=gpt", "--set", "short:layers.*.mixer.impl=none"]
    memory = comparing.memory_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "in_fresh_process", lambda function, *arguments: function(*arguments))
        patch.setattr(comparing, "memory_of", lambda one, *rest: memory(one, *rest) if one.name == "gpt" else MEMORY)
        assert main(["compare", *members, *flags]) == 1
    first = (folder / "comparison.json").rename(folder / "first.json")
    return folder, flags, json.loads(first.read_text(encoding="utf-8"))


@pytest.fixture
def cheap(monkeypatch):
    """Without memory and the page's charts, which take longest."""
    monkeypatch.setattr(comparing, "memory_of", lambda *_: MEMORY)
    monkeypatch.setattr(comparing, "page", lambda _: "")


@pytest.fixture
def report(compared):
    """What the small comparison wrote as JSON."""
    return compared[2]


def entrant(name, values, lr=0.01, **more):
    """A record that a comparison might have."""
    runs = tuple(
        SeedRun(
            seed=seed,
            test=value,
            test_metrics={"bits_per_byte": value},
            steps=20,
            seconds=10.0 + seed,
            curve=tuple(
                Point(step=step, validation=value + 1 / step, seconds=step / 2, flops=1e9 * step)
                for step in (5, 10, 20)
            ),
            contexts=[
                {
                    "context": 64 * times,
                    "test": value + 0.1 * (times - 1),
                    "positions": [
                        {"first": 1, "last": 1, "tokens": 9, "bits_per_byte": 4.0},
                        {"first": 2, "last": 2, "tokens": 9, "bits_per_byte": 3.0},
                    ],
                }
                for times in (1, 2)
            ],
            command=f"kinformer train {name}",
        )
        for seed, value in enumerate(values)
    )
    fields = {
        "name": name,
        "spec": name,
        "set": {},
        "facts": {
            "members": [
                {"name": name, "title": name.title(), "paper": "A paper", "growth": "linear", "exact_limit": "always",
                 "departures": ["none"]}
            ],
            "config": {"dim": 32, "layers": [1, 2]},
            "max_length": None,
            "needs": [],
        },
        "parameters": 1000,
        "flops_step": 1e9,
        "error": None,
        "sweep": (Trial(lr=0.01, validation=3.0), Trial(lr=0.02, validation=None)),
        "lr": lr,
        "moved": None,
        "runs": runs,
        "state_bytes": {"128": 4096, "1024": 32768},
        "training": {"seconds": 0.1},
        "generation": {"points": [{"kind": "decode", "batch": b, "length": 128, "seconds": 0.01} for b in (1, 16)]},
        "lengths": {
            "points": [
                {"kind": kind, "batch": 1, "length": length, "seconds": length * 1e-4}
                for kind in ("forward", "step")
                for length in (64, 256)
            ]
        },
        "memory": {"training": 2**20, "lengths": [{"length": 64, "bytes": 5000}, {"length": 256, "bytes": 50000}]},
        "machine": {"processor": "one", "threads": 1, "device": "cpu", "python": "3", "versions": {"torch": "2"}},
        "settings": {"length": 64, "batch_size": 2},
    }  # fmt: skip
    return EntrantRecord(**(fields | more))


def comparison(*entrants, **more):
    """A made-up comparison."""
    fields = {
        "kinformer": "0",
        "created": "2026-01-01",
        "command": "kinformer compare a b",
        "task": "next-token",
        "figure": "bits_per_byte",
        "unit": "bits per byte",
        "lower_is_better": True,
        "data": {"name": "book", "version": "1", "fingerprint": "sha256:1", "split": "test", "max_bytes": None},
        "baselines": {"ngram_bits_per_byte": 2.5},
        "budget": {"parameters": 1000, "steps": [20], "tokens_step": 128, "seeds": 3},
        "settings": {},
        "seconds": {"training": 1.0},
        "entrants": entrants,
    }
    return Comparison(**(fields | more))
