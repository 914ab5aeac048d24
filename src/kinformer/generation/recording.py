"""Steps of generation without Python: recorded once and then run.

``benchmarks/step_recording.py`` and ``benchmarks/gpu.py`` measure what recordings gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count, islice
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kinformer.core.attention_state import ReservedSlots, SlotRange
from kinformer.core.model import CausalModel, Model
from kinformer.core.state import ReservedState, State, map_tensors, rebuilt, tensors
from kinformer.generation import native
from kinformer.generation.fusing import Fusion, without_unused
from kinformer.generation.native import is_native
from kinformer.runtime.autograd import autocast_dtype
from kinformer.runtime.compiling import substituting
from kinformer.runtime.errors import KinformerError

# A tape of a step: the operators that the model calls, with their arguments, and this list as a function.
#
# The model runs as usual while a dispatch mode of PyTorch notes every operator. A number of the host among the
# arguments may count past slots: :func:`at_any_length` compares the tapes of two lengths, and replaces numbers that
# differ by the size of a view of the slots. If the host reads the data, or shapes depend on the data, the tape raises
# an :class:`UnrecordableError`.

Arguments = tuple[object, ...]
Keywords = dict[str, object]
Item = TypeVar("Item")

_READS = {"tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WHOLE = {torch.ops.aten.lstm.input}
"""Composite operators to record whole: PyTorch 2.11 splits this operator into operators that change the rank."""
Function = Callable[..., tuple[Tensor, ...]]
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
"""The formats of memory; operators in a graph take a format's index here."""


class UnrecordableError(Exception):
    """The reason why a step cannot be recorded; ``steps``: after how many steps to try again, None if unknown."""

    def __init__(self, reason: str, steps: int | None = None) -> None:
        super().__init__(reason)
        self.steps = steps


class Ref(NamedTuple):
    """A tensor: an input or a result by its number, or, with a number below 0, a tensor of the model."""

    number: int


class SlotCount(NamedTuple):
    """A number of the host: ``offset`` more than the number of slots of the input ``view``."""

    view: int
    offset: int


class View(NamedTuple):
    """A view of past slots: its number among the inputs, its number of slots, and the rule by which they grow."""

    number: int
    slots: int
    rule: object


class Call(NamedTuple):
    """A call of an operator: the arguments in the order of its schema, and the numbers of its results."""

    operator: OpOverload
    arguments: Arguments
    results: tuple[int, ...]


class Tape(TorchDispatchMode):
    """The operators called while this mode is on; ``captured``: the tensors from before, without the ``inputs``;
    ``mixed``: an operator that gave tensors and other values, which no call holds."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.captured: list[Tensor] = []
        self.mixed: OpOverload | None = None
        self.results: list[Tensor] = []  # by number; they stay alive, so that Python does not use an id again
        self._refs: dict[int, Ref] = {}
        self._numbers = count()
        self._inside = False
        for tensor in inputs:
            self._number(tensor)

    def tensor(self, ref: Ref) -> Tensor:
        """Return the tensor of ``ref``."""
        return self.results[ref.number] if ref.number >= 0 else self.captured[-1 - ref.number]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import PyTorch's compiler, which takes a second.

    def ref(self, tensor: Tensor) -> Ref:
        """Return the reference to ``tensor``; a tensor that existed before the tape is captured."""
        ref = self._refs.get(id(tensor))
        if ref is None:
            ref = self._refs[id(tensor)] = Ref(-1 - len(self.captured))
            self.captured.append(tensor)
        return ref

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        operator = _operator(func)
        if operator.reads and not _plain_index(func, args):
            raise UnrecordableError(f"the operator {func} depends on the data")
        if self._inside:
            return self._run(func, operator, args, kwargs)
        arguments = [
            args[place] if place < len(args) else kwargs.get(name, default)
            for place, (name, default) in enumerate(operator.parameters)
        ]
        noted = tuple(map(self._note, arguments))
        self._inside = True
        try:
            output = self._run(func, operator, args, kwargs)
        finally:
            self._inside = False
        outputs = output if isinstance(output, (tuple, list)) else () if output is None else (output,)
        tensors = [isinstance(item, Tensor) for item in outputs]
        if all(tensors):
            self.calls.append(Call(func, noted, tuple(self._number(item) for item in outputs)))
        elif any(tensors):
            self.mixed = func
        # The other operators return types or sizes to the host, such as ``promote_types``.
        return output

    def _run(self, func: OpOverload, operator: _Operator, args: Arguments, kwargs: Keywords) -> object:
        if operator.parts is None:
            return func(*args, **kwargs)
        with self:  # In inference mode PyTorch does not split composite operators before this mode sees them.
            return operator.parts(*args, **kwargs)

    def _number(self, tensor: Tensor) -> int:
        number = next(self._numbers)
        self._refs[id(tensor)] = Ref(number)
        self.results.append(tensor)
        return number

    def _note(self, argument: object) -> object:
        if isinstance(argument, Tensor):
            return self.ref(argument)
        if isinstance(argument, (list, tuple)):
            return [self._note(item) for item in argument]
        return argument


class _Operator(NamedTuple):
    """An operator: whether the host may read its result, the function of its parts, and its parameters."""

    reads: bool
    parts: Callable[..., object] | None
    parameters: tuple[tuple[str, object], ...]


@cache
def _operator(func: OpOverload) -> _Operator:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    # Not ``func.decompose``, whose decompositions in Python import PyTorch's compiler.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) and func not in _WHOLE
    parts = partial(func._op_dk, key) if composite else None
    parameters = tuple((item.name, item.default_value) for item in func._schema.arguments)
    return _Operator(bool(_TAGS & set(func.tags)), parts, parameters)


def _plain_index(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether ``func`` indexes by numbers: with masks the shape would depend on the data."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(x is not None and x.dtype in masks for x in args[1])


class _WatchedReads(TorchFunctionMode):
    """A mode that refuses reads of tensors that call no operator, such as ``tolist``."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if getattr(func, "__name__", "") in _READS:
            raise UnrecordableError(f"the host reads the data ({func.__name__})")
        return func(*args, **(kwargs or {}))


