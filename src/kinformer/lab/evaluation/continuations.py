"""The log-likelihoods of continuations after their contexts. A shared beginning is absorbed once, and its state is
forked.

    log-likelihood = sum over the continuation of ln p(token | context, the continuation so far)

The choices of a question share its context, and questions share the examples before them. Contexts are therefore
visited as a tree. The model absorbs a shared beginning once, and its state is repeated for the contexts that begin so.
The state after a context is repeated for its continuations. Partition invariance makes this exact for any member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import isnan
from os.path import commonprefix
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State, join_rows, map_tensors, nbytes, repeat_rows, select_rows
from kinformer.lab.evaluation.bits import CHUNK, logits_in_parts
from kinformer.runtime.errors import KinformerError, plural, require_finite
from kinformer.runtime.process import FEW, few_rows

SHARED = 32
"""The fewest tokens of a shared beginning to absorb once; a shorter beginning costs less in each row."""
_FORKED_BYTES = 1 << 30
"""The most bytes of states that continuations hold at a time, for at least one row."""

Ids = tuple[int, ...]
HeadInputs = Tensor | tuple[Tensor, ...]
"""What ``CausalModel.head_inputs`` returns: a tensor or a NamedTuple of tensors."""
T = TypeVar("T")


class Continuation(NamedTuple):
    """The ids ``tokens`` after the ids ``context``; a context has at least one id."""

    context: Ids
    tokens: Ids


class Score(NamedTuple):
    """The log-likelihood of a continuation in nats, and whether all its tokens are the most probable ones."""

    log_likelihood: float
    greedy: bool


class _Row(NamedTuple):
    """A row to absorb: ``inputs``, whose last tokens predict ``targets``."""

    inputs: Ids
    targets: Ids


class _Absorbed(NamedTuple):
    """The scores of rows, the head's inputs after the last token of each row, leaves [rows, 1, ...], and the state."""

    scores: list[Score]
    last: HeadInputs
    state: State


