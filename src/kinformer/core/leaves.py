"""The leaves of a state by name and in order, as a graph without Python takes and returns them.

Leaves that grow keep an open axis of past slots. Those of a window are full from the start: slots are right-aligned,
and those before a sequence's first token are as invalid as those that a shorter sequence has in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinformer.core.state import State, map_tensors
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.core.model import CausalModel

BATCH, PAST = "batch", "past"
"""The open axes of a leaf: the sequences, and the tokens that they have absorbed."""
_SLOTS = 2


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state: its ``name`` is the path to it, ``shape`` has the names of open axes. A new sequence begins
    with zeros and no past slots."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def grows(self) -> bool:
        """Return whether the leaf gains a slot with every token."""
        return PAST in self.shape

    @property
    def facts(self) -> dict[str, object]:
        """Return the leaf as data that JSON can hold."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    def zeros(self, batch: int, past: int = 0) -> Tensor:
        """Return the leaf of ``batch`` new sequences, with ``past`` slots where it grows."""
        sizes = {BATCH: batch, PAST: past}
        shape = [size if isinstance(size, int) else sizes[size] for size in self.shape]
        return torch.zeros(shape, dtype=getattr(torch, self.dtype))

    def accepts(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` has the dtype and all sizes but the open ones."""
        sizes = zip(tensor.shape, self.shape, strict=False)
        fits = all(isinstance(expected, str) or size == expected for size, expected in sizes)
        return fits and tensor.dim() == len(self.shape) and str(tensor.dtype) == f"torch.{self.dtype}"

    def filled(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in memory of its own, with zeros before its slots where a window has more."""
        slots = self.shape[_SLOTS] if tensor.dim() == len(self.shape) > _SLOTS else PAST
        if isinstance(slots, int) and (missing := slots - tensor.shape[_SLOTS]) > 0:
            before = tensor.new_zeros(*tensor.shape[:_SLOTS], missing, *tensor.shape[_SLOTS + 1 :])
            return torch.cat([before, tensor], dim=_SLOTS)
        return tensor.clone(memory_format=torch.contiguous_format)


def named_leaves(state: State, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state with the paths to them, as in ``layers.0.0.k``, in order."""
    if isinstance(state, Tensor):
        yield ".".join(path), state
        return
    names = getattr(state, "_fields", None) or map(str, range(len(state)))
    for name, item in zip(names, state, strict=True):
        yield from named_leaves(item, (*path, name))


def unflattened(like: State, leaves: Sequence[Tensor]) -> State:
    """Return the state of the structure of ``like`` that has these leaves."""
    rest = iter(leaves)
    return map_tensors(lambda _: next(rest), like)


def leaves_of(model: CausalModel) -> list[Leaf]:
    """Return the leaves of the states of ``model``, a causal model of tokens, with windows that are full.

    Errors: ``KinformerError`` for a leaf that does not begin with zeros, or grows other than by slots.
    """
    retained = [size for module in model.modules() if isinstance(size := getattr(module, "retained", None), int)]
    length = max(retained, default=0) + 3
    if model.max_length is not None:
        length = max(1, min(length, model.max_length - 1))
    initial = dict(named_leaves(model.initial_state(1)))
    with torch.no_grad():
        states = [model(torch.zeros(1, time, dtype=torch.int64))[1] for time in (length, length + 1)]
    now, then = (dict(named_leaves(state)) for state in states)
    return [_leaf(name, initial[name], now[name], then[name]) for name in initial]


def _leaf(name: str, first: Tensor, now: Tensor, then: Tensor) -> Leaf:
    """Return the leaf that is ``first`` at the start, ``now`` behind some tokens, and ``then`` behind one more."""
    if bool(first.any()):
        raise KinformerError(f"the state's {name} does not begin with zeros, as the leaves of a graph do.")
    shape: list[int | str] = [BATCH, *now.shape[1:]]
    for axis, (size, next_size) in enumerate(zip(now.shape, then.shape, strict=True)):
        if size != next_size:
            shape[axis] = PAST
    sizes: Mapping[int, int] = dict(enumerate(first.shape))
    irregular = [axis for axis, size in enumerate(now.shape) if size != sizes.get(axis) and axis != _SLOTS]
    if irregular or PAST in shape[:_SLOTS] + shape[_SLOTS + 1 :]:
        raise KinformerError(f"the state's {name} grows other than by a slot for every token.")
    return Leaf(name, str(first.dtype).removeprefix("torch."), tuple(shape))
