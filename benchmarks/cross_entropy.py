"""What do logits cost that are made in pieces? Forward and backward of `gpt`, 4 layers, over vocabularies of 4,096 on.

    whole     all logits at once, then PyTorch's cross-entropy
    pieces    some rows of logits at a time, with their loss and its gradients (lab/training/cross_entropy.py)

The same loss by both to 1e-5 in float32 (1e-3 in bfloat16), or they are not timed. Every shape has a process of its
own, which keeps the memory that it has freed, as commands do. Bytes are the peak of a process that does it one way.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from common import Contestant, arguments, gate_equal, in_process, interleave, memory, of_width, prepare, save, show
from kinformer.family.build import configure
from kinformer.lab.tasks.next_token import NextTokenLoss, TokenBatch
from kinformer.lab.training import cross_entropy
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.runtime.process import keep_memory

SHAPES = ((4096, 128, 8, 128), (4096, 256, 8, 512), (16384, 256, 8, 256), (50257, 256, 4, 256))
"""Vocabulary, dim, rows, tokens of a row."""
NEVER = 1 << 60


def step(engine: ObjectiveModule, batch: TokenBatch, least: int) -> torch.Tensor:
    """The loss of a step whose logits are made in pieces from so many elements on."""
    before, cross_entropy.LOGITS = cross_entropy.LOGITS, least
    try:
        loss = engine(batch, None, 0.0)[0]
        loss.backward()
    finally:
        cross_entropy.LOGITS = before
    engine.zero_grad()
    return loss.detach()


WAYS = {"whole": NEVER, "pieces": 1}


def made(shape: tuple[int, ...], precision: str) -> tuple[ObjectiveModule, TokenBatch]:
    vocabulary, dim, rows, length = shape
    torch.manual_seed(0)
    engine = ObjectiveModule(configure("gpt", "small", vocabulary, of_width(dim)).build(), NextTokenLoss(), precision)
    return engine, TokenBatch(torch.randint(vocabulary, (rows, length + 1)))


def race(engine: ObjectiveModule, batch: TokenBatch, rounds: int) -> dict[str, Any]:
    """Seconds by either way."""
    whole, pieces = (step(engine, batch, least) for least in WAYS.values())
    gap = gate_equal("in pieces", pieces, whole, 1e-5 if engine.precision == "fp32" else 1e-3)
    contestants = [Contestant(name, partial(step, engine, batch, least), fast=True) for name, least in WAYS.items()]
    interleave(contestants, rounds)
    return {"gap": gap} | {each.name: each.median for each in contestants}


def peak(engine: ObjectiveModule, batch: TokenBatch, way: str) -> dict[str, Any]:
    """Bytes of the largest resident set of this process, which makes three steps."""
    for _ in range(3):
        step(engine, batch, WAYS[way])
    return {"bytes": memory("VmHWM")}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--point", nargs=6, help="one shape, its precision and what is measured of it: time, or a way")
    options = prepare(parser)
    rounds = options.rounds or (1 if options.quick else 7)
    if options.point:
        keep_memory()
        *shape, precision, what = options.point
        subject = made(tuple(map(int, shape)), precision)
        print(json.dumps(race(*subject, rounds) if what == "time" else peak(*subject, what)))
        return
    rows = []
    for precision in ("bf16-mixed", "fp32"):
        for shape in [(512, 64, 2, 32)] if options.quick else SHAPES:
            point = partial(in_process, __file__, "--rounds", rounds, "--point", *shape, precision)
            row = dict(zip(("vocabulary", "dim", "rows", "length"), shape, strict=True)) | {"precision": precision}
            row |= point("time") | {f"{way} bytes": point(way)["bytes"] for way in WAYS}
            rows.append(row | {"times as fast": row["whole"] / row["pieces"]})
    show("forward and backward, seconds", list(rows[0]), [list(row.values()) for row in rows])
    save(options, "cross_entropy", {"shapes": rows})


if __name__ == "__main__":
    main()