_DEPENDS = "which operators run depends on the length"


def at_any_length(one: Tape, other: Tape, views: Sequence[tuple[View, View]]) -> list[Call]:
    """Return the calls of a step at any number of past slots, from its tapes at two numbers of past slots; ``views``
    are the views of the slots on both tapes.

    Errors: :class:`UnrecordableError` if the operators depend on the number of slots.
    """
    same = len(one.calls) == len(other.calls) and len(one.captured) == len(other.captured)
    if not same or not all(map(_equal, one.captured, other.captured)):
        raise UnrecordableError(_DEPENDS)
    return [_join(a, b, views) for a, b in zip(one.calls, other.calls, strict=True)]


def _join(a: Any, b: Any, views: Sequence[tuple[View, View]]) -> Any:
    """Return one value for ``a`` and ``b``, the same part of a call on two tapes."""
    if type(a) is not type(b):
        raise UnrecordableError(_DEPENDS)
    if isinstance(a, Call):
        return Call(*(_join(x, y, views) for x, y in zip(a, b, strict=True)))
    if type(a) in (list, tuple) and len(a) == len(b):
        return type(a)(_join(x, y, views) for x, y in zip(a, b, strict=True))
    # Every call gets a new handle of an object, and handles cannot be compared; the outputs are compared at the end.
    if isinstance(a, torch.ScriptObject) or a == b or (a != a and b != b):  # NaN does not equal itself.
        return a
    grown = [view for view, longer in views if a - view.slots == b - longer.slots] if type(a) is int else []
    if not grown or any(view.rule != grown[0].rule for view in grown):
        raise UnrecordableError(_DEPENDS)
    return SlotCount(grown[0].number, a - grown[0].slots)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))


# A shorter list of calls with the same results.


def simplify(
    calls: Sequence[Call], tapes: Sequence[Tape], outputs: Sequence[Ref], twins: Sequence[tuple[int, int]] = ()
) -> tuple[list[Call], list[Tensor], list[Ref]]:
    """Return fewer calls with the same results, the tensors that they capture, and the references to ``outputs``.

    A call is removed if its results are constants, equal the results of an earlier call, are a view of a whole tensor,
    or are not used. Random numbers and tensors that some call writes to are never shared. ``tapes``: the tapes of the
    calls, at one or two numbers of past slots; ``twins``: pairs of equal inputs, of which only the first is read.
    """
    tape, captured = tapes[0], list(tapes[0].captured)
    written = {_storage(tape, ref) for call in calls for ref in _writes(call)}
    same: dict[Ref, Ref] = {Ref(second): Ref(first) for first, second in twins}
    earlier: dict[tuple[OpOverload, str], tuple[int, ...]] = {}
    shorter: list[Call] = []
    for call in calls:
        read, results = list(_flat(call.arguments, Ref)), list(map(Ref, call.results))
        arguments = _replace(call.arguments, same)
        if len(results) == 1 and read and all(_is_whole(one, read[0], results[0]) for one in tapes):
            same[results[0]] = same.get(read[0], read[0])
            if not call.operator._schema.is_mutable:
                continue
        drawn = torch.Tag.nondeterministic_seeded in call.operator.tags
        if results and not drawn and not any(_storage(tape, ref) in written for ref in (*read, *results)):
            before = earlier.setdefault((call.operator, repr(arguments)), call.results)
            if before is not call.results:
                same |= {ref: same.get(Ref(number), Ref(number)) for ref, number in zip(results, before, strict=True)}
                continue
            fixed = not any(_flat(arguments, SlotCount)) and all(ref.number < 0 for ref in _flat(arguments, Ref))
            if fixed and all(_is_small(tape.tensor(ref)) for ref in results):
                same |= {ref: Ref(-1 - place) for place, ref in enumerate(results, start=len(captured))}
                captured += map(tape.tensor, results)
                continue
        shorter.append(call._replace(arguments=arguments))
    refs = [same.get(ref, ref) for ref in outputs]
    if is_native():
        grown = {
            number
            for number, same_results in enumerate(zip(*(one.results for one in tapes), strict=True))
            if len({result.shape for result in same_results}) > 1
        }
        shorter = Fusion(shorter, refs, tape.results, captured, grown).calls()
    shorter = without_unused(shorter, {ref.number for ref in refs})
    needed = dict.fromkeys([*_flat(list(shorter), Ref), *refs])
    stored = [ref for ref in needed if ref.number < 0]
    places = {ref: Ref(-1 - place) for place, ref in enumerate(stored)}
    used = [call._replace(arguments=_replace(call.arguments, places)) for call in shorter]
    return used, [captured[-1 - ref.number] for ref in stored], [places.get(ref, ref) for ref in refs]


