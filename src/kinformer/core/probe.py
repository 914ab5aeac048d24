"""Probes: points where a mixer shows its values to an observer, which traces or draws them.

    v = probe("values", v)       # of tokens, [batch, heads, keys, width]
    probe("outputs", y)          # of the heads, before their norm, gate and output projection

``probe`` returns its value unless ``probing`` names the same point. An observer may return another value, and the mixer
computes with that. The heads' outputs are linear in the values, so columns of an identity in place of the values make
the mixer's own kernels return its attention weights, also where no kernel forms them.

The library shows these points:

    values     as above; ``keys``: the "text", the "source" or "summaries"; ``implied``: the meaning of weights other
               than probabilities; ``lacking``: a sentence about the share of the weights that belongs to no token
    outputs    [batch, heads, queries, width], or merged [batch, queries, heads * width]
    buckets    int64 [batch, heads, rounds, tokens]: the bucket or cluster of each token
    choices    int64 [batch, choosers, queries, n]: the blocks of ``block`` keys that each query chose, -1 for none
    experts    int64 [..., n] of ``count`` experts, with their ``weights`` [..., n]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

KERNEL = "implied by kernel attention, which computes no probabilities: what each value adds to the output"
"""``implied`` of every kernel attention."""

Observer = Callable[..., Tensor]
"""``observer(value, at, **facts)`` returns the value that the mixer continues with."""
_observers: dict[str, Observer] = {}
_thread = 0


class NoWeights(Exception):  # noqa: N818 (a finding, not a failure)
    """A mixer does not have attention weights; the message is a sentence with the reason."""


@contextmanager
def probing(**observers: Observer) -> Iterator[None]:
    """Call ``observers`` by the name of a point whenever a module that runs in this thread shows a value there."""
    global _observers, _thread
    before = _observers, _thread
    _observers, _thread = observers, get_ident()
    try:
        yield
    finally:
        _observers, _thread = before


def probed(name: str) -> bool:
    """Return whether somebody observes the point ``name``; False inside a compiled graph."""
    return bool(_observers) and not torch.compiler.is_compiling() and get_ident() == _thread and name in _observers


def probe(name: str, value: Tensor, at: int = 0, **facts: Any) -> Tensor:
    """Show ``value`` at the point ``name``, and return the value to continue with.

    at: the index of the value's first token among the mixer's tokens, for a mixer that works piece by piece.
    """
    return _observers[name](value, at, **facts) if _observers and probed(name) else value


def no_weights(reason: str) -> None:
    """Raise :class:`NoWeights` with the ``reason``, a sentence for users, where the point "values" is observed."""
    if _observers and probed("values"):
        raise NoWeights(reason)


# The weights of a mixer, read from its outputs. The outputs of a head are linear in the values: y_i = sum_j w_ij v_j,
# plus a part that does not depend on the values. If columns of an identity matrix replace the values of a block of
# tokens, the mixer's own kernels return the columns w_ij of these tokens. This holds for every mechanism.

Keys = Literal["text", "source", "summaries"]


class Weights(NamedTuple):
    """The weights of one call of a mixer, in float32 or better: outputs = weights @ values + constant.

    weights: [heads, queries, keys]; values: [heads, keys, width]; outputs: [heads, queries, width].
    constant: the part of the outputs that does not depend on the values, [heads, queries, width]. It is 0 except for
        values by distance and compressed memories.
    buckets: int64 [heads, rounds, tokens], or None. If only some heads have buckets, these are the last heads.
    keys, implied, lacking: the facts that the mixer gives at the point "values".
    """

    weights: Tensor
    values: Tensor
    outputs: Tensor
    constant: Tensor
    buckets: Tensor | None
    keys: Keys
    implied: str
    lacking: str


def weights_of(mixer: nn.Module, inputs: Sequence[object]) -> Weights:
    """Return the weights of the call ``mixer(*inputs)`` with one sequence, as :func:`weights_of_rows`."""
    rows = weights_of_rows(mixer, inputs)
    return Weights(*(part[0] if isinstance(part, Tensor) else part for part in rows))  # type: ignore[arg-type]


@torch.no_grad()
def weights_of_rows(mixer: nn.Module, inputs: Sequence[object]) -> Weights:
    """Return the weights of the call ``mixer(*inputs)``, whose tensors have the batch as a further first axis. One
    further call gives as many columns as values are wide.

    inputs: a chunk and a state without a past or, of an encoder, x and its context. A mask of outputs behind them is
    left out, so that all outputs are read.

    Errors: ``NoWeights``, with the reason, where the mixer has none.
    """
    observers, inputs = _Observers(), inputs[:2]
    outputs = observers.call(mixer, inputs)
    values = torch.cat([part for _, part in sorted(observers.values.items())], 2)
    buckets = observers.buckets[0].cpu() if observers.buckets else None
    # With zeros as values, the outputs are the part that does not depend on the values.
    observers.first = -1
    constant = observers.call(mixer, inputs)
    columns = []
    for observers.first in range(0, values.shape[2], values.shape[3]):
        column = observers.call(mixer, inputs) - constant
        columns.append(column[..., : values.shape[2] - observers.first])
    weights = torch.cat(columns, -1)
    values = values.to(outputs.dtype).repeat_interleave(weights.shape[1] // values.shape[1], 1)
    facts: dict[str, Any] = {"keys": "text", "implied": "", "lacking": ""} | observers.facts
    return Weights(weights, values, outputs, constant, buckets, **facts)


class _Observers:
    """Observers of one mixer, which can replace its values.

    ``first`` None keeps the values, and -1 replaces them by zeros. Any other number replaces them by columns of the
    identity matrix, for the tokens from ``first`` on.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.values: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.buckets: list[Tensor] = []
        self.facts: dict[str, str] = {}

    def call(self, mixer: nn.Module, inputs: Sequence[object]) -> Tensor:
        """Return the heads' outputs [batch, heads, time, width] of a call."""
        self.outputs.clear()
        with probing(values=self._values, outputs=self._outputs, buckets=self._buckets):
            mixer(*inputs)
        if not self.values or not self.outputs:
            raise NoWeights(
                f"{type(mixer).__name__} does not show its values and outputs, from which weights are read "
                "(core/probe.py says how)."
            )
        width = next(iter(self.values.values())).shape[3]
        parts = [y for _, y in sorted(self.outputs.items())]
        parts = [y if y.dim() == 4 else y.unflatten(-1, (-1, width)).transpose(1, 2) for y in parts]
        return torch.cat([y.float() if y.dtype.itemsize < 4 else y for y in parts], 2)

    def _values(self, v: Tensor, at: int, **facts: str) -> Tensor:
        if self.first is None:
            self.values.setdefault(at, v)
            self.facts = facts
            return v
        columns = torch.zeros_like(v)
        if self.first >= 0:
            low = max(self.first, at)
            high = max(low, min(self.first + v.shape[3], at + v.shape[2]))
            index = torch.arange(low, high, device=v.device)
            columns[:, :, index - at, index - self.first] = 1
        return columns

    def _outputs(self, y: Tensor, at: int) -> Tensor:
        self.outputs[at] = y
        return y

    def _buckets(self, buckets: Tensor, at: int) -> Tensor:
        self.buckets.append(buckets)
        return buckets
