"""A tape of a step: the operators that the model calls, with their arguments, and that list as a function.

The model runs as ever while a dispatch mode of PyTorch notes every operator. A number of the host among the arguments
may count past slots: :func:`at_any_length` compares the tapes of two lengths, and expresses what differs by the size of
a view of the slots. What no tape can hold raises an :class:`UnrecordableError`: the host's reads of the data, and
shapes that depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = tuple[object, ...]
Keywords = dict[str, object]

_READS = {"tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WHOLE = {torch.ops.aten.lstm.input}
"""Operators that read no data and stay whole: PyTorch 2.11 takes this one apart into results of another rank."""
Function = Callable[..., tuple[Tensor, ...]]
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
"""The formats of memory by their number in PyTorch's operators."""


class UnrecordableError(Exception):
    """The reason why a step has to be made in Python; ``steps``: after how many
    more to try again, None where unknown."""

    def __init__(self, reason: str, steps: int | None = None) -> None:
        super().__init__(reason)
        self.steps = steps


class Ref(NamedTuple):
    """A tensor: an input or a result by its number, or, below 0, one that the model holds."""

    number: int


class SlotCount(NamedTuple):
    """A number of the host that is ``offset`` more than the slots of the input ``view``."""

    view: int
    offset: int


class View(NamedTuple):
    """A view of past slots: its number among the inputs, how many slots it has, and the rule by which that grows."""

    number: int
    slots: int
    rule: object


class Call(NamedTuple):
    """A call of an operator: its arguments in the order of its schema, and the numbers of its results."""

    operator: OpOverload
    arguments: Arguments
    results: tuple[int, ...]


class Tape(TorchDispatchMode):
    """The operators that were called while this mode was on; ``captured`` are the tensors that existed before, other
    than the ``inputs``."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.captured: list[Tensor] = []
        self._all: list[Tensor] = []  # alive, so that no identity is used again
        self._refs: dict[int, Ref] = {}
        self._numbers = count()
        self._inside = False
        for tensor in inputs:
            self._made(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to leave PyTorch's compiler alone, it would be imported, which takes a second

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note all operators within the context."""
        with self, _WatchedReads():
            yield

    def ref(self, tensor: Tensor) -> Ref:
        """Return what stands for ``tensor``; one that existed before is captured."""
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
        noted = tuple(map(self._noted, arguments))
        self._inside = True
        try:
            output = self._run(func, operator, args, kwargs)
        finally:
            self._inside = False
        outputs = output if isinstance(output, (tuple, list)) else () if output is None else (output,)
        tensors = [isinstance(item, Tensor) for item in outputs]
        if all(tensors):
            self.calls.append(Call(func, noted, tuple(self._made(item) for item in outputs)))
        elif any(tensors):
            raise UnrecordableError(f"the operator {func} gives tensors and other values")
        # what is left tells the host of types and sizes, such as ``promote_types``
        return output

    def _run(self, func: OpOverload, operator: _Operator, args: Arguments, kwargs: Keywords) -> object:
        if operator.parts is None:
            return func(*args, **kwargs)
        with self:  # in inference mode nothing else takes it apart
            return operator.parts(*args, **kwargs)

    def _made(self, tensor: Tensor) -> int:
        number = next(self._numbers)
        self._refs[id(tensor)] = Ref(number)
        self._all.append(tensor)
        return number

    def _noted(self, argument: object) -> object:
        if isinstance(argument, Tensor):
            return self.ref(argument)
        if isinstance(argument, (list, tuple)):
            return [self._noted(item) for item in argument]
        return argument


class _Operator(NamedTuple):
    """The facts of an operator: whether the host may read its result, the function that calls the operators that it is
    made of, and each parameter's name and default."""

    reads: bool
    parts: Callable[..., object] | None
    parameters: tuple[tuple[str, object], ...]


@cache
def _operator(func: OpOverload) -> _Operator:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    # PyTorch's own decompositions in Python (``func.decompose``) import its compiler
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) and func not in _WHOLE
    parts = partial(func._op_dk, key) if composite else None
    parameters = tuple((item.name, item.default_value) for item in func._schema.arguments)
    return _Operator(bool(_TAGS & set(func.tags)), parts, parameters)


