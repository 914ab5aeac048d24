"""The datastore of a run or of its options: opened, checked to be the run's, and attached to its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kinformer.core.head import NeedsStore
from kinformer.core.model import CausalModel
from kinformer.data import Corpus, Split, first_bytes, open_corpus
from kinformer.datastore.options import StoreOptions
from kinformer.runtime.errors import KinformerError, marked, spelled
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import note
from kinformer.tasks.runs import TrainedRun
from kinformer.tasks.shared.text import note_shared, spec_of

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig
    from kinformer.datastore.attached import AttachedDecoder, KeyedDecoder
    from kinformer.datastore.exact import ExactSearch, Similarity
    from kinformer.datastore.lists import ListSearch
    from kinformer.datastore.retrieving import RetrievingDecoder
    from kinformer.datastore.store import Datastore, KeySpace, Record
    from kinformer.models.decoder import Decoder

WEIGHT, NEIGHBOURS, TEMPERATURE = 0.25, 32, 1.0
GATED_NEIGHBOURS = 4
EXACT_BELOW = 1 << 16
"""Of fewer entries, exact search takes no time to speak of."""
RETRIEVAL = "retrieval"
"""What a run's ``data`` calls its datastore, retriever, neighbours and probes."""


class StoredRun(TrainedRun, Protocol):
    """The protocol of a run with a datastore: one from which it is made, or one to which it belongs."""

    def model(self, changes: Mapping[str, object] | None = None) -> Any: ...
    def weights_digest(self) -> str: ...


OpenRun = Callable[[str | Path], StoredRun]
"""Opens the run in a folder."""


def looks_up(config: ModelConfig) -> bool:
    """Return whether the head of a model searches a store while it is trained (:class:`NeedsStore`)."""
    return isinstance(getattr(config, "head", None), NeedsStore)


def keyed(run: StoredRun, model: Decoder) -> KeyedDecoder:
    """Return the model with its keys exposed; only a causal one has some."""
    from kinformer.datastore.attached import KeyedDecoder

    if run.config.protocol is not CausalModel:
        raise KinformerError(
            f"{run.folder}: {run.member!r} is no causal decoder, and only such a one can have a store."
        )
    if run.tokenizer is None or run.config.input.kind != "tokens":
        raise KinformerError(
            f"{run.folder}: reads {run.config.input.kind}, and a datastore is of text; give a run of a model of tokens."
        )
    return KeyedDecoder(model)


def origin_of(run: StoredRun, keys: KeyedDecoder) -> KeySpace:
    """Return the key space of a datastore of this run, which identifies it."""
    from kinformer.datastore.store import KeySpace

    assert run.tokenizer is not None
    return KeySpace(
        weights=run.weights_digest(),
        representation=keys.representation,
        dim=keys.width,
        vocab_size=keys.decoder.vocab_size,
        tokenizer=run.tokenizer.fingerprint,
    )


def attach_store(
    run: StoredRun, model: Decoder, open_run: OpenRun, options: StoreOptions | None = None, rows: int | None = None
) -> Any:
    """Return ``model`` with the store that its run or ``options`` name, or as it is where there is none.

    ``rows``: a retriever is made ready to read this many sequences token by token.
    """
    options = options or StoreOptions()
    if looks_up(run.config):
        return _retrieving(run, model, open_run, options, rows)
    return model if options.datastore is None else attach_mixture(run, model, options)


def attach_mixture(run: StoredRun, model: Decoder, options: StoreOptions) -> AttachedDecoder:
    """Return ``model`` with the datastore that ``options`` name at its head (kNN-LM)."""
    from kinformer.datastore.attached import AttachedDecoder
    from kinformer.datastore.store import Datastore
    from kinformer.heads.knn import KnnMixture

    assert options.datastore is not None
    store = Datastore(options.datastore, origin_of(run, keyed(run, model)))
    probes = probes_of(options.datastore, options.probes)
    head = KnnMixture(
        searcher(store, probes),
        weight=WEIGHT if options.weight is None else options.weight,
        temperature=TEMPERATURE if options.knn_temperature is None else options.knn_temperature,
        neighbours=NEIGHBOURS if options.neighbours is None else options.neighbours,
    )
    if options.probes is None and (probes or store.entries >= EXACT_BELOW):
        note(f"neighbours are looked up {search_words(probes)}")
    return AttachedDecoder(model, head)


