"""States that are carried from step to step: one per accumulated part of each process, stored in checkpoints by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from kinformer.core.state import State
    from kinformer.training.distributed import Group


class Carried:
    """The states of this process's ``parts`` accumulated parts; None before the first step.

    In a checkpoint they are the leaves of all parts of all processes, in the order of the global batch's rows, so that
    they can be dealt out to another number of processes or parts.
    """

    def __init__(self, parts: int) -> None:
        self.states: list[Any] = [None] * parts

    def clear(self) -> None:
        """Reset all parts to the initial state."""
        self.states = [None] * len(self.states)

    def put(self, part: int, state: State) -> None:
        """Store ``state`` for the next step, cut from its graph."""
        self.states[part] = states.detach(state)

    def tensors(self, group: Group) -> dict[str, Tensor]:
        """Return every leaf of every part on the first process, called ``"part.leaf"``; all processes take part."""
        if self.states[0] is None:
            return {}
        leaves_here = [leaf for state in self.states for leaf in states.tensors(state)]
        everyone = group.collect(leaves_here)
        per_part = len(leaves_here) // len(self.states)
        flat = [leaf for leaves in everyone for leaf in leaves]
        return {f"{i // per_part:04d}.{i % per_part:04d}": leaf.clone() for i, leaf in enumerate(flat)}

    def load(self, tensors: Mapping[str, Tensor], template: Any, group: Group) -> None:
        """Restore this process's share of the tensors of :meth:`tensors`. ``template`` is any state of the model."""
        if not tensors:
            return
        rows: dict[str, list[Tensor]] = {}
        for name in sorted(tensors):
            rows.setdefault(name.split(".")[0], []).append(tensors[name])
        all_states = [rebuilt(template, leaves) for leaves in rows.values()]
        wanted = group.world * len(self.states)
        if len(all_states) != wanted:
            all_states = _deal(states.join_rows(all_states), wanted)
        rank_states = all_states[group.rank * len(self.states) : (group.rank + 1) * len(self.states)]
        # Copied, since how a tensor from a file is aligned in memory may decide how a sum of it is rounded.
        self.states = [states.fork(states.to(state, device=group.device)) for state in rank_states]


def rebuilt(template: Any, leaves: list[Tensor]) -> State:
    """Return a state of ``leaves`` in the order of ``core.state.tensors``, structured as the ``template``."""
    if len(leaves) != len(list(states.tensors(template))):
        raise KinformerError(
            f"the checkpoint's carried state has {plural(len(leaves), 'tensor')} but this model's has "
            f"{len(list(states.tensors(template)))}; resume with the model that wrote it."
        )
    source: Iterator[Tensor] = iter(leaves)
    return states.map_tensors(lambda _: next(source), template)


def _deal(state: State, parts: int) -> list[Any]:
    total = next(states.tensors(state)).shape[0]
    return [states.select_rows(state, rows) for rows in torch.arange(total).chunk(parts)]
