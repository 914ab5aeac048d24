"""From laptop to cluster: what training one member at four sizes takes of one device to 4,096, on paper.

A decoder like LLaMA (grouped queries, rotary positions, SwiGLU, checkpoints at every layer) learns from 4M tokens a
step, in rows of 1k and 32k tokens, at 7B parameters also of 1M. For every number of devices the fastest mesh that fits,
or the one that takes least memory. And published runs: what ``kinformer estimate`` says of their model, device and plan
beside what they report.

    python benchmarks/cluster.py
    python benchmarks/cluster.py --only 7B/32768 published     # these parts anew; the others as the result has them
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from common import RESULTS, arguments, prepare, save, show
from kinformer.family.build import configure
from kinformer.lab.estimation.cluster import Cluster, MeshCost
from kinformer.lab.estimation.options import DEVICES

SHAPES: dict[str, dict[str, int]] = {
    "100M": {"dim": 768, "layers": 12, "heads": 12, "kv": 4, "ff": 2048, "vocab": 32000},
    "1B": {"dim": 2048, "layers": 22, "heads": 32, "kv": 8, "ff": 5632, "vocab": 32000},
    "7B": {"dim": 4096, "layers": 32, "heads": 32, "kv": 32, "ff": 11008, "vocab": 32000},
    "70B": {"dim": 8192, "layers": 80, "heads": 64, "kv": 8, "ff": 28672, "vocab": 32000},
    "405B": {"dim": 16384, "layers": 126, "heads": 128, "kv": 8, "ff": 53248, "vocab": 128256},
}
LENGTHS, DEVICE_COUNTS, TOKENS = (1024, 32768), (1, 8, 64, 512, 4096), 1 << 22
LONGEST = {"7B": 1 << 20}
PUBLICATIONS = "published"
PUBLISHED = (
    # Touvron et al. 2023, LLaMA (arXiv 2302.13971), table 15: 82,432 GPU hours for 1T tokens, that is 3,370 a second;
    # 2,048 tokens a row, 4M a step.
    {"run": "LLaMA 7B", "shape": "7B", "hardware": "a100", "devices": 64, "length": 2048, "batch": 2048,
     "reported": 1e12 / (82432 * 3600), "plan": "not reported", "checkpoint": False},
    # Llama team 2024, The Llama 3 Herd of Models (arXiv 2407.21783), table 4: 400 TFLOP/s a device, 41 % of the peak.
    {"run": "Llama 3 405B", "shape": "405B", "hardware": "h100", "devices": 16384, "length": 8192, "batch": 2048,
     "reported": 400e12 / (6 * 405e9), "plan": "tp=8, pipeline of 16, fsdp=128", "checkpoint": True},
)  # fmt: skip


def llama(dim: int, layers: int, heads: int, kv: int, ff: int, vocab: int, checkpoint: bool = True) -> Any:
    """Return the config of a decoder like LLaMA of these sizes."""
    changes: dict[str, Any] = {
        "dim": dim,
        "layers": layers,
        "layers.*.mixer.num_heads": heads,
        "layers.*.mixer.projection": {"kind": "grouped", "num_kv_heads": kv, "bias": False},
        "layers.*.mixer.bias": False,
        "layers.*.feed_forward": {"kind": "swiglu", "hidden_dim": ff},
        "layers.*.norm": "rms_norm",
        "norm": "rms_norm",
        "head.tied": False,
        "stack.checkpoint": checkpoint,
    }
    return configure("rope", "paper", vocab, changes)


def cluster(shape: str, hardware: str, length: int, batch: int, checkpoint: bool = True) -> Cluster:
    """Return the cluster that trains ``shape`` in bfloat16 products with AdamW."""
    config = llama(**SHAPES[shape], checkpoint=checkpoint)
    sizes: dict[str, Any] = {"batch": batch, "length": length, "optimizer": "adamw", "precision": "bf16-mixed"}
    many = Cluster(config, DEVICES[hardware], 0.5, **sizes)
    many.tensor = (1, min(DEVICES[hardware].node, SHAPES[shape]["kv"]))
    return many


def best(costs: list[MeshCost]) -> MeshCost | None:
    """Return the fastest that fits, or the one of least memory."""
    return min(costs, key=lambda cost: (not cost.fits, cost.step if cost.fits else cost.train_bytes), default=None)


def row(cost: MeshCost | None, **names: Any) -> dict[str, Any]:
    """Return what a table says of a mesh."""
    if cost is None:
        return names | {"mesh": None}
    return names | asdict(cost)


def main() -> None:
    parser = arguments(__doc__)
    parts = {f"{shape}/{length}": (shape, length) for shape in tuple(SHAPES)[:4] for length in LENGTHS}
    parts |= {f"{shape}/{length}": (shape, length) for shape, length in LONGEST.items()}
    parser.add_argument("--only", nargs="+", choices=[*parts, PUBLICATIONS], help="only these parts")
    options = prepare(parser)
    wanted = options.only or (["100M/1024"] if options.quick else [*parts, PUBLICATIONS])
    rows: list[dict[str, Any]] = []
    published: list[dict[str, Any]] = []
    if options.only:
        before = json.loads((options.out or RESULTS / "cluster.json").read_text(encoding="utf-8"))
        rows = [each for each in before["table"] if f"{each['model']}/{each['length']}" not in wanted]
        published = [] if PUBLICATIONS in wanted else before["published"]
    for name, (shape, length) in parts.items():
        if name in wanted:
            costs = cluster(shape, "h100", length, TOKENS // length)
            rows += [row(best(costs.costs(n)), model=shape, length=length, devices=n) for n in DEVICE_COUNTS]
            print(name, flush=True)
    rows.sort(key=lambda each: ([*SHAPES].index(each["model"]), each["length"], each["devices"]))
    for run in PUBLISHED if PUBLICATIONS in wanted else ():
        many = cluster(run["shape"], run["hardware"], run["length"], run["batch"], run["checkpoint"])
        costs = many.costs(run["devices"])
        published += [
            row(cost, **run) | {"tokens/s a device": cost.tokens_per_second / run["devices"]} for cost in costs
        ]
    header = ("model", "length", "devices", "mesh", "accumulate", "GiB", "fits", "s a step", "tokens/s a device")
    show("from laptop to cluster, H100, 4M tokens a step", header, [_line(each) for each in rows])
    header = ("run", "devices", "mesh", "GiB", "fits", "tokens/s a device", "reported")
    lines = [
        (each["run"], each["devices"], each["mesh"], f"{each['train_bytes'] / 2**30:.1f}", each["fits"],
         f"{each['tokens/s a device']:.0f}", f"{each['reported']:.0f}")
        for each in published
    ]  # fmt: skip
    show("published runs", header, lines)
    save(options, "cluster", {"table": rows, "published": published, "shapes": SHAPES})


def _line(each: dict[str, Any]) -> tuple[Any, ...]:
    names = each["model"], f"{each['length']:,}", each["devices"]
    if each["mesh"] is None:
        return *names, "-", "-", "-", "-", "-", "-"
    speed = each["tokens_per_second"] / each["devices"]
    memory = f"{each['train_bytes'] / 2**30:.1f}"
    return *names, each["mesh"], each["accumulate"], memory, each["fits"], f"{each['step']:.3g}", f"{speed:.0f}"


if __name__ == "__main__":
    main()
