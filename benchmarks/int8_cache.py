"""What do keys and values of the past in 8 bits cost in bits per byte, and what do they save in bytes and time?

    python benchmarks/int8_cache.py --threads 1        # some three minutes

A small model of the member ``rope`` is trained by the command line on the standard library. Texts of it are then
read as in generation, chunk by chunk after a state, with the past in full and in 8 bits: bits per byte, the largest
difference of a logit, and the bytes of the state. Texts read in one chunk must give equal bits. A step of one token
after a long past is timed in turns, of layers of 4 heads of 64; 8 bits are multiplied as they are, or converted first.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kinformer
from common import arguments, prepare, save, show, text_bytes, train
from kinformer.core.contract import Chunk
from kinformer.core.state import nbytes, reserve
from kinformer.kernels.attention import cached as int8
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.relative_positions import Rope

INT8 = {"layers.*.mixer.cache": "int8"}
LENGTH = 256
WAYS = {"full": ("full", True), "int8": ("int8", True), "converted": ("int8", False)}
"""How the past is stored, and whether 8 bits are multiplied as they are."""


def read(model: Any, rows: Tensor, chunk: int) -> tuple[Tensor, int]:
    """Return the logits of ``rows`` [batch, time] absorbed ``chunk`` by chunk, and the bytes of a row's state."""
    state, logits = model.initial_state(len(rows)), []
    with torch.inference_mode():
        for part in rows.split(chunk, 1):
            some, state = model(part, state)
            logits.append(some)
    return torch.cat(logits, 1), nbytes(state) // len(rows)


def bits(logits: Tensor, rows: Tensor) -> float:
    """Bits per byte of all tokens but the first of each row."""
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), rows[:, 1:].flatten())
    return float(loss) / math.log(2)


def quality(folder: Path, rows: Tensor) -> list[dict[str, float]]:
    full, held = kinformer.load(folder), kinformer.load(folder, set=INT8)
    found = []
    for chunk in (LENGTH, 16, 1):
        (one, size), (two, small) = (read(model, rows, chunk) for model in (full, held))
        found.append(
            {
                "chunk": chunk, "full": bits(one, rows), "int8": bits(two, rows),
                "logit": float((one - two).abs().max()), "full_bytes": size, "int8_bytes": small,
            }
        )  # fmt: skip
    whole = found[0]
    if whole["full"] != whole["int8"]:
        raise SystemExit("texts read in one chunk differ, so nothing was measured")
    return found


def step_times(past: int, rounds: int) -> dict[str, float]:
    """Milliseconds of processor time of a token after ``past`` others, the median of ``rounds`` in turns."""
    x = torch.randn(1, past, 256)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    least = int8.LEAST
    with torch.inference_mode():
        states = {}
        for way, (cache, _) in WAYS.items():
            mixer = SoftmaxAttention.Config(num_heads=4, position=Rope.Config(), cache=cache).build(256)  # type: ignore[arg-type]
            state = mixer(Chunk(x), reserve(mixer.initial_state(1), past + rounds + 1))[1]
            states[way] = mixer, state
        for _ in range(rounds):
            for way, (mixer, state) in states.items():
                int8.LEAST = least if WAYS[way][1] else 1 << 40
                begun = time.process_time()
                _, state = mixer(Chunk(x[:, :1]), state)
                taken[way].append((time.process_time() - begun) * 1000)
                states[way] = mixer, state
    int8.LEAST = least
    return {way: statistics.median(values) for way, values in taken.items()}


def main() -> None:
    options = prepare(arguments(__doc__))
    steps, count = (5, 4) if options.quick else (150, 16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        sizes = ("--set", "dim=64", "--set", "layers=2", "--length", LENGTH, "--batch-size", 4, "--steps", steps)
        train("rope", folder, options.threads, *sizes)
        rows = text_bytes(None, count * LENGTH).long().view(count, LENGTH)
        found = quality(folder, rows)
    rounds = 5 if options.quick else 40
    times = {str(past): step_times(past, rounds) for past in ((64,) if options.quick else (1024, 4096, 16384))}
    header = ("chunk", "bits, full", "bits, int8", "largest difference of a logit", "bytes, full", "bytes, int8")
    show("bits per byte", header, [list(row.values()) for row in found])
    show("one token, ms", ("past", *WAYS), [[past, *of.values()] for past, of in times.items()])
    save(options, "int8_cache", {"steps": steps, "quality": found, "milliseconds": times})


if __name__ == "__main__":
    main()
