"""One step of generation, recorded once and then run without Python.

A step of one token for each row calls some thousand Python functions and a few hundred small operators, which on a
CPU take longer than the products where batches and models are small. :func:`record` has PyTorch write the operators
down while the model makes a step (the tracer of ``torch.jit``; nothing is compiled) and runs that list from then on.
Recordings stay with the model and end where it changes (``generation.recordings``).

Whatever a list cannot hold is detected beforehand, and the model is then stepped in Python:

* what the host reads of the data (exits, searches, hashing) or draws at random, and hooks of modules;
* leaves of the state that change their shape, or host numbers other than the bounds of reserved slots;
* what depends on the length: past slots enter as views of growing length, and the list written down at the length of
  now must equal that at the longest the buffers can hold.

The first recorded step must also agree with the model's.

``benchmarks/step_recording.py`` keeps it: by ``step_recording.json``, a recorded step takes 0.51 to 0.59 of the time of
a step in Python. Delete it when every row ``recorded`` is above 0.9 of the row ``in Python``. PyTorch has deprecated
its tracer, but nothing replaces it: ``torch.export``'s graph is as slow as Python, and AOTInductor's step needs 22 to
64 s and a C++ compiler to make, where a recording needs half a second. AOTInductor replaces the tracer when it makes a
step in 1 s that is no slower. If PyTorch drops the tracer earlier, sessions step in Python (:func:`_traced`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.reserved import ReservedSlots
from kinformer.generation.packed import PackedLinear
from kinformer.generation.recordable import UnrecordableError, watched
from kinformer.generation.recordings import Unchanged
from kinformer.runtime.autocast import autocast_dtype

_NEAR = 1e-4
"""How far the logits of a recorded step may be from the model's, relative to the largest: operators are the same."""

Run = Callable[..., tuple[Tensor, ...]]
Way = Callable[[Tensor, Any], tuple[tuple[Tensor, ...], Any]]
"""(values of a step, state) -> (what comes out, the state after)."""


