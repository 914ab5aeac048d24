"""A datastore of a trained run: the run's vector of every context of a text, and the next token of each context."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from kinformer.lab.data.files import spooled
from kinformer.lab.datastore.attach import origin_of
from kinformer.lab.datastore.keys import KeyedDecoder, keyed
from kinformer.lab.datastore.search import build, has_lists
from kinformer.lab.datastore.store import Datastore, IndexedText, Writer, entries_of, open_source
from kinformer.lab.runs.options import IndexOptions
from kinformer.lab.runs.run import Run, open_run
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import locked
from kinformer.runtime.progress import note, progressing


@dataclass(frozen=True)
class Indexed:
    """A datastore of ``run`` after a build that wrote ``new`` entries of ``text`` in ``seconds``; ``lists`` for
    approximate search, None for a datastore without lists."""

    run: Path
    store: Datastore
    text: dict[str, object]
    new: int
    seconds: float
    lists: int | None

    @property
    def bytes(self) -> int:
        """Bytes of the datastore's files."""
        return sum(path.stat().st_size for path in self.store.folder.rglob("*") if path.is_file())

    @property
    def facts(self) -> dict[str, object]:
        """The datastore's facts as data that JSON can hold."""
        store = self.store
        return {
            "datastore": str(store.folder),
            "run": str(self.run),
            "entries": store.entries,
            "new_entries": self.new,
            "dim": store.dim,
            "dtype": store.record.dtype,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "text": self.text,
            "lists": self.lists,
        }


def index(folder: str | Path, options: IndexOptions, quiet: bool = True) -> Indexed:
    """Build a datastore of the run in ``folder``, or continue a stopped build; a finished datastore does not change."""
    run = open_run(folder)
    keys = keyed(run, run.model().to(options.prepare(options.seed)))
    with spooled(options.data) as data:
        text = open_source(run, keys.decoder, replace(options, data=data))
        started_at = time.perf_counter()
        new = _write(run, keys, text, options, quiet)
        seconds = time.perf_counter() - started_at
        store, place, count = Datastore(options.datastore), Path(options.datastore), None
        if options.approximate or has_lists(place):  # new lists, or existing lists brought up to date
            with locked(place), progressing(quiet, "sorting") as progress:
                how = {"key_bytes": options.key_bytes, "similarity": options.similarity}
                count = build(store, options.lists, **how, seed=options.seed, progress=progress).count  # type: ignore[arg-type]
    return Indexed(Path(folder), store, text.identity, new, seconds, count)


def _write(run: Run, keys: KeyedDecoder, text: IndexedText, options: IndexOptions, quiet: bool) -> int:
    """Write the missing entries, and return their number."""
    with Writer(options.datastore, origin_of(run, keys), dtype=options.dtype) as writer:
        if not options.append and not writer.holds(text.identity):
            raise KinformerError(
                f"{options.datastore}: is of another text, or read in another way; add `append` or give another folder."
            )
        done = before = writer.begin(text.identity, text.entries)
        try:
            with progressing(quiet, "indexing") as progress:
                for vectors, tokens, state in entries_of(keys, text, done, writer.load_state()):
                    writer.append(vectors, tokens)
                    done += len(tokens)
                    if writer.pending >= writer.FLUSHED or done == text.entries:
                        writer.flush(() if done == text.entries else state)
                    if progress is not None:
                        progress(done, text.entries)
        except KeyboardInterrupt:
            note(f"kept {plural(writer.record.parts[-1].written, 'entry')}; give the same command again to continue.")
            raise
    return done - before
