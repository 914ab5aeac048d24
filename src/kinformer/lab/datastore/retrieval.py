"""The retrieval of a run whose head searches a store (SPALM): its datastore, the retriever that made it, and tables.

``config.json`` names them under ``data.retrieval``. The neighbours of every training and validation token are searched
once. A table of the tokens after them is stored in the datastore's folder, for all runs with as many neighbours.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from kinformer.core.parts import Neighbours, Searcher
from kinformer.core.stack import ModelConfig
from kinformer.lab.data import Corpus
from kinformer.lab.datastore.attach import (
    GATED_NEIGHBOURS,
    RETRIEVAL,
    following,
    looks_up,
    origin_of,
    search_words,
    searcher,
)
from kinformer.lab.datastore.keys import OpenRun, StoredRun, keyed
from kinformer.lab.datastore.search import probes_of, similarity_of
from kinformer.lab.datastore.store import TOKEN, Datastore, IndexedText, StoredText, crc32, entries_of
from kinformer.lab.evaluation.bits import Windows, streamable
from kinformer.lab.runs.options import TrainOptions
from kinformer.lab.tasks.task import TrainingPlan
from kinformer.lab.training.data_module import DataModule
from kinformer.lab.training.schedule import seconds_of
from kinformer.lab.training.settings import Settings
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError, marked, require
from kinformer.runtime.files import read_json, reading, take, write_json
from kinformer.runtime.progress import note, progressing


def choose_retrieval(options: TrainOptions, config: ModelConfig) -> dict[str, object]:
    """Return the retrieval entry of a new run's ``data``."""
    named = {name: getattr(options, name) for name in ("retriever", "neighbours", "probes")}
    if options.datastore is None:
        for name, value in named.items():
            if value is not None:
                raise KinformerError(f"{marked(name)}: says how a datastore is used; give `datastore` FOLDER too.")
        if looks_up(config):
            note("note: there is no `datastore`, so this trains the model without its long-term memory.")
        return {}
    if not looks_up(config):
        raise KinformerError(
            f"`datastore` {options.datastore}: the head of {options.member!r} looks nothing up while it is trained; "
            "train spalm, or give the datastore to kinformer evaluate and generate."
        )
    if options.retriever is None:
        raise KinformerError(
            f"`datastore` {options.datastore}: is searched with what made it; give `retriever` RUN, which was indexed."
        )
    require("neighbours", options.neighbours, 1)
    require("probes", options.probes, 0)
    paths = {name: str(Path(str(getattr(options, name))).resolve()) for name in ("datastore", "retriever")}
    probes = probes_of(paths["datastore"], options.probes)
    return {RETRIEVAL: paths | {"neighbours": options.neighbours or GATED_NEIGHBOURS, "probes": probes}}


def resume_retrieval(run: StoredRun, options: TrainOptions) -> dict[str, object]:
    """Return the retrieval entry of a resumed run's ``data``: unchanged, except for moved folders."""
    retrieval = run.data.get(RETRIEVAL)
    for name in ("datastore", "retriever", "neighbours", "probes"):
        value = getattr(options, name)
        moved = retrieval is not None and name in ("datastore", "retriever")
        if value is not None and not moved and (retrieval is None or (value or None) != retrieval[name]):
            raise KinformerError(
                f"`{name}` {value}: the run in {run.folder} was started with another value, and a resumed run keeps "
                "its settings; leave it out, or give another `out`."
            )
    if retrieval is None:
        return {}
    paths = {name: getattr(options, name) for name in ("datastore", "retriever")}
    return {
        RETRIEVAL: retrieval | {name: str(Path(path).resolve()) for name, path in paths.items() if path is not None}
    }


