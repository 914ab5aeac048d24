"""How probable symbols are after one another by a causal language model, for prefixes of a beam, stepped in batch.

A symbol is one token or several. The model reads ``begin``, then the tokens of the symbols; a whole text ends with
``end``. Every prefix is absorbed once: its state is that of the prefix without its last symbol, continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.model import CausalModel, device_of
from kinformer.core.state import State
from kinformer.runtime.matmul import few_rows

Prefix = tuple[int, ...]


class Texts(NamedTuple):
    """The tokens of symbols: ``first`` of each where a text begins, ``later`` of each after another; ``begin`` and
    ``end`` of a text."""

    first: Sequence[Sequence[int]]
    later: Sequence[Sequence[int]]
    begin: Sequence[int]
    end: Sequence[int]


class _Entry(NamedTuple):
    """A prefix: its ``state``, of one row; the ``total`` log-probability of its symbols; the log-probabilities of every
    symbol ``after`` it, and of the end of the text last."""

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
        """Return log p of the symbols of ``prefix``, which was read or extends one that was by one symbol."""
        if prefix in self._entries:
            return self._entries[prefix].total
        parent = self._entries[prefix[:-1]]
        return parent.total + parent.after[prefix[-1] - 1]

    def end(self, prefix: Prefix) -> float:
        """Return the log-probability that the text ends after ``prefix``, which was read."""
        return self._entries[prefix].after[-1]

    def read(self, prefixes: Iterable[Prefix]) -> None:
        """Read ``prefixes``, each of which was read before or extends one that was by one symbol, and forget all
        others but the empty one."""
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
            logits, state = self._absorb(states.join_rows(before), tokens)
            last = torch.tensor([len(item) - 1 for item in tokens], device=self.device)
            following = logits[torch.arange(len(tokens), device=self.device), last]
            after = self._after(following, state, later=prefixes != [()])
        for number, (prefix, total) in enumerate(zip(prefixes, totals, strict=True)):
            row = states.select_rows(state, torch.tensor([number], device=self.device))
            self._entries[prefix] = _Entry(row, total, after[number])

    def _absorb(self, state: State, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """Return log-probabilities [rows, time, vocab] and the state after ``tokens``, as many as each row has."""
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
            logits, _ = self._absorb(states.repeat_rows(state, len(long)), [item[:-1] for item in tokens] * rows)
            scores = logits.unflatten(0, (rows, len(long)))
            for place, (number, item) in enumerate(zip(long, tokens, strict=True)):
                rest = torch.tensor(item[1:], device=self.device)
                result[:, number] += scores[:, place, torch.arange(len(rest), device=self.device), rest].sum(-1)
        return result.tolist()
