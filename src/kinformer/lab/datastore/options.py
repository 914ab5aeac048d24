"""The options of a datastore: by keyword in Python, by flag on the command line. Free of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kinformer.runtime.errors import Checked, KinformerError, marked, require_above


@dataclass(frozen=True, kw_only=True)
class StoreOptions(Checked):
    """The options by which a datastore's next tokens are mixed into the model's prediction (kNN-LM), or of the
    datastore that the model's head searches (SPALM)."""

    datastore: str | None = None
    """A datastore of this run (see: kinformer index) whose next tokens are mixed into its predictions; for a run of
    spalm, another one than it was trained with."""
    retriever: str | None = None
    """With `datastore`, for a run of spalm: the run that made it (if not given, the retriever of training)."""
    weight: float | None = None
    """With `datastore`: the store's share of the prediction, 0 to 1 (0.25 if not given)."""
    neighbours: int | None = None
    """With `datastore`: entries looked up per token (32 if not given; for a run of spalm as many as in training)."""
    knn_temperature: float | None = None
    """With `datastore`: the divisor of squared distances, or products, before their softmax (1 if not given)."""
    probes: int | None = None
    """With `datastore`: search approximately, in N of its lists (see: kinformer index --approximate); 0 searches
    exactly. If not given, 8 where it has lists, else exactly."""

    LEAST = {"neighbours": 1, "probes": 0}
    SHARES = {"weight": "[0, 1]"}

    def __post_init__(self) -> None:
        require_above("knn_temperature", self.knn_temperature, 0)
        super().__post_init__()

    def check_store(self) -> None:
        """Refuse the options of a store where none is named."""
        names = {field.name for field in fields(StoreOptions)} | {"tune", "sizes"}
        for option in fields(type(self)) if self.datastore is None else ():
            if option.name in names and getattr(self, option.name) != option.default:
                raise KinformerError(
                    f"{marked(option.name)}: says how a datastore is used; give `datastore` FOLDER too."
                )


@dataclass(frozen=True, kw_only=True)
class ListOptions(Checked):
    """The options of the lists of a datastore, for approximate search."""

    approximate: bool = False
    """Also sort the entries into lists, for approximate search (needs faiss)."""
    lists: int | None = None
    """With `approximate`: into how many lists (the root of the number of entries if not given)."""
    key_bytes: int | None = None
    """With `approximate`: bytes of a key in the lists, by product quantisation, a divisor of its width (a byte a number
    if not given). The keys themselves stay, to rank the entries that the lists find."""
    similarity: Literal["l2", "inner"] | None = None
    """With `approximate`: near means a small squared distance (l2, if not given) or a large inner product."""

    LEAST = {"lists": 1, "key_bytes": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lists", "key_bytes", "similarity"):
            if (value := getattr(self, name)) is not None and not self.approximate:
                raise KinformerError(f"{marked(name)} {value}: is for approximate search; add `approximate`.")