def _plain_index(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether ``func`` indexes by numbers: only masks make a shape that depends on the data."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(x is not None and x.dtype in masks for x in args[1])


class _WatchedReads(TorchFunctionMode):
    """A mode that refuses reads of tensors without an operator."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if getattr(func, "__name__", "") in _READS:
            raise UnrecordableError(f"the host reads the data ({func.__name__})")
        return func(*args, **(kwargs or {}))


def at_any_length(one: Tape, other: Tape, views: Sequence[tuple[View, View]]) -> list[Call]:
    """Return the calls of a step as they are at any number of past slots, from the tapes of two numbers; ``views`` are
    the views of the slots in either.

    Errors: :class:`UnrecordableError` where another number of slots means other operators.
    """
    same = len(one.calls) == len(other.calls) and len(one.captured) == len(other.captured)
    if not same or not all(map(_equal, one.captured, other.captured)):
        raise _depends()
    return [_joined(a, b, views) for a, b in zip(one.calls, other.calls, strict=True)]


def _depends() -> UnrecordableError:
    return UnrecordableError("what is done depends on the length")


def _joined(a: Any, b: Any, views: Sequence[tuple[View, View]]) -> Any:
    """Return what stands for both ``a`` and ``b``, the same part of a call on two tapes."""
    if type(a) is not type(b):
        raise _depends()
    if a == b or (a != a and b != b):  # NaN does not equal itself
        return a
    if isinstance(a, Call):
        return Call(*(_joined(x, y, views) for x, y in zip(a, b, strict=True)))
    if type(a) in (list, tuple) and len(a) == len(b):
        return type(a)(_joined(x, y, views) for x, y in zip(a, b, strict=True))
    grown = [view for view, longer in views if a - view.slots == b - longer.slots] if type(a) is int else []
    if not grown or any(view.rule != grown[0].rule for view in grown):
        raise _depends()
    return SlotCount(grown[0].number, a - grown[0].slots)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))


def compiled(calls: Sequence[Call], inputs: int, captured: int, outputs: Sequence[Ref]) -> Function:
    """Return ``calls`` as a function that PyTorch runs without Python: of this many ``inputs`` and ``captured``
    tensors, with a tuple of ``outputs``."""
    graph = torch._C.Graph()
    values = {Ref(number): graph.addInput(f"x{number}") for number in range(inputs)}
    values |= {Ref(-1 - number): graph.addInput(f"w{number}") for number in range(captured)}
    writer = _Writer(graph, values)
    for call in calls:
        writer.write(call)
    results = [values[ref] for ref in outputs]
    node = writer.add("prim::TupleConstruct", results, torch._C.TupleType([value.type() for value in results]))
    graph.registerOutput(node)
    return torch._C._create_function_from_graph("step", graph)


class _Writer:
    """Writes calls into a graph; ``values`` are those of the graph that stand for tensors."""

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
        parameters = zip(call.arguments, _types(call.operator), strict=True)
        inputs = [self._value(argument, type) for argument, type in parameters]
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
            size = self.add("aten::size", [self._values[Ref(argument.view)], self._constant(2)], torch._C.IntType.get())
            return self.add("aten::add", [size, self._constant(argument.offset)], torch._C.IntType.get())
        if isinstance(type, torch._C.OptionalType):
            type = type.getElementType()
        if isinstance(argument, list):
            items = [self._value(item, type.getElementType()) for item in argument]
            return self.add("prim::ListConstruct", items, type)
        if isinstance(type, torch._C.FloatType) and isinstance(argument, int):
            argument = float(argument)
        return self._constant(_FORMATS.index(argument) if isinstance(argument, torch.memory_format) else argument)

    def _constant(self, value: object) -> torch._C.Value:
        key = type(value), str(value)
        if key not in self._constants:
            self._constants[key] = self._graph.insertConstant(value)
        return self._constants[key]


@cache
def _types(func: OpOverload) -> tuple[torch._C.JitType, ...]:
    return tuple(item.type for item in func._schema.arguments)
