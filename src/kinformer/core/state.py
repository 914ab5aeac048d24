"""Generic functions over any state: no function here depends on a mechanism.

Every tensor has the batch axis first. The class attribute ``slots`` of a ``NamedTuple`` names the tensor leaves whose
third axis counts right-aligned past slots. Invalid slots hold zeros, so states compare on valid slots.
``outlives_reset`` marks a ``NamedTuple`` with which new sequences begin too (a source). ``derived``, such as ``{"k":
"hidden_states"}``, maps a leaf that may have fewer slots to the leaf from which a mixer recomputes it. A leaf named
``aux`` ([batch]) accumulates an auxiliary loss, which does not depend on targets; the class attribute
``aux_name`` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError, plural

State = Any
"""A tensor, a tuple or ``NamedTuple`` of states, or a :class:`ReservedState`; each part has its own type."""


class ReservedState:
    """A single-owner state for long generation: using it consumes it, ``fork`` copies it.

    A subclass keeps its tensors in buffers that it writes in place. ``ticket`` is a host-side generation number that
    all descendants of one reservation share: :meth:`consume` raises when a later step has already written into them.
    """

    def __init__(self, ticket: list[int]) -> None:
        self._ticket = ticket
        self._generation = ticket[0]

    def check(self) -> None:
        """Raise unless this is the newest state of its reservation."""
        if self._generation != self._ticket[0]:
            raise KinformerError(
                f"This reserved state was already used (generation {self._generation}; its buffers are at "
                f"{self._ticket[0]}); it has one owner: use the state that the last step returned, or fork() it first."
            )

    def consume(self) -> list[int]:
        """Claim the buffers for the next step; return the ticket for the successor."""
        self.check()
        self._ticket[0] += 1
        return self._ticket

    def refuse_graph(self) -> None:
        """Raise where gradients are recorded."""
        if torch.is_grad_enabled():
            raise KinformerError(
                "a reserved state does not hold a graph; step it under torch.no_grad(), or use its value."
            )

    def value(self) -> State:
        """Return a copy of this state as an immutable ``NamedTuple`` value."""
        raise NotImplementedError

    def reclaimed(self) -> ReservedState:
        """Return this state for use again, after any later steps; the states of these steps cannot be used any more."""
        raise NotImplementedError

    @property
    def like(self) -> State:
        """Return a value of the same types and widths, of any number of slots."""
        return self.value()

    def map(self, function: Callable[[Tensor], Tensor]) -> ReservedState:
        """Return a new reservation whose tensors are ``function`` of copies of this state's tensors."""
        raise NotImplementedError

    def fork(self) -> ReservedState:
        """Return an independent copy: both may then be used."""
        return self.map(torch.clone)

    def select_rows(self, rows: Tensor) -> ReservedState:
        """Return an independent reservation of the rows ``rows`` [n] int64, in that order."""
        return self.map(lambda leaf: leaf.index_select(0, rows.to(leaf.device)))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the allocated tensors, capacity included."""
        raise NotImplementedError


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Return the same structure with ``function`` applied to every tensor."""
    return _mapped(state, lambda part: part.map(function), function)


def _mapped(state: State, part: Callable[[ReservedState], State], leaf: Callable[..., Tensor] = lambda x: x) -> State:
    if isinstance(state, (Tensor, ReservedState)):
        return leaf(state) if isinstance(state, Tensor) else part(state)
    return rebuilt(state, [_mapped(item, part, leaf) for item in state])


def rebuilt(state: State, items: Sequence[object]) -> State:
    """Return a tuple of ``items``, in the type of ``state`` where ``state`` is a ``NamedTuple``."""
    return type(state)(*items) if hasattr(state, "_fields") else tuple(items)


