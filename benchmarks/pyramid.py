"""HIPT on large images made of digits: attention among regions or their mean? Levels below frozen, learning, or new?

An image is 16 x 16 handwritten digits, each of 16 x 16 pixels. The digits 0 to 3 are equally frequent in every image;
in one of its 16 regions of 4 x 4, at a place of its own, many are the same, which is the image's class: what is where
decides, as a tumour among tissue, and the counts of digits say nothing. Digits of training images and of test images
are different ones. Tiles learn without labels (DINO), then regions of frozen tiles, then the classes of few images:

    frozen        as published: attention among regions, gated pooling, levels below as they are
    mean          the mean of the same regions' vectors, by logistic regression (the best of four penalties, chosen on
                  the test images, which can only flatter it)
    learning      as frozen, but all levels learn
    new           all levels learn, from random weights

Run folders in --runs that are finished are only measured, and those that were stopped go on:

    python benchmarks/pyramid.py --runs runs/pyramid
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common import arguments, kinformer, prepare, save, sets, show, train
from kinformer.lab.data.images import DIGITS, read_images
from kinformer.lab.runs.run import open_run
from kinformer.lab.tasks.dino import vectors_of

CLASSES, TILES, REGION, PIXELS = 4, 16, 4, 16
SAME = 10
"""Digits of the class in its region of 16."""
TRAIN, TEST = 256, 400
LABELLED = (64, 256)
SEEDS = 3
ALL_LEARN = {"input.frozen": "false", "input.encoder.input.frozen": "false"}
DINO = ("--task", "dino", "--prototypes", 256, "--lr", 1e-3, "--optimizer", "adamw")


def images(digits: np.ndarray, labels: np.ndarray, count: int, draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    """``count`` images [count, 256, 256] made of ``digits`` [n, 8, 8], and their classes [count]."""
    of_class = [np.flatnonzero(labels == digit) for digit in range(10)]
    regions = TILES // REGION
    answers = np.arange(count) % CLASSES
    made = np.empty((count, TILES * PIXELS, TILES * PIXELS), np.uint8)
    for index, answer in enumerate(answers):
        inside = np.concatenate([np.full(SAME, answer), draw.integers(CLASSES, 10, REGION**2 - SAME)])
        others = np.repeat([each for each in range(CLASSES) if each != answer], SAME)
        outside = np.concatenate([others, draw.integers(CLASSES, 10, TILES**2 - REGION**2 - len(others))])
        draw.shuffle(inside)
        draw.shuffle(outside)
        which = np.full((TILES, TILES), -1)
        row, column = REGION * draw.integers(0, regions, 2)
        which[row : row + REGION, column : column + REGION] = inside.reshape(REGION, REGION)
        which[which < 0] = outside
        chosen = [digits[draw.choice(of_class[digit])] for digit in which.ravel()]
        tiles = np.stack(chosen).repeat(2, 1).repeat(2, 2).reshape(TILES, TILES, PIXELS, PIXELS)
        made[index] = tiles.swapaxes(1, 2).reshape(made.shape[1:])
    return made, answers


def write(folder: Path) -> dict[int, Path]:
    """Archives with so many labelled training images, all with the same test images; by that number."""
    data = read_images(DIGITS)
    parts = {}
    for seed, (name, count) in enumerate((("train", TRAIN), ("test", TEST))):
        part = getattr(data, name)
        digits, labels = np.array(part.pixels)[..., 0], np.array(part.labels)
        parts[name] = images(digits, labels, count, np.random.default_rng(seed))
    found = {}
    for count in LABELLED:
        found[count] = folder / f"{count}.npz"
        x, y = parts["train"]
        test = {"x_test": parts["test"][0], "y_test": parts["test"][1]}
        np.savez_compressed(found[count], x_train=x[:count], y_train=y[:count], **test)
    return found


def mean_of_regions(folder: Path, path: Path) -> float:
    """The share of test images that is right by the mean of their regions' vectors."""
    model, data = open_run(folder).model().eval(), read_images(str(path))
    vectors, answers = [], []
    for part in (data.train, data.test):
        vectors.append(vectors_of(model, 2, part, len(part)))
        answers.append(torch.from_numpy(np.array(part.labels)).long())
    mean, deviation = vectors[0].mean(0), vectors[0].std(0) + 1e-6
    x, held_out = ((each - mean) / deviation for each in vectors)
    return max(regression(x, answers[0], held_out, answers[1], penalty) for penalty in (1e-3, 1e-2, 1e-1, 1.0))


