"""How much faster is generation with calibrated early exits, and does the risk hold? (CALM, Schuster et al. 2022)

Trains eight layers on the bytes of a text for some minutes, three quarters of them with the losses of all exits
(aligned), the rest with tokens that leave by exits drawn at random (mixed), so that later tokens have seen the copied
states of those that left. Calibrates the model on the validation split for textual and for risk consistency, and then

* measures the loss of each calibration on prompts of the test split, which nothing has seen, beside a bound of its mean
  that holds with the same confidence (Bentkus' inequality over the binomial distribution);
* measures bits per byte with and without exits;
* times greedy generation of one sequence with all layers and with each threshold, in turns in one process.

``--run FOLDER`` keeps the run there, and the one it began from beside it: what is trained already is not trained again.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from common import Contestant, arguments, interleave, kinformer, prepare, save, sets, show
from kinformer.generation.generate import generate
from kinformer.generation.weights import pack
from kinformer.lab.calibration.options import CalibrateOptions
from kinformer.lab.calibration.risk import at_threshold
from kinformer.lab.data import Split
from kinformer.lab.evaluation.depths import noting_exits, with_rule
from kinformer.lab.runs.run import Run, open_run
from kinformer.lab.tasks.evaluation import EvaluationSettings
from kinformer.lab.tasks.next_token_evaluation import TextSamples
from kinformer.lab.tasks.texts import held_out

SIZES = {"layers": 8, "dim": 128, "layers.*.mixer.num_heads": 4, "layers.*.feed_forward.hidden_dim": 512}
LR = 5e-3
TRAINING = ("--optimizer", "muon", "--batch-size", 8, "--length", 128)
QUICK = ("--steps", 5)
PROMPT, NEW = 64, 32
"""Tokens of a sample's prompt and of its continuation."""
TIMED = 2000
"""Tokens of a timed continuation, whose steps are recorded, which is part of the time."""
ALIGNED = 0.75
"""The share of the minutes in which all exits are trained at once."""


def trained(options: argparse.Namespace, folder: Path) -> Run:
    """The run in ``folder``, trained now if it is not there."""
    aligned = folder.with_name(f"{folder.name}-aligned")
    train(options, aligned, ALIGNED, "aligned", "--tokenizer", "bytes", "--lr", LR)
    train(options, folder, 1 - ALIGNED, "mixed", "--init", aligned, "--lr", LR / 2)
    return open_run(folder)


def train(options: argparse.Namespace, folder: Path, share: float, training: str, *more: Any) -> None:
    """One part of the training, for a ``share`` of the minutes."""
    if (folder / "config.json").is_file():
        return
    changes = sets(SIZES | {"stack.training": training})
    length = QUICK if options.quick else ("--minutes", share * options.minutes)
    words = ("--data", options.data, "--threads", torch.get_num_threads(), "--out", folder)
    kinformer("train", "calm", "--recipe", "small", *changes, *TRAINING, *length, *words, *more)


def calibrated(options: argparse.Namespace, folder: Path, consistency: str) -> dict[str, Any]:
    """What ``kinformer calibrate`` says; the run has its threshold."""
    bound = ("--risk", options.risk, "--confidence", options.confidence, "--consistency", consistency)
    samples = ("--prompts", options.prompts, "--prompt-tokens", PROMPT, "--new-tokens", NEW)
    told = kinformer("calibrate", folder, *bound, *samples, "--threads", torch.get_num_threads())
    return {name: value for name, value in told.items() if name not in ("run", "seconds")}


def upper_bound(losses: np.ndarray, confidence: float) -> float:
    """An upper bound on the expected loss, from independent ``losses`` in [0, 1], which it exceeds with a probability
    of at most 1 - confidence: the largest r with e P(Bin(n, r) <= ceil(sum of losses)) > 1 - confidence (Bentkus 2004).
    """
    total, low, high = np.ceil(losses.sum() - 1e-9), float(losses.mean()), 1.0
    for _ in range(60):  # bisection, to below the resolution of float64
        middle = (low + high) / 2
        holds = np.e * binom.cdf(total, len(losses), middle) > 1 - confidence
        low, high = (middle, high) if holds else (low, middle)
    return high


