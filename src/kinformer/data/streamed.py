"""Documents to pack that are read one after the other: a dataset of Hugging Face that is streamed, or any iterable.

The record of a piece says how many documents had been read behind it and, of a dataset that has one, its state, so that
a second call continues there. Without a state, those documents are read again and left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kinformer.data.records import TEXT, text_of
from kinformer.data.shard_writer import Packing, drawn
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.parsing import JsonObject

HUB = "hf:"


def documents_of(data: str | Path | Iterable[object]) -> Documents | None:
    """Return the documents that ``data`` streams; None where it is a path or another name."""
    if isinstance(data, str) and data.startswith(HUB):
        return Documents(data, _hub(data))
    if isinstance(data, str | Path):
        return None
    name = f"the {type(data).__name__}"
    if isinstance(data, Mapping):
        raise KinformerError(f"`data`: {name} has several splits ({', '.join(map(str, data))}); give one of them.")
    if not isinstance(data, Iterable) or iter(data) is data:
        raise KinformerError(
            f"`data`: {name} cannot be read a second time, which a call that goes on does; give a dataset, a list, or "
            "an object whose __iter__ restarts."
        )
    return Documents(name, data)


def _hub(place: str) -> Iterable[object]:
    """Return the streamed dataset of hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT."""
    names = place.removeprefix(HUB).split(":")
    if not all(names) or len(names) > 3:
        raise KinformerError(
            f"{place}: is no name of a dataset; give hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT, as in "
            "hf:allenai/c4:en:train."
        )
    split = names.pop() if len(names) > 1 else "train"
    try:
        from datasets import load_dataset
    except ImportError:
        raise KinformerError(
            f"{place}: is read by the package datasets, which is not there; pip install datasets."
        ) from None
    with _reading(place):
        return load_dataset(*names, split=split, streaming=True)


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Report in one sentence why a stream broke, whatever the error of the library that serves it."""
    try:
        yield
    except KinformerError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise KinformerError(
            f"{place}: cannot be read ({reason}); give the same again to go on behind the last shard, when it can be."
        ) from error


class Documents:
    """The documents of ``data``, whose items are texts or rows with a text, in order."""

    def __init__(self, name: str, data: Iterable[object]) -> None:
        self.name = name
        self.data: Any = data  # may also skip, or have a state
        self.read = 0
        self._rows: Iterator[object] = iter(())

    def fingerprint(self, field: str | None) -> str:
        """Return what tells the stream from others: a digest of its name and its first document."""
        with _reading(self.name):
            first = next(iter(self.data), "")
        return hashlib.sha256(self.name.encode() + b"\0" + self._text(first, field)).hexdigest()

    def go_on(self, place: JsonObject) -> None:
        """Continue from a :meth:`place`; empty is the beginning."""
        self.read = place.get("documents", 0)
        with _reading(self.name):
            if state := place.get("state"):
                self.data.load_state_dict(state)
                self._rows = iter(self.data)
            elif self.read and hasattr(self.data, "skip"):
                self._rows = iter(self.data.skip(self.read))
            else:
                self._rows = islice(self.data, self.read, None)

    def place(self) -> dict[str, object]:
        """Return how many documents were read, and the state of a dataset that has one: plain values."""
        state = {"state": self.data.state_dict()} if hasattr(self.data, "state_dict") else {}
        return {"documents": self.read, **state}

    def piece(self, packing: Packing) -> Iterator[tuple[str, bool, bytes]] | None:
        """Return the next documents (split, that one begins, and bytes), of ``shard_bytes`` or a little more; None at
        the end."""
        texts = self._texts(packing)
        first = next(texts, None)
        return None if first is None else chain([first], texts)

    def _texts(self, packing: Packing) -> Iterator[tuple[str, bool, bytes]]:
        filled = 0
        while filled < packing.shard_bytes:
            with _reading(self.name):
                row = next(self._rows, None)
            if row is None:
                return
            self.read += 1
            text = self._text(row, packing.text_field)
            filled += len(text)
            yield drawn(text, packing.holdout), True, text

    def _text(self, row: object, field: str | None) -> bytes:
        field = field or TEXT
        row = {field: row} if isinstance(row, str) else row
        value = row.get(field) if isinstance(row, Mapping) else None
        return text_of(value, row, field, f"{self.name}, document {max(1, self.read)}")
