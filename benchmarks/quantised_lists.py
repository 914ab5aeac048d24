"""Ten million keys in lists of 16 bytes a key: how long do they take, how large are they, and what do they find?

Keys of --dim numbers lie near a curved sheet of a few dimensions, as a network's do: tanh of a random map of --hidden
normal numbers, with noise. They are written in pieces into a datastore; `build` sorts them into lists with --key-bytes
bytes a key (product quantisation, Jegou et al. 2011). What is reported: seconds and the peak of anonymous memory
(RssAnon) of the build, bytes of the lists; then, with --queries new keys, recall@32 against exact search, and seconds,
for several numbers of probes, each with the candidates ranked by the stored keys and as the lists alone rank them.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import arguments, prepare, save, show
from datastore import anonymous
from kinformer.lab.datastore.search import _SPARE_LISTS, FOLDER, ExactSearch, ListSearch, build
from kinformer.lab.datastore.store import Datastore, KeySpace, Writer
from kinformer.runtime.process import begin_process

NEIGHBOURS, PIECE, VOCAB = 32, 1 << 16, 256


class Keys:
    """Keys [n, dim] of any number, drawn by a seed."""

    def __init__(self, dim: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.maps = [torch.randn(*shape, generator=generator) for shape in ((hidden, dim), (dim, dim))]

    def __call__(self, count: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        first, second = self.maps
        x = torch.randn(count, len(first), generator=generator) @ first / len(first) ** 0.5
        x = (1.5 * x).tanh() @ second / len(second) ** 0.5
        return x + 0.05 * torch.randn(x.shape, generator=generator)


def written(folder: Path, keys: Keys, entries: int, dim: int) -> Datastore:
    """The datastore, made piece by piece."""
    origin = KeySpace(weights="synthetic", representation="sheet", dim=dim, vocab_size=VOCAB, tokenizer="bytes")
    tokens = np.random.default_rng(0)
    with Writer(folder, origin, dtype="float16") as writer:
        done = writer.begin({"keys": "synthetic"}, entries)
        while done < entries:
            count = min(PIECE, entries - done)
            writer.append(keys(count, 1 + done), tokens.integers(VOCAB, size=count))
            done += count
            if writer.pending >= writer.FLUSHED or done == entries:
                writer.flush()
    return Datastore(folder, origin)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The largest anonymous memory of this process while the context is open, above that before."""
    before, peak, over = anonymous(os.getpid()), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            peak[0] = max(peak[0], anonymous(os.getpid()) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def searched(store: Datastore, queries: torch.Tensor, true: torch.Tensor, probes: int) -> dict[str, Any]:
    """Recall@32 and seconds of all queries, with candidates ranked by the stored keys, and by the lists alone."""
    found: dict[str, Any] = {"probes": probes}
    spare = dict(_SPARE_LISTS)
    for name, candidates in (("", spare["PQ"]), ("_unranked", 1)):
        _SPARE_LISTS["PQ"] = candidates
        search = ListSearch(store, probes)
        search.search(queries[:8], NEIGHBOURS)
        begun = time.perf_counter()
        entries = search.search(queries, NEIGHBOURS).entries
        found[f"seconds{name}"] = time.perf_counter() - begun
        found[f"recall{name}"] = float((true[:, :, None] == entries[:, None]).any(2).double().mean())
    _SPARE_LISTS.update(spare)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64, help="of a key")
    parser.add_argument("--hidden", type=int, default=12, help="dimensions of the sheet that keys lie near")
    parser.add_argument("--key-bytes", type=int, default=16, help="of a key in the lists")
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--probes", type=int, nargs="+", default=[4, 8, 16, 32])
    options = prepare(parser)
    begin_process()
    entries = 50_000 if options.quick else options.entries
    keys = Keys(options.dim, options.hidden)
    with tempfile.TemporaryDirectory() as temporary:
        begun = time.perf_counter()
        store = written(Path(temporary) / "store", keys, entries, options.dim)
        writing = time.perf_counter() - begun
        begun = time.perf_counter()
        with peak_memory() as peak:
            made = build(store, key_bytes=options.key_bytes)
        seconds = time.perf_counter() - begun
        size = sum(path.stat().st_size for path in (store.folder / FOLDER).iterdir())
        queries = keys(options.queries, 0)
        begun = time.perf_counter()
        true = ExactSearch(store).search(queries, NEIGHBOURS).entries
        exact = time.perf_counter() - begun
        found = [searched(store, queries, true, probes) for probes in options.probes]
    print(
        f"{entries:,} keys of {options.dim} numbers in {made.count:,} lists, {options.key_bytes} bytes a key: "
        f"{seconds:.0f} s, {peak[0] / 2**30:.2f} GiB anonymous at most, lists of {size / 2**20:.0f} MiB; exact search "
        f"of {options.queries} queries: {exact:.1f} s"
    )
    columns = ("probes", "seconds", "recall", "seconds_unranked", "recall_unranked")
    show(
        f"{options.queries} queries, {NEIGHBOURS} neighbours",
        columns,
        [[each[name] for name in columns] for each in found],
    )
    names = ("dim", "hidden", "key_bytes", "queries")
    facts = {"entries": entries, "neighbours": NEIGHBOURS, "lists": made.count} | {
        n: getattr(options, n) for n in names
    }
    built = {"writing_seconds": writing, "build_seconds": seconds, "peak_anonymous_bytes": peak[0], "list_bytes": size}
    save(options, "quantised_lists", facts | built | {"exact_seconds": exact, "searches": found})


if __name__ == "__main__":
    main()