class ContinuationScorer:
    """A scorer of continuations by ``model`` (in eval mode).
    ``length`` is how many tokens the model reads at most, None for any number; of a longer context it reads the end. At
    most ``chunk`` tokens are computed at a time, and at most ``rows`` contexts (None: any number)."""

    def __init__(
        self, model: CausalModel, length: int | None = None, *, chunk: int = CHUNK, rows: int | None = None
    ) -> None:
        self.model, self.length, self.chunk, self.rows = model, length, chunk, rows
        self.absorbed = 0
        """The tokens that the model has read so far, padding not counted."""

    def scores(self, continuations: Sequence[Continuation]) -> Iterator[tuple[int, Score]]:
        """Yield the number of each of ``continuations`` and its score, in the order in which they are computed."""
        by_context: dict[Ids, list[tuple[int, Ids]]] = defaultdict(list)
        for number, (context, tokens) in enumerate(continuations):
            if not tokens:
                yield number, Score(0.0, True)
            else:
                by_context[self._cut(context, tokens)].append((number, tokens))
        with torch.inference_mode():
            yield from self._visit(by_context, list(by_context), 0, None)

    def _cut(self, context: Ids, tokens: Ids) -> Ids:
        """Return the end of ``context`` that the model reads before ``tokens``; it never reads their last token."""
        if self.length is None:
            return context
        if len(tokens) > self.length:
            raise KinformerError(
                f"a continuation has {plural(len(tokens), 'token')}, but the model reads {self.length} at most; give a "
                "larger `context`."
            )
        return context[-(self.length + 1 - len(tokens)) :]

    def _visit(
        self, members: dict[Ids, list[tuple[int, Ids]]], contexts: list[Ids], depth: int, state: State
    ) -> Iterator[tuple[int, Score]]:
        """Yield the scores behind ``contexts``, whose first ``depth`` tokens are the same and lead to ``state``."""
        branches: dict[Ids, list[Ids]] = defaultdict(list)
        for context in contexts:
            branches[context[depth : depth + SHARED] if len(context) > depth + SHARED else ()].append(context)
        alone = branches.pop((), [])
        for branch in branches.values():
            if len(branch) == 1:
                alone += branch
                continue
            stem = min(len(commonprefix(branch)), min(map(len, branch)) - 1)  # of any sequences, as of tuples of ids
            behind = self._absorb([_Row(branch[0][depth:stem], ())], state).state
            yield from self._visit(members, branch, stem, behind)
        single, forked = [], []
        for context in alone:
            rest = context[depth:]
            if len(members[context]) > 1 and len(rest) >= SHARED:
                forked.append((rest, members[context]))
            else:
                single += [(number, _Row((rest + tokens)[:-1], tokens)) for number, tokens in members[context]]
        yield from self._single(single, state)
        for batch in self._batches(forked, lambda item: len(item[0])):  # several continuations of each context
            absorbed = self._absorb([_Row(rest, ()) for rest, _ in batch], _repeated(state, len(batch)))
            tails = [(row, number, tokens) for row, (_, several) in enumerate(batch) for number, tokens in several]
            yield from self._tails(tails, absorbed)

    def _single(self, items: list[tuple[int, _Row]], state: State) -> Iterator[tuple[int, Score]]:
        """Yield the scores of rows that share nothing but ``state``, a state of one row."""
        for batch in self._batches(items, lambda item: len(item[1].inputs)):
            absorbed = self._absorb([row for _, row in batch], _repeated(state, len(batch)))
            yield from zip((number for number, _ in batch), absorbed.scores, strict=True)

    def _batches(self, items: list[T], length: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield batches of ``items`` to compute together, the longest items first."""
        items = sorted(items, key=length, reverse=True)
        start = 0
        while start < len(items):
            stop = start + min(max(1, self.chunk // length(items[start])), self.rows or self.chunk)
            yield items[start:stop]
            start = stop

    def _tails(self, tails: list[tuple[int, int, Ids]], behind: _Absorbed) -> Iterator[tuple[int, Score]]:
        """Yield the scores of continuations ``tails`` (row of ``behind``, number, tokens): ``behind`` predicts their
        first tokens, and copies of its state predict the other tokens."""
        tails.sort(key=lambda tail: len(tail[2]), reverse=True)
        rows = torch.tensor([row for row, _, _ in tails], device=device_of(self.model))
        targets = torch.tensor([tokens[:1] for _, _, tokens in tails], device=rows.device)
        nats, greedy = self._predicted(select_rows(behind.last, rows), targets)
        firsts = [Score(-loss, best) for loss, best in zip(nats.tolist(), greedy.tolist(), strict=True)]
        limit = max(1, _FORKED_BYTES * (int(rows.max()) + 1) // max(1, nbytes(behind.state)))
        start = 0
        while start < len(tails):
            longest = len(tails[start][2]) - 1
            stop = start + (min(max(1, self.chunk // longest), limit) if longest else len(tails))
            part, rest = tails[start:stop], [Score(0.0, True)] * len(tails[start:stop])
            if longest:
                forked = select_rows(behind.state, rows[start:stop])
                rest = self._absorb([_Row(tokens[:-1], tokens[1:]) for _, _, tokens in part], forked).scores
            for (_, number, _), before, after in zip(part, firsts[start:stop], rest, strict=True):
                yield number, Score(before.log_likelihood + after.log_likelihood, before.greedy and after.greedy)
            start = stop

    def _absorb(self, rows: list[_Row], state: State) -> _Absorbed:
        """Absorb ``rows`` after ``state``, some tokens of all rows at a time."""
        device, inputs, lengths = device_of(self.model), [row.inputs for row in rows], [len(row.inputs) for row in rows]
        longest, self.absorbed = max(lengths), self.absorbed + sum(lengths)
        tokens = torch.tensor([ids + (0,) * (longest - len(ids)) for ids in inputs]).to(device)
        ends = torch.tensor(lengths, device=device)[:, None]
        scored = torch.tensor([len(row.targets) for row in rows], device=device)[:, None]
        places = torch.arange(longest, device=device)
        valid, counted = places < ends, (places < ends) & (places >= ends - scored)
        targets = torch.zeros_like(tokens)
        targets[counted] = torch.tensor([token for row in rows for token in row.targets], device=device).long()
        nats, greedy = torch.zeros(len(rows), dtype=torch.float64, device=device), torch.ones_like(ends[:, 0]).bool()
        last, order = [], []
        step = max(1, self.chunk // len(rows))
        for start in range(0, longest, step):
            part = slice(start, start + step)
            with few_rows(device, tokens[:, part].numel() < FEW):
                read, state = self.model.head_inputs(
                    tokens[:, part], state, valid=None if bool(valid[:, part].all()) else valid[:, part]
                )
            row, column = counted[:, part].nonzero(as_tuple=True)
            if len(row):
                losses, best = self._predicted(_at(read, row, column), targets[:, part][row, column][:, None])
                nats.index_add_(0, row, losses)
                greedy[row[~best]] = False
            ending = ((ends[:, 0] > start) & (ends[:, 0] <= start + step)).nonzero()[:, 0]
            if len(ending):
                last.append(_at(read, ending, ends[ending, 0] - 1 - start))
                order.append(ending)
        total = nats.tolist()
        require_finite(not any(map(isnan, total)), f" behind {plural(longest, 'token')}")
        behind = select_rows(join_rows(last), torch.cat(order).argsort())
        return _Absorbed([Score(-loss, best) for loss, best in zip(total, greedy.tolist(), strict=True)], behind, state)

    def _predicted(self, inputs: object, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return -ln p [n] float64 of ``targets`` [n, 1] by the head's ``inputs``, leaves [n, 1, ...], and whether they
        are the most probable, [n]."""
        nats, greedy = [], []
        for logits, wanted in logits_in_parts(self.model, inputs, targets):
            nats.append(nn.functional.cross_entropy(logits, wanted, reduction="none").double())
            greedy.append(logits.argmax(dim=-1) == wanted)
        return torch.cat(nats), torch.cat(greedy)


def _at(inputs: HeadInputs, rows: Tensor, places: Tensor) -> HeadInputs:
    """Return the head's ``inputs`` at ``places`` [n] of ``rows`` [n], leaves [n, 1, ...]."""
    return map_tensors(lambda leaf: leaf[rows, places][:, None], inputs)


def _repeated(state: State, rows: int) -> State:
    """Return the ``state`` of one row repeated for ``rows`` rows; None stands for new sequences."""
    return None if state is None else repeat_rows(state, rows)
