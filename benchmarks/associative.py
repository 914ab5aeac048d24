"""Associative retrieval (Schlag, Irie and Schmidhuber 2021, section 6.1): the value that was stored under a key.

Every step of a sequence is one pair of a key and a value, each out of ``num_keys`` symbols; then some keys are
queried.

    replace=False: every key once, so the memory must hold ``num_keys`` pairs        (how much fits in?)

        step      0    1    2    3      query
        key       2    0    3    1        3
        value     1    3    0    2        0 = target, the value that came with key 3

    replace=True: twice as many steps, keys come again with other values             (can it be updated?)

        step      0    1    2    3    4    5      query
        key       2    0    2    1    0    2        2
        value     1    1    0    2    2    2        2 = target, the last value of key 2 (1 and 0 are old)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError


class Retrieval(NamedTuple):
    """The examples: ``keys``, ``values`` [rows, writes], ``queries``, ``targets`` [rows, num_queries]: int64 from 0 to
    num_keys - 1."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    targets: Tensor


class AssociativeRetrieval:
    """An endless stream of examples from one generator: the same ``seed`` gives the same examples.

    Without ``replace`` keys and values are permutations; with it both are drawn independently. A query is the key of a
    uniformly drawn step, so every query has an answer, and a key that was written often is queried often.
    """

    def __init__(self, num_keys: int, replace: bool = False, seed: int = 0) -> None:
        if num_keys < 1:
            raise KinformerError(f"associative retrieval: num_keys is {num_keys}, expected 1 or more.")
        self.num_keys, self.replace = num_keys, replace
        self.writes = 2 * num_keys if replace else num_keys
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows: int, num_queries: int = 1) -> Retrieval:
        """Return ``rows`` sequences, each with ``num_queries`` queries."""
        keys, values = self._symbols(rows), self._symbols(rows)
        steps = torch.randint(self.writes, (rows, num_queries), generator=self.generator)
        queries = keys.gather(1, steps)
        return Retrieval(keys, values, queries, values.gather(1, last_write(keys, queries)))

    def _symbols(self, rows: int) -> Tensor:
        if self.replace:
            return torch.randint(self.num_keys, (rows, self.writes), generator=self.generator)
        return torch.rand(rows, self.num_keys, generator=self.generator).argsort(dim=1)


def last_write(keys: Tensor, queries: Tensor) -> Tensor:
    """Return the last step [rows, num_queries] at which each of ``queries`` stands in ``keys`` [rows, writes]."""
    step = torch.arange(keys.shape[1], device=keys.device)
    return torch.where(keys[:, None] == queries[..., None], step, -1).amax(dim=-1)
