"""The datastore of a run or of its options: opened, checked to belong to the run, and attached to its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid
from kinformer.core.model import Hidden
from kinformer.core.parts import Input, NeedsStore, Neighbours
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State
from kinformer.heads.language import KnnMixture
from kinformer.lab.data import Corpus, Split, first_bytes, open_corpus
from kinformer.lab.datastore.keys import KeyedDecoder, KeyedStates, OpenRun, StoredRun, keyed
from kinformer.lab.datastore.options import StoreOptions
from kinformer.lab.datastore.search import ExactSearch, ListSearch, Similarity, probes_of, similarity_of
from kinformer.lab.datastore.store import Datastore, KeySpace, Record
from kinformer.lab.tasks.texts import note_shared, spec_of
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError, marked, spelled
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import note


class StoreDecoder(nn.Module):
    """A language model whose :meth:`logits` search a store. The store is not a part of the state. A subclass has
    ``decoder``, ``hidden``, ``head_inputs`` and ``logits``."""

    decoder: Any
    head_inputs: Callable[..., Any]
    logits: Callable[..., Tensor]

    @property
    def input(self) -> Input:
        return self.decoder.input

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    def forward(
        self, values: Tensor, state: Any = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return logits [batch, time, vocab] (zero where not ``valid``) and the state after the chunk."""
        inputs, state = self.head_inputs(values, state, valid=valid, reset=reset)
        return select_valid(self.logits(inputs), valid), state


class AttachedDecoder(StoreDecoder):
    """A decoder with another ``head``, which makes the logits from the decoder's logits [n, vocab] and keys [n, width].
    The state is the decoder's state; the head's store is not a part of it."""

    def __init__(self, decoder: Decoder, head: nn.Module) -> None:
        super().__init__()
        self.keyed, self.head = KeyedDecoder(decoder), head
        self.train(decoder.training)

    @property
    def decoder(self) -> Decoder:
        return self.keyed.decoder

    @property
    def max_length(self) -> int | None:
        return self.decoder.max_length

    def initial_state(self, batch: int, **options: Any) -> State:
        """Return the state of ``batch`` new sequences."""
        return self.decoder.initial_state(batch, **options)

    def hidden(self, values: Tensor, state: State = None, **options: Any) -> Hidden:
        """Return the decoder's hidden states, its state and its taps; ``options``: ``valid``, ``reset``, ``taps``."""
        return self.decoder.hidden(values, state, **options)

    def head_inputs(self, values: Tensor, state: State = None, **marks: Any) -> tuple[KeyedStates, State]:
        """Return hidden states and keys, and the state after the chunk; ``marks``: ``valid``, ``reset``."""
        return self.keyed(values, state, **marks)

    def logits(self, inputs: KeyedStates) -> Tensor:
        """Return logits [batch, time, vocab] of head inputs [batch, time, ...]."""
        logits = self.decoder.logits(inputs.hidden_states)
        return self.head(logits.flatten(0, -2), inputs.keys.flatten(0, -2)).view(logits.shape)


# A decoder whose head takes neighbours that a frozen decoder, the retriever, finds in a store (SPALM, Yogatama et al.
# 2021). Both decoders read the same tokens, and the state holds both states; the store is not a part of the state.


class RetrievingState(NamedTuple):
    """The state: ``decoder`` belongs to the model itself, ``retriever`` to the model that makes its queries."""

    decoder: State
    retriever: State


class RetrievingDecoder(StoreDecoder):
    """A language model: ``decoder`` with the ``neighbours`` nearest entries of ``searcher`` at every token.
    ``retriever`` made the store's keys; it is frozen. Only :meth:`logits` searches the store."""

    def __init__(
        self, decoder: Decoder, retriever: KeyedDecoder, searcher: ExactSearch | ListSearch, neighbours: int
    ) -> None:
        super().__init__()
        self.decoder, self.retriever = decoder, retriever.requires_grad_(False)
        self.searcher, self.neighbours = searcher, neighbours
        self.train(decoder.training)

    def train(self, mode: bool = True) -> RetrievingDecoder:
        super().train(mode)
        self.retriever.eval()
        return self

    @property
    def max_length(self) -> int | None:
        """Return the length at which the positions of the decoder or of the retriever end."""
        ends = [end for end in (self.decoder.max_length, self.retriever.decoder.max_length) if end is not None]
        return min(ends, default=None)

    def initial_state(self, batch: int, *, dtype: torch.dtype | None = None, **options: Any) -> RetrievingState:
        """Return the state of ``batch`` new sequences; ``dtype`` is the type of the decoder's part."""
        return RetrievingState(
            self.decoder.initial_state(batch, dtype=dtype, **options),
            self.retriever.decoder.initial_state(batch, **options),
        )

    def hidden(
        self, values: Tensor, state: RetrievingState | None = None, *, taps: Sequence[int] = (), **marks: Any
    ) -> Hidden:
        """Return the decoder's hidden states and taps, and the state after; ``marks``: ``valid``, ``reset``."""
        before = state or RetrievingState(None, None)
        hidden_states, after, tapped = self.decoder.hidden(values, before.decoder, taps=taps, **marks)
        with torch.no_grad():
            _, retriever_state, _ = self.retriever.decoder.hidden(values, before.retriever, **marks)
        return Hidden(hidden_states, RetrievingState(after, retriever_state), tapped)

    def head_inputs(
        self, values: Tensor, state: RetrievingState | None = None, **marks: Any
    ) -> tuple[KeyedStates, RetrievingState]:
        """Return the decoder's hidden states and the retriever's keys, and the state after the chunk."""
        before = state or RetrievingState(None, None)
        hidden_states, after, _ = self.decoder.hidden(values, before.decoder, **marks)
        with torch.no_grad():
            inputs, retriever_state = self.retriever(values, before.retriever, **marks)
        return inputs._replace(hidden_states=hidden_states), RetrievingState(after, retriever_state)

    def logits(self, inputs: KeyedStates) -> Tensor:
        """Return logits [batch, time, vocab] of head inputs [batch, time, ...]."""
        result = self.searcher.search(inputs.keys.flatten(0, -2).detach(), self.neighbours)
        neighbours = following(result).view(*inputs.hidden_states.shape[:-1], -1)
        return self.decoder.head(inputs.hidden_states, self.decoder.input, neighbours=neighbours)


