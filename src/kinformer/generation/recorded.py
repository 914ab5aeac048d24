"""One step of generation, recorded once and then run without Python.

A step of one token for each row calls some thousand Python functions and a few hundred small operators, which on a
CPU take longer than the products where batches and models are small. :func:`record` has PyTorch write the operators
down while the model makes a step (``torch.jit.trace``; nothing is compiled) and runs that list from then on.

What a list cannot hold is found out beforehand, and the model is then stepped as ever:

* what the host reads of the data (exits, searches, hashing) or draws at random, and hooks of modules;
* leaves of the state that change their shape, or host numbers other than the bounds of reserved slots;
* what depends on the length: past slots enter as views of growing length, and the list written down at the length of
  now must equal that at the longest the buffers can hold.

The first recorded step must also give what the model gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kinformer.core import state as states
from kinformer.core.reserved import ReservedSlots
from kinformer.generation.packed import PackedLinear
from kinformer.runtime.autocast import autocast_dtype

_NEAR = 1e-4
"""How far the logits of a recorded step may be from the model's, relative to the largest: operators are the same."""
_READS = {"tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Run = Callable[..., tuple[Tensor, ...]]
Way = Callable[[Tensor, Any], tuple[tuple[Tensor, ...], Any]]
"""(values of a step, state) -> (what comes out, the state after)."""


class UnrecordableError(Exception):
    """Why a step has to be made in Python; ``steps``: after how many more it may be otherwise, None where unknown."""

    def __init__(self, reason: str, steps: int | None = None) -> None:
        super().__init__(reason)
        self.steps = steps


def logits_after(model: Any, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Logits [batch, vocab] behind the last of ``tokens`` [batch, time], and the state there."""
    inputs, state = model.head_inputs(tokens, state)
    return model.logits(states.map_tensors(lambda x: x[:, -1:], inputs))[:, 0], state


class RecordedStep:
    """The recorded step of a model or of a part of one, in one or more ways, and the state that it steps.

    Each of ``runs`` takes the step's values, views of the reserved slots, all other leaves of the state and
    ``weights``; ``retained`` is how many past slots each reservation keeps, None for all.
    """

    def __init__(
        self, runs: Sequence[Run], weights: Sequence[Tensor], state: Any, retained: Sequence[int | None]
    ) -> None:
        self._runs, self._weights, self._state, self._retained = runs, weights, state, retained
        self._parts = _parts(state)
        self._bounds = [(part.slots.start, part.slots.stop) for part in self._parts]
        self._leaves = _leaves(state)
        self._form = _form(state)

    @property
    def has_room(self) -> bool:
        """Whether the buffers hold another token."""
        return all(stop < part.capacity for part, (_, stop) in zip(self._parts, self._bounds, strict=True))

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [batch, vocab] after ``tokens`` [batch, 1], which the state absorbs."""
        return self.go(tokens, 0)[0]

    def go(self, values: Tensor, way: int) -> Sequence[Tensor]:
        """What comes out of a step of ``values`` by a ``way``, which the state absorbs."""
        views: list[Tensor] = []
        after = []
        for part, (start, stop), retained in zip(self._parts, self._bounds, self._retained, strict=True):
            views += part.views(start, stop)
            after.append((start if retained is None else max(start, stop + 1 - retained), stop + 1))
        self._bounds = after
        with torch.jit.optimized_execution(False):  # it runs the first steps slowly, to no gain afterwards
            outputs = self._runs[way](values, *views, *self._leaves, *self._weights)
        views_count = len(outputs) - len(self._leaves)
        self._leaves = list(outputs[views_count:])
        return outputs[:views_count]

    def release(self) -> Any:
        """The state, for steps in Python; this object is then done with."""
        bounds, leaves = iter(self._bounds), iter(self._leaves)
        return _mapped(self._state, lambda part: part.moved_on(*next(bounds), next(leaves)), lambda _: next(leaves))

    def with_state(self, state: Any) -> RecordedStep | None:
        """The same step from another state on; None where that has other sizes, for which it was not checked."""
        if _form(state) != self._form or any(
            now.slots.stop - now.slots.start < then.slots.stop - then.slots.start or now.slots.stop >= now.capacity
            for now, then in zip(_parts(state), self._parts, strict=True)
        ):
            return None
        return RecordedStep(self._runs, self._weights, state, self._retained)


def record(model: Any, tokens: Tensor, state: Any) -> RecordedStep:
    """The recorded step of ``model`` from ``state`` on, which is not stepped yet.

    ``tokens`` [batch, 1] are those that come next; the slots behind the past are written to in passing.

    Errors: :class:`UnrecordableError` with the reason.
    """

    def step(tokens: Tensor, state: Any) -> tuple[tuple[Tensor, ...], Any]:
        logits, after = logits_after(model, tokens, state)
        return (logits,), after

    return record_ways([step], [model], tokens, state)


def record_ways(ways: Sequence[Way], parts: Sequence[nn.Module], values: Tensor, state: Any) -> RecordedStep:
    """The recorded ``ways`` of a step of ``values`` from ``state`` on, all by the same ``parts`` of a model; otherwise
    as :func:`record`."""
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
    for way, outputs in enumerate(expected):
        trial = RecordedStep(runs, weights, state, recordings[0])
        _compare([*trial.go(values, way), *trial._leaves], outputs)
    return RecordedStep(runs, weights, state, recordings[0])


def _recorded(
    way: Way, values: Tensor, state: Any, weights: Sequence[Tensor]
) -> tuple[Run, list[int | None], list[Tensor]]:
    """A ``way`` written down, how many past slots each reservation keeps, and what it gives and leaves as the state."""
    parts = _parts(state)
    opened = _opened(state, [(part.slots.start, part.slots.stop) for part in parts])
    random = torch.get_rng_state()
    with _Watching(), _WatchedReads():
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
            return torch.jit.trace(step, (values, *views, *_leaves(opened), *weights), check_trace=False)
    except Exception as error:
        raise UnrecordableError(f"PyTorch cannot write it down: {error}") from error


def _inputs(parts: Sequence[nn.Module]) -> list[Tensor]:
    """The weights that a recording must be given, as it cannot hold them: those that learn or are packed."""
    every = nn.ModuleList(parts)
    packed = [module.packed for module in every.modules() if isinstance(module, PackedLinear)]
    return [*packed, *(weight for weight in every.parameters() if weight.requires_grad)]


def _same(one: Run, other: Run) -> bool:
    """Whether two recordings are the same operators with the same constants."""
    pairs = zip_longest(_written(one), _written(other), fillvalue=(None, None, None))
    return all(a[:2] == b[:2] and _equal(a[2], b[2]) for a, b in pairs)


def _written(run: Run) -> Iterator[tuple[Any, Any, Any]]:
    """Of each operator its kind, the numbers of what it takes, and what it holds where it is a constant."""
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
    """What a recording does not read of the state again."""
    bounds = [(part.capacity, part.slots.full) for part in _parts(state)]
    return bounds, [(leaf.shape, leaf.dtype) for leaf in _leaves(state)]


def _compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(results, expected, strict=True):
        if a.numel() and not float((a - b).abs().max()) <= _NEAR * max(1.0, float(b.abs().max())):
            raise UnrecordableError("what it gives is not what the model gives")


def _longest(part: ReservedSlots, retained: int | None) -> tuple[int, int]:
    """Bounds of the longest past, before a token, that the buffers of ``part`` can hold."""
    last = part.capacity - 1
    return (0, last) if retained is None else (max(0, last - retained), last)


def _mapped(state: Any, part: Callable[[ReservedSlots], Any], leaf: Callable[[Tensor], Any]) -> Any:
    """The structure of ``state`` with ``part`` of its reserved slots and ``leaf`` of its other tensors, in order."""
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
    """All tensors of a state but the buffers of reserved slots."""
    leaves: list[Tensor] = []
    _mapped(state, lambda part: leaves.append(part.seen), leaves.append)
    return leaves


def _opened(state: Any, bounds: Sequence[tuple[int, int]]) -> Any:
    item = iter(bounds)
    return _mapped(state, lambda part: part.open(part.views(*next(item)), part.seen), lambda leaf: leaf)


class _Watching(TorchDispatchMode):
    """Refuses operators whose result the host reads, or whose shape depends on the data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _TAGS & set(func.tags) and not _plain_index(func, args):
            raise UnrecordableError(f"the operator {func} depends on the data")
        with self:
            output = func.decompose(*args, **(kwargs or {}))  # in inference mode nothing else takes them apart
        return func(*args, **(kwargs or {})) if output is NotImplemented else output


def _plain_index(func: Any, args: Any) -> bool:
    """Whether ``func`` indexes by numbers: only masks make a shape of their own."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(x is not None and x.dtype in masks for x in args[1])


class _WatchedReads(TorchFunctionMode):
    """Refuses what reads tensors without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise UnrecordableError(f"the host reads the data ({func.__name__})")
        return func(*args, **(kwargs or {}))
