"""Beam search over a causal model that continues a source (Vaswani et al. 2017, section 6.1; Wu et al. 2016).

    score(y) = log p(y | source) / ((5 + |y|) / 6)^alpha          |y| counts EOS

A hypothesis is finished where EOS is among the best ``beam`` continuations of its sentence. A sentence is done when it
has ``beam`` finished ones, or when none of the running ones could become better than its best. A beam of 1 is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from kinformer.core import state as states
from kinformer.core.model import CausalModel
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.matmul import few_rows
from kinformer.runtime.words import plural


class Hypothesis(NamedTuple):
    """A hypothesis: ``tokens`` without BOS and EOS, and the ``score`` above."""

    tokens: list[int]
    score: float


class BeamResult(NamedTuple):
    """The best hypothesis of every row, and the most bytes that their states had."""

    best: list[Hypothesis]
    state_bytes: int


class Search(NamedTuple):
    """The settings of a search: the ids that begin and end a sequence, how many hypotheses are followed, and alpha."""

    bos: int
    eos: int
    beam: int = 4
    length_penalty: float = 0.6


class _Running:
    """The hypotheses of the sentences that are not done: ``tokens`` [sentences, beam, length], ``scores`` [sentences,
    beam], log-probabilities, and the number of every sentence."""

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

    ``limits``: how many tokens the continuation of each row may have; one that has reached its limit must end, at the
    probability of EOS, so the model reads BOS and that many tokens. A row's continuation does not depend on the others.
    The cache is reordered at most once a token, and not at all where every hypothesis goes on from its own place.

    Errors: ``KinformerError`` for predictions that are not finite.
    """
    if not 1 <= search.beam < model.vocab_size:
        raise KinformerError(
            f"a beam of {search.beam} must be 1 or more, and fewer than the {plural(model.vocab_size, 'id')}."
        )
    device = next(states.tensors(state)).device
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
    size = states.nbytes(state)
    state, width = states.reserve(states.repeat_rows(state, search.beam, sources=False), max(limits)), 1
    while True:
        logits, before = model.logits(inputs)[:, -1].float().cpu(), running.sentences
        running, origin = _continued(running, logits, search, width, hypotheses, limits)
        if not len(running.sentences):
            return BeamResult([max(item, key=lambda hypothesis: hypothesis.score) for item in hypotheses], size)
        some_end = len(running.sentences) < len(before)
        if width == search.beam and not torch.equal(origin, torch.arange(len(logits))):
            state = states.select_rows(state, origin, sources=False)
        elif width != search.beam and some_end:
            fresh_rows = (running.sentences[:, None] * search.beam + torch.arange(search.beam)).flatten()
            state = states.select_rows(state, fresh_rows, sources=False)
        if some_end:
            state = states.select_sources(state, torch.searchsorted(before, running.sentences))
        width = search.beam
        inputs, state = model.head_inputs(running.tokens[:, :, -1].reshape(-1, 1).to(device), state)
        size = max(size, states.nbytes(state))


def _continued(
    running: _Running,
    logits: Tensor,
    search: Search,
    width: int,
    hypotheses: list[list[Hypothesis]],
    limits: Sequence[int],
) -> tuple[_Running, Tensor]:
    """Return the hypotheses one token longer, of the sentences that are not done, and the row of ``logits`` of each;
    finished ones are added to ``hypotheses``. ``width``: how many a sentence has now."""
    count, vocab = len(running.sentences), logits.shape[-1]
    odds = log_softmax(logits, -1)
    require_finite(bool(odds.amin().isfinite()))  # what is no number spreads to the whole row
    if search.bos != search.eos:
        odds[:, search.bos] = -torch.inf
    full = torch.tensor([running.length >= limits[int(sentence)] for sentence in running.sentences])
    others = torch.arange(vocab) != search.eos
    # A hypothesis of the greatest length must end: all but EOS is impossible.
    odds.view(count, width, vocab).masked_fill_(full[:, None, None] & others, -torch.inf)
    total = (running.scores[:, :, None] + odds.view(count, width, vocab)).flatten(1)
    # Twice the beam: as many as ``beam`` of the best may end, and ``beam`` others must go on.
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
    """Return whether a sentence has its translation."""
    sentence = int(running.sentences[row])
    finished, limit, best = hypotheses[sentence], limits[sentence], float(running.scores[row, 0])
    if running.length > limit or len(finished) >= search.beam:
        return True
    # The running hypotheses can only lose probability; at best they do so at the largest penalty.
    return bool(finished) and max(item.score for item in finished) >= best / _penalty(limit + 1, search)


def _penalty(length: int, search: Search) -> float:
    return ((5 + length) / 6) ** search.length_penalty
