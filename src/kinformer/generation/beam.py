"""Search for probable outputs: beams over a causal model, and connectionist temporal classification."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import exp, inf, log, log1p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State, join_rows, nbytes, repeat_rows, reserve, select_rows, select_sources, tensors
from kinformer.runtime.errors import KinformerError, plural, require_finite
from kinformer.runtime.process import few_rows

# Beam search over a causal model that continues a source (Vaswani et al. 2017, section 6.1; Wu et al. 2016).
#
#     score(y) = log p(y | source) / ((5 + |y|) / 6)^alpha          |y| counts EOS
#
# A hypothesis is finished where EOS is among the best ``beam`` continuations of its sentence. A sentence is done when
# it has ``beam`` finished hypotheses, or when no running hypothesis can become better than the best finished one. A
# beam of 1 is greedy.


class Hypothesis(NamedTuple):
    """A hypothesis: ``tokens`` without BOS and EOS, and the ``score`` above."""

    tokens: list[int]
    score: float


class BeamResult(NamedTuple):
    """The ``best`` hypothesis of every row, and the largest size of the state during the search, in bytes."""

    best: list[Hypothesis]
    state_bytes: int


class Search(NamedTuple):
    """The settings of a search: the ids that begin and end a sequence, the ``beam``, and alpha (``length_penalty``)."""

    bos: int
    eos: int
    beam: int = 4
    length_penalty: float = 0.6


class _Running:
    """The hypotheses of the unfinished sentences: ``tokens`` [sentences, beam, length], their log-probabilities
    ``scores`` [sentences, beam], and the numbers of the ``sentences``, [sentences]."""

    def __init__(self, sentences: Tensor, tokens: Tensor, scores: Tensor) -> None:
        self.sentences, self.tokens, self.scores = sentences, tokens, scores

    @property
    def length(self) -> int:
        return self.tokens.shape[2]

    def taken(self, rows: Tensor) -> _Running:
        """Return the sentences ``rows`` alone."""
        return _Running(self.sentences[rows], self.tokens[rows], self.scores[rows])


@torch.inference_mode()
def beam_search(model: CausalModel, state: State, search: Search, limits: Sequence[int]) -> BeamResult:
    """Return the best continuation of every row of ``state``, which has begun over the sources (``model.begin``).

    ``limits``: the largest number of tokens in the continuation of each row. A continuation that has reached its limit
    must end, at the probability of EOS, so the model reads at most BOS and ``limit`` tokens. The continuation of a row
    does not depend on other rows. The cache is reordered at most once a token, and only where it must be.

    Errors: ``KinformerError`` for NaN or infinity in the predictions.
    """
    if not 1 <= search.beam < model.vocab_size:
        raise KinformerError(
            f"a beam of {search.beam} must be 1 or more, and fewer than the {plural(model.vocab_size, 'id')}."
        )
    device = next(tensors(state)).device
    with few_rows(device):
        return _searched(model, state, search, limits, device)


def _searched(
    model: CausalModel, state: State, search: Search, limits: Sequence[int], device: torch.device
) -> BeamResult:
    rows = len(limits)
    hypotheses: list[list[Hypothesis]] = [[] for _ in limits]
    begin = torch.full((rows, 1), search.bos, device=device)
    inputs, state = model.head_inputs(begin, state)
    running = _Running(torch.arange(rows), torch.empty(rows, 1, 0, dtype=torch.int64), torch.zeros(rows, 1))
    size = nbytes(state)
    state, width = reserve(repeat_rows(state, search.beam, sources=False), max(limits)), 1
    while True:
        logits, before = model.logits(inputs)[:, -1].float().cpu(), running.sentences
        running, origin = _continued(running, logits, search, width, hypotheses, limits)
        if not len(running.sentences):
            return BeamResult([max(item, key=lambda hypothesis: hypothesis.score) for item in hypotheses], size)
        some_end = len(running.sentences) < len(before)
        if width == search.beam and not torch.equal(origin, torch.arange(len(logits))):
            state = select_rows(state, origin, sources=False)
        elif width != search.beam and some_end:
            fresh_rows = (running.sentences[:, None] * search.beam + torch.arange(search.beam)).flatten()
            state = select_rows(state, fresh_rows, sources=False)
        if some_end:
            state = select_sources(state, torch.searchsorted(before, running.sentences))
        width = search.beam
        inputs, state = model.head_inputs(running.tokens[:, :, -1].reshape(-1, 1).to(device), state)
        size = max(size, nbytes(state))


def _continued(
    running: _Running,
    logits: Tensor,
    search: Search,
    width: int,
    hypotheses: list[list[Hypothesis]],
    limits: Sequence[int],
) -> tuple[_Running, Tensor]:
    """Return the hypotheses of the unfinished sentences, one token longer, and for each hypothesis the row of
    ``logits`` that it continues. Finished hypotheses are added to ``hypotheses``. ``width`` is the present number of
    hypotheses of a sentence."""
    count, vocab = len(running.sentences), logits.shape[-1]
    odds = log_softmax(logits, -1)
    require_finite(bool(odds.amin().isfinite()))  # before the masks below set -inf; NaN spreads to the whole row
    if search.bos != search.eos:
        odds[:, search.bos] = -torch.inf
    full = torch.tensor([running.length >= limits[int(sentence)] for sentence in running.sentences])
    others = torch.arange(vocab) != search.eos
    # A hypothesis of the greatest length must end: all but EOS is impossible.
    odds.view(count, width, vocab).masked_fill_(full[:, None, None] & others, -torch.inf)
    total = (running.scores[:, :, None] + odds.view(count, width, vocab)).flatten(1)
    # Twice the beam: up to ``beam`` of the best hypotheses may end, and ``beam`` others must continue.
    scores, places = total.topk(min(2 * search.beam, total.shape[1]), dim=1)
    parents, tokens = places // vocab, places % vocab
    ends = tokens == search.eos
    penalty = _penalty(running.length + 1, search)
    for row, rank in (ends[:, : search.beam] & scores[:, : search.beam].isfinite()).nonzero().tolist():
        tokens_of_row = running.tokens[row, parents[row, rank]].tolist()
        hypotheses[int(running.sentences[row])].append(Hypothesis(tokens_of_row, float(scores[row, rank]) / penalty))
    chosen = ends.to(torch.int8).argsort(dim=1, stable=True)[:, : search.beam]
    parents, tokens, scores = (item.gather(1, chosen) for item in (parents, tokens, scores))
    before = running.tokens.gather(1, parents[:, :, None].expand(-1, -1, running.length))
    after = _Running(running.sentences, torch.cat([before, tokens[:, :, None]], 2), scores)
    unfinished = torch.tensor([not _done(after, row, search, hypotheses, limits) for row in range(count)])
    origin = (torch.arange(count)[:, None] * width + parents)[unfinished].flatten()
    return after.taken(unfinished), origin


def _done(
    running: _Running, row: int, search: Search, hypotheses: list[list[Hypothesis]], limits: Sequence[int]
) -> bool:
    sentence = int(running.sentences[row])
    finished, limit, best = hypotheses[sentence], limits[sentence], float(running.scores[row, 0])
    if running.length > limit or len(finished) >= search.beam:
        return True
    # The running hypotheses can only lose probability; at best they do so at the largest penalty.
    return bool(finished) and max(item.score for item in finished) >= best / _penalty(limit + 1, search)


def _penalty(length: int, search: Search) -> float:
    return ((5 + length) / 6) ** search.length_penalty


# The probabilities of sequences of symbols by a causal language model, for all prefixes of a beam in one batch.
#
# A symbol is one token or several. The model reads ``begin``, then the tokens of the symbols; a whole text ends with
# ``end``. Every prefix is read once: the model continues the state of the prefix that lacks the last symbol.

Prefix = tuple[int, ...]


class Texts(NamedTuple):
    """The tokens of symbols: ``first`` where a text begins, ``later`` elsewhere; ``begin`` and ``end`` of a text."""

    first: Sequence[Sequence[int]]
    later: Sequence[Sequence[int]]
    begin: Sequence[int]
    end: Sequence[int]


class _Entry(NamedTuple):
    """A prefix: its ``state``, its ``total``, log-probabilities of all symbols ``after`` it, the end last."""

    state: State
    total: float
    after: list[float]


class SymbolModel:
    """The log-probabilities of prefixes, tuples of symbols counted from 1, by ``model``, in eval mode."""

    def __init__(self, model: CausalModel, texts: Texts) -> None:
        self.model, self.texts, self.device = model, texts, device_of(model)
        self._entries: dict[Prefix, _Entry] = {}
        start = model.initial_state(1, device=self.device)
        self._add([()], [start], [0.0], [texts.begin])

    def total(self, prefix: Prefix) -> float:
        """Return log p of the symbols of ``prefix``, which was read before or extends a prefix that was read by one."""
        if prefix in self._entries:
            return self._entries[prefix].total
        parent = self._entries[prefix[:-1]]
        return parent.total + parent.after[prefix[-1] - 1]

    def end(self, prefix: Prefix) -> float:
        """Return the log-probability that the text ends after ``prefix``, which was read."""
        return self._entries[prefix].after[-1]

    def read(self, prefixes: Iterable[Prefix]) -> None:
        """Read ``prefixes`` and forget all other prefixes but the empty one. Each prefix was read before, or extends by
        one symbol a prefix that was read."""
        wanted = list(prefixes)
        if new := [prefix for prefix in wanted if prefix not in self._entries]:
            before = [self._entries[prefix[:-1]].state for prefix in new]
            tokens = [(self.texts.later if len(prefix) > 1 else self.texts.first)[prefix[-1] - 1] for prefix in new]
            self._add(new, before, [self.total(prefix) for prefix in new], tokens)
        self._entries = {prefix: self._entries[prefix] for prefix in dict.fromkeys([(), *wanted])}

    @torch.inference_mode()
    def _add(
        self, prefixes: list[Prefix], before: list[State], totals: list[float], tokens: list[Sequence[int]]
    ) -> None:
        with few_rows(self.device):
            logits, state = self._absorb(join_rows(before), tokens)
            last = torch.tensor([len(item) - 1 for item in tokens], device=self.device)
            following = logits[torch.arange(len(tokens), device=self.device), last]
            after = self._after(following, state, later=prefixes != [()])
        for number, (prefix, total) in enumerate(zip(prefixes, totals, strict=True)):
            row = select_rows(state, torch.tensor([number], device=self.device))
            self._entries[prefix] = _Entry(row, total, after[number])

    def _absorb(self, state: State, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """Return log-probabilities [rows, time, vocab] and the state after ``tokens``, which may differ in length."""
        longest = max(map(len, tokens))
        padded = [[*item, *[0] * (longest - len(item))] for item in tokens]
        valid = [[True] * len(item) + [False] * (longest - len(item)) for item in tokens]
        ragged = any(len(item) < longest for item in tokens)
        marks = {"valid": torch.tensor(valid, device=self.device)} if ragged else {}
        logits, state = self.model(torch.tensor(padded, device=self.device), state, **marks)
        return logits.double().log_softmax(-1), state

    def _after(self, following: Tensor, state: State, later: bool) -> list[list[float]]:
        """Return the log-probabilities of all symbols, and of the end last, after every row of ``state``, whose next
        tokens have the log-probabilities ``following`` [rows, vocab]."""
        texts = [*(self.texts.later if later else self.texts.first), self.texts.end]
        result = following[:, [item[0] for item in texts]]
        if long := [number for number, item in enumerate(texts) if len(item) > 1]:
            tokens = [texts[number] for number in long]
            rows = len(following)
            logits, _ = self._absorb(repeat_rows(state, len(long)), [item[:-1] for item in tokens] * rows)
            scores = logits.unflatten(0, (rows, len(long)))
            for place, (number, item) in enumerate(zip(long, tokens, strict=True)):
                rest = torch.tensor(item[1:], device=self.device)
                result[:, number] += scores[:, place, torch.arange(len(rest), device=self.device), rest].sum(-1)
        return result.tolist()


# Decoding of connectionist temporal classification: symbols from the class at each position (Graves et al. 2006).
#
# A path gives a class to every position; its labelling drops repeats, then blanks. ``greedy`` takes the labelling of
# the most probable path, ``prefix_beam`` the labelling whose paths are most probable together, as far as its beam
# finds it. With a language model the labelling y with the greatest sum is sought (Hannun et al. 2014):
#
#     log p(y | sound) + alpha log p(y) + beta |y|

BLANK = 0
LEAST_PROBABILITY = 1e-4


class Greedy:
    """The most probable path, decoded part by part."""

    def __init__(self) -> None:
        self._last = BLANK

    def feed(self, logits: Tensor) -> list[int]:
        """Return the symbols that ``logits`` [time, classes] add to the earlier ones."""
        path = logits.argmax(-1).tolist()
        before = [self._last, *path][: len(path)]
        self._last = path[-1] if path else self._last
        return [symbol for symbol, last in zip(path, before, strict=True) if symbol not in (last, BLANK)]


def greedy(logits: Tensor) -> list[int]:
    """Return the labelling of the most probable path through ``logits`` [time, classes]."""
    return Greedy().feed(logits)


class Fusion(NamedTuple):
    """The share of a language model in the score of a labelling: ``alpha`` times the log-probability of its symbols by
    ``model``, and ``beta`` for each symbol. A model of None adds no probability."""

    model: SymbolModel | None = None
    alpha: float = 0.0
    beta: float = 0.0

    def added(self, prefix: tuple[int, ...]) -> float:
        """Return alpha log p(``prefix``) + beta |``prefix``|."""
        likely = 0.0 if self.model is None else self.alpha * self.model.total(prefix)
        return likely + self.beta * len(prefix)

    def ended(self, prefix: tuple[int, ...]) -> float:
        """Return the same sum for a complete labelling: p includes the end of its text."""
        return self.added(prefix) + (0.0 if self.model is None else self.alpha * self.model.end(prefix))


ALONE = Fusion()


def prefix_beam(logits: Tensor, beam: int, fusion: Fusion = ALONE) -> list[int]:
    """Return the best labelling of ``logits`` [time, classes] among the best ``beam`` prefixes at every position: the
    most probable one, or the one with the greatest sum by ``fusion``.

    Classes with a probability below 1e-4 at a position are skipped.
    """
    log_probabilities = logits.double().log_softmax(-1)
    likely = log_probabilities > log(LEAST_PROBABILITY)
    prefixes: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -inf)}
    for row, mask in zip(log_probabilities, likely, strict=True):
        classes = torch.nonzero(mask)[:, 0].tolist()
        prefixes = _step(prefixes, dict(zip(classes, row[mask].tolist(), strict=True)))
        best = sorted(prefixes.items(), key=lambda item: -_sum(*item[1]) - fusion.added(item[0]))[:beam]
        prefixes = dict(best)
        if fusion.model is not None:
            fusion.model.read(prefixes)
    return list(max(prefixes.items(), key=lambda item: _sum(*item[1]) + fusion.ended(item[0]))[0])


def _step(
    prefixes: dict[tuple[int, ...], tuple[float, float]], classes: dict[int, float]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return the prefixes after one more position, each with two log-probabilities: of its paths that end in a blank,
    and of its other paths."""
    blanks: dict[tuple[int, ...], float] = defaultdict(lambda: -inf)
    others: dict[tuple[int, ...], float] = defaultdict(lambda: -inf)
    for prefix, (blank, other) in prefixes.items():
        both = _sum(blank, other)
        for symbol, probability in classes.items():
            if symbol == BLANK:
                blanks[prefix] = _sum(blanks[prefix], both + probability)
                continue
            longer, repeats = (*prefix, symbol), bool(prefix) and prefix[-1] == symbol
            # A repeated symbol is a new one only after a blank; without a blank it prolongs the same one.
            others[longer] = _sum(others[longer], (blank if repeats else both) + probability)
            if repeats:
                others[prefix] = _sum(others[prefix], other + probability)
    return {prefix: (blanks[prefix], others[prefix]) for prefix in blanks.keys() | others.keys()}


def _sum(a: float, b: float) -> float:
    """Return log(exp a + exp b) without overflow."""
    low, high = min(a, b), max(a, b)
    return high if low == -inf else high + log1p(exp(low - high))
