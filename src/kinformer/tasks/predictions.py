"""What predicting and embedding return for every item: a row of values and a line for people, or a vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from kinformer.runtime.errors import require
from kinformer.runtime.fields import Checked

if TYPE_CHECKING:
    import numpy as np

FileSource: TypeAlias = str | Path | Sequence[str | Path]
"""Where pictures or sounds come from: a file, a folder, data by name, or a list of paths."""


@dataclass(frozen=True, kw_only=True)
class ItemSettings(Checked):
    """How items are read and computed, one after the other."""

    text_field: str | None = None
    """The column or field with the text, where it is not called text or sentence."""
    format: Literal["lines", "tsv", "csv", "jsonl"] | None = None
    """How the rows of the input are written. If not given, by the file's ending, and lines on standard input."""
    batch_size: int = 32
    """Items that are computed at a time; bounds the memory, does not change the result."""
    max_items: int | None = None
    """Take the first N items only."""
    quiet: bool = False
    """Print only the result, without progress or notes."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_items"):
            require(name, getattr(self, name), 1)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PredictionSettings(ItemSettings):
    """How runs of any task predict."""

    top_k: int = 1
    """Give the N most probable classes of an item, or candidates of a mask, each with its probability."""
    label_field: str | None = None
    """The column or field with a label to show beside the prediction, where it is not called label."""

    def __post_init__(self) -> None:
        require("top_k", self.top_k, 1)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(ItemSettings):
    """How runs of any task make vectors."""

    pooling: Literal["mean", "first", "last"] = "mean"
    """What the vector of an item is: the mean over its positions, or the vector of the first or of the last one."""


class Embedded(NamedTuple):
    """A vector, float32 [dim], of the item ``name``: a text, or the path of a file. ``kind``: what it is the name of,
    ``text``, ``image`` or ``audio``."""

    kind: str
    name: str
    vector: np.ndarray


class Predicted(NamedTuple):
    """A prediction: its ``row`` for tables and JSON, and one ``line`` for people."""

    row: Mapping[str, object]
    line: str
