"""What does a trained model gain when it is fine-tuned to use 8,192 memories, beside more training?

Wu et al. 2022, section 4.6: a model that was trained without a memory learns to use one in few steps, and then is as
good as one of several times its weights. Here, on your own text, in bytes, by `kinformer train` and `--init`:

    plain       windowed softmax attention with T5's biases, --steps steps by consecutive segments
    continued   the plain model after --more further steps at the rate of the fine-tuning
    memory      the plain model as `memorizing`, whose third layer looks things up in --memory memories, after as many
    larger      with --larger: as plain, of twice the width, --steps and --more steps

All are measured with their state carried through the same held-out bytes; the one with a memory also with fewer
memories, which need no other weights. Run folders in --runs that exist already are only measured.

    python benchmarks/memory_tuning.py --data book.txt --runs runs/tuning --threads 1
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import arguments, kinformer, of_width, prepare, save, sets, show, train

LAYERS, LAYER, SEGMENT = 4, 2, 256
FEWER = (0, 512, 2048)


def common(options: Any) -> tuple[Any, ...]:
    """The words of every training."""
    text = ("--data", options.data) if options.data else ()
    return (*text, "--segments", "--length", SEGMENT, "--batch-size", options.rows, "--seed", options.seed)


def shape(dim: int) -> list[str]:
    """The plain model's sizes."""
    attention = {"layers.*.mixer.position": "t5", "layers.*.mixer.pattern.window": SEGMENT, "position": "none"}
    return sets(of_width(dim) | {"layers": LAYERS} | attention)


def bits(folder: Path, options: Any, *words: Any) -> float:
    """Bits per byte of the held-out text with the state carried."""
    threads = ("--threads", options.threads) if options.threads else ()
    found = kinformer("evaluate", folder, "--max-bytes", options.bytes, "--chunk", SEGMENT, *threads, *words)
    return found["bits_per_byte"]


def row(name: str, trained: dict[str, Any], steps: int, value: float) -> dict[str, Any]:
    """A line of the result."""
    print(f"{name}: {value:.4f} bits per byte", flush=True)
    return {
        "model": name, "parameters": trained["parameters"], "steps": steps, "seconds": trained["seconds"],
        "bits_per_byte": value,
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", help="the text (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=3000, help="of the plain model")
    parser.add_argument("--more", type=int, default=1000, help="of the fine-tunings")
    parser.add_argument("--memory", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--larger", action="store_true", help="train the larger model, too, which takes longest")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    options = prepare(parser)
    options.bytes = 100_000
    if options.quick:
        options.steps, options.more, options.bytes, options.dim, options.memory = 4, 4, 4000, 64, 512
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        words, threads = common(options), options.threads
        plain, small = folder / "plain", shape(options.dim)
        first = train("local", plain, threads, *words, "--steps", options.steps, "--lr", options.lr, *small)
        rows = [row("plain", first, options.steps, bits(plain, options))]
        tuning = ("--init", plain, "--steps", options.more, "--lr", options.lr / 4)
        further = train("local", folder / "continued", threads, *words, *tuning)
        rows.append(row("continued", further, options.steps + options.more, bits(folder / "continued", options)))
        place = f"layers.{LAYER}.mixer.memory_size"
        memory = folder / "memory"
        tuned = train("memorizing", memory, threads, *words, *tuning, *sets({place: options.memory}))
        rows.append(row(f"{options.memory} memories", tuned, options.steps + options.more, bits(memory, options)))
        for fewer in FEWER:
            value = bits(memory, options, *sets({place: fewer}))
            rows.append(row(f"the same, {fewer} memories", tuned, options.steps + options.more, value))
        if options.larger:
            steps = options.steps + options.more
            whole = ("--steps", steps, "--lr", options.lr, *shape(2 * options.dim))
            larger = train("local", folder / "larger", threads, *words, *whole)
            rows.append(row("larger", larger, steps, bits(folder / "larger", options)))
    show("fine-tuned to a memory", tuple(rows[0]), [list(each.values()) for each in rows])
    settings = {key: getattr(options, key) for key in ("steps", "more", "memory", "dim", "rows", "lr", "seed")}
    save(options, "memory_tuning", {"settings": settings | {"segment": SEGMENT}, "rows": rows})


if __name__ == "__main__":
    main()
