"""What commands that use a datastore share: their options, and a model with its store attached."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from kinformer.cli.options import Count, Number, Text, require
from kinformer.cli.runs import tokenizer_of
from kinformer.core.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.cli.runs import HeldOut
    from kinformer.family.runs import Run
    from kinformer.memory.datastore import Datastore, Origin
    from kinformer.memory.exact import ExactSearch
    from kinformer.memory.lists import ListSearch
    from kinformer.models.attached import AttachedDecoder, KeyedDecoder
    from kinformer.models.retrieving import RetrievingDecoder

WEIGHT, NEIGHBOURS, TEMPERATURE = 0.25, 32, 1.0
GATED_NEIGHBOURS = 4


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a datastore's next tokens are mixed into the model's own prediction (kNN-LM), or which the model's head looks
    things up in (SPALM)."""

    datastore: Text = None
    """A datastore of this run (see: kinformer index) whose next tokens are mixed into its predictions; for a run of
    spalm, another one than it was trained with."""
    retriever: Text = None
    """With --datastore, for a run of spalm: the run that made it (that which it was trained with if not given)."""
    weight: Number = None
    """With --datastore: the store's share of the prediction, 0 to 1 (0.25 if not given)."""
    neighbours: Count = None
    """With --datastore: entries looked up per token (32 if not given; for a run of spalm as many as in training)."""
    knn_temperature: Number = None
    """With --datastore: what squared distances are divided by before their softmax (1 if not given)."""
    probes: Count = None
    """With --datastore: search approximately, in so many of its lists (see: kinformer index --approximate)."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStoreOptions(StoreOptions):
    """How a datastore is measured."""

    tune: bool = False
    """With --datastore: find weight, temperature and neighbours (up to --neighbours) on the validation split, or on the
    first half of the text where that is the same; the figures are of what was not used."""
    sizes: Text = None
    """With --datastore: also measure with its first so many entries, as in 10000,100000."""


def check_store(options: StoreOptions) -> None:
    """Refuse the options of a store where none is named, and values out of range."""
    given = [field.name for field in fields(type(options)) if _is_given(options, field)]
    if given and options.datastore is None:
        flag = given[0].replace("_", "-")
        raise KinformerError(f"--{flag}: says how a datastore is used; give --datastore FOLDER too.")
    if isinstance(options, MeasuredStoreOptions) and options.tune:
        for name in ("weight", "knn_temperature"):
            if getattr(options, name) is not None:
                flag = name.replace("_", "-")
                raise KinformerError(f"--{flag}: is what --tune finds; leave one of them out.")
    require("--weight", options.weight, 0)
    require("--neighbours", options.neighbours, 1)
    require("--probes", options.probes, 1)


def _is_given(options: StoreOptions, field: Field[Any]) -> bool:
    """Whether an option of a store, but not the store itself, differs from its default."""
    own = {each.name for each in fields(MeasuredStoreOptions)} - {"datastore"}
    return field.name in own and getattr(options, field.name) != field.default


def keyed(run: Run, model: Any) -> KeyedDecoder:
    """The model with its keys shown; only a causal decoder has some."""
    from kinformer.models.attached import KeyedDecoder
    from kinformer.models.decoder import Decoder

    if not isinstance(model, Decoder):
        raise KinformerError(
            f"{run.folder}: {run.member!r} is no causal decoder, and only such a one can have a store."
        )
    return KeyedDecoder(model)


def origin_of(run: Run, keys: KeyedDecoder) -> Origin:
    """What a datastore of this run is told by."""
    from kinformer.memory.datastore import Origin

    return Origin(
        weights=run.weights_digest(),
        representation=keys.representation,
        dim=keys.width,
        vocab_size=keys.decoder.vocab_size,
        tokenizer=tokenizer_of(run).fingerprint,
    )


def attach(run: Run, model: Any, options: StoreOptions) -> AttachedDecoder:
    """``model`` with the datastore that ``options`` name at its head."""
    from kinformer.heads.knn import KnnMixture
    from kinformer.memory.datastore import Datastore
    from kinformer.models.attached import AttachedDecoder

    assert options.datastore is not None
    store = Datastore(options.datastore, origin_of(run, keyed(run, model)))
    head = KnnMixture(
        searcher(store, options.probes),
        weight=WEIGHT if options.weight is None else options.weight,
        temperature=TEMPERATURE if options.knn_temperature is None else options.knn_temperature,
        neighbours=NEIGHBOURS if options.neighbours is None else options.neighbours,
    )
    return AttachedDecoder(model, head)


def looks_up(model: Mapping[str, Any]) -> bool:
    """Whether the head of a model, its config given as data, is one that looks things up (SPALM)."""
    head = model.get("head")
    return isinstance(head, Mapping) and head.get("kind") == "spalm"


def equipped(run: Run, model: Any, options: StoreOptions, rows: int | None = None) -> Any:
    """``model`` with the store that its run or ``options`` name, or as it is where there is none; ``rows``: the
    retriever is made ready to read so many sequences token by token."""
    if looks_up(run.model):
        return _retrieving(run, model, options, rows)
    return model if options.datastore is None else attach(run, model, options)


def _retrieving(run: Run, model: Any, options: StoreOptions, rows: int | None) -> RetrievingDecoder | Any:
    from kinformer.family.runs import open_run
    from kinformer.generation.packed import pack
    from kinformer.memory.datastore import Datastore
    from kinformer.models.retrieving import RetrievingDecoder

    for name in ("weight", "knn_temperature", "tune", "sizes"):
        if getattr(options, name, None) not in (None, False):
            flag = name.replace("_", "-")
            raise KinformerError(f"--{flag}: is for kNN-LM; the gate of {run.folder} was trained; leave it out.")
    said: dict[str, Any] = {"neighbours": GATED_NEIGHBOURS, "probes": None} | dict(run.data.get("retrieval") or {})
    said |= {name: given for name in (*said, "datastore", "retriever") if (given := getattr(options, name)) is not None}
    if "datastore" not in said:
        return model
    if "retriever" not in said:
        raise KinformerError(
            f"--datastore {said['datastore']}: {run.folder} was trained without; give --retriever RUN, which made it."
        )
    retriever = open_run(said["retriever"])
    keys = keyed(retriever, retriever.load().to(next(model.parameters()).device))
    store = Datastore(said["datastore"], origin_of(retriever, keys))
    if store.record.origin.tokenizer != tokenizer_of(run).fingerprint:
        raise KinformerError(f"{store.folder}: its tokens are not those of {run.folder}; give one of its tokenizer.")
    if rows is not None:
        keys = keyed(retriever, pack(keys.decoder, rows))
    return RetrievingDecoder(model, keys, searcher(store, said["probes"]), said["neighbours"])


class Lookup(NamedTuple):
    """What a head looks things up in, and how many neighbours it is given."""

    store: Datastore
    neighbours: int

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "datastore": str(self.store.folder),
            "entries": self.store.entries,
            "neighbours": self.neighbours,
        }


def lookup_of(model: Any) -> Lookup | None:
    """What the head of a model, as :func:`equipped` gave it, looks things up in."""
    from kinformer.models.retrieving import RetrievingDecoder

    if not isinstance(model, RetrievingDecoder):
        return None
    found: Any = model.searcher
    return Lookup(found.store, model.neighbours)


def note_stored(store: Datastore, held: HeldOut, holdout: float | None) -> None:
    """Tell where the store holds the very text that is measured."""
    for part in store.record.parts:
        same = (part.source.get("fingerprint"), part.source.get("holdout")) == (held.corpus.fingerprint, holdout)
        if same and held.split.name in part.source.get("splits", ()):
            print(
                f"kinformer: note: the {held.split.name} split of {held.corpus.name} is in the datastore itself, so "
                "these figures are not of held-out text.",
                file=sys.stderr,
            )


def searcher(store: Datastore, probes: int | None, entries: int | None = None) -> ExactSearch | ListSearch:
    """Exact search in the first ``entries`` entries, or with ``probes`` in the store's lists."""
    from kinformer.memory.exact import ExactSearch
    from kinformer.memory.lists import ListSearch

    if probes is None:
        return ExactSearch(store, entries=entries)
    return ListSearch(store, probes, entries=entries)
