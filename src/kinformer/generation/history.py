"""The recent text of a session and states within it, to which the session can go back.

A mark holds a state and the text since. Going back takes the state of a mark, which costs nothing (values never change,
reserved parts are reclaimed), and leaves the rest of the text to be absorbed with whatever comes next, as one chunk. By
partition invariance that is as if what was taken back had never been there, whatever the mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.state import State
from kinformer.generation.sampling import Noted
from kinformer.generation.stops import Watched

HeadInputs = Tensor | tuple[Tensor, ...]
"""What ``CausalModel.head_inputs`` returns: a tensor or a NamedTuple of tensors [batch, time, ...]."""

Snapshot = tuple[Noted, Watched]
"""What the sampler and the stops of a session know of its text."""

_APART = 32
"""Tokens between the marks of a session that steps: stepping on from a mark takes the time of about one step."""


@dataclass
class Entry:
    """Some of the text: ``tokens`` [batch, time] of which ``valid`` [batch, time] count (None: all), ``counts`` of each
    row, and what sampler and stops knew ``before`` it (None in a session that cannot go back)."""

    tokens: Tensor
    valid: Tensor | None
    counts: list[int]
    before: Snapshot | None

    def split(self, counts: Sequence[int]) -> tuple[Entry, Entry]:
        """Return the entry without the last ``counts`` tokens of each row, and these."""
        left = [count - last for count, last in zip(self.counts, counts, strict=True)]
        if self.valid is None and len(set(left)) == 1:
            cut = left[0]
            return (
                replace(self, tokens=self.tokens[:, :cut], counts=left),
                replace(self, tokens=self.tokens[:, cut:], counts=list(counts)),
            )
        valid = torch.ones_like(self.tokens, dtype=torch.bool) if self.valid is None else self.valid
        first = valid.cumsum(dim=1) <= torch.tensor(left, device=valid.device)[:, None]
        return replace(self, valid=valid & first, counts=left), replace(self, valid=valid & ~first, counts=list(counts))

    def fork(self, copies: int) -> Entry:
        """Return the entry with each row ``copies`` times."""
        return Entry(*(repeated(item, copies) for item in (self.tokens, self.valid, self.counts, self.before)))


def repeated(item: Any, copies: int) -> Any:
    """Return a tensor, a list with an item per row, or a tuple of these or None, with each row ``copies`` times."""
    if isinstance(item, Tensor):
        return item.repeat_interleave(copies, dim=0)
    if isinstance(item, list):
        return [row for row in item for _ in range(copies)]
    if item is None:
        return None
    return states.rebuilt(item, [repeated(part, copies) for part in item])


def joined(entries: Sequence[Entry]) -> tuple[Tensor, Tensor | None]:
    """Return the tokens [batch, time] of all entries, and which of them count, None for all."""
    if len(entries) == 1:
        return entries[0].tokens, entries[0].valid
    tokens = torch.cat([entry.tokens for entry in entries], dim=1)
    if all(entry.valid is None for entry in entries):
        return tokens, None
    valid = [torch.ones_like(e.tokens, dtype=torch.bool) if e.valid is None else e.valid for e in entries]
    return tokens, torch.cat(valid, dim=1)


@dataclass
class Mark:
    """A ``state`` (None: of new sequences), the ``logits`` and head inputs (``ends``) behind it, and the ``entries``
    that follow."""

    state: State
    logits: Tensor | None
    ends: HeadInputs | None
    entries: list[Entry]

    def fork(self, copies: int) -> Mark:
        """Return the mark with each row ``copies`` times."""
        state = None if self.state is None else states.repeat_rows(states.reclaimed(self.state), copies)
        entries = [entry.fork(copies) for entry in self.entries]
        return Mark(state, repeated(self.logits, copies), repeated(self.ends, copies), entries)


class History:
    """The marks of a session that can go back by up to ``bound`` tokens of each row; the oldest is that far back."""

    def __init__(self, bound: int, batch: int) -> None:
        self.bound, self.batch = bound, batch
        self.marks: list[Mark] = []

    @property
    def rewindable(self) -> list[int]:
        """Return how many tokens each row can go back."""
        return [min(self.bound, count) for count in self._since(self.marks[0])] if self.marks else [0] * self.batch

    def is_due(self, pending: Sequence[Entry]) -> bool:
        """Return whether a mark is to be made before ``pending`` is absorbed."""
        if not self.marks:
            return True
        absorbed = min(self._since(self.marks[-1])) - sum(min(entry.counts) for entry in pending)
        return absorbed >= max(self.bound, _APART)

    def mark(self, state: State, logits: Tensor | None, ends: HeadInputs | None, pending: Sequence[Entry]) -> None:
        """Make a mark at ``state``, which has not absorbed ``pending`` yet."""
        self.marks.append(Mark(state, logits, ends, list(pending)))
        self._forget()

    def note(self, entry: Entry) -> None:
        """Note text that follows what was there."""
        for mark in self.marks:
            mark.entries.append(entry)
        self._forget()

    def drop(self, counts: Sequence[int]) -> list[Entry]:
        """Drop the last ``counts`` tokens of each row, and the marks within them; return what is dropped, the last
        first."""
        while any(map(int.__lt__, self._since(self.marks[-1]), counts)):
            self.marks.pop()
        retained: list[Entry] = []
        dropped: list[Entry] = []
        left = list(counts)
        for entry in reversed(self.marks[-1].entries):
            gone = [min(pair) for pair in zip(left, entry.counts, strict=True)]
            left = [rest - count for rest, count in zip(left, gone, strict=True)]
            dropped.append(replace(entry, counts=gone))
            retained.insert(0, entry.split(gone)[0] if any(gone) else entry)
        retained = [entry for entry in retained if any(entry.counts)]
        for mark in self.marks:
            mark.entries[len(mark.entries) - len(dropped) :] = retained
        return dropped

    def fork(self, copies: int) -> History:
        """Return the history with each row ``copies`` times; the session's state must be reclaimed afterwards."""
        forked = History(self.bound, self.batch * copies)
        forked.marks = [mark.fork(copies) for mark in self.marks]
        return forked

    def _since(self, mark: Mark) -> list[int]:
        """Return how many tokens of each row follow ``mark``."""
        return list(map(sum, zip([0] * self.batch, *(entry.counts for entry in mark.entries), strict=True)))

    def _forget(self) -> None:
        """Forget marks that lie further back than any rewinding."""
        while len(self.marks) > 1 and min(self._since(self.marks[1])) >= self.bound:
            del self.marks[0]
