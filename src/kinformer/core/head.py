"""The interfaces of heads beside logits: a product with a table, a distribution of values, a search in a store."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from kinformer.core.input import Input


class VocabularyShare(Protocol):
    """The tokens of a vocabulary that one process has the logits of."""

    def nats(self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of ``targets`` [rows] for x [rows, dim], a scalar, in all processes."""
        ...


class OutputProduct(nn.Module):
    """A head whose logits are x W^T + b. ``vocabulary_part``: where processes share the vocabulary, which tokens W has
    (``training.vocabulary``)."""

    vocabulary_part: VocabularyShare | None = None

    def product(self, input: Input) -> tuple[Tensor, Tensor | None] | None:
        """Return W [vocab, dim] and b [vocab] or None; ``input`` is the model's, whose table may be W. Return None
        where an adapter adds to the product, so that the head must be called."""
        raise NotImplementedError


class Likelihood(nn.Module):
    """A head that predicts ordered values by a distribution: its logits [batch, time, parameters] are the parameters.

    ``draws``: how many uniform numbers it takes to draw one position.
    """

    draws: int

    def nats(self, logits: Tensor, values: Tensor) -> Tensor:
        """Return -ln p(values), float32 at least: [...] of ``logits`` [..., parameters] and ``values`` int64 [...], or
        [..., channels] where a position holds several, which are then scored together."""
        raise NotImplementedError

    def draw(self, logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
        """Draw values int64 like those of :meth:`nats`, by ``uniform`` [..., draws] from [0, 1); ``temperature`` 1
        draws as the head predicts, 0 takes the most probable value, or one near it."""
        raise NotImplementedError


class NeedsStore:
    """Mixin of the config of a head that searches a datastore while it is trained, such as SPALM.

    Its ``forward`` also takes ``neighbours`` [batch, time, k] int64, the tokens that followed the nearest entries of a
    datastore, -1 where there is none, or None without a datastore. ``datastore`` supplies them, in training too.
    """


class Neighbours(NamedTuple):
    """The entries of a store nearest to each of n queries, nearest first; k is at most the number that was requested.

    ``distances`` [n, k] float32, squared L2; ``tokens`` [n, k] int64, the token that followed; ``entries`` [n, k]
    int64, numbers in the store. Where a query has fewer than k neighbours, the last ones are (infinity, 0, -1).
    """

    distances: Tensor
    tokens: Tensor
    entries: Tensor


class Searcher(Protocol):
    """A store of (key, next token) entries that a head searches.

    A store outlives every sequence: it is a read-only attachment of a head, never part of a state. ``bytes_read``
    counts the bytes that all searches so far have read from its files.
    """

    @property
    def bytes_read(self) -> int: ...

    @property
    def entries(self) -> int:
        """Return how many entries a search may return."""
        ...

    def search(self, queries: Tensor, neighbours: int) -> Neighbours:
        """Return the nearest entries of ``queries`` [n, dim], on their device."""
        ...
