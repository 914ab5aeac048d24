"""A million tokens through a trained model in constant memory: a window, and a window beside pinned first tokens.

A small decoder with rotary positions is trained on one text with full attention at --length, by `kinformer train`. It
then reads another text of --tokens bytes as one stream, its state carried from chunk to chunk, with `pattern=local` and
with `pattern=sinks` (`--set`, no further training; as many cached tokens), and, for comparison, in separate windows of
--length that begin anew, as evaluations do. Watched are bits per byte, the bytes of the state and the resident memory,
whose peak in the second half is held against that in the first. Both texts are Python's own sources, different files.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kinformer
from common import arguments, memory, prepare, save, show, text_bytes, train
from kinformer.core.state import nbytes, reserve, value

PATTERN = "layers.*.mixer.pattern"
CHUNK, GROWTH, COUNT = 1024, 10 * 2**20, 4


def streamed(model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """Read ``tokens`` [time] as one sequence."""
    state, nats, watch = reserve(model.initial_state(1), 1), [], []
    begun = time.perf_counter()
    for start in range(0, len(tokens) - 1, CHUNK):
        part = tokens[start : start + CHUNK + 1]
        logits, state = model(part[None, :-1], state)
        nats.append(float(functional.cross_entropy(logits[0], part[1:], reduction="sum")))
        watch.append((nbytes(value(state)), memory("VmRSS")))
    seconds = time.perf_counter() - begun
    warm = watch[len(watch) // 20 :]
    sizes = {size for size, _ in warm}
    halves = [max(resident for _, resident in part) for part in (warm[: len(warm) // 2], warm[len(warm) // 2 :])]
    tenths = [nats[len(nats) * index // 10 : len(nats) * (index + 1) // 10] for index in range(10)]
    return {
        "bits_per_byte": sum(nats) / (len(tokens) - 1) / math.log(2),
        "by_tenth": [sum(tenth) / (CHUNK * len(tenth)) / math.log(2) for tenth in tenths if tenth],
        "tokens_per_second": (len(tokens) - 1) / seconds,
        "state_bytes": max(sizes),
        "state_constant": len(sizes) == 1,
        "resident_growth_bytes": halves[1] - halves[0],
        "resident_constant": halves[1] - halves[0] < GROWTH,
    }


def in_windows(model: nn.Module, tokens: Tensor, length: int) -> dict[str, Any]:
    """Read ``tokens`` in windows of ``length`` that begin anew."""
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    nats = 0.0
    for rows in windows.split(64):
        logits, _ = model(rows[:, :-1])
        nats += float(functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"))
    return {"bits_per_byte": nats / (len(windows) * (length - 1)) / math.log(2)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--length", type=int, default=128, help="of training, and how many tokens are cached")
    parser.add_argument("--run", type=Path, help="the run folder, trained if it is not there")
    options = prepare(parser)
    if options.quick:
        options.tokens, options.steps = 20_000, 5
    every = text_bytes(None, 2 * options.tokens + 1)
    read, learned = every[: options.tokens + 1], every[options.tokens + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        (data := Path(folder) / "text.txt").write_bytes(bytes(learned.to(torch.uint8).numpy()))
        run = options.run or Path(folder) / "run"
        words = (
            "--recipe",
            "tiny",
            "--data",
            data,
            "--steps",
            options.steps,
            "--length",
            options.length,
            "--set",
            "dim=64",
        )
        trained = train("rope", run, options.threads, *words, "--tokenizer", "bytes")
        results: dict[str, Any] = {}
        patterns = {
            f"window of {options.length}": {"kind": "local", "window": options.length},
            f"{COUNT} first tokens and a window of {options.length - COUNT}":
                {"kind": "sinks", "count": COUNT, "window": options.length - COUNT},
        }  # fmt: skip
        with torch.inference_mode():
            for name, pattern in patterns.items():
                model = kinformer.load(run, set={PATTERN: pattern}).eval()
                results[name] = streamed(model, read)
            anew = kinformer.load(run).eval()
            results[f"windows of {options.length}, each anew"] = in_windows(anew, read, options.length)
    names = ("bits_per_byte", "tokens_per_second", "state_bytes", "resident_growth_bytes", "resident_constant")
    rows = [[name, *(result.get(one, "") for one in names)] for name, result in results.items()]
    show(f"{options.tokens:,} tokens", ("read by", *names), rows)
    kept = ("parameters", "steps", "seconds", "validation_bits_per_byte")
    save(
        options,
        "sinks",
        {"tokens": options.tokens, "length": options.length, "count": COUNT, "chunk": CHUNK,
         "training": {name: trained.get(name) for name in kept}, "results": results},
    )  # fmt: skip


if __name__ == "__main__":
    main()
