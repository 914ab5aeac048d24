"""Does a datastore help with a text that the model never saw? Train on one book, index half of another, read the rest.

The first half of --other is indexed with the run of --data (or --run). Weight, temperature and neighbours are tuned on
the third quarter, and bits per byte are reported on the last one: with weight 0, which is the model alone, and as
tuned, for growing parts of the store. Nothing is trained on --other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import arguments, kinformer, prepare, save, show

HALF = ("--holdout", "0.5")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the book to train on")
    parser.add_argument("--other", type=Path, required=True, help="the book whose first half is indexed")
    parser.add_argument("--member", default="rope")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training without --run")
    parser.add_argument("--run", type=Path, help="a run of --data, instead of training one")
    parser.add_argument("--neighbours", type=int, default=256, help="as many are tried at most")
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--max-bytes", type=int, help="of each half of --other")
    options = prepare(parser)
    limit = 20_000 if options.quick else options.max_bytes
    bound = ("--max-bytes", limit) if limit else ()
    threads = ("--threads", options.threads) if options.threads else ()
    with tempfile.TemporaryDirectory() as temporary:
        run, store = options.run or Path(temporary) / "run", Path(temporary) / "store"
        if options.run is None:
            size = ("--steps", 30) if options.quick else ("--minutes", options.minutes)
            recipe = ("--recipe", "tiny" if options.quick else "small")
            kinformer("train", options.member, "--data", options.data, "--out", run, *size, *recipe, *threads)
        other = ("--data", options.other, *HALF, *bound, *threads)
        built = kinformer("index", run, "--datastore", store, "--approximate", *other)
        sizes = ",".join(str(built["entries"] // part) for part in (256, 64, 16, 4, 2))
        asked = ("--neighbours", options.neighbours, "--probes", min(options.probes, built["lists"]), "--sizes", sizes)
        told = kinformer("evaluate", run, "--datastore", store, *other, "--tune", *asked)
    columns = ("entries", "bits_per_byte", "bits_per_byte_alone", "weight", "temperature", "neighbours", "recall")
    show(
        f"bits per byte on {told['bytes']:,} bytes of {options.other.name}",
        columns,
        [[each[name] for name in columns] for each in told["sizes"]],
    )
    gain = told["bits_per_byte_alone"] - told["bits_per_byte"]
    print(f"{told['bits_per_byte_alone']:.4f} alone, {told['bits_per_byte']:.4f} with the datastore: {gain:.4f} less")
    for each in (built, told):
        for place in ("run", "datastore"):
            each.pop(place, None)
    save(options, "knn_domain", {"train": options.data.name, "other": options.other.name, "index": built} | told)


if __name__ == "__main__":
    main()