def with_neighbours(
    rows: DataModule, run: StoredRun, open_run: OpenRun, plan: TrainingPlan, device: str, quiet: bool
) -> DataModule:
    """Return the run's rows of text with the tokens of their neighbours, where the model uses them."""
    if not (record := run.data.get(RETRIEVAL)):
        return rows
    if not hasattr(rows, "with_neighbours"):
        raise KinformerError("`datastore`: this task looks nothing up; leave it out.")
    corpus, settings = plan.data, plan.settings
    retriever = open_run(record["retriever"])
    keys = keyed(retriever, retriever.model().to(device))
    store = Datastore(record["datastore"], origin_of(retriever, keys))
    part, first = _train_part(store, run, corpus)
    _check_settings(keys.decoder, record["retriever"], settings, rows.carries)
    search = searcher(store, record["probes"])

    def plan_of(name: str, tokens: int, **source: object) -> NeighbourTable:
        similarity = similarity_of(store.folder, None)
        described = {"first": first, "probes": record["probes"]} | (
            {} if similarity == "l2" else {"similarity": similarity}
        )
        return NeighbourTable(name=name, tokens=tokens, neighbours=record["neighbours"], source=described | source)

    train_plan = plan_of("train", len(corpus.splits["train"]) - 1)
    held_out = corpus.splits["validation"].take(settings.validation_tokens)
    source = {"fingerprint": corpus.fingerprint, "holdout": run.data.get("holdout"), "split": "validation"}
    held_out_plan = plan_of("validation", len(held_out) - 1, **source)
    # The validation text is read in the same way as the datastore's text.
    context, overlap = part.source.get("context"), part.source.get("overlap", 0.0)
    windows = None if context is None else Windows(context=context, overlap=overlap)
    entries = entries_of(keys, IndexedText([held_out], windows, part.source["chunk"], {}), 0, ())
    held_out_keys = (queries for queries, _, _ in entries)
    missing = train_plan.tokens - _written(train_plan.path(store).with_suffix(".json"), train_plan)[0]
    if missing:
        tried = store.float_keys(slice(first, first + min(missing, _BLOCK)))
        minutes = seconds_of(search.search, tried, record["neighbours"] + 1) * missing / len(tried) / 60
        note(
            f"neighbours of every token are looked up {search_words(record['probes'])}, once for all runs that ask for "
            f"as many: {missing:,} tokens, about {minutes:,.1f} minutes"
        )
    with progressing(quiet, "looking up neighbours") as progress:
        train = table(store, train_plan, partial(neighbours_without_self, store, search, first, train_plan), progress)
        look_up = partial(neighbours_of, held_out_keys, search, held_out_plan)
        validation = table(store, held_out_plan, look_up, progress)
    result: DataModule = rows.with_neighbours(train, validation)
    return result


def _train_part(store: Datastore, run: StoredRun, corpus: Corpus) -> tuple[StoredText, int]:
    """Return the part of ``store`` that equals the run's training split, and its first entry's number."""
    reason, tokenizer = "it holds other data", run.tokenizer
    assert tokenizer is not None
    if store.record.origin.tokenizer != tokenizer.fingerprint:
        raise KinformerError(
            f"{store.folder}: holds the tokens of another tokenizer than the run's; leave `tokenizer` and "
            f"`train_tokenizer` out, so that the run takes the tokenizer of {run.data[RETRIEVAL]['retriever']}."
        )
    first, matches = 0, []
    for part in store.record.parts:
        source = part.source
        if source.get("fingerprint") == corpus.fingerprint:
            read_as = (source.get("splits"), source.get("holdout"), source.get("max_bytes"))
            if read_as == (["train"], run.data.get("holdout"), None):
                matches.append((part, first))
            else:
                reason = "it holds another part of it"
        first += part.total
    if len(matches) != 1 or reason != "it holds other data" or not _same_tokens(store, *matches[0], corpus):
        holdout = run.data.get("holdout")
        held_out = "" if holdout is None else f" {marked('holdout')} {holdout:g}"
        raise KinformerError(
            f"{store.folder}: is not a datastore of the training split of {corpus.name} as this run reads it "
            f"({reason}); make one: kinformer index {run.data[RETRIEVAL]['retriever']} --data {run.data['spec']} "
            f"--split train --datastore FOLDER{held_out}."
        )
    return matches[0]


def _same_tokens(store: Datastore, part: StoredText, first: int, corpus: Corpus) -> bool:
    """Return whether entry t of ``part`` is the token after training token t, for all t."""
    train, step = corpus.splits["train"], 1 << 20
    if part.total != len(train) - 1:
        return False
    return all(
        np.array_equal(
            store.tokens[first + start : first + min(start + step, part.total)],
            train.tokens(1 + start, min(step, part.total - start)),
        )
        for start in range(0, part.total, step)
    )


def _check_settings(reader: Decoder, where: str, settings: Settings, segments: bool) -> None:
    """Raise unless the objective uses neighbours, and the retriever ``reader`` reads the model's rows to their end."""
    if settings.objective not in (None, "next-token"):
        raise KinformerError(f"`objective` {settings.objective}: looks nothing up; take next-token.")
    if segments and not streamable(reader):
        raise KinformerError(
            f"`segments`: the state never ends, but the state of the retriever {where} grows with every token or its "
            "positions end; take one with a bounded state, or leave `segments` out."
        )
    if reader.max_length is not None and settings.length > reader.max_length:
        raise KinformerError(
            f"`length` {settings.length}: the positions of the retriever {where} end at {reader.max_length}; give "
            f"`length` {reader.max_length} or less, or take another retriever."
        )


# Tables of the tokens that follow the nearest entries of a store, at every token of a text, searched once and stored.
#
# ``NAME.bin`` holds int32 [tokens, k], row after row, -1 for a missing neighbour. ``NAME.json`` holds the name of the
# text, the number of flushed rows, and their checksum. A killed build continues after the flushed rows.

SCHEMA = 1
FOLDER = "neighbours"
_BLOCK = 2048