def regression(x: Tensor, y: Tensor, held_out: Tensor, answers: Tensor, penalty: float) -> float:
    """Logistic regression with half the squared weights, times ``penalty``, beside the loss."""
    weight = torch.zeros(CLASSES, x.shape[1], requires_grad=True)
    bias = torch.zeros(CLASSES, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimiser.zero_grad()
        value = functional.cross_entropy(x @ weight.T + bias, y) + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return float(((held_out @ weight.T + bias).argmax(-1) == answers).double().mean())


class Pyramid:
    """What the runs share: where they are and how long they take."""

    def __init__(self, folder: Path, options: Any) -> None:
        self.folder, self.options = folder, options
        self.archives = write(folder)
        self.threads = ("--threads", options.threads) if options.threads else ()

    def learn(self, name: str, steps: int, *words: Any) -> Path:
        """A run of the recipe ``small``, begun, gone on with, or there."""
        out = self.folder / name
        train("hipt", out, self.options.threads, "--recipe", "small", "--steps", steps, *words)
        return out

    def levels(self, seed: int) -> Path:
        """Tiles, then regions, learnt without labels from the images that most labels are known of."""
        words = (*DINO, "--data", self.archives[max(LABELLED)], "--seed", seed)
        views = ("--area", 0.8, "--local-views", 0)
        tiles = self.learn(f"tiles-{seed}", self.options.tiles, *words, *views, "--batch-size", 256)
        further = ("--level", 2, "--init", tiles, "--batch-size", 64)
        return self.learn(f"regions-{seed}", self.options.regions, *words, *further)

    def right(self, name: str, count: int, seed: int, below: Path) -> float:
        """The share of test images that the contestant ``name`` gets right, with ``count`` labels."""
        if name == "mean":
            return mean_of_regions(below, self.archives[count])
        words: list[Any] = ["--task", "vision", "--data", self.archives[count], "--seed", seed, "--batch-size", 16]
        words += ["--optimizer", "adamw", "--lr", self.options.lr]
        words += [] if name == "new" else ["--init", below]
        words += [] if name == "frozen" else sets(ALL_LEARN)
        out = self.learn(f"{name}-{count}-{seed}", self.options.steps, *words)
        return kinformer("evaluate", out, *self.threads)["accuracy"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tiles", type=int, default=600, help="steps of the tiles, 256 each")
    parser.add_argument("--regions", type=int, default=600, help="steps of the regions, 64 each")
    parser.add_argument("--steps", type=int, default=300, help="steps of the classes, 16 images each")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the classes")
    parser.add_argument("--contestants", nargs="*", default=["frozen", "mean", "learning", "new"])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    options = prepare(parser)
    if options.quick:
        options.tiles = options.regions = options.steps = 2
        options.seeds = 1
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        pyramid = Pyramid(folder, options)
        for seed in range(options.seeds):
            below = pyramid.levels(seed)
            for name in options.contestants:
                for count in LABELLED:
                    right = pyramid.right(name, count, seed, below)
                    found.setdefault(name, {}).setdefault(f"{count} labels", []).append(right)
                    print(f"{name}, {count} labels, seed {seed}: {right:.1%} right", flush=True)
    rows = [
        [name, count, statistics.mean(shares), min(shares), max(shares)]
        for name, own in found.items()
        for count, shares in own.items()
    ]
    show(f"accuracy on {TEST} images, 25 % by chance", ["contestant", "labels", "mean", "least", "most"], rows)
    save(options, "pyramid", {"accuracy": found})


if __name__ == "__main__":
    main()
