"""How far do heads learn to look back, and what do their spans save? (Sukhbaatar et al. 2019, figures 3 and 4)

Trains two models of six layers on the bytes of a text, for equally many steps by one recipe: one whose heads learn
their spans, from 0 up to --most tokens, and the same with all spans at --most, which cost nothing and have no
gradient. Rows of --length tokens carry their state on. Measures held-out bits per byte, the spans by layer and head,
the bytes of the state after --most tokens, and in turns the seconds of a training step and of evaluation. Run folders
in --runs that exist already are gone on with, or only measured:

    python benchmarks/spans.py --data war-and-peace.txt --runs runs/spans
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from common import RESULTS, Contestant, arguments, interleave, kinformer, prepare, save, sets, show, text_bytes, train
from kinformer.core.state import nbytes
from kinformer.lab.runs.run import open_run
from kinformer.parts.scores import SoftSpan

SIZES = {"layers": 6, "dim": 128, "layers.*.mixer.num_heads": 4, "layers.*.feed_forward.hidden_dim": 512}
SPANS: dict[str, dict[str, float]] = {"adaptive": {"initial": 0.0}, "full": {"initial": 1.0, "penalty": 0.0}}
TRAINING = ("--tokenizer", "bytes", "--optimizer", "muon", "--lr", 5e-3, "--batch-size", 4)
ROUNDS = 9


def trained(name: str, options: Any) -> Path:
    """The run with these spans, begun, gone on with or already there."""
    folder = options.runs / name
    span = {f"layers.*.mixer.span.{key}": value for key, value in (SPANS[name] | {"max_span": options.most}).items()}
    if name == "adaptive":
        span["layers.*.mixer.span.penalty"] = options.penalty
    changes = SIZES | span | {"layers.*.mixer.position.max_distance": options.most}
    where = ("--data", options.data, "--length", options.length, "--steps", options.steps)
    words = ("--recipe", "small", *sets(changes), *TRAINING, *where)
    train("adaptive-span", folder, torch.get_num_threads(), *words)
    return folder


def spans_of(model: Any) -> list[list[float]]:
    """Tokens, by layer and head."""
    return [module.spans() for module in model.modules() if isinstance(module, SoftSpan)]


def timed(models: dict[str, Any], options: Any) -> dict[str, dict[str, float]]:
    """Seconds of a training step without the optimiser and of reading the same tokens, after --most tokens."""
    text = text_bytes(None if options.data == "stdlib" else options.data, options.most + options.length + 1)[None]
    past, tokens, targets = text[:, : options.most], text[:, options.most : -1], text[:, options.most + 1 :]

    def read(name: str) -> None:
        with torch.no_grad():
            models[name](tokens, begun[name])

    def step(name: str) -> None:
        logits, _ = models[name](tokens, begun[name])
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    with torch.no_grad():
        begun = {name: model(past)[1] for name, model in models.items()}
    found = {"state_bytes": {name: float(nbytes(state)) for name, state in begun.items()}}
    for what, run in (("read", read), ("step", step)):
        contestants = [Contestant(name, partial(run, name), fast=True) for name in models]
        interleave(contestants, options.rounds or ROUNDS)
        found[f"{what}_seconds"] = {each.name: each.median for each in contestants}
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", default="stdlib", help="the text (Python's own sources if not given)")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--most", type=int, default=1024, help="the largest span, in tokens")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, which goes on where the last ended")
    parser.add_argument("--steps", type=int, default=800, help="of training")
    parser.add_argument("--penalty", type=float, default=2e-6, help="of the mean span of a layer, per token of it")
    options = prepare(parser)
    limits: tuple[Any, ...] = ("--threads", torch.get_num_threads())
    if options.quick:
        options.steps, options.most, options.length, options.rounds = 2, 128, 64, 1
        limits = (*limits, "--max-bytes", "2k")
    with tempfile.TemporaryDirectory() as scratch:
        options.runs = options.runs or Path(scratch)
        folders = {name: trained(name, options) for name in SPANS}
        bits = {name: kinformer("evaluate", folder, *limits)["bits_per_byte"] for name, folder in folders.items()}
        models = {name: open_run(folder).model() for name, folder in folders.items()}
        if not options.quick:
            picture = (options.out or RESULTS / "spans.json").with_suffix(".png")
            kinformer("draw", folders["adaptive"], "--spans", "--out", picture)
    found = timed(models, options)
    spans = spans_of(models["adaptive"])
    flat = [span for layer in spans for span in layer]
    short = sum(span < options.most / 10 for span in flat) / len(flat)
    show(
        "spans in tokens",
        ("", *(f"head {n}" for n in range(len(spans[0])))),
        [[f"layer {n}", *each] for n, each in enumerate(spans)],
    )
    rows = [[name, *(each[name] for each in (bits, *found.values()))] for name in SPANS]
    show("spans learnt and full", ("", "bits per byte", "state bytes", "reading, s", "training step, s"), rows)
    settings = {name: getattr(options, name) for name in ("most", "length", "steps", "penalty")} | {"sizes": SIZES}
    result = {"settings": settings, "training": list(TRAINING), "data": Path(options.data).name, "bits_per_byte": bits}
    save(options, "spans", result | found | {"spans": spans, "heads_below_a_tenth": short})


if __name__ == "__main__":
    main()