def tensors(state: State) -> Iterator[Tensor]:
    """Yield all tensor leaves, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, ReservedState):
        yield from state.tensors()
    else:
        for item in state:
            yield from tensors(item)


def reserved_parts(state: State) -> Iterator[ReservedState]:
    """Yield all reserved parts, in order."""
    if isinstance(state, ReservedState):
        yield state
    elif not isinstance(state, Tensor):
        for item in state:
            yield from reserved_parts(item)


def form(state: State) -> object:
    """Return the structure that all states of one mixer share: the types, and the sizes of leaves except for rows and
    past slots. All floating-point types count as one type, since mixers convert them."""
    if isinstance(state, Tensor):
        return state.shape[1:], _kind(state)
    if isinstance(state, ReservedState):
        state = state.like
    if not isinstance(state, tuple):
        return type(state)
    slots, names = getattr(state, "slots", ()), getattr(state, "_fields", None) or ("",) * len(state)
    sizes = (
        (item.shape[1:2] + item.shape[3:], _kind(item)) if name in slots and isinstance(item, Tensor) else form(item)
        for name, item in zip(names, state, strict=True)
    )
    return type(state), *sizes


def _kind(leaf: Tensor) -> object:
    """Return the dtype of ``leaf``, or ``float`` for any floating-point dtype."""
    return float if leaf.is_floating_point() else leaf.dtype


def require_rows(state: State, batch: int, device: torch.device, shared: bool = False) -> None:
    """Raise unless every tensor of ``state`` has ``batch`` rows and is on ``device``.

    ``shared``: several neighbouring rows of the input may read one row of the state. Parts that outlive a reset are
    shared, since the hypotheses of a beam share a source.
    """
    if not isinstance(state, (Tensor, ReservedState)):
        for item in state:
            require_rows(item, batch, device, shared or getattr(state, "outlives_reset", False))
        return
    for leaf in (state,) if isinstance(state, Tensor) else state.tensors():
        rows = leaf.shape[0]
        if rows != batch and not (shared and rows and batch % rows == 0):
            raise KinformerError(
                f"the state has {plural(rows, 'row')}, but the input has {batch}; kinformer.nn.states has select_rows, "
                "repeat_rows and join_rows."
            )
        if leaf.device != device:
            raise KinformerError(
                f"the state is on {leaf.device}, but the input is on {device}; kinformer.nn.states has `to`, which "
                "moves a state."
            )


def detach(state: State) -> State:
    """Return the state cut from the graph, as a segment passes it to the next in truncated back-propagation."""
    return map_tensors(torch.Tensor.detach, state)


def select_rows(state: State, rows: Tensor, sources: bool = True) -> State:
    """Return the state of the rows ``rows`` [n] int64, in that order; every tensor is copied once. Without ``sources``
    the parts that outlive a reset stay unchanged."""
    if isinstance(state, ReservedState):
        return state.select_rows(rows)
    if isinstance(state, Tensor):
        return state.index_select(0, rows.to(state.device))
    if not sources and getattr(state, "outlives_reset", False):
        return state
    return rebuilt(state, [select_rows(item, rows, sources) for item in state])


def select_sources(state: State, rows: Tensor) -> State:
    """Return the state with the rows ``rows`` [n] int64 of the parts that outlive a reset; others stay unchanged."""
    if isinstance(state, (Tensor, ReservedState)):
        return state
    if getattr(state, "outlives_reset", False):
        return select_rows(state, rows)
    return rebuilt(state, [select_sources(item, rows) for item in state])


def repeat_rows(state: State, times: int, sources: bool = True) -> State:
    """Repeat every row ``times`` times, one after the other, for several samples from one prompt. Without ``sources``,
    the parts that outlive a reset are not repeated: each of their rows then serves ``times`` neighbours."""
    if not sources and getattr(state, "outlives_reset", False):
        return state
    if isinstance(state, (Tensor, ReservedState)):
        return map_tensors(lambda leaf: leaf.repeat_interleave(times, dim=0), state)
    return rebuilt(state, [repeat_rows(item, times, sources) for item in state])


def join_rows(states: list[State]) -> State:
    """Return one state with the rows of ``states``, padded on the left; derived leaves are empty if one lacks them."""
    first = states[0]
    if any(isinstance(state, ReservedState) for state in states):
        raise KinformerError(
            "a reserved state has a single owner and cannot be joined; join value(state) of each "
            "(kinformer.core.state), and reserve the result."
        )
    if any(type(state) is not type(first) for state in states):
        raise KinformerError(
            f"states of the types {', '.join(sorted({type(state).__name__ for state in states}))} cannot be joined; "
            "join states of one model."
        )
    if isinstance(first, Tensor):
        return torch.cat(states)
    slots, derived = getattr(first, "slots", ()), getattr(first, "derived", {})
    names = getattr(first, "_fields", [""] * len(first))
    joined = []
    for name, *items in zip(names, *states, strict=True):
        if name in derived:
            sources = [getattr(state, derived[name]) for state in states]
            if any(item.shape[2] < source.shape[2] for item, source in zip(items, sources, strict=True)):
                items = [item[:, :, :0] for item in items]
        joined.append(torch.cat(_same_slots(items)) if name in slots else join_rows(items))
    return rebuilt(first, joined)


def to(state: State, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
    """Return the state on ``device``, with floating leaves as ``dtype`` unless it is None."""
    return map_tensors(lambda x: x.to(device=device, dtype=dtype if dtype and x.is_floating_point() else None), state)


def renewed(state: State, derived: bool = False) -> State:
    """Return the state without slots that no row has filled. Unless ``derived`` is True, also drop the leaves that were
    computed by the old weights: after a change of the weights they must be recomputed."""
    if isinstance(state, (Tensor, ReservedState)):
        return state
    slots, made = getattr(state, "slots", ()), () if derived else getattr(state, "derived", ())
    filled = int(state.seen.max()) if slots and hasattr(state, "seen") else None
    items = []
    for name, item in zip(getattr(state, "_fields", [""] * len(state)), state, strict=True):
        if name in slots:
            retained = 0 if name in made else item.shape[2] if filled is None else filled
            items.append(item[:, :, max(0, item.shape[2] - retained) :].clone())
        else:
            items.append(renewed(item, derived))
    return rebuilt(state, items)


def nbytes(state: State) -> int:
    """Return the bytes that the state's tensors hold (capacity included for reserved states)."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors(state))


