"""``kinformer index DIR --data PATH --datastore FOLDER``: a datastore of a trained run, for kNN-LM."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.cli.index_options import Options
from kinformer.cli.options import require
from kinformer.cli.output import print_json, size
from kinformer.cli.reading import progressing, source
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.cli.index_text import Source
    from kinformer.memory.lists import Lists
    from kinformer.models.attached import KeyedDecoder


def run(options: Options) -> int:
    """Build, or go on building, and report."""
    from kinformer.cli.index_text import open_source
    from kinformer.cli.store import keyed
    from kinformer.family.runs import open_run
    from kinformer.training.precision import use_fast_products

    require("--chunk", options.chunk, 1)
    require("--max-bytes", options.max_bytes, 2)
    require("--lists", options.lists, 1)
    if options.lists is not None and not options.approximate:
        raise KinformerError(f"--lists {options.lists}: is for approximate search; add --approximate.")
    run = open_run(options.folder)
    use_fast_products()
    keys = keyed(run, run.load().to(options.prepare(options.seed)))
    with source(options) as data:
        text = open_source(run, keys.decoder, data, options)
        begun = time.perf_counter()
        new = _write(run, keys, text, options)
        seconds = time.perf_counter() - begun
        lists = _sort(options)
    _report(options, text, new, seconds, lists)
    return 0


def _write(run: Any, keys: KeyedDecoder, text: Source, options: Options) -> int:
    """Write the entries that are not there yet; returns how many."""
    from kinformer.cli.index_text import entries_of
    from kinformer.cli.store import origin_of
    from kinformer.memory.writer import Writer

    with Writer(options.datastore, origin_of(run, keys), dtype=options.dtype) as writer:
        if not options.append and not writer.holds(text.identity):
            raise KinformerError(
                f"{options.datastore}: holds a datastore of another text, or read in another way; add --append to add "
                "to it, or give another folder."
            )
        done = before = writer.begin(text.identity, text.entries)
        try:
            with progressing(options.json, "indexing") as progress:
                for vectors, tokens, state in entries_of(keys, text, done, writer.load_state()):
                    writer.append(vectors, tokens)
                    done += len(tokens)
                    if writer.pending >= writer.FLUSHED or done == text.entries:
                        writer.flush(() if done == text.entries else state)
                    if progress is not None:
                        progress(done, text.entries)
        except KeyboardInterrupt:
            kept = writer.record.parts[-1].written
            print(f"kinformer: kept {kept:,} entries; give the same command again to go on.", file=sys.stderr)
            raise
    return done - before


def _sort(options: Options) -> Lists | None:
    """Build the lists that were asked for, or bring those that are there up to date."""
    from kinformer.memory.datastore import Datastore
    from kinformer.memory.lists import build, has_lists

    if not options.approximate and not has_lists(Path(options.datastore)):
        return None
    with progressing(options.json, "sorting") as progress:
        return build(Datastore(options.datastore), options.lists, seed=options.seed, progress=progress)


def _report(options: Options, text: Source, new: int, seconds: float, lists: Lists | None) -> None:
    from kinformer.memory.datastore import Datastore

    store = Datastore(options.datastore)
    held = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
    if options.json:
        facts = {"datastore": str(store.folder), "run": options.folder, "entries": store.entries, "new_entries": new}
        shape = {"dim": store.dim, "dtype": store.record.dtype, "bytes": held, "seconds": seconds}
        print_json(facts | shape | {"text": text.identity, "lists": None if lists is None else lists.count})
        return
    speed = f" in {seconds:.0f} s, {new / seconds:,.0f} a second" if new else ""
    print(f"{store.folder}: {new:,} new entries{speed}; {store.entries:,} in all, {size(held)}")
    if lists is not None:
        print(f"sorted into {lists.count:,} lists, for evaluate and generate with --probes")