def logits_after(model: Any, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return logits [batch, vocab] behind the last of ``tokens`` [batch, time], and the state there."""
    inputs, state = model.head_inputs(tokens, state)
    return model.logits(states.map_tensors(lambda x: x[:, -1:], inputs))[:, 0], state


class Recording:
    """The recorded step of a model or of a part of one, in one or more ways; :meth:`begin` steps a state by it.

    Each of ``runs`` takes the step's values, views of the reserved slots, all other leaves of the state and the weights
    of ``parts``; ``retained`` is how many past slots each reservation retains, None for all. Of ``state``, from which
    it was made, only the sizes are stored.
    """

    def __init__(
        self, runs: Sequence[Run], parts: Sequence[nn.Module], state: Any, retained: Sequence[int | None]
    ) -> None:
        self.runs, self.weights, self.retained = runs, _inputs(parts), retained
        self._form, self._past = _form(state), _past(state)
        self.holds = Unchanged(parts).holds

    def begin(self, state: Any) -> RecordedStep | None:
        """Return steps from ``state`` on; None where that has other sizes, for which it was not checked."""
        if autocast_dtype(next(states.tensors(state)).device) is not None or _form(state) != self._form:
            return None
        if any(now < then for now, then in zip(_past(state), self._past, strict=True)):
            return None
        return None if any(part.slots.stop >= part.capacity for part in _parts(state)) else RecordedStep(self, state)


class RecordedStep:
    """A :class:`Recording` at work, and the state that it steps."""

    def __init__(self, recording: Recording, state: Any) -> None:
        self.recording, self._state = recording, state
        self._parts = _parts(state)
        self._bounds = [(part.slots.start, part.slots.stop) for part in self._parts]
        self._leaves = _leaves(state)

    @property
    def goes_on(self) -> bool:
        """Return whether the buffers hold another token and the model is unchanged."""
        room = all(stop < part.capacity for part, (_, stop) in zip(self._parts, self._bounds, strict=True))
        return room and self.recording.holds()

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, vocab] after ``tokens`` [batch, 1], which the state absorbs."""
        return self.go(tokens, 0)[0]

    def go(self, values: Tensor, way: int) -> Sequence[Tensor]:
        """Return the outputs of a step of ``values`` by a ``way``, which the state absorbs."""
        views: list[Tensor] = []
        after = []
        for part, (start, stop), retained in zip(self._parts, self._bounds, self.recording.retained, strict=True):
            views += part.views(start, stop)
            after.append((start if retained is None else max(start, stop + 1 - retained), stop + 1))
        self._bounds = after
        with torch.jit.optimized_execution(False):  # it runs the first steps slowly, to no gain afterwards
            outputs = self.recording.runs[way](values, *views, *self._leaves, *self.recording.weights)
        views_count = len(outputs) - len(self._leaves)
        self._leaves = list(outputs[views_count:])
        return outputs[:views_count]

    def release(self) -> Any:
        """Return the state, for steps in Python; this object must not be used any more."""
        bounds, leaves = iter(self._bounds), iter(self._leaves)
        return _mapped(self._state, lambda part: part.moved_on(*next(bounds), next(leaves)), lambda _: next(leaves))


def record(model: Any, tokens: Tensor, state: Any) -> Recording:
    """Return the recorded step of ``model`` from ``state`` on, which is not stepped yet.

    ``tokens`` [batch, 1] are those that come next; the slots behind the past are written to in passing.

    Errors: :class:`UnrecordableError` with the reason.
    """

    def step(tokens: Tensor, state: Any) -> tuple[tuple[Tensor, ...], Any]:
        logits, after = logits_after(model, tokens, state)
        return (logits,), after

    return record_ways([step], [model], tokens, state)


def record_ways(ways: Sequence[Way], parts: Sequence[nn.Module], values: Tensor, state: Any) -> Recording:
    """Return the recorded ``ways`` of a step of ``values`` from ``state`` on, all by the same ``parts`` of a
    model; otherwise like :func:`record`."""
    reserved = _parts(state)
    if any(part.slots.stop >= part.capacity for part in reserved):
        raise UnrecordableError("the reserved slots are used up, or not laid out yet", 1)
    if any(module._forward_hooks or module._forward_pre_hooks for part in parts for module in part.modules()):
        raise UnrecordableError("a module has hooks, which run in Python")
    if autocast_dtype(values.device) is not None:
        raise UnrecordableError("autocast is on, and may be off at the next step")
    weights = _inputs(parts)
    recorded = [_recorded(way, values, state, weights) for way in ways]
    runs, recordings, expected = zip(*recorded, strict=True)
    if any(item != recordings[0] for item in recordings):
        raise UnrecordableError("the ways keep unlike pasts")
    recording = Recording(runs, parts, state, recordings[0])
    for way, outputs in enumerate(expected):
        trial = RecordedStep(recording, state)
        _compare([*trial.go(values, way), *trial._leaves], outputs)
    return recording


def _recorded(
    way: Way, values: Tensor, state: Any, weights: Sequence[Tensor]
) -> tuple[Run, list[int | None], list[Tensor]]:
    """Return a recorded ``way``, how many past slots each reservation retains, and its outputs and state."""
    parts = _parts(state)
    opened = _opened(state, [(part.slots.start, part.slots.stop) for part in parts])
    random = torch.get_rng_state()
    with watched():
        outputs, after = way(values, opened)
    if not torch.equal(random, torch.get_rng_state()):
        raise UnrecordableError("a step draws random numbers")
    if [(x.shape, x.dtype) for x in _leaves(opened)] != [(x.shape, x.dtype) for x in _leaves(after)]:
        raise UnrecordableError("a leaf of the state changes its shape")
    retained = [part.retained for part in _parts(opened)]
    run = _traced(way, values, opened, weights)
    if parts:
        longest = [_longest(part, recordings) for part, recordings in zip(parts, retained, strict=True)]
        if not _same(run, _traced(way, values, _opened(state, longest), weights)):
            ahead = max(stop - part.slots.stop for part, (_, stop) in zip(parts, longest, strict=True))
            raise UnrecordableError("what is done depends on the length", ahead // 2 + 1)
    return run, retained, [*outputs, *_leaves(after)]


def _traced(way: Way, values: Tensor, opened: Any, weights: Sequence[Tensor]) -> Run:
    parts = _parts(opened)
    views = [view for part in parts for view in part.buffers]

    def step(values: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        item, rest = iter(inputs[: len(views)]), iter(inputs[len(views) :])
        state = _mapped(
            opened, lambda part: part.open([next(item) for _ in part.buffers], next(rest)), lambda _: next(rest)
        )
        outputs, after = way(values, state)
        return *outputs, *_leaves(after)

    try:
        with warnings.catch_warnings(), torch.jit.optimized_execution(False):
            warnings.simplefilter("ignore")  # of sizes that become numbers: what they decide is compared
            # what torch.jit.trace gives stays with the process for good; a function of its own is freed
            inputs = (values, *views, *_leaves(opened), *weights)
            graph, _ = torch._C._create_graph_by_tracing(step, inputs, lambda _: "", True, False, None, [])
            return torch._C._create_function_from_graph("step", graph)
    except Exception as error:
        raise UnrecordableError(f"PyTorch cannot write it down: {error}") from error


def _inputs(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Return the weights that a recording takes as inputs, as it cannot hold them: those that learn or are packed."""
    every = nn.ModuleList(parts)
    packed = [module.packed for module in every.modules() if isinstance(module, PackedLinear)]
    return [*packed, *(weight for weight in every.parameters() if weight.requires_grad)]


def _same(one: Run, other: Run) -> bool:
    """Return whether two recordings are the same operators with the same constants."""
    pairs = zip_longest(_written(one), _written(other), fillvalue=(None, None, None))
    return all(a[:2] == b[:2] and _equal(a[2], b[2]) for a, b in pairs)


def _written(run: Run) -> Iterator[tuple[Any, Any, Any]]:
    """Yield of each operator its kind, the numbers of its inputs, and its value where it is a constant."""
    graph = run.graph  # type: ignore[attr-defined]
    numbers = {value.debugName(): number for number, value in enumerate(graph.inputs())}
    for node in graph.nodes():
        taken = [numbers[value.debugName()] for value in node.inputs()]
        for value in node.outputs():
            numbers[value.debugName()] = len(numbers)
        constant = node.output().toIValue() if node.kind() == "prim::Constant" else None
        yield node.kind(), (taken, node.outputsSize()), constant


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr() or (one.shape == other.shape and torch.equal(one, other))
    return bool(one == other)


def _form(state: Any) -> Any:
    """Return the parts of the state that a recording does not read again, such as types and sizes."""
    bounds = [(part.capacity, part.slots.full) for part in _parts(state)]
    return bounds, [(leaf.shape, leaf.dtype) for leaf in _leaves(state)]


def _past(state: Any) -> list[int]:
    """Return how many slots of each reservation are the past."""
    return [part.slots.stop - part.slots.start for part in _parts(state)]


def _compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(results, expected, strict=True):
        if a.numel() and not float((a - b).abs().max()) <= _NEAR * max(1.0, float(b.abs().max())):
            raise UnrecordableError("what it gives is not what the model gives")


def _longest(part: ReservedSlots, retained: int | None) -> tuple[int, int]:
    """Return the bounds of the longest past, before a token, that the buffers of ``part`` can hold."""
    last = part.capacity - 1
    return (0, last) if retained is None else (max(0, last - retained), last)


def _mapped(state: Any, part: Callable[[ReservedSlots], Any], leaf: Callable[[Tensor], Any]) -> Any:
    """Return the structure of ``state`` with ``part`` of its reserved slots and
    ``leaf`` of its other tensors, in order."""
    if isinstance(state, Tensor):
        return leaf(state)
    if isinstance(state, ReservedSlots):
        return part(state)
    if isinstance(state, states.ReservedState):
        raise UnrecordableError(f"{type(state).__name__} counts on the host")
    items = [_mapped(item, part, leaf) for item in state]
    return type(state)(*items) if hasattr(state, "_fields") else tuple(items)


def _parts(state: Any) -> list[ReservedSlots]:
    parts: list[ReservedSlots] = []
    _mapped(state, parts.append, lambda _: None)
    return parts


def _leaves(state: Any) -> list[Tensor]:
    """Return all tensors of a state but the buffers of reserved slots."""
    leaves: list[Tensor] = []
    _mapped(state, lambda part: leaves.append(part.seen), leaves.append)
    return leaves


def _opened(state: Any, bounds: Sequence[tuple[int, int]]) -> Any:
    bound = iter(bounds)
    return _mapped(state, lambda part: part.open(part.views(*next(bound)), part.seen), lambda leaf: leaf)