_SMALL = 1 << 16
"""The most bytes of a constant that a recording stores; larger constants would hold the weights twice."""


def _is_small(tensor: Tensor) -> bool:
    return tensor._is_view() or tensor.nbytes <= _SMALL


def _flat(item: object, kind: type[Item]) -> Iterator[Item]:
    """Yield the objects of the type ``kind`` in ``item``, also inside lists."""
    if isinstance(item, kind):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _flat(part, kind)


def _replace(item: Any, by: Mapping[Ref, Ref]) -> Any:
    """Return ``item`` with the references in ``by`` replaced, also inside lists."""
    if isinstance(item, Ref):
        return by.get(item, item)
    return type(item)(_replace(part, by) for part in item) if type(item) in (list, tuple) else item


def _writes(call: Call) -> Iterator[Ref]:
    """Yield the tensors that the operator writes to."""
    for argument, parameter in zip(call.arguments, call.operator._schema.arguments, strict=True):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            yield from _flat(argument, Ref)


def _storage(tape: Tape, ref: Ref) -> int:
    return tape.tensor(ref).untyped_storage()._cdata


def _is_whole(tape: Tape, ref: Ref, view: Ref) -> bool:
    """Return whether ``view`` is all of the tensor ``ref``, in the same order."""
    if _storage(tape, ref) != _storage(tape, view):
        return False
    forms = [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in map(tape.tensor, (ref, view))]
    return forms[0] == forms[1]


def compile_calls(
    calls: Sequence[Call], inputs: int, captured: int, outputs: Sequence[Ref], parts: Sequence[int] = ()
) -> Function:
    """Return ``calls`` as a function that PyTorch runs without Python, of ``inputs`` and then ``captured`` tensors;
    both are numbers. It returns the tuple of ``outputs``. Behind the first input stand buffers of slots, as many as in
    each of ``parts``, in place of their views, and behind all tensors the bounds of each part's slots."""
    graph = torch._C.Graph()
    values = {Ref(number): graph.addInput(f"x{number}") for number in range(inputs)}
    values |= {Ref(-1 - number): graph.addInput(f"w{number}") for number in range(captured)}
    writer, numbers = _Writer(graph, values), iter(range(1, inputs))
    for part, buffers in enumerate(parts):
        bounds = [graph.addInput(f"{name}{part}").setType(torch._C.IntType.get()) for name in ("start", "stop")]
        for ref in map(Ref, islice(numbers, buffers)):
            values[ref] = writer.add("aten::slice", [values[ref], writer.constant(2), *bounds, writer.constant(1)])
    for call in calls:
        writer.write(call)
    results = [values[ref] for ref in outputs]
    node = writer.add("prim::TupleConstruct", results, torch._C.TupleType([value.type() for value in results]))
    graph.registerOutput(node)
    return torch._C._create_function_from_graph("step", graph)


class _Writer:
    """Writes calls into a graph; ``values`` are the graph's values by the references to tensors."""

    def __init__(self, graph: Any, values: dict[Ref, torch._C.Value]) -> None:
        self._graph, self._values = graph, values
        self._constants: dict[tuple[type, str], torch._C.Value] = {}

    def add(self, kind: str, inputs: Sequence[object], type: torch._C.JitType | None = None) -> torch._C.Value:
        node = self._graph.create(kind, inputs, 1)
        self._graph.insertNode(node)
        if type is not None:
            node.output().setType(type)
        return node.output()

    def write(self, call: Call) -> None:
        schema = call.operator._schema
        parameters = zip(call.arguments, schema.arguments, strict=True)
        inputs = [self._value(argument, parameter.type) for argument, parameter in parameters]
        returns = schema.returns
        listed = len(returns) == 1 and isinstance(returns[0].type, torch._C.ListType)
        node = self._graph.create(schema.name, inputs, len(returns))
        self._graph.insertNode(node)
        if listed:
            node.output().setType(returns[0].type)
            node = self._graph.create("prim::ListUnpack", [node.output()], len(call.results))
            self._graph.insertNode(node)
        self._values.update(zip(map(Ref, call.results), node.outputs(), strict=True))

    def _value(self, argument: object, type: torch._C.JitType) -> torch._C.Value:
        if isinstance(argument, Ref):
            return self._values[argument]
        if isinstance(argument, SlotCount):
            size = self.add("aten::size", [self._values[Ref(argument.view)], self.constant(2)], torch._C.IntType.get())
            return self.add("aten::add", [size, self.constant(argument.offset)], torch._C.IntType.get())
        if isinstance(type, torch._C.OptionalType):
            type = type.getElementType()
        if isinstance(argument, list):
            items = [self._value(item, type.getElementType()) for item in argument]
            return self.add("prim::ListConstruct", items, type)
        if isinstance(type, torch._C.FloatType) and isinstance(argument, int):
            argument = float(argument)
        return self.constant(_FORMATS.index(argument) if isinstance(argument, torch.memory_format) else argument)

    def constant(self, value: object) -> torch._C.Value:
        key = type(value), str(id(value) if isinstance(value, torch.ScriptObject) else value)
        if key not in self._constants:
            self._constants[key] = self._graph.insertConstant(value)
        return self._constants[key]


