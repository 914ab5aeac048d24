"""A sweep: one member at several learning rates and seeds; the best on validation is measured once on the test split.

    python examples/sweep.py --member gpt --data book.txt --steps 300
    python examples/sweep.py --member gated-deltanet --rates 1e-3,3e-3,1e-2 --seeds 3

A run that is there already is not trained again, so a sweep that was stopped goes on. Every run is a folder that
``kinformer evaluate`` and ``kinformer generate`` read; ``kinformer compare`` sweeps by itself.
"""

import argparse
from pathlib import Path
from statistics import mean

import kinformer


def sweep(member, out, rates, seeds, **settings):
    """Bits per byte on the validation split, a list over seeds for every rate; ``settings`` are those of training."""
    return {rate: [trained(member, folder_of(out, member, rate, seed), lr=rate, seed=seed, **settings)
                   for seed in range(seeds)] for rate in rates}  # fmt: skip


def trained(member, folder, **settings):
    """Bits per byte of the best validation of a run, which is trained, or trained on, if it is not complete."""
    begun = (folder / "config.json").is_file()
    return kinformer.train(member, out=folder, resume=begun, quiet=True, **settings).metrics["bits_per_byte"]


def folder_of(out, member, rate, seed):
    return Path(out) / f"{member}-lr{rate:g}-seed{seed}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--member", default="gpt")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rates", default="1e-3,3e-3,1e-2")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", default="sweep")
    options = vars(parser.parse_args())
    options["rates"] = [float(rate) for rate in options["rates"].split(",")]
    results = sweep(**options)
    for rate, bits in results.items():
        print(f"lr {rate:<8g} {mean(bits):.4f} bits per byte ({', '.join(f'{value:.4f}' for value in bits)})")
    best = min(results, key=lambda rate: mean(results[rate]))
    if best in (min(results), max(results)):
        print(f"lr {best:g} is an end of the sweep; try beyond it.")
    folder = folder_of(options["out"], options["member"], best, 0)
    tested = kinformer.evaluate(folder, split="test", first=50_000).metrics["bits_per_byte"]
    print(f"{folder}: {tested:.4f} bits per byte on the test split")


if __name__ == "__main__":
    main()
