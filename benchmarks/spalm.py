"""Is a gate that learns to use neighbours (SPALM) worth more than mixing them in, and what does it cost?

A frozen run reads the training split of a book into a datastore with lists. Measured on the same held-out bytes: that
run alone; with its neighbours mixed in by a tuned weight (kNN-LM); Transformer-XL, which is SPALM without a datastore;
and SPALM, whose 4 neighbours of every training token are looked up once before the same steps from the same seed. All
have equally many layers, heads and features.

    python benchmarks/spalm.py --data book.txt --threads 1
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, kinformer, prepare, save, show


def train(member: str, data: Path, folder: Path, options: Any, seed: int, *further: Any) -> dict[str, Any]:
    """A new run in ``folder``; ``before`` is how many seconds the command took besides training and validation."""
    shape = ("--set", f"layers={options.layers}", "--set", f"dim={options.dim}")
    shape += ("--set", f"layers.*.mixer.num_heads={options.heads}")
    if member == "spalm":
        sizes = {"segment": options.length, "memory": options.length}
        shape += tuple(item for name, size in sizes.items() for item in ("--set", f"layers.*.mixer.{name}={size}"))
    amount = ("--length", options.length, "--batch-size", options.batch_size, "--steps", options.steps)
    where = ("--data", data, "--out", folder, "--seed", seed, "--validation-tokens", 4096, "--lr", options.lr)
    begun = time.perf_counter()
    done = kinformer("train", member, *where, *amount, *shape, *threads(options), *further)
    names = ("parameters", "steps", "seconds", "tokens_per_second")
    return {name: done[name] for name in names} | {"before": time.perf_counter() - begun - done["seconds"]}


def threads(options: Any) -> tuple[Any, ...]:
    return ("--threads", options.threads) if options.threads else ()


def measured(folder: Path, options: Any, *further: Any) -> dict[str, Any]:
    limit = ("--max-bytes", options.max_bytes) if options.max_bytes else ()
    return kinformer("evaluate", folder, *limit, *threads(options), *further)


def one_seed(data: Path, folder: Path, options: Any, seed: int) -> dict[str, Any]:
    """Bits per byte and costs of all four ways with one seed."""
    retriever, store = folder / "retriever", folder / "store"
    reader = train("rope", data, retriever, options, seed)
    where = ("--datastore", store)
    built = kinformer(
        "index", retriever, "--data", data, "--split", "train", "--approximate", *where, *threads(options)
    )
    mixed = measured(retriever, options, *where, "--tune", "--neighbours", options.mixed)
    ways = {"retriever alone": {"bits_per_byte": mixed["bits_per_byte_alone"]} | reader}
    names = ("bits_per_byte", "weight", "temperature", "neighbours", "probes", "recall")
    ways["neighbours mixed in (kNN-LM)"] = {name: mixed[name] for name in names} | {"parameters": reader["parameters"]}
    ways["without a datastore (Transformer-XL)"] = train("spalm", data, folder / "without", options, seed)
    looked_up = (*where, "--retriever", retriever, "--neighbours", options.neighbours)
    ways["gated neighbours (SPALM)"] = train("spalm", data, folder / "with", options, seed, *looked_up)
    for way, run in (("without a datastore (Transformer-XL)", "without"), ("gated neighbours (SPALM)", "with")):
        ways[way]["bits_per_byte"] = measured(folder / run, options)["bits_per_byte"]
    index = {name: built[name] for name in ("entries", "dim", "bytes", "seconds", "lists")}
    print(f"seed {seed}: " + ", ".join(f"{way} {each['bits_per_byte']:.4f}" for way, each in ways.items()), flush=True)
    return {"seed": seed, "index": index, "bytes": mixed["bytes"], "ways": ways}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the book to train on and to read on")
    parser.add_argument("--take", type=int, default=400_000, help="use so many bytes of it")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="tokens of a window, a segment and its memory")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400, help="of every run")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--neighbours", type=int, default=4, help="of SPALM")
    parser.add_argument("--mixed", type=int, default=64, help="neighbours that kNN-LM's tuning tries at most")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-bytes", type=int, help="measure on so many bytes")
    options = prepare(parser)
    if options.quick:
        options.take, options.steps, options.seeds, options.max_bytes = 30_000, 5, 1, 500
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "book.txt"
        data.write_bytes(options.data.read_bytes()[: options.take])
        runs = [one_seed(data, Path(temporary) / str(seed), options, seed) for seed in range(options.seeds)]
    rows = []
    for way in runs[0]["ways"]:
        found = [run["ways"][way] for run in runs]
        rows.append([way, statistics.mean(each["bits_per_byte"] for each in found)])
        rows[-1] += [found[0].get(name) for name in ("parameters", "tokens_per_second", "before")]
    title = f"bits per byte of {runs[0]['bytes']:,} held-out bytes"
    show(title, ("", "bits per byte", "parameters", "tokens/s", "s before training"), rows)
    names = (
        "take",
        "layers",
        "dim",
        "heads",
        "length",
        "batch_size",
        "steps",
        "lr",
        "neighbours",
        "mixed",
        "max_bytes",
    )
    settings = {"data": options.data.name} | {name: getattr(options, name) for name in names}
    save(options, "spalm", {"settings": settings, "runs": runs})


if __name__ == "__main__":
    main()