Progress = Callable[[int, int], None]
Blocks = Callable[[int], Iterator[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class NeighbourTable:
    """A table of ``tokens`` rows of ``neighbours`` tokens each; ``source`` names the text, as plain data."""

    name: str
    tokens: int
    neighbours: int
    source: Mapping[str, object]

    @property
    def identity(self) -> dict[str, object]:
        return {"schema": SCHEMA, "tokens": self.tokens, "neighbours": self.neighbours, "source": dict(self.source)}

    def path(self, store: Datastore) -> Path:
        """Return the table's file, in the store's folder."""
        stamp = zlib.crc32(repr((sorted(self.source.items()), self.neighbours, store.record.blocks)).encode())
        return store.folder / FOLDER / f"{self.name}-{stamp:08x}.bin"


def table(store: Datastore, plan: NeighbourTable, blocks: Blocks, progress: Progress | None = None) -> np.ndarray:
    """Return the rows of ``plan`` [tokens, k] int32, mapped. Missing rows come from ``blocks(first)``, which yields
    pieces [n, k] of all rows from ``first`` on. Other processes wait for the writing process."""
    path = plan.path(store)
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            take(file.fileno(), wait=True)
            _fill(file, path, plan, blocks, progress)
    except OSError as error:
        raise KinformerError(
            f"{path}: could not be written ({error.strerror or error}); free space, or copy the datastore to a folder "
            "that can be written to."
        ) from error
    return np.memmap(path, TOKEN, "r", shape=(plan.tokens, plan.neighbours))


def _fill(file: BinaryIO, path: Path, plan: NeighbourTable, blocks: Blocks, progress: Progress | None) -> None:
    record, row = path.with_suffix(".json"), plan.neighbours * TOKEN.itemsize
    done, crc = _written(record, plan)
    if os.fstat(file.fileno()).st_size < done * row:
        done, crc = 0, 0
    os.ftruncate(file.fileno(), done * row)
    if done and crc32(np.memmap(path, TOKEN, "r", shape=(done, plan.neighbours))) != crc:
        raise KinformerError(f"{path}: is damaged (it does not match its checksum); remove it and try again.")
    for block in blocks(done) if done < plan.tokens else ():
        assert block.shape[1] == plan.neighbours
        rows = np.ascontiguousarray(block, TOKEN)
        file.write(rows.data.cast("B"))
        file.flush()
        os.fsync(file.fileno())
        done, crc = done + len(rows), crc32(rows, crc)
        write_json(record, plan.identity | {"written": done, "crc": crc})
        if progress is not None:
            progress(done, plan.tokens)
    assert done == plan.tokens


def _written(record: Path, plan: NeighbourTable) -> tuple[int, int]:
    """Return how many rows are on the disk, and their checksum."""
    if not record.exists():
        return 0, 0
    content = read_json(record)
    if not isinstance(content, dict) or any(content.get(name) != value for name, value in plan.identity.items()):
        raise KinformerError(f"{record}: does not belong to this table; remove it and try again.")
    with reading(record, remedy="remove it and try again"):
        return int(content["written"]), int(content["crc"])


def neighbours_without_self(
    store: Datastore, searcher: Searcher, first: int, plan: NeighbourTable, done: int
) -> Iterator[np.ndarray]:
    """Yield the tokens after the neighbours of the entries from ``first + done`` on, without the entries themselves."""
    for start in range(first + done, first + plan.tokens, _BLOCK):
        stop = min(start + _BLOCK, first + plan.tokens)
        queries = store.float_keys(slice(start, stop))
        yield others(searcher.search(queries, plan.neighbours + 1), torch.arange(start, stop), plan.neighbours)


def neighbours_of(keys: Iterator[Tensor], searcher: Searcher, plan: NeighbourTable, done: int) -> Iterator[np.ndarray]:
    """Yield the tokens after the neighbours of ``keys`` (pieces [n, dim], in order), from number ``done`` on."""
    seen = 0
    for piece in keys:
        new = piece[max(0, done - seen) :]
        seen += len(piece)
        for queries in new.split(_BLOCK) if len(new) else ():
            yield padded(searcher.search(queries, plan.neighbours), plan.neighbours)


def others(nearest: Neighbours, itself_at: Tensor, neighbours: int) -> np.ndarray:
    """Return next tokens [n, neighbours] of ``nearest`` [n, neighbours + 1] without the entries ``itself_at`` [n]."""
    itself = nearest.entries == itself_at[:, None]
    order = itself.to(torch.int8).sort(dim=1, stable=True).indices
    rest = nearest._replace(entries=nearest.entries.masked_fill(itself, -1))
    return padded(Neighbours(*(leaf.gather(1, order)[:, :neighbours] for leaf in rest)), neighbours)


def padded(nearest: Neighbours, neighbours: int) -> np.ndarray:
    """Return next tokens [n, neighbours] int32, -1 for a missing neighbour."""
    rows = np.full((len(nearest.entries), neighbours), -1, TOKEN)
    tokens = following(nearest)
    rows[:, : tokens.shape[1]] = tokens.cpu().numpy()
    return rows