def reserve(state: State, length: int) -> State:
    """Return a single-owner state with room for ``length`` more tokens, to be used under ``no_grad``.

    Parts of the state that grow provide a ``reserve(length)`` method; constant parts stay values.
    """
    if isinstance(state, (Tensor, ReservedState)):
        return state
    if hasattr(type(state), "reserve") and hasattr(type(state), "slots"):
        return state.reserve(length)
    return rebuilt(state, [reserve(item, length) for item in state])


def fork(state: State) -> State:
    """Return an independent copy; both may be used, whether values or reserved."""
    return map_tensors(torch.clone, state)


def reclaimed(state: State) -> State:
    """Return an earlier state for use again: values never change, and later states lose their reserved parts."""
    return _mapped(state, lambda part: part.reclaimed())


def value(state: State) -> State:
    """Return the state as plain values: every reserved part copied out of its buffers."""
    return _mapped(state, lambda part: part.value())


def difference(left: State, right: State) -> float:
    """Return the largest absolute difference of two states of one structure, on valid slots (0: equal, inf: NaN)."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape:
            raise KinformerError(f"States of shapes {tuple(left.shape)} and {tuple(right.shape)} cannot be compared.")
        return _gap(left, right)
    left, right = value(left), value(right)
    if type(left) is not type(right) or len(left) != len(right):
        raise KinformerError(f"States of types {type(left).__name__} and {type(right).__name__} cannot be compared.")
    slots, names = getattr(left, "slots", ()), getattr(left, "_fields", [""] * len(left))
    gaps = [0.0]
    for name, a, b in zip(names, left, right, strict=True):
        gaps.append(_gap(*_same_slots([a, b])) if name in slots else difference(a, b))
    return max(gaps)


def _gap(left: Tensor, right: Tensor) -> float:
    if left.numel() == 0:
        return 0.0
    gap = (left.detach().double() - right.detach().double()).abs()
    return float(gap.nan_to_num(nan=torch.inf).max())


def _same_slots(leaves: list[Tensor]) -> list[Tensor]:
    """Return right-aligned leaves [batch, heads, slots, ...] padded with zeros on the left to one number of slots."""
    longest = max(leaf.shape[2] for leaf in leaves)
    return [
        torch.cat([leaf.new_zeros(*leaf.shape[:2], longest - leaf.shape[2], *leaf.shape[3:]), leaf], dim=2)
        for leaf in leaves
    ]


def pop_aux(state: State) -> tuple[dict[str, Tensor], State]:
    """Return the auxiliary losses accumulated in the state, ``({name: [batch]}, state with zeros in their place)``."""
    costs: dict[str, Tensor] = {}

    def walk(node: State) -> State:
        if isinstance(node, (Tensor, ReservedState)):
            return node
        items = [walk(item) for item in node]
        if "aux" in getattr(node, "_fields", ()):
            aux = node.aux
            costs[node.aux_name] = costs[node.aux_name] + aux if node.aux_name in costs else aux
            items[node._fields.index("aux")] = torch.zeros_like(aux)
        return rebuilt(node, items)

    return costs, walk(state)