def _retrieving(
    run: StoredRun, model: Decoder, open_run: OpenRun, options: StoreOptions, rows: int | None
) -> Decoder | RetrievingDecoder:
    """Return ``model`` with its datastore and the retriever that made it (SPALM)."""
    from kinformer.datastore.retrieving import RetrievingDecoder
    from kinformer.datastore.store import Datastore
    from kinformer.generation.packed import pack

    for name in ("weight", "knn_temperature", "tune", "sizes"):
        if getattr(options, name, None) not in (None, False):
            raise KinformerError(f"{marked(name)}: is for kNN-LM; the gate of {run.folder} was trained; leave it out.")
    record: JsonObject = {"neighbours": GATED_NEIGHBOURS} | dict(run.data.get(RETRIEVAL) or {})
    names = ("datastore", "retriever", "neighbours")
    record |= {name: option for name in names if (option := getattr(options, name)) is not None}
    if "datastore" not in record:
        return model
    if options.probes is not None or "probes" not in record:
        record["probes"] = probes_of(record["datastore"], options.probes)
    if "retriever" not in record:
        raise KinformerError(
            f"`datastore` {record['datastore']}: {run.folder} was trained without; give `retriever` RUN, which made it."
        )
    retriever = open_run(record["retriever"])
    keys = keyed(retriever, retriever.model().to(next(model.parameters()).device))
    store = Datastore(record["datastore"], origin_of(retriever, keys))
    assert run.tokenizer is not None
    if store.record.origin.tokenizer != run.tokenizer.fingerprint:
        raise KinformerError(f"{store.folder}: its tokens are not those of {run.folder}; give one of its tokenizer.")
    if rows is not None:
        keys = keyed(retriever, pack(keys.decoder, rows))
    return RetrievingDecoder(model, keys, searcher(store, record["probes"]), record["neighbours"])


def lookup_facts(model: object) -> dict[str, object] | None:
    """Return the facts of the attached datastore as JSON, with the number of neighbours."""
    from kinformer.datastore.retrieving import RetrievingDecoder

    if not isinstance(model, RetrievingDecoder):
        return None
    store = model.searcher.store
    return {"datastore": str(store.folder), "entries": store.entries, "neighbours": model.neighbours}


def note_stored(record: Record, run: StoredRun, corpus: Corpus, data: str | None, parts: Sequence[Split]) -> None:
    """Note how much of ``parts``, which are measured, the store holds; ``data`` names their ``corpus`` (None: the
    run's own)."""
    stored = [part.source for part in record.parts if part.source.get("fingerprint") == corpus.fingerprint]
    if not stored:
        return
    seen = []
    for source in stored:
        other = open_corpus(spec_of(run, data), tokenizer=corpus.tokenizer, holdout=source.get("holdout"))
        splits = [other.splits[name] for name in source.get("splits", ())]
        limit = source.get("max_bytes")
        seen += splits if limit is None else [first_bytes(splits[0], limit, other.tokenizer)]
    for part in parts:
        note_shared(seen, part, "in the datastore itself")


def probes_of(folder: str | Path, requested: int | None) -> int | None:
    """Return how many of a datastore's lists are searched, None for exact search: ``requested`` (0: exact), else in
    lists where it has some."""
    from kinformer.datastore.lists import default_probes

    return default_probes(Path(folder)) if requested is None else requested or None


def search_words(probes: int | None) -> str:
    """Return in words how a datastore is searched, and how to choose otherwise."""
    if probes is None:
        return "exactly (kinformer index --approximate makes lists, which are faster to search)"
    return spelled(f"approximately, in {probes} of the datastore's lists (`probes` 0: exactly)")


def searcher(
    store: Datastore, probes: int | None, entries: int | None = None, similarity: Similarity | None = None
) -> ExactSearch | ListSearch:
    """Return exact search in the first ``entries`` entries, or with ``probes`` in the store's lists; ``similarity``
    None: as these were made."""
    from kinformer.datastore.exact import ExactSearch
    from kinformer.datastore.lists import ListSearch, similarity_of

    similarity = similarity_of(store.folder, similarity)
    if probes is None:
        return ExactSearch(store, entries=entries, similarity=similarity)
    return ListSearch(store, probes, entries=entries, similarity=similarity)
