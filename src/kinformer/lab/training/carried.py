"""States carried from step to step: one per accumulated part of each process, stored in checkpoints by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.runtime.errors import KinformerError, plural

if TYPE_CHECKING:
    from kinformer.core.state import State
    from kinformer.lab.training.distributed import Group


class Carried:
    """The states of this process's ``parts`` accumulated parts; None before the first step.

    A checkpoint holds the leaves of all parts of all processes, in the order of the global batch's rows, so that a run
    with another number of processes or parts can read them.
    """

    def __init__(self, parts: int) -> None:
        self.states: list[State] = [None] * parts
        self.cuts: list[int | None] = []

    def clear(self) -> None:
        """Reset all parts to the initial state."""
        self.states = [None] * len(self.states)

    def put(self, part: int, state: State) -> None:
        """Store ``state`` for the next step, cut from its graph."""
        self.states[part] = states.detach(state)

    def divide(self, whole: State, model: Any, group: Group) -> None:
        """Keep this process's heads of the carried states.

        ``whole`` is a state of the undivided model, ``model`` this process's part of the model. Leaves without heads
        are the same in all parts.
        """
        pairs = zip(states.tensors(whole), states.tensors(model.initial_state(1)), strict=True)
        for leaf, fewer in pairs:
            dims = [dim for dim, (a, b) in enumerate(zip(leaf.shape, fewer.shape, strict=True)) if a != b]
            self.cuts.append(dims[0] if dims else None)
        if any(getattr(module, "context", 0) and hasattr(module, "combine") for module in model.modules()):
            raise KinformerError(
                "`parallel` tp: the state of the projections 'convolved' and 'kv_shift' holds heads of queries, keys "
                "and values side by side, so it cannot be carried by heads; train without `segments`, or leave tp out."
            )
        part = group.rank % group.tensor
        for index, state in enumerate(self.states):
            if state is not None:
                order = iter(self.cuts)
                self.states[index] = states.map_tensors(lambda leaf: self._part(leaf, next(order), part, group), state)  # noqa: B023

    @staticmethod
    def _part(leaf: Tensor, dim: int | None, part: int, group: Group) -> Tensor:
        return leaf if dim is None else leaf.chunk(group.tensor, dim)[part].clone()

    def _joined(self, index: int, leaves: tuple[Tensor, ...]) -> Tensor:
        dim = self.cuts[index]
        return leaves[0] if dim is None else torch.cat(leaves, dim)

    def tensors(self, group: Group) -> dict[str, Tensor]:
        """Return every leaf of every part on the first process, called ``"part.leaf"``; all processes take part."""
        if self.states[0] is None:
            return {}
        leaves_here = [leaf for state in self.states for leaf in states.tensors(state)]
        everyone = group.collect(leaves_here)
        per_part = len(leaves_here) // len(self.states)
        if self.cuts:
            parts = [everyone[begin : begin + group.tensor] for begin in range(0, len(everyone), group.tensor)]
            everyone = [
                [self._joined(i % per_part, same) for i, same in enumerate(zip(*part, strict=True))] for part in parts
            ]
        # Processes that share the time of rows have the same states.
        flat = [leaf for leaves in everyone[:: group.context] for leaf in leaves]
        return {f"{i // per_part:04d}.{i % per_part:04d}": leaf.clone() for i, leaf in enumerate(flat)}

    def load(self, tensors: Mapping[str, Tensor], template: object, group: Group) -> None:
        """Restore this process's share of the tensors of :meth:`tensors`. ``template`` is any state of the model."""
        if not tensors:
            return
        rows: dict[str, list[Tensor]] = {}
        for name in sorted(tensors):
            rows.setdefault(name.split(".")[0], []).append(tensors[name])
        all_states = [rebuilt(template, leaves) for leaves in rows.values()]
        wanted = group.replicas * len(self.states)
        if len(all_states) != wanted:
            all_states = _deal(states.join_rows(all_states), wanted)
        rank_states = all_states[group.replica * len(self.states) : (group.replica + 1) * len(self.states)]
        # Copied: the alignment of a tensor in memory can change the rounding of its sums, and files align otherwise.
        self.states = [states.fork(states.to(state, device=group.device)) for state in rank_states]


def rebuilt(template: object, leaves: list[Tensor]) -> State:
    """Return a state of ``leaves`` in the order of ``core.state.tensors``, structured as the ``template``."""
    if len(leaves) != len(list(states.tensors(template))):
        raise KinformerError(
            f"the checkpoint's carried state has {plural(len(leaves), 'tensor')} but this model's has "
            f"{len(list(states.tensors(template)))}; resume with the model that wrote it."
        )
    source: Iterator[Tensor] = iter(leaves)
    return states.map_tensors(lambda _: next(source), template)


def _deal(state: State, parts: int) -> list[State]:
    total = next(states.tensors(state)).shape[0]
    return [states.select_rows(state, rows) for rows in torch.arange(total).chunk(parts)]
