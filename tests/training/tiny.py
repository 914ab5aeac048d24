"""Small runs for the tests of training; also imported by their other processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kinformer.family.build import build
from kinformer.heads.classes import ClassificationHead
from kinformer.lab.data import BosEos, Corpus, Examples, Labelled
from kinformer.lab.data.masking import Masking, ordinary
from kinformer.lab.data.pairs import Languages, Pairs, Parallel
from kinformer.lab.data.tokenizer import ByteTokenizer
from kinformer.lab.tasks.classify import Labels
from kinformer.lab.tasks.mlm import MaskedTokens
from kinformer.lab.tasks.next_token import NextTokens
from kinformer.lab.tasks.table import TASKS
from kinformer.lab.tasks.translate import TranslationPairs
from kinformer.lab.training.checkpoint import Checkpoints
from kinformer.lab.training.data_module import DataModule
from kinformer.lab.training.distributed import Group
from kinformer.lab.training.loop import Result, Trainer
from kinformer.lab.training.settings import Settings

Overrides = dict[str, Any] | None
CPU = Group(torch.device("cpu"))
SETTINGS = Settings(
    steps=8,
    length=16,
    batch_size=4,
    lr=3e-3,
    log_every=1,
    checkpoint_every=4,
    validate_every=0,
    validation_tokens=256,
    seed=7,
)


def trainer(
    corpus: Corpus,
    folder: Path,
    group: Group = CPU,
    model: Overrides = None,
    segments: bool = False,
    started_at: float | None = None,
    double: bool = False,
    **changes: Any,
) -> Trainer:
    """``model`` overrides fields of the tiny recipe; its key ``member`` names the member; ``double``: in float64.

    An encoder is trained to find masked tokens of the corpus, or with the objective ``classification`` to tell the
    classes of :func:`labelled`.
    """
    overrides = dict(model or {})
    settings = replace(SETTINGS, **changes)
    if settings.objective == "classification":
        overrides["head"] = ClassificationHead.Config(classes=3)
    encodes = settings.objective in ("classification", "masked-language", "mlm-cpc", "translation")
    torch.manual_seed(3)
    built = build(overrides.pop("member", "gpt"), "tiny", 259 if encodes else 256, overrides)
    built = built.double() if double else built
    data = rows(corpus, settings) if encodes else NextTokens(corpus, settings, segments)
    task = next(task for task in TASKS.values() if (settings.objective or "next-token") in task.objectives)
    return Trainer(
        built, data, task.objective(settings.objective, built), settings, folder, group, started_at=started_at
    )


def rows(corpus: Corpus, settings: Settings) -> DataModule:
    """The rows for a tiny encoder, whose last three ids are special."""
    ends = BosEos(257, 258)
    if settings.objective == "classification":
        return Labels(labelled(), settings, ends)
    if settings.objective == "translation":
        return TranslationPairs(reversals(), settings, ends, smoothing=0.0)
    return MaskedTokens(corpus, settings, Masking(256, ordinary(256, set())), ends)


def reversals(number: int = 200) -> Parallel:
    """Words of 3 to 9 letters, and their letters in reverse."""
    draw = np.random.default_rng(0)
    words = [draw.integers(97, 105, draw.integers(3, 10)).astype(np.uint8).tobytes() for _ in range(number)]
    pairs = Pairs(words, [word[::-1] for word in words])
    return Parallel(
        "tiny", "1", "none", Languages(), ByteTokenizer(), {"train": pairs, "validation": pairs.taken(range(40))}
    )


def labelled(number: int = 120) -> Labelled:
    """Texts of 5 to 40 bytes below 8; class c has many bytes c."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, number)
    lengths = draw.integers(5, 41, number).tolist()
    texts = [
        np.where(draw.random(length) < 0.5, label, draw.integers(0, 8, length)).astype(np.uint8)
        for label, length in zip(labels.tolist(), lengths, strict=True)
    ]
    starts = np.cumsum([0, *map(len, texts)])
    splits = {name: Examples(name, np.concatenate(texts), starts, labels) for name in ("train", "validation", "test")}
    return Labelled("tiny", "1", "none", ("0", "1", "2"), 8, splits)


def train(corpus: Corpus, folder: Path, group: Group = CPU, model: Overrides = None, **changes: Any) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    return trainer(corpus, folder, group, model, **changes).run()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint, whole."""
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    saved = checkpoints.read(checkpoints.steps()[-1])
    return dict(saved.files["model"]) if saved.shards is None else saved.shards.whole("model")


def gap(left: Path, right: Path) -> float:
    """Largest difference of two runs' final weights."""
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def curve(folder: Path) -> list[float]:
    """The loss of every logged step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def rewound(folder: Path, to: Path) -> Path:
    """A copy of a run as it was when its last checkpoint but one was the newest."""
    shutil.copytree(folder, to)
    newest = max((to / "checkpoints").iterdir())
    shutil.rmtree(newest)
    return to