def on_unseen(options: argparse.Namespace, run: Run, model: Any, consistency: Any, threshold: float) -> Any:
    """The losses of prompts of the test split, their mean and its bound, and layers per token."""
    sampling = CalibrateOptions(
        risk=options.risk, confidence=options.confidence, split="test", seed=1,
        prompts=options.prompts, prompt_tokens=PROMPT, new_tokens=NEW,
    )  # fmt: skip
    samples = TextSamples(run, model, sampling)
    losses = samples.losses(threshold, consistency)
    bound = upper_bound(losses, options.confidence)
    layers = samples.exits[threshold].layers_per_token
    kept = {"samples": len(losses), "loss": float(losses.mean()), "bound": bound, "within": bound <= options.risk}
    return kept | {"without_loss": float((losses == 0).mean()), "layers_per_token": layers}


def timed(options: argparse.Namespace, model: Any, split: Split, thresholds: dict[str, float]) -> dict[str, Any]:
    """Speed of a continuation with all layers and with each threshold, in turns, and the layers per token meanwhile."""
    length = 8 if options.quick else TIMED
    starts = iter(np.random.default_rng(2).integers(len(split) - PROMPT, size=10_000).tolist())
    layers: dict[str, list[float]] = {name: [] for name in thresholds}

    def step(name: str) -> None:
        prompt = torch.from_numpy(split.rows(np.array([next(starts)]), PROMPT))
        if name not in thresholds:
            with with_rule(model.stack, None):
                generate(model, prompt, max_new_tokens=length, temperature=0.0)
            return
        with at_threshold(model, thresholds[name]), noting_exits(model) as noted:
            generate(model, prompt, max_new_tokens=length, temperature=0.0)
        assert noted.result is not None
        layers[name].append(noted.result.layers_per_token)

    contestants = [Contestant(name, partial(step, name)) for name in ("all layers", *thresholds)]
    interleave(contestants, options.rounds or (2 if options.quick else 9))
    base = contestants[0].median
    return {
        each.name: {
            "tokens_per_second": length / each.median,
            "speedup": base / each.median,
            "layers_per_token": float(np.mean(layers[each.name])) if each.name in layers else SIZES["layers"],
        }
        for each in contestants
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="the text (Python's own sources if not given)")
    parser.add_argument("--run", type=Path, help="the run folder, kept; a temporary one if not given")
    parser.add_argument("--minutes", type=float, default=30.0, help="of training")
    parser.add_argument("--risk", type=float, default=0.05)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--consistency", nargs="+", choices=("textual", "risk"), default=("textual", "risk"))
    parser.add_argument("--prompts", type=int, default=1000, help="samples, of the calibration and of the unseen text")
    options = prepare(parser)
    with tempfile.TemporaryDirectory() as folder:
        options.run = options.run or Path(folder) / "run"
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """All of it."""
    run = trained(options, options.run)
    found = {name: calibrated(options, options.run, name) for name in options.consistency}
    thresholds = {name: each["threshold"] for name, each in found.items() if each["threshold"] is not None}
    model = pack(run.model({"stack.rule.thresholds": [1.0]}))
    test = held_out(run, EvaluationSettings(split="test")).split
    unseen = {name: on_unseen(options, run, model, name, each) for name, each in thresholds.items()}
    speed = timed(options, model, test, thresholds)
    bits = {}
    for name, each in thresholds.items():
        words = ("--max-bytes", "100k", "--threads", torch.get_num_threads())
        told = kinformer("evaluate", options.run, "--set", f"stack.rule.thresholds=[{each}]", *words)
        bits |= {"all layers": told["all_layers_bits_per_byte"], name: told["bits_per_byte"]}
    rows = []
    for name, each in thresholds.items():
        losses = (found[name]["measured"], unseen[name]["loss"], unseen[name]["bound"])
        rows.append([name, each, *losses, speed[name]["layers_per_token"], speed[name]["speedup"], bits[name]])
    header = ("", "threshold", "loss", "unseen", "bound", "layers", "speed-up", "bits per byte")
    show(f"risk {options.risk:g} with confidence {options.confidence:g}", header, rows)
    training = {"data": run.data["identity"], "settings": dict(run.training), "validation": run.figures}
    result = {"training": training, "calibration": found, "unseen": unseen, "generation": speed, "bits_per_byte": bits}
    save(options, "calm", {"sizes": SIZES} | result)


if __name__ == "__main__":
    main()