# The recordings of a model's steps: the model stores them, and they are valid while the model is unchanged.

_LIMIT = 4
"""The number of recordings that a model stores; each is for one batch size and reserved room."""


class Derived:
    """A collection that a model stores, and that is not copied or saved with the model."""

    def __deepcopy__(self, memo: object) -> Derived:
        return type(self)()

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        return type(self), ()


class Recordings(Derived, list["Recording"]):
    """The last recordings of a model's steps."""

    def keep(self, recording: Recording) -> None:
        self.insert(0, recording)
        del self[_LIMIT:]


def recordings_of(model: Model | nn.Module) -> Recordings:
    """Return the recordings of ``model``, stored in an attribute, so that garbage collection frees them together."""
    retained: Recordings = vars(model).setdefault("_recordings", Recordings())
    retained[:] = [recording for recording in retained if recording.holds()]
    return retained


@cache
def _count_steps() -> None:
    """Let every step of an optimiser raise the versions of the weights, as fused optimisers do not."""

    def raise_versions(optimiser: Optimizer, *_: object) -> None:
        weights = chain.from_iterable(group["params"] for group in optimiser.param_groups)
        torch.autograd.graph.increment_version([weight for weight in weights if weight.grad is not None])

    register_optimizer_step_post_hook(raise_versions)


class Unchanged:
    """A check whether modules are unchanged: the same submodules, parameters and buffers with the same values, in the
    same mode, without hooks. Values that change through ``.data`` and other attributes of modules are not compared.

    A check takes some ten microseconds, since its loops run in C.
    """

    def __init__(self, parts: Sequence[Model | nn.Module]) -> None:
        _count_steps()
        modules = dict.fromkeys(module for part in parts for module in part.modules())
        self._states = [module.__dict__ for module in modules]
        self._hooks = [state[name] for state in self._states for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._hooks += [hooks._global_forward_hooks, hooks._global_forward_pre_hooks]
        tables = [state[name] for state in self._states for name in ("_modules", "_parameters", "_buffers")]
        self._tables, self._empty = [table for table in tables if table], [table for table in tables if not table]
        self._items = list(self._present())
        self._tensors = [item for item in self._items if isinstance(item, Tensor)]
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._then = self._facts()

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        if any(self._hooks) or any(self._empty) or not all(map(is_, self._present(), self._items)):
            return False
        return self._facts() == self._then

    def _present(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._tables))

    def _facts(self) -> list[object]:
        sizes = sum(map(len, self._tables)), sum(map(len, self._states))  # ``forward`` may be among new attributes
        facts = map(Tensor.data_ptr, self._tensors), map(attrgetter("_version"), self._versioned)
        return [*sizes, *map(itemgetter("training"), self._states), *chain(*facts)]


# One step of generation, recorded once and then run without Python.
#
# A step of one token for each row calls some thousand Python functions and a few hundred small operators, which take
# longer than the products where batches and models are small. :func:`record` notes the operators while the model makes
# a step, and PyTorch's interpreter runs this list from then on. The model stores its recordings until it changes.
#
# :func:`record` refuses a step that a list cannot hold, and the model is then stepped in Python:
#
# * the host reads the data (early exits, searches, hashing), the step draws random numbers, or modules have hooks;
# * leaves of the state change their shape, or the host counts other numbers than the bounds of reserved slots;
# * the operators depend on the length: past slots enter as views of growing length, and the list that was noted with
#   one past slot must equal the list with the most slots that the buffers hold, except for numbers that count slots.
#   Where the steps of a short past differ, the list begins at the present length;
# * the first recorded step differs from the model's step.
#
# ``benchmarks/step_recording.py`` keeps it: by ``step_recording.json``, a recorded step takes 0.55 to 0.64 of the time
# of a step in Python. Delete it when every row ``recorded`` is above 0.9 of the row ``in Python``, or AOTInductor makes
# an equally fast step within 0.1 s instead of tens of seconds; a recording takes the time of seven steps. If PyTorch
# drops TorchScript's interpreter earlier, sessions step in Python (:func:`record`).

_NEAR = 1e-3
"""The largest difference between the logits of a recorded step and the model's, relative to the largest logit. In
bfloat16 it is four roundings, because an operator in C rounds once where PyTorch's operators round several times."""


Step = Callable[[Tensor, State], tuple[tuple[Tensor, ...], State]]
"""(tokens [batch, time] of a step, state) -> (the step's outputs, the state after)."""