def following(neighbours: Neighbours) -> Tensor:
    """Return the tokens [n, k] that followed, -1 for a missing neighbour."""
    return neighbours.tokens.masked_fill(neighbours.entries < 0, -1)


# The datastore that a run or options name, at the head of the run's model.

MIXTURE = {"weight": 0.25, "temperature": 1.0, "neighbours": 32}
GATED_NEIGHBOURS = 4
EXACT_BELOW = 1 << 16
"""The number of entries below which exact search takes hardly any time."""
RETRIEVAL = "retrieval"
"""The key in a run's ``data`` for its datastore, retriever, neighbours and probes."""


def looks_up(config: ModelConfig) -> bool:
    """Return whether the head of a model searches a store while it is trained (:class:`NeedsStore`)."""
    return isinstance(getattr(config, "head", None), NeedsStore)


def origin_of(run: StoredRun, keys: KeyedDecoder) -> KeySpace:
    """Return the key space that identifies a datastore of this run."""
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
    """Return ``model`` with the store that its run or ``options`` name, if any. ``rows``: prepare the retriever to read
    this many sequences token by token."""
    options = options or StoreOptions()
    if looks_up(run.config):
        return _retrieving(run, model, open_run, options, rows)
    return model if options.datastore is None else attach_mixture(run, model, options)


def mixture_of(options: StoreOptions) -> dict[str, Any]:
    """Return the weight, temperature and neighbours of a mixture (kNN-LM), with defaults for missing options."""
    requested = {"weight": options.weight, "temperature": options.knn_temperature, "neighbours": options.neighbours}
    return MIXTURE | {name: value for name, value in requested.items() if value is not None}


def attach_mixture(run: StoredRun, model: Decoder, options: StoreOptions) -> AttachedDecoder:
    """Return ``model`` with the datastore that ``options`` name at its head (kNN-LM)."""
    assert options.datastore is not None
    store = Datastore(options.datastore, origin_of(run, keyed(run, model)))
    probes = probes_of(options.datastore, options.probes)
    head = KnnMixture(searcher(store, probes), **mixture_of(options))
    if options.probes is None and (probes or store.entries >= EXACT_BELOW):
        note(f"neighbours are looked up {search_words(probes)}")
    return AttachedDecoder(model, head)


def _retrieving(
    run: StoredRun, model: Decoder, open_run: OpenRun, options: StoreOptions, rows: int | None
) -> Decoder | RetrievingDecoder:
    """Return ``model`` with its datastore and the retriever that made it (SPALM)."""
    from kinformer.generation.weights import pack

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
        raise KinformerError(
            f"{store.folder}: its tokens come from another tokenizer than {run.folder}'s; give one of its tokenizer."
        )
    if rows is not None:
        keys = keyed(retriever, pack(keys.decoder))
    return RetrievingDecoder(model, keys, searcher(store, record["probes"]), record["neighbours"])


def lookup_facts(model: object) -> dict[str, object] | None:
    """Return the facts of the attached datastore as JSON, with the number of neighbours."""
    if not isinstance(model, RetrievingDecoder):
        return None
    store = model.searcher.store
    return {"datastore": str(store.folder), "entries": store.entries, "neighbours": model.neighbours}


def note_stored(record: Record, run: StoredRun, corpus: Corpus, data: str | None, parts: Sequence[Split]) -> None:
    """Print a note on how much of the ``parts`` of ``corpus`` the store holds; ``data`` names it (None: the run's)."""
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


def search_words(probes: int | None) -> str:
    """Return in words how a datastore is searched, and the option that changes it."""
    if probes is None:
        return "exactly (kinformer index --approximate makes lists, which are faster to search)"
    return spelled(f"approximately, in {probes} of the datastore's lists (`probes` 0: exactly)")


def searcher(
    store: Datastore, probes: int | None, entries: int | None = None, similarity: Similarity | None = None
) -> ExactSearch | ListSearch:
    """Return exact search in the first ``entries`` entries, or with ``probes`` search in the store's lists;
    ``similarity`` None: the similarity of the lists."""
    similarity = similarity_of(store.folder, similarity)
    if probes is None:
        return ExactSearch(store, entries=entries, similarity=similarity)
    return ListSearch(store, probes, entries=entries, similarity=similarity)
