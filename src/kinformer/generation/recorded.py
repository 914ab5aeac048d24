"""One step of generation, recorded once and then run without Python.

A step of one token for each row calls some thousand Python functions and a few hundred small operators, which on a
CPU take longer than the products where batches and models are small. :func:`record` writes the operators down while the
model makes a step (``generation.recordable``; nothing is compiled), and PyTorch's interpreter runs that list from then
on. Recordings stay with the model and end where it changes (``generation.recordings``).

Whatever a list cannot hold is detected beforehand, and the model is then stepped in Python:

* what the host reads of the data (exits, searches, hashing) or draws at random, and hooks of modules;
* leaves of the state that change their shape, or host numbers other than the bounds of reserved slots;
* what depends on the length: past slots enter as views of growing length, and the list written down with one of them
  must equal that at the most the buffers can hold, except for numbers that count slots. Where the steps of a short past
  differ, the list begins at the length of now.

The first recorded step must also agree with the model's.

``benchmarks/step_recording.py`` keeps it: by ``step_recording.json``, a recorded step takes 0.65 to 0.71 of the time of
a step in Python. Delete it when every row ``recorded`` is above 0.9 of the row ``in Python``. ``torch.export``'s graph
is as slow as Python, and AOTInductor's step needs 22 to 68 s and a C++ compiler to make, where a recording takes the
time of seven steps. AOTInductor replaces it when it makes a step in 0.1 s that is no slower. If PyTorch drops
TorchScript's interpreter earlier, sessions step in Python (:func:`_recorded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.model import CausalModel, Model
from kinformer.core.reserved import ReservedSlots
from kinformer.core.state import State
from kinformer.generation.recordable import Call, Tape, UnrecordableError, View, at_any_length, compiled
from kinformer.generation.recordings import Unchanged
from kinformer.runtime.autocast import autocast_dtype

_NEAR = 1e-4
"""How far the logits of a recorded step may be from the model's, relative to the largest: operators are the same."""


class Run(NamedTuple):
    """A list of operators: a ``function`` of a step's tensors and of those of the model, ``captured``."""

    function: Callable[..., tuple[Tensor, ...]]
    captured: Sequence[Tensor]


Way = Callable[[Tensor, State], tuple[tuple[Tensor, ...], State]]
"""(values of a step, state) -> (what comes out, the state after)."""