def logits_after(model: CausalModel, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    """Return logits [batch, vocab] after the last of ``tokens`` [batch, time], and the state there."""
    inputs, state = model.head_inputs(tokens, state)
    return model.logits(map_tensors(lambda x: x[:, -1:], inputs))[:, 0], state


def logits_alone(model: CausalModel, tokens: Tensor, state: State) -> tuple[tuple[Tensor, ...], State]:
    """Return the logits of :func:`logits_after` as the outputs of a step, and the state after it."""
    logits, state = logits_after(model, tokens, state)
    return (logits,), state


class Recording:
    """The recorded step of a model; :meth:`begin` steps a state by it.

    ``function`` is the list of operators, of ``tokens`` [batch, time], the buffers of reserved slots, all other leaves
    of the state, the model's tensors ``captured`` and the bounds of the slots. Each reservation has ``least`` past
    slots or more and retains ``retained`` of its slots, None for all. Only the sizes of ``state``, which the step was
    recorded from, are stored.
    ``twins`` are pairs of leaves that must be equal, of which the function reads the first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        captured: Sequence[Tensor],
        model: Model | nn.Module,
        state: State,
        least: Sequence[int],
        retained: Sequence[int | None],
        time: int = 1,
        twins: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.function, self.captured, self.twins = function, captured, twins
        self.least, self.retained, self.time = least, retained, time
        self._form, self._most = self.form(state), [part.capacity for part in _parts(state)]
        self.holds = Unchanged([model]).holds

    def form(self, state: State) -> object:
        """Return the types and sizes of ``state`` that the recording holds for, without the number of past slots."""
        return [part.slots.full for part in _parts(state)], *_sizes(state)

    def begin(self, state: State, time: int = 1) -> RecordedStep | None:
        """Return steps of ``time`` tokens from ``state`` on; None for another time, or a state of other sizes."""
        narrow = autocast_dtype(next(tensors(state)).device) is not None
        return None if narrow or time != self.time or self.form(state) != self._form else self._begin(state)

    def _begin(self, state: State) -> RecordedStep | None:
        for part, least, most in zip(_parts(state), self.least, self._most, strict=True):
            full = part.slots.stop + self.time > part.capacity
            if full or part.capacity > most or part.slots.stop - part.slots.start < least:
                return None
        leaves = _leaves(state)
        if not all(torch.equal(leaves[one], leaves[other]) for one, other in self.twins):
            return None
        return RecordedStep(self, state)


class RecordedStep:
    """A :class:`Recording` at work, and the state that it steps."""

    def __init__(self, recording: Recording, state: State) -> None:
        self.recording, self.state = recording, state
        self._parts = _parts(state)
        self._bounds = _bounds(state)
        self._buffers = [buffer for part in self._parts for buffer in part.buffers]
        self._leaves = _leaves(state)

    @property
    def goes_on(self) -> bool:
        """Return whether the buffers have room for another step and the model is unchanged."""
        ends = (stop + self.recording.time for _, stop in self._bounds)
        room = all(end <= part.capacity for part, end in zip(self._parts, ends, strict=True))
        return room and self.recording.holds()

    def outputs(self, tokens: Tensor) -> Sequence[Tensor]:
        """Return the outputs of a step of ``tokens`` [batch, time], which the state absorbs."""
        recording, after = self.recording, self._bounds_after()
        bounds = chain.from_iterable((start, end) for (start, _), (_, end) in zip(self._bounds, after, strict=True))
        self._bounds = after
        # Optimised execution makes the first steps slow and the others no faster.
        with torch.jit.optimized_execution(False):
            outputs = recording.function(tokens, *self._buffers, *self._leaves, *recording.captured, *bounds)
        count = len(outputs) - len(self._leaves)
        self._leaves = list(outputs[count:])
        return outputs[:count]

    def _bounds_after(self) -> list[tuple[int, int]]:
        """Return the bounds of the past slots after another step."""
        ends = [stop + self.recording.time for _, stop in self._bounds]
        return [
            (start if retained is None else max(start, end - retained), end)
            for (start, _), end, retained in zip(self._bounds, ends, self.recording.retained, strict=True)
        ]

    def release(self) -> State:
        """Return the state, for steps in Python; this object must not be used any more."""
        bounds, leaves = iter(self._bounds), iter(self._leaves)
        return _map(self.state, lambda part: part.moved_on(*next(bounds), next(leaves)), lambda _: next(leaves))


def record(model: CausalModel, tokens: Tensor, state: State, absorb: Callable[..., Any] = logits_alone) -> Recording:
    """Return the recorded step ``absorb(model, tokens, state)`` of ``tokens`` [batch, time] after ``state``.

    The state is not stepped, but slots after its past are written to.

    Errors: :class:`UnrecordableError` with the reason.
    """
    parts, time, step = _parts(state), tokens.shape[1], partial(absorb, model)
    if any(part.slots.stop + time > part.capacity for part in parts):
        raise UnrecordableError("the reserved slots are used up, or not laid out yet", 1)
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise UnrecordableError("a module has hooks, which run in Python")
    if autocast_dtype(tokens.device) is not None:
        raise UnrecordableError("autocast is on, and may be off at the next step")
    if tokens.device.type in CAPTURES:
        return _record_graph(step, model, tokens, state)
    now = _bounds(state)
    one_slot = [(max(start, stop - 1), stop) for start, stop in now]
    taped = _tape_step(step, tokens, _open(state, one_slot, time))
    if taped.tape.mixed is not None:
        raise UnrecordableError(f"the operator {taped.tape.mixed} gives tensors and other values")
    calls, bounds, tapes = taped.tape.calls, now, [taped.tape]
    expected = [*taped.outputs, *taped.leaves]
    if parts:
        outputs, after = step(tokens, _open(state, now, time))
        expected = [*outputs, *_leaves(after)]
        longest = [_longest(part, retained, time) for part, retained in zip(parts, taped.retained, strict=True)]
        then = _tape_step(step, tokens, _open(state, longest, time))
        try:
            bounds, calls = one_slot, _at_any_length(state, taped, then)
        except UnrecordableError:
            bounds, taped = now, _tape_step(step, tokens, _open(state, now, time))
            try:
                calls = _at_any_length(state, taped, then)
            except UnrecordableError as refused:
                room = max(stop - part.slots.stop for part, (_, stop) in zip(parts, longest, strict=True))
                raise UnrecordableError(str(refused), room // 2 + 1) from None
        tapes = [taped.tape, then.tape]
    refs = [taped.tape.ref(tensor) for tensor in (*taped.outputs, *taped.leaves)]
    leaves = _leaves(state)
    twins, first = _twins(leaves), taped.inputs - len(leaves)
    while True:
        pairs = [(first + one, first + other) for one, other in twins]
        simple, captured, results = simplify(calls, tapes, refs, pairs)
        last = results[-len(leaves) :]
        stay = [(one, other) for one, other in twins if last[one] == last[other]]
        if stay == twins:
            break
        twins = stay
    try:
        function = compile_calls(simple, taped.inputs, len(captured), results, [len(part.buffers) for part in parts])
    except Exception as error:
        raise UnrecordableError(f"PyTorch cannot write it down: {error}") from error
    least = [stop - start for start, stop in bounds]
    recording = Recording(function, captured, model, state, least, taped.retained, time, twins)
    trial = RecordedStep(recording, state)
    _compare([*trial.outputs(tokens), *trial._leaves], expected)
    return recording


def _twins(leaves: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the numbers of leaves with equal whole numbers, such as every layer's positions: a first and another."""
    firsts: list[int] = []
    twins = []
    for number, leaf in enumerate(leaves):
        if leaf.dtype == torch.int64:
            first = next((one for one in firsts if torch.equal(leaves[one], leaf)), None)
            if first is None:
                firsts.append(number)
            else:
                twins.append((first, number))
    return twins


class _TapedStep(NamedTuple):
    """A step on tape: the number of its ``inputs``, its outputs, the leaves of the state after, the views of the slots,
    and the number of slots that each mixer retains."""

    tape: Tape
    inputs: int
    outputs: tuple[Tensor, ...]
    leaves: list[Tensor]
    views: list[Tensor]
    retained: list[int | None]


def _tape_step(step: Step, tokens: Tensor, opened: object) -> _TapedStep:
    """Return a step of ``tokens`` from the state ``opened`` on tape."""
    parts, before = _parts(opened), _leaves(opened)
    generators = (torch.default_generator, *torch.cuda.default_generators)
    random = [generator.get_state() for generator in generators]
    views = [view for part in parts for view in part.buffers]
    inputs = (tokens, *views, *before)
    tape = Tape(inputs)
    # Attention of one query is recorded as PyTorch's kernel, which the operator in C then replaces.
    in_c = {"attend": native.attend} if tokens.device.type not in CAPTURES and is_native() else {}
    with tape, _WatchedReads(), substituting(in_c):
        outputs, after = step(tokens, opened)
    if not all(map(torch.equal, random, map(torch.Generator.get_state, generators))):
        raise UnrecordableError("a step draws random numbers")
    if [(x.shape, x.dtype) for x in _leaves(after)] != [(x.shape, x.dtype) for x in before]:
        raise UnrecordableError("a leaf of the state changes its shape")
    return _TapedStep(tape, len(inputs), outputs, _leaves(after), views, [part.retained for part in parts])


def _at_any_length(state: State, one: _TapedStep, other: _TapedStep) -> list[Call]:
    """Return the calls of a step at any number of past slots between the numbers of two steps on tape."""
    parts = zip(_parts(state), one.retained, strict=True)
    rules = [(part.capacity, part.slots, retained) for part, retained in parts for _ in part.buffers]
    views = [
        (View(number, a.shape[2], rule), View(number, b.shape[2], rule))
        for number, (a, b, rule) in enumerate(zip(one.views, other.views, rules, strict=True), start=1)
    ]
    return at_any_length(one.tape, other.tape, views)


def _sizes(state: State) -> tuple[object, ...]:
    """Return the types and sizes of the state, which a recording does not read again, without the number of slots."""
    slots = [[(buffer[:, :, :0].shape, buffer.dtype) for buffer in part.buffers] for part in _parts(state)]
    return slots, [(leaf.shape, leaf.dtype) for leaf in _leaves(state)]


def _compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for result, b in zip(results, map(Tensor.double, expected), strict=True):
        near = max(_NEAR, 4 * torch.finfo(result.dtype).eps) if result.is_floating_point() else _NEAR
        # In float64, so that masks can be subtracted too.
        if b.numel() and not float((result.double() - b).abs().max()) <= near * max(1.0, float(b.abs().max())):
            raise UnrecordableError("its outputs differ from the model's outputs")


def _longest(part: ReservedSlots, retained: int | None, time: int) -> tuple[int, int]:
    """Return the bounds of the longest past, before ``time`` tokens, that ``part``'s buffers can hold."""
    last = part.capacity - time
    return (0, last) if retained is None else (max(0, last - retained), last)


def _map(state: State, part: Callable[[ReservedSlots], object], leaf: Callable[[Tensor], object]) -> State:
    """Return ``state`` with ``part`` of its reserved slots and ``leaf`` of its other tensors, in order."""
    if isinstance(state, Tensor):
        return leaf(state)
    if isinstance(state, ReservedSlots):
        return part(state)
    if isinstance(state, ReservedState):
        raise UnrecordableError(f"{type(state).__name__} counts on the host")
    return rebuilt(state, [_map(item, part, leaf) for item in state])


def _parts(state: State) -> list[ReservedSlots]:
    parts: list[ReservedSlots] = []
    _map(state, parts.append, lambda _: None)
    return parts


def _leaves(state: State) -> list[Tensor]:
    """Return all tensors of a state but the buffers of reserved slots."""
    leaves: list[Tensor] = []
    _map(state, lambda part: leaves.append(part.seen), leaves.append)
    return leaves


def _bounds(state: State) -> list[tuple[int, int]]:
    return [(part.slots.start, part.slots.stop) for part in _parts(state)]


def _open(state: State, bounds: Sequence[tuple[int, int]], time: int) -> State:
    bound = iter(bounds)
    return _map(state, lambda part: part.open(part.views(*next(bound), time), part.seen), lambda leaf: leaf)


# A step on a GPU: a CUDA graph of the launches of a step.
#
# A graph repeats the launches of a step on the same addresses, so the token, the state and the outputs stay in place: a
# step copies its token in, and its last launches copy the new leaves over the old ones. The number of past slots may
# not change either, so they are right-aligned behind invalid slots, like the past of a shorter row in a batch, and move
# by one slot after a step. Sampling stays outside of the graph.
#
# A tape of the step first finds reads of the host, random numbers, copies from the host and leaves that grow, none of
# which a graph can repeat. ``benchmarks/gpu.py`` keeps graphs: by the part ``generation`` of ``gpu.json``, a token of
# constant states takes 0.05 to 0.14 of the time of a step in Python. Delete them when it takes 0.8.

_LEAST_SLOTS = 64


def captured(function: Callable[[], Item], device: torch.device) -> Callable[[], Item]:
    """Return a function that repeats, as a CUDA graph, what ``function`` launches on ``device`` and returns the same
    tensors. ``function`` is called once before, for what first calls allocate and choose."""
    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = function()

    def replay() -> Item:
        graph.replay()
        return result

    return replay


CAPTURES = {"cuda": captured}
"""The types of devices whose steps are captured, and how."""


class GraphRecording(Recording):
    """The step of a model, ``function``, which each state captures. ``idle`` has at most one that is not in use."""

    def __init__(self, step: Step, model: Model | nn.Module, tokens: Tensor, state: State, opened: object) -> None:
        self.tokens, self.idle = tokens.clone(), list[GraphedStep]()
        super().__init__(step, (), model, state, (), [part.retained for part in _parts(opened)], tokens.shape[1])

    def form(self, state: State) -> object:
        return self._slots(state), *_sizes(state)

    def _slots(self, state: State) -> list[int]:
        """Return the number of past slots in place of each reservation: enough for the room of ``state``."""
        sizes = []
        for (start, stop), part, retained in zip(_bounds(state), _parts(state), self.retained, strict=True):
            needed = stop - start + max(part.room, self.time)
            most = max(_LEAST_SLOTS, 1 << (needed + self.time - 1).bit_length()) - self.time
            sizes.append(most if retained is None else min(most, retained))
        return sizes

    def in_place(self, state: State) -> State:
        """Return a copy of ``state`` with as many slots as stay in place."""
        sizes = zip(self._slots(state), _bounds(state), strict=True)

        def relaid(part: ReservedSlots) -> ReservedSlots:
            most, (start, stop) = next(sizes)
            return part.relaid(SlotRange(max(0, most - stop + start), most, self.time, False))

        return _map(state, relaid, torch.clone)

    def _begin(self, state: State) -> RecordedStep:
        with suppress(IndexError):
            return self.idle.pop().load(state)
        return GraphedStep(self, state)


class GraphedStep(RecordedStep):
    """A captured step and its state in place; :class:`UnrecordableError` if the device does not capture it."""

    recording: GraphRecording

    def __init__(self, recording: GraphRecording, state: State) -> None:
        try:
            super().__init__(recording, recording.in_place(state))
            self._tokens, self._most = recording.tokens.clone(), [stop for _, stop in self._bounds]
            self._replay = CAPTURES[self._tokens.device.type](self._go, self._tokens.device)
            self.load(state)
        except RuntimeError as error:  # also where memory is short
            raise UnrecordableError(f"it cannot be captured as a graph: {error}") from error

    def load(self, state: State) -> GraphedStep:
        """Copy ``state`` into place, and return this step to continue from there."""
        self._bounds, self._slots = _bounds(state), [part.slots for part in _parts(state)]
        for place, value in zip(tensors(self.state), tensors(self.recording.in_place(state)), strict=True):
            place.copy_(value)
        return self

    @property
    def goes_on(self) -> bool:
        after = zip(self._bounds_after(), self._most, strict=True)
        return all(stop - start <= most for (start, stop), most in after) and self.recording.holds()

    def outputs(self, tokens: Tensor) -> Sequence[Tensor]:
        self._tokens.copy_(tokens)
        self._bounds = self._bounds_after()
        return [output.clone() for output in self._replay()]

    def release(self) -> State:
        past, leaves = zip(self._bounds, self._slots, strict=True), iter(self._leaves)

        def relaid(part: ReservedSlots) -> ReservedSlots:
            ((start, stop), before), _ = next(past), next(leaves)
            first, room = min(start, 1), max(before.room - (stop - before.stop), 0)
            return part.relaid(SlotRange(first, first + stop - start, room, before.full))

        state = _map(self.state, relaid, lambda _: next(leaves).clone())
        self.recording.idle[:] = [self]
        return state

    def _go(self) -> tuple[Tensor, ...]:
        """Step the state in place, and return the outputs: the launches that a graph repeats."""
        time, bounds = self.recording.time, [(0, most) for most in self._most]
        outputs, after = self.recording.function(self._tokens, _open(self.state, bounds, time))
        held = {x.untyped_storage()._cdata for x in tensors(self.state)}
        apart = [x.clone() if x.untyped_storage()._cdata in held else x for x in (*outputs, *_leaves(after))]
        for leaf, value in zip(self._leaves, apart[len(outputs) :], strict=True):
            leaf.copy_(value)
        for buffer in chain.from_iterable(part.buffers for part in self._parts):
            buffer[:, :, :-time] = buffer[:, :, time:].clone()
        return tuple(apart[: len(outputs)])


def _record_graph(step: Step, model: Model | nn.Module, tokens: Tensor, state: State) -> Recording:
    opened = _open(state, _bounds(state), tokens.shape[1])
    outputs, after = step(tokens, opened)
    recording = GraphRecording(step, model, tokens, state, opened)
    place = recording.in_place(state)
    tape = _tape_step(step, tokens, _open(place, [(0, stop) for _, stop in _bounds(place)], recording.time)).tape
    for call in tape.calls:
        operands = [tape.tensor(ref) for ref in (*_flat(call.arguments, Ref), *map(Ref, call.results))]
        host = [x for x in operands if x.device != tokens.device]
        copies = call.operator._schema.name in ("aten::to", "aten::_to_copy", "aten::copy_")
        # Other operators take a number of the host, without dimensions, as a constant.
        if host and len(host) < len(operands) and (copies or any(map(Tensor.dim, host))):
            raise UnrecordableError("a step copies between the host and the device")
    del place, tape  # a cache may be large
    trial = GraphedStep(recording, state)
    _compare([*trial.outputs(tokens), *trial._leaves], [*outputs, *_leaves(after)])
    recording.idle.append(trial)
    return recording


# The leaves of a state by name and in order, for a graph without Python, which takes and returns them.
#
# Leaves that grow keep an open axis of past slots. Leaves of a window are full from the start: slots are right-aligned,
# and slots before a sequence's first token are invalid, like the first slots of a shorter sequence in a batch.

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


def named_leaves(state: State, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state with the paths to them, as in ``layers.0.0.k``, in order."""
    if isinstance(state, Tensor):
        yield ".".join(path), state
        return
    names = getattr(state, "_fields", None) or map(str, range(len(state)))
    for name, item in zip(names, state, strict=True):
        yield from named_leaves(item, (*path, name))


def unflattened(like: State, leaves: Sequence[Tensor]) -> State:
    """Return a state of the structure of ``like`` with these leaves."""
    rest = iter(leaves)
    return map_tensors(lambda _: next(rest), like)


def leaves_of(model: CausalModel) -> list[Leaf]:
    """Return the leaves of the states of ``model``, a causal model of tokens, with full windows.

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
    """Return the leaf with the value ``first`` at the start, ``now`` after some tokens and ``then`` after one more."""
    if bool(first.any()):
        raise KinformerError(f"the state's {name} does not begin with zeros, as the leaves of a graph do.")
    shape: list[int | str] = [BATCH, *now.shape[1:]]
    for axis, (size, next_size) in enumerate(zip(now.shape, then.shape, strict=True)):
        if size != next_size:
            shape[axis] = PAST
    sizes: dict[int, int] = dict(enumerate(first.shape))
    irregular = [axis for axis, size in enumerate(now.shape) if size != sizes.get(axis) and axis != _SLOTS]
    if irregular or PAST in shape[:_SLOTS] + shape[_SLOTS + 1 :]:
        raise KinformerError(f"the state's {name} grows other than by a slot for every token.")
    return Leaf(name, str(first.dtype).removeprefix("torch."), tuple(shape))
