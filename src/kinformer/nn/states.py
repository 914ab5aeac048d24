"""Functions on the state of any layer: a ``NamedTuple`` of tensors, batch first.

state = states.to(state, "cuda")                        # another device, or another dtype
state = states.select_rows(state, torch.tensor([2, 0]))
state = states.repeat_rows(state, 4)                    # several continuations of one prompt
state = states.reserve(state, 1000)                     # room to write the next 1,000 tokens in place
states.save(state, "state.safetensors")
state = states.load("state.safetensors", layer.initial_state(1))
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from kinformer.core.state import (
    State,
    detach,
    difference,
    fork,
    form,
    join_rows,
    map_tensors,
    nbytes,
    repeat_rows,
    reserve,
    select_rows,
    tensors,
    to,
    value,
)
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.files import load_tensors, save_tensors

__all__ = [
    "detach",
    "difference",
    "fork",
    "join_rows",
    "load",
    "map_tensors",
    "nbytes",
    "repeat_rows",
    "reserve",
    "save",
    "select_rows",
    "tensors",
    "to",
    "value",
]


def save(state: State, path: str | Path) -> None:
    """Write the values of ``state`` to a safetensors file, atomically."""
    leaves = tensors(value(state))
    save_tensors(Path(path), {f"{number:04d}": leaf.clone() for number, leaf in enumerate(leaves)})


def load(path: str | Path, like: State) -> State:
    """Return the state that :func:`save` wrote to ``path``, on the device of ``like``.

    like: a state of the same layer, such as ``layer.initial_state(1)``; it may have other rows.

    Errors: ``KinformerError`` for a damaged file and for the state of another layer.
    """
    stored = load_tensors(Path(path))[0]
    leaves = iter([stored[name] for name in sorted(stored)])

    def take(leaf: Tensor) -> Tensor:
        return next(leaves).to(leaf.device)

    refusal = KinformerError(
        f"{path}: holds the state of another layer; give `like`, an initial state of the layer that it was saved of."
    )
    like = value(like)
    if len(stored) != sum(1 for _ in tensors(like)):
        raise refusal
    state = map_tensors(take, like)
    if form(state) != form(like):
        raise refusal
    return state
