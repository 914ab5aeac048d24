"""What is it worth that a process keeps the memory that it has freed? Training steps with it and without.

    given back   as glibc has it: freed memory is the system's again, which clears it when it is asked for
    kept         as commands have it (runtime/compiling.py)

Every measurement has a process of its own, in turns; told are the median seconds of a step over all of them, the pages
that a step asks for, and the most memory that any process had. Both must have the same loss after the first steps.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from typing import Any

import torch

from common import arguments, gate_equal, in_process, memory, of_width, prepare, save, show
from kinformer.family.build import configure
from kinformer.lab.tasks.next_token import NextTokenLoss, TokenBatch
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.lab.training.optimisers import Optimiser
from kinformer.lab.training.settings import Settings
from kinformer.runtime.process import keep_memory, use_fast_products

SHAPES = (
    ("gpt", 256, 128, 8, 128),
    ("gpt", 4096, 128, 8, 128),
    ("gpt", 256, 256, 8, 512),
    ("linear-transformer", 256, 256, 8, 512),
)
"""Member, vocabulary, dim, rows, tokens of a row."""
WAYS, WARM_UP = ("given back", "kept"), 3


def point(member: str, sizes: list[int], precision: str, way: str, steps: int) -> dict[str, Any]:
    """Seconds of a step in this process, its pages a step and its peak in bytes, and its loss after the first steps."""
    if way == "kept":
        keep_memory()
    use_fast_products()
    vocabulary, dim, rows, length = sizes
    torch.manual_seed(0)
    model = configure(member, "small", vocabulary, of_width(dim)).build()
    settings = Settings(optimizer="adamw", lr=1e-3, steps=100, length=length, batch_size=rows)
    optimiser, engine = Optimiser(model, settings), ObjectiveModule(model, NextTokenLoss(), precision)
    batch, seconds, loss, pages = TokenBatch(torch.randint(vocabulary, (rows, length + 1))), [], 0.0, 0
    for number in range(WARM_UP + steps):
        begun = time.perf_counter()
        found = engine(batch, None, 0.0)[0]
        found.backward()
        optimiser.step(1e-4)
        seconds.append(time.perf_counter() - begun)
        if number == WARM_UP - 1:
            loss, pages = float(found.detach()), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pages = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages) // steps
    return {"seconds": seconds[WARM_UP:], "pages": pages, "bytes": memory("VmHWM"), "loss": loss}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--point", nargs=8, help="a shape, its precision, the way, and how many steps")
    options = prepare(parser)
    if options.point:
        member, *sizes, precision, way, steps = options.point
        print(json.dumps(point(member, list(map(int, sizes)), precision, way, int(steps))))
        return
    rows = []
    for precision in ("bf16-mixed", "fp32"):
        for shape in [("gpt", 256, 64, 2, 32)] if options.quick else SHAPES:
            steps = 2 if options.quick else max(8, 60_000 // (shape[3] * shape[4]))
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for _ in range(options.rounds or (1 if options.quick else 3)):
                for way in WAYS:
                    found[way].append(in_process(__file__, "--point", *shape, precision, way, steps))
            losses = [torch.tensor([each["loss"] for each in found[way]]) for way in WAYS]
            gate_equal(f"{shape[0]}, kept memory", *losses, 1e-3)
            row = dict(zip(("member", "vocabulary", "dim", "rows", "length"), shape, strict=True))
            row |= {"precision": precision}
            for way, own in found.items():
                row[way] = statistics.median([second for each in own for second in each["seconds"]])
                row[f"{way}, pages"] = statistics.median(each["pages"] for each in own)
                row[f"{way}, bytes"] = max(each["bytes"] for each in own)
            rows.append(row | {"times as fast": row[WAYS[0]] / row[WAYS[1]]})
    show("a training step, seconds", list(rows[0]), [list(row.values()) for row in rows])
    save(options, "kept_memory", {"shapes": rows})


if __name__ == "__main__":
    main()
