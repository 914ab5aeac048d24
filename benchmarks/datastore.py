"""Ten million keys of a real model: how long does a datastore take, in how much memory, and how fast is it searched?

`kinformer index --approximate` runs in a process of its own, is killed (SIGKILL) when a third is written, and is given
again. What is reported: seconds of both sittings together, the peak of anonymous memory (RssAnon), the entries that
the kill left; then, with batches of 1,024 queries from held-out text, seconds, bytes read and recall@32 against exact
search for several numbers of probes. Without --run a decoder of 3.2 million parameters is trained first.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import arguments, prepare, save, show
from kinformer.lab.data import open_corpus
from kinformer.lab.datastore.keys import KeyedDecoder
from kinformer.lab.datastore.search import ExactSearch, ListSearch
from kinformer.lab.datastore.store import RECORD, Datastore
from kinformer.lab.runs.run import open_run
from kinformer.runtime.process import begin_process

BATCH, NEIGHBOURS, RECALLED = 1024, 32, 256
COMMAND = (sys.executable, "-m", "kinformer")


def train(folder: Path, minutes: float, quick: bool) -> None:
    """A run to take the keys of."""
    size = ("--steps", "20", "--batch-size", "4") if quick else ("--minutes", str(minutes))
    recipe = "tiny" if quick else "small"
    subprocess.run([*COMMAND, "train", "rope", "--recipe", recipe, "--out", str(folder), *size], check=True)


def anonymous(process: int) -> int:
    """Bytes of anonymous memory of a process, 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def written(store: Path) -> int:
    """Entries that are counted."""
    try:
        return json.loads((store / RECORD).read_text(encoding="utf-8"))["entries"]
    except OSError:
        return 0


def sitting(command: list[str], store: Path, kill_at: int | None) -> tuple[float, int, int]:
    """Seconds, peak of anonymous memory and exit status of one indexing process."""
    begun, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        if kill_at is not None and written(store) >= kill_at:
            process.kill()
        time.sleep(0.05)
    return time.perf_counter() - begun, peak, process.returncode


def build(run: Path, store: Path, entries: int, options: Any) -> dict[str, Any]:
    """Index in two sittings, the first one killed."""
    command = [*COMMAND, "index", str(run), "--datastore", str(store), "--max-bytes", str(entries + 1), "--json"]
    command += ["--data", options.data, "--approximate", "--threads", str(torch.get_num_threads())]
    first, peak, status = sitting(command, store, entries // 3)
    if status != -9:
        raise SystemExit(f"the first sitting ended with {status} before it was killed; see above.")
    kept = written(store)
    second, again, status = sitting(command, store, None)
    if status or written(store) != entries:
        raise SystemExit(
            f"the second sitting ended with {status}, the store has {written(store)} of {entries} entries."
        )
    return {
        "entries": entries,
        "seconds": first + second,
        "sittings": [first, second],
        "entries_kept_by_the_kill": kept,
        "peak_anonymous_bytes": max(peak, again),
        "store_bytes": sum(path.stat().st_size for path in store.rglob("*") if path.is_file()),
    }


def held_out_keys(run: Path, data: str, batches: int) -> list[torch.Tensor]:
    """Batches of keys of the validation split, evenly spread over it."""
    record = open_run(run)
    model, length = KeyedDecoder(record.model()), int(record.training["length"])
    split = open_corpus(data).splits["validation"]
    wanted = min(batches * BATCH, len(split) // length * 8)
    starts = np.linspace(0, len(split) - length - 1, max(1, wanted // 8)).astype(np.int64)
    with torch.inference_mode():
        rows = [model(torch.from_numpy(split.rows(some, length)))[0].keys for some in np.array_split(starts, batches)]
    places = torch.linspace(length // 8, length - 1, 8).long()
    return [keys[:, places].flatten(0, 1)[:BATCH] for keys in rows]


def search(store: Datastore, queries: list[torch.Tensor], probes: int, true: torch.Tensor) -> dict[str, Any]:
    """Seconds a batch, bytes read and recall with ``probes``."""
    searcher, seconds = ListSearch(store, probes), []
    for batch in queries:
        begun = time.perf_counter()
        found = searcher.search(batch, NEIGHBOURS)
        seconds.append(time.perf_counter() - begun)
    found = searcher.search(queries[0][: len(true)], NEIGHBOURS)
    recall = float((true[:, :, None] == found.entries[:, None]).any(2).double().mean())
    return {
        "probes": probes,
        "seconds": statistics.median(seconds),
        "first_seconds": seconds[0],
        "bytes_read_per_batch": searcher.bytes_read // (len(queries) + 1),
        "recall": recall,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, help="a trained causal run")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training without --run")
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--data", default="stdlib", help="the text; it must hold as many tokens")
    parser.add_argument("--probes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--folder", type=Path, help="where the datastore is kept (a temporary folder if not given)")
    options = prepare(parser)
    begin_process()
    entries = 150_000 if options.quick else options.entries
    with tempfile.TemporaryDirectory() as temporary:
        run = options.run or Path(temporary) / "run"
        if options.run is None:
            train(run, options.minutes, options.quick)
        store = options.folder or Path(temporary) / "store"
        built = build(run, store, entries, options)
        queries = held_out_keys(run, options.data, options.rounds or 5)
        opened = Datastore(store)
        begun = time.perf_counter()
        exact = ExactSearch(opened).search(queries[0][:RECALLED], NEIGHBOURS)
        exact_seconds = time.perf_counter() - begun
        found = [search(opened, queries, probes, exact.entries) for probes in options.probes]
    peak, disk = (built[name] / 2**30 for name in ("peak_anonymous_bytes", "store_bytes"))
    print(
        f"{entries:,} keys of {opened.dim} numbers: {built['seconds']:.0f} s, killed at "
        f"{built['entries_kept_by_the_kill']:,}; {peak:.2f} GiB anonymous at most, {disk:.2f} GiB on disk"
    )
    columns = ("probes", "seconds", "first_seconds", "bytes_read_per_batch", "recall")
    show(
        f"{len(queries[0]):,} queries a batch, {NEIGHBOURS} neighbours; exact search of {len(exact.entries)}: "
        f"{exact_seconds:.1f} s",
        columns,
        [[each[name] for name in columns] for each in found],
    )
    result = {"dim": opened.dim, "dtype": opened.record.dtype, "queries": len(queries[0]), "neighbours": NEIGHBOURS}
    facts = {"exact_seconds": exact_seconds, "exact_queries": len(exact.entries)}
    save(options, "datastore", result | {"build": built} | facts | {"searches": found})


if __name__ == "__main__":
    main()
