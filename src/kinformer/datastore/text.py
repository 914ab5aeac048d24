"""The text of a datastore, and the entries that a model makes of it, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.data import EvaluationStream, Split, first_bytes, open_corpus
from kinformer.datastore.attach import StoredRun
from kinformer.evaluation.windows import Windows, batches
from kinformer.runtime.errors import choose
from kinformer.tasks.shared.text import WindowOptions, check_positions, main_windows, spec_of

if TYPE_CHECKING:
    from kinformer.core.state import State
    from kinformer.datastore.attached import KeyedDecoder
    from kinformer.models.decoder import Decoder


@dataclass(frozen=True)
class IndexedText:
    """A text and how it is read; ``identity`` says both, as plain data. ``windows`` None: with the state carried."""

    splits: Sequence[Split]
    windows: Windows | None
    chunk: int
    identity: dict[str, object]

    @property
    def entries(self) -> int:
        """Return the number of entries: one for every token that has one before it."""
        return sum(len(split) - 1 for split in self.splits)


class SourceOptions(WindowOptions, Protocol):
    """The options that name a text and how it is read (``runs.options.IndexOptions``)."""

    @property
    def data(self) -> str | None: ...
    @property
    def split(self) -> str: ...
    @property
    def holdout(self) -> float | None: ...
    @property
    def max_bytes(self) -> int | None: ...
    @property
    def chunk(self) -> int: ...


def open_source(run: StoredRun, model: Decoder, options: SourceOptions) -> IndexedText:
    """Return the text that ``options`` name."""
    holdout = run.data.get("holdout") if options.holdout is None else options.holdout
    corpus = open_corpus(spec_of(run, options.data), tokenizer=run.tokenizer, holdout=holdout)
    names = ["train", "validation", "test"] if holdout is None else ["train", "test"]
    if options.split != "all":
        names = [choose(options.split, corpus.splits, "`split`")]
    splits = [corpus.splits[name] for name in names if len(corpus.splits[name])]
    if options.max_bytes is not None:
        splits = [first_bytes(splits[0], options.max_bytes, corpus.tokenizer)]
    for split in splits:
        split.require(2, "an entry")
    windows = main_windows(run, model, options)
    check_positions(model, windows)
    identity = {
        "name": corpus.name,
        "fingerprint": corpus.fingerprint,
        "splits": names,
        "holdout": holdout,
        "max_bytes": options.max_bytes,
        "context": None if windows is None else windows.context,
        "overlap": 0.0 if windows is None else windows.overlap,
        "chunk": options.chunk,
    }
    return IndexedText(splits, windows, options.chunk, identity)


Entries = tuple[Tensor, np.ndarray, tuple[Tensor, ...]]


def entries_of(model: KeyedDecoder, text: IndexedText, done: int, leaves: Sequence[Tensor]) -> Iterator[Entries]:
    """Yield keys [n, width], next tokens [n] and the carried state's tensors, from entry number ``done`` on.

    ``done`` is where an earlier call had come to, and ``leaves`` are the tensors that it gave there.
    """
    first = 0
    for split in text.splits:
        entries = len(split) - 1
        if done < first + entries:
            retained = leaves if done > first else ()
            skipped = max(0, done - first)
            with torch.inference_mode():
                if text.windows is None:
                    yield from _carried(model, EvaluationStream(split, text.chunk), skipped, retained)
                else:
                    yield from _windowed(model, split, text, skipped)
        first += entries


def _carried(
    model: KeyedDecoder, stream: EvaluationStream, skipped: int, leaves: Sequence[Tensor]
) -> Iterator[Entries]:
    device = next(model.parameters()).device
    state: State = model.decoder.initial_state(1)
    if skipped:
        source = iter(leaves)
        state = states.map_tensors(lambda _: next(source).to(device), state)
    seen = 0
    for segment in stream:
        seen += segment.tokens.shape[1] - 1
        if seen > skipped:
            tokens = torch.from_numpy(segment.tokens).to(device)
            _, keys, state = model(tokens[:, :-1], state)
            yield keys[0], segment.tokens[0, 1:], tuple(states.tensors(state))


def _windowed(model: KeyedDecoder, split: Split, text: IndexedText, skipped: int) -> Iterator[Entries]:
    assert text.windows is not None
    device = next(model.parameters()).device
    seen = 0
    for group in batches(len(split) - 1, text.windows, max(1, text.chunk // text.windows.context)):
        seen += sum(window.size - window.unscored for window in group)
        if seen > skipped:
            tokens = split.rows(np.array([window.start for window in group]), group[0].size + 1)
            unscored = np.array([window.unscored for window in group])
            counted = np.arange(group[0].size) >= unscored[:, None]
            keys = model(torch.from_numpy(tokens[:, :-1]).to(device)).keys
            yield keys[torch.from_numpy(counted).to(device)], tokens[:, 1:][counted], ()
