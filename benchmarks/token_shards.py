"""How long does training on token shards take to start, and how much memory, at 1, 10 and 100 GB of ids?

The shards are holes (sparse files of no blocks), with true tables: a document for every 5,000 tokens, a mark for every
65,536. Each size is opened in a process of its own, which draws rows as training does. Told are the seconds to open and
to draw the first batch, the memory of its own that this takes (the mapped tables are the page cache's), and the seconds
of a batch of 64 rows of 2,049 tokens from then on; and how fast Python's own sources are packed, by one process and by
two. The gate: the packed shards hold the ids and the documents of the corpus itself.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from common import arguments, in_process, memory, prepare, save, show
from kinformer.lab.data import RandomWindows, open_corpus
from kinformer.lab.data.packed import MANIFEST, PACKED_SCHEMA, PACKED_SPLITS, TABLES
from kinformer.lab.data.packing import Packing, pack
from kinformer.runtime.files import signed, write_json

SIZES = (1, 10, 100)
"""Gigabytes."""
SHARD, DOCUMENT, MARK, ROWS, LENGTH, BATCHES = 10**9, 5_000, 65_536, 64, 2048, 100


def hollow(folder: Path, tokens: int) -> None:
    """Write shards of ``tokens`` ids of one byte that are holes, and a manifest."""
    splits: dict[str, Any] = {}
    for name in PACKED_SPLITS:
        count = tokens if name == "train" else 10**6
        shards = []
        for number, start in enumerate(range(0, count, SHARD)):
            path = folder / f"{name}-{number:06d}.ids"
            size = min(SHARD, count - start)
            with path.open("wb") as file:
                file.truncate(size)
            shards.append({"file": path.name, "tokens": size, "bytes": size, "sha256": ""})
        marks = np.append(np.arange(0, count, MARK), count)
        tables = {"documents": np.arange(0, count, DOCUMENT), "marks": np.stack([marks, marks], axis=1)}
        splits[name] = {"shards": shards}
        for table in TABLES:
            path = folder / f"{name}.{table}.npy"
            np.save(path, tables[table])
            splits[name][table] = {"file": path.name, "size": path.stat().st_size, "sha256": ""}
    about = {"schema": PACKED_SCHEMA, "name": "holes", "tokenizer": "bytes", "vocab_size": 256, "width": 1, "data": ""}
    write_json(folder / MANIFEST, signed(about | {"splits": splits}))


def point(folder: str) -> dict[str, Any]:
    """Open ``folder`` in this process and draw rows."""
    before, begun = memory("RssAnon"), time.perf_counter()
    split = open_corpus(folder).splits["train"]
    rows = RandomWindows(split, ROWS, LENGTH, 0, reset_documents=True)
    opened = time.perf_counter() - begun
    rows.batch(0), rows.resets(0)
    first = time.perf_counter() - begun
    seconds = []
    for step in range(1, BATCHES + 1):
        begun = time.perf_counter()
        rows.batch(step), rows.resets(step)
        seconds.append(time.perf_counter() - begun)
    facts = {
        "open, seconds": opened,
        "to the first batch, seconds": first,
        "a batch, seconds": statistics.median(seconds),
    }
    return facts | {"memory, MB": (memory("RssAnon") - before) / 1e6}


def packing(workers: int, shard: int) -> float:
    """Megabytes of text a second, of Python's own sources as bytes, after the gate."""
    with tempfile.TemporaryDirectory() as place:
        begun = time.perf_counter()
        pack(Packing(data="stdlib", shard_bytes=shard), Path(place) / "shards", workers, lambda done, total: None)
        seconds = time.perf_counter() - begun
        ours, theirs = open_corpus(str(Path(place) / "shards")).splits, open_corpus().splits
        for name, split in theirs.items():
            if (
                not np.array_equal(ours[name].documents, split.documents)
                or ours[name].tokens(0, len(split)).tobytes() != split.tokens(0, len(split)).tobytes()
            ):
                raise SystemExit(f"{name}: the shards hold other ids than the corpus.")
        return sum(split.bytes for split in theirs.values()) / 1e6 / seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--point", help="a folder to open in this process")
    options = prepare(parser)
    if options.point:
        print(json.dumps(point(options.point)))
        return
    speeds = {workers: packing(workers, 2 * 10**6) for workers in (1, 2)}
    rows = []
    for gigabytes in (0.3,) if options.quick else SIZES:
        with tempfile.TemporaryDirectory() as place:
            hollow(Path(place), int(gigabytes * 1e9))
            found = [in_process(__file__, "--point", place) for _ in range(options.rounds or 3)]
        rows.append({"GB": gigabytes} | {name: statistics.median(each[name] for each in found) for name in found[0]})
    show("opening token shards", list(rows[0]), [[round(value, 4) for value in row.values()] for row in rows])
    print({f"MB a second packed, {workers} processes": round(speed, 1) for workers, speed in speeds.items()})
    result = {"sizes": rows, "packed, MB a second": {str(workers): speed for workers, speed in speeds.items()}}
    save(options, "token_shards", result | {"batch": {"rows": ROWS, "tokens": LENGTH + 1}})


if __name__ == "__main__":
    main()
