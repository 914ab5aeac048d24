"""The datastore of a run or of its options: opened, checked to belong to the run, and attached to its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk, left_align, select_valid
from kinformer.core.model import CausalModel, Hidden
from kinformer.core.parts import Input, NeedsStore
from kinformer.core.state import State
from kinformer.heads.language import KnnMixture
from kinformer.lab.data import Corpus, Split, first_bytes, open_corpus
from kinformer.lab.datastore.options import StoreOptions
from kinformer.lab.datastore.search import ExactSearch, ListSearch, Similarity, probes_of, similarity_of
from kinformer.lab.datastore.store import Datastore, KeySpace, Record, read_record
from kinformer.lab.tasks.evaluation import EvaluationSettings, TrainedRun
from kinformer.lab.tasks.texts import measured_part, note_shared, spec_of
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError, marked, spelled
from kinformer.runtime.parsing import JsonObject
from kinformer.runtime.progress import note

if TYPE_CHECKING:
    from kinformer.core.stack import ModelConfig
    from kinformer.lab.datastore.retrieval import RetrievingDecoder

# A decoder whose head searches a store, by keys that the model makes of the context.
#
# The key of a context is the input of the last layer's feed-forward (after its pre-norm if it has one), which
# Khandelwal et al. 2020 found best. In a post-norm layer the norm follows the attention sublayer, so this input is
# normed too. The keys of a decoder without such a sublayer are its final hidden states.

FEED_FORWARD, HIDDEN = "feed-forward input of the last layer", "final hidden states"


class KeyedStates(NamedTuple):
    """The inputs of a head that searches a store: ``hidden_states`` [batch, time, dim] for the decoder's own
    prediction, ``keys`` [batch, time, key width] to search with."""

    hidden_states: Tensor
    keys: Tensor


class KeyedDecoder(nn.Module):
    """A decoder that also returns the key of every context: its ``representation`` in words, and its ``width``."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if getattr(decoder, "exit_heads", None) is not None:
            raise KinformerError(
                "the decoder's exits have separate heads, but a datastore works with one head; give a run with "
                "tied classifiers (stack.classifiers=tied)."
            )
        self.decoder = decoder
        self.representation, self.width = HIDDEN, decoder.config.width
        if (seen := self._probe()) is not None:
            self.representation, self.width = FEED_FORWARD, seen

    def forward(
        self, tokens: Tensor, state: State = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[KeyedStates, State]:
        """Absorb ``tokens`` [batch, time]; hidden states and keys are zero where not ``valid``."""
        if self.representation == HIDDEN:
            hidden_states, state, _ = self.decoder.hidden(tokens, state, valid=valid, reset=reset)
            return KeyedStates(hidden_states, hidden_states), state
        with self._tapped() as seen:
            hidden_states, state, _ = self.decoder.hidden(tokens, state, valid=valid, reset=reset)
        keys = seen[-1]
        if valid is not None:
            back = left_align(valid).inverse[..., None].expand(-1, -1, keys.shape[-1])
            keys = select_valid(keys.gather(1, back), valid)
        return KeyedStates(hidden_states, keys), state

    def _probe(self) -> int | None:
        """Return the width of the last layer's feed-forward input; None unless the input is one vector a token."""
        stack = self.decoder.stack
        if stack.adaptive or not isinstance(getattr(stack.units[-1], "feed_forward", None), nn.Module):
            return None
        tokens = self.decoder.input.example(1, 2, self.decoder.input.device)
        with torch.no_grad(), self._tapped() as seen:
            self.decoder.hidden(tokens)
        return seen[-1].shape[-1] if seen and seen[-1].shape[:-1] == (1, 2) else None

    @contextmanager
    def _tapped(self) -> Iterator[list[Tensor]]:
        """Tap the last layer's feed-forward input within the context (the last use counts)."""
        seen: list[Tensor] = []
        feed_forward = self.decoder.stack.units[-1].get_submodule("feed_forward")

        def hook(_: nn.Module, inputs: tuple[Tensor | Chunk, *tuple[object, ...]]) -> None:
            seen.append(inputs[0].x if isinstance(inputs[0], Chunk) else inputs[0])

        with feed_forward.register_forward_pre_hook(hook):
            yield seen


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


MIXTURE = {"weight": 0.25, "temperature": 1.0, "neighbours": 32}
GATED_NEIGHBOURS = 4
EXACT_BELOW = 1 << 16
"""The number of entries below which exact search takes hardly any time."""
RETRIEVAL = "retrieval"
"""The key in a run's ``data`` for its datastore, retriever, neighbours and probes."""


class StoredRun(TrainedRun, Protocol):
    """The protocol of a run with a datastore, made from the run or used by its model."""

    def model(self, changes: Mapping[str, object] | None = None) -> Any: ...
    def weights_digest(self) -> str: ...


OpenRun = Callable[[str | Path], StoredRun]
"""A function that opens the run in a folder."""


def looks_up(config: ModelConfig) -> bool:
    """Return whether the head of a model searches a store while it is trained (:class:`NeedsStore`)."""
    return isinstance(getattr(config, "head", None), NeedsStore)


def keyed(run: StoredRun, model: Decoder) -> KeyedDecoder:
    """Return the model with its keys exposed. Raise unless the model is causal and reads tokens."""
    if run.config.protocol is not CausalModel:
        raise KinformerError(f"{run.folder}: {run.member!r} is not a causal decoder, which a datastore needs.")
    if run.tokenizer is None or run.config.input.kind != "tokens":
        raise KinformerError(
            f"{run.folder}: reads {run.config.input.kind}, and a datastore is of text; give a run of a model of tokens."
        )
    return KeyedDecoder(model)


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
    from kinformer.lab.datastore.retrieval import RetrievingDecoder

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
    from kinformer.lab.datastore.retrieval import RetrievingDecoder

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


def note_text(
    facts: Mapping[str, object] | None, run: StoredRun, options: EvaluationSettings, holdout: float | None
) -> None:
    """Print a note if the datastore of :func:`lookup_facts` holds text on which ``run`` was measured."""
    if facts is not None:
        corpus, part = measured_part(run, options, holdout)
        note_stored(read_record(Path(str(facts["datastore"]))), run, corpus, options.data, [part])


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
