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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

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