def logits_after(model: CausalModel, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    """Return logits [batch, vocab] behind the last of ``tokens`` [batch, time], and the state there."""
    inputs, state = model.head_inputs(tokens, state)
    return model.logits(states.map_tensors(lambda x: x[:, -1:], inputs))[:, 0], state


class Recording:
    """The recorded step of a model or of a part of one, in one or more ways; :meth:`begin` steps a state by it.

    Each of ``runs`` takes the step's values, views of the reserved slots and all other leaves of the state, and depends
    on ``parts`` of the model. Each reservation has ``least`` past slots or more and retains ``retained`` of them, None
    for all. Of ``state``, from which it was made, only the sizes are stored. A step absorbs ``time`` tokens.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        parts: Sequence[Model | nn.Module],
        state: State,
        least: Sequence[int],
        retained: Sequence[int | None],
        time: int = 1,
    ) -> None:
        self.runs, self.least, self.retained, self.time = runs, least, retained, time
        self._form, self._most = _form(state), [part.capacity for part in _parts(state)]
        self.holds = Unchanged(parts).holds

    def begin(self, state: State, time: int = 1) -> RecordedStep | None:
        """Return steps of ``time`` tokens from ``state`` on; None where the time or the sizes of ``state`` are others
        than it was checked for."""
        narrow = autocast_dtype(next(states.tensors(state)).device) is not None
        if narrow or time != self.time or _form(state) != self._form:
            return None
        for part, least, most in zip(_parts(state), self.least, self._most, strict=True):
            full = part.slots.stop + time > part.capacity
            if full or part.capacity > most or part.slots.stop - part.slots.start < least:
                return None
        return RecordedStep(self, state)


class RecordedStep:
    """A :class:`Recording` at work, and the state that it steps."""

    def __init__(self, recording: Recording, state: State) -> None:
        self.recording, self._state = recording, state
        self._parts = _parts(state)
        self._bounds = [(part.slots.start, part.slots.stop) for part in self._parts]
        self._leaves = _leaves(state)

    @property
    def goes_on(self) -> bool:
        """Return whether the buffers hold another token and the model is unchanged."""
        ends = (stop + self.recording.time for _, stop in self._bounds)
        room = all(end <= part.capacity for part, end in zip(self._parts, ends, strict=True))
        return room and self.recording.holds()

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, vocab] after ``tokens`` [batch, 1], which the state absorbs."""
        return self.go(tokens, 0)[0]

    def go(self, values: Tensor, way: int) -> Sequence[Tensor]:
        """Return the outputs of a step of ``values`` by a ``way``, which the state absorbs."""
        views: list[Tensor] = []
        after = []
        for part, (start, stop), retained in zip(self._parts, self._bounds, self.recording.retained, strict=True):
            end = stop + self.recording.time
            views += part.views(start, stop, self.recording.time)
            after.append((start if retained is None else max(start, end - retained), end))
        self._bounds = after
        with torch.jit.optimized_execution(False):  # it runs the first steps slowly, to no gain afterwards
            function, captured = self.recording.runs[way]
            outputs = function(values, *views, *self._leaves, *captured)
        views_count = len(outputs) - len(self._leaves)
        self._leaves = list(outputs[views_count:])
        return outputs[:views_count]

    def release(self) -> State:
        """Return the state, for steps in Python; this object must not be used any more."""
        bounds, leaves = iter(self._bounds), iter(self._leaves)
        return _mapped(self._state, lambda part: part.moved_on(*next(bounds), next(leaves)), lambda _: next(leaves))


def record(model: CausalModel, tokens: Tensor, state: State) -> Recording:
    """Return the recorded step of ``model`` from ``state`` on, which is not stepped yet.

    ``tokens`` [batch, 1] are those that come next; the slots behind the past are written to in passing.

    Errors: :class:`UnrecordableError` with the reason.
    """

    def step(tokens: Tensor, state: State) -> tuple[tuple[Tensor, ...], State]:
        logits, after = logits_after(model, tokens, state)
        return (logits,), after

    return record_ways([step], [model], tokens, state)


def record_ways(ways: Sequence[Way], parts: Sequence[Model | nn.Module], values: Tensor, state: State) -> Recording:
    """Return the recorded ``ways`` of a step of ``values`` from ``state`` on, all by the same ``parts`` of a
    model; otherwise like :func:`record`."""
    reserved, time = _parts(state), values.shape[1]
    if any(part.slots.stop + time > part.capacity for part in reserved):
        raise UnrecordableError("the reserved slots are used up, or not laid out yet", 1)
    if any(module._forward_hooks or module._forward_pre_hooks for part in parts for module in part.modules()):
        raise UnrecordableError("a module has hooks, which run in Python")
    if autocast_dtype(values.device) is not None:
        raise UnrecordableError("autocast is on, and may be off at the next step")
    recorded = [_recorded(way, values, state) for way in ways]
    if any(item.retained != recorded[0].retained for item in recorded):
        raise UnrecordableError("the ways keep unlike pasts")
    least = [max(slots) for slots in zip(*(item.least for item in recorded), strict=True)]
    recording = Recording([item.run for item in recorded], parts, state, least, recorded[0].retained, time)
    for way, item in enumerate(recorded):
        trial = RecordedStep(recording, state)
        _compare([*trial.go(values, way), *trial._leaves], item.results)
    return recording


class Recorded(NamedTuple):
    """A recorded way: its run, how many past slots each reservation has at least and how many it retains, and the
    outputs and leaves of the state."""

    run: Run
    least: list[int]
    retained: list[int | None]
    results: list[Tensor]


def _recorded(way: Way, values: Tensor, state: State) -> Recorded:
    """Return a recorded ``way`` of a step of ``values`` from ``state`` on."""
    parts, time = _parts(state), values.shape[1]
    now = [(part.slots.start, part.slots.stop) for part in parts]
    one_slot = [(max(start, stop - 1), stop) for start, stop in now]
    random = torch.get_rng_state()
    taped = _taped(way, values, _opened(state, one_slot, time))
    if not torch.equal(random, torch.get_rng_state()):
        raise UnrecordableError("a step draws random numbers")
    if [(x.shape, x.dtype) for x in taped.leaves] != [(x.shape, x.dtype) for x in _leaves(state)]:
        raise UnrecordableError("a leaf of the state changes its shape")
    calls, bounds = taped.tape.calls, now
    results = [*taped.outputs, *taped.leaves]
    if parts:
        outputs, after = way(values, _opened(state, now, time))
        results = [*outputs, *_leaves(after)]
        longest = [_longest(part, retained, time) for part, retained in zip(parts, taped.retained, strict=True)]
        then = _taped(way, values, _opened(state, longest, time))
        try:
            bounds, calls = one_slot, _at_any_length(state, taped, then)
        except UnrecordableError:
            bounds, taped = now, _taped(way, values, _opened(state, now, time))
            try:
                calls = _at_any_length(state, taped, then)
            except UnrecordableError as refused:
                ahead = max(stop - part.slots.stop for part, (_, stop) in zip(parts, longest, strict=True))
                raise UnrecordableError(str(refused), ahead // 2 + 1) from None
    refs = [taped.tape.ref(tensor) for tensor in (*taped.outputs, *taped.leaves)]
    try:
        function = compiled(calls, taped.inputs, len(taped.tape.captured), refs)
    except Exception as error:
        raise UnrecordableError(f"PyTorch cannot write it down: {error}") from error
    least = [stop - start for start, stop in bounds]
    return Recorded(Run(function, taped.tape.captured), least, taped.retained, results)


class _Taped(NamedTuple):
    """A step on tape: how many ``inputs`` it has, its outputs, the leaves of the state after, the views of the slots
    and how many of them the mixer retains."""

    tape: Tape
    inputs: int
    outputs: tuple[Tensor, ...]
    leaves: list[Tensor]
    views: list[Tensor]
    retained: list[int | None]


def _taped(way: Way, values: Tensor, opened: object) -> _Taped:
    """Return a step of ``values`` from the state ``opened`` on tape."""
    parts = _parts(opened)
    views = [view for part in parts for view in part.buffers]
    inputs = (values, *views, *_leaves(opened))
    tape = Tape(inputs)
    with tape.watching():
        outputs, after = way(values, opened)
    return _Taped(tape, len(inputs), outputs, _leaves(after), views, [part.retained for part in parts])


def _at_any_length(state: State, one: _Taped, other: _Taped) -> list[Call]:
    """Return the calls of a step on tape as they are at any number of past slots between those of two steps."""
    parts = zip(_parts(state), one.retained, strict=True)
    rules = [(part.capacity, part.slots, retained) for part, retained in parts for _ in part.buffers]
    views = [
        (View(number, a.shape[2], rule), View(number, b.shape[2], rule))
        for number, (a, b, rule) in enumerate(zip(one.views, other.views, rules, strict=True), start=1)
    ]
    return at_any_length(one.tape, other.tape, views)


def _form(state: State) -> tuple[object, ...]:
    """Return the parts of the state that a recording does not read again, such as types and sizes; not how many slots
    there are."""
    slots = [(part.slots.full, *(buffer[:, :, :0].shape for buffer in part.buffers)) for part in _parts(state)]
    dtypes = [part.buffers[0].dtype for part in _parts(state)]
    return slots, dtypes, [(leaf.shape, leaf.dtype) for leaf in _leaves(state)]


def _compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(map(Tensor.double, results), map(Tensor.double, expected), strict=True):  # of masks, too
        if a.numel() and not float((a - b).abs().max()) <= _NEAR * max(1.0, float(b.abs().max())):
            raise UnrecordableError("what it gives is not what the model gives")


def _longest(part: ReservedSlots, retained: int | None, time: int) -> tuple[int, int]:
    """Return the bounds of the longest past, before ``time`` tokens, that ``part``'s buffers can hold."""
    last = part.capacity - time
    return (0, last) if retained is None else (max(0, last - retained), last)


def _mapped(state: State, part: Callable[[ReservedSlots], object], leaf: Callable[[Tensor], object]) -> State:
    """Return ``state`` with ``part`` of its reserved slots and ``leaf`` of its other tensors, in order."""
    if isinstance(state, Tensor):
        return leaf(state)
    if isinstance(state, ReservedSlots):
        return part(state)
    if isinstance(state, states.ReservedState):
        raise UnrecordableError(f"{type(state).__name__} counts on the host")
    return states.rebuilt(state, [_mapped(item, part, leaf) for item in state])


def _parts(state: State) -> list[ReservedSlots]:
    parts: list[ReservedSlots] = []
    _mapped(state, parts.append, lambda _: None)
    return parts


def _leaves(state: State) -> list[Tensor]:
    """Return all tensors of a state but the buffers of reserved slots."""
    leaves: list[Tensor] = []
    _mapped(state, lambda part: leaves.append(part.seen), leaves.append)
    return leaves


def _opened(state: State, bounds: Sequence[tuple[int, int]], time: int) -> State:
    bound = iter(bounds)
    return _mapped(state, lambda part: part.open(part.views(*next(bound), time), part.seen), lambda leaf: leaf)
