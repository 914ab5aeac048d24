"""Does a training step cost the same whatever the length? 65,536 tokens a step, cut into 128 x 512 up to 1 x 65,536.

Members of the recipe benchmark, fp32 (products through oneDNN, as `kinformer train` has it) and bf16-mixed, AdamW
included; a name with "+checkpoint" computes activations again in the backward. Every point runs in a process of its
own, the points in turn, round after round: tokens/s, and the peak of resident memory above what was resident before
the first step. A slope of 0 of log seconds against log length means that length is free; plain attention tends to 1.
Both members must stay within 15 % of their fastest point.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import kinformer
from common import arguments, in_process, memory, prepare, products, save, show, slope, text_bytes

MEMBERS = ("linear-transformer", "fast-weights")
TOKENS = 65_536
FLAT = 0.15


def point(member: str, precision: str, batch: int, length: int, steps: int) -> dict[str, Any]:
    """One measurement in this process: median seconds of ``steps`` steps after a first one, and peak memory."""
    torch.manual_seed(0)
    name, _, extra = member.partition("+")
    model = kinformer.build(name, recipe="benchmark", vocab_size=256, set={"checkpoint": bool(extra)}).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    window = text_bytes(None, batch * (length + 1)).view(batch, length + 1)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    resident, seconds, losses = memory("VmRSS"), [], []
    with products(True):
        for _ in range(1 + steps):
            begun = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model(window[:, :-1])[0]
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
            del logits
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(loss.detach()))
            seconds.append(time.perf_counter() - begun)
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise SystemExit(f"{member} at {batch} x {length}: the loss went {losses[0]:.3f} -> {losses[-1]:.3f}.")
    return {"seconds": statistics.median(seconds[1:]), "peak_bytes": memory("VmHWM") - resident}


def summary(lengths: list[int], points: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What the rounds of every length say together."""
    seconds = [statistics.median(each["seconds"] for each in rounds) for rounds in points]
    peaks = [statistics.median(each["peak_bytes"] for each in rounds) for rounds in points]
    return {
        "seconds": seconds,
        "peak_bytes": peaks,
        "slope_of_seconds": slope(lengths, seconds),
        "slope_of_memory": slope(lengths, peaks),
        "slowest_over_fastest": max(seconds) / min(seconds),
        "flat": max(seconds) / min(seconds) <= 1 + FLAT,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per process")
    parser.add_argument("--members", nargs="+", default=list(MEMBERS), help='such as local or "local+checkpoint"')
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192, 32_768, 65_536])
    parser.add_argument("--name", default="length", help="of the result file")
    parser.add_argument(
        "--point", nargs=5, metavar=("MEMBER", "PRECISION", "BATCH", "LENGTH", "STEPS"), help="one point"
    )
    options = prepare(parser)
    if options.point:
        member, precision, *sizes = options.point
        print(json.dumps(point(member, precision, *map(int, sizes))))
        return
    tokens = 4096 if options.quick else TOKENS
    lengths = [length for length in options.lengths if length <= tokens]
    rounds = options.rounds or (1 if options.quick else 3)
    keys = [(member, precision) for member in options.members for precision in options.precisions]
    found: dict[tuple[str, str], list[list[dict[str, Any]]]] = {key: [[] for _ in lengths] for key in keys}
    for _ in range(rounds):
        for key in keys:
            for index, length in enumerate(lengths):
                found[key][index].append(in_process(__file__, "--point", *key, tokens // length, length, options.steps))
    results = []
    for (member, precision), points in found.items():
        result = {"member": member, "precision": precision} | summary(lengths, points)
        results.append(result)
        rows = [
            [f"{tokens // length} x {length}", tokens / seconds, peak / 2**20]
            for length, seconds, peak in zip(lengths, result["seconds"], result["peak_bytes"])
        ]
        show(f"{member} {precision}", ("batch x length", "tokens/s", "peak MiB"), rows)
        print(f"slope {result['slope_of_seconds']:+.3f}, slowest / fastest {result['slowest_over_fastest']:.2f}")
    save(options, options.name, {"tokens": tokens, "lengths": lengths, "results": results})


if __name__ == "__main__":
    main()
