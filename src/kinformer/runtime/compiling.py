"""What a captured graph and tensors of shapes alone do not have: marks on functions for ``torch.compile``, models of
shapes, costs of operators that PyTorch cannot count, values on the host, and tensors sharded over processes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# Marks on functions for ``torch.compile`` that do not load the compiler.
#
# PyTorch's decorators load the compiler as soon as they decorate: more than a second, and 70 MB, in every process that
# builds a model.

F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
R = TypeVar("R")
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def uncompiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Leave a function out of graphs: ``torch.compiler.disable``, called once the compiler is loaded."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        disabled: Callable[P, R] | None = None

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal disabled
            if disabled is None and "torch._dynamo" in sys.modules:
                disabled = torch.compiler.disable(function, reason=reason)
            return (disabled or function)(*args, **kwargs)

        # These attributes end a graph here, with the reason, if it meets the function before the compiler is loaded.
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return call

    return decorate


def spare_operators(*operators: object) -> None:
    """Let operators of ``torch.library.custom_op`` be called without loading the compiler.

    PyTorch leaves the kernels of these operators out of graphs. Its mark loads the compiler at the first call, and then
    stores the replacement of the kernel in this attribute. In a PyTorch without the attribute the compiler is loaded.
    """
    for operator in operators:
        for function in getattr(operator, "_backend_fns", {}).values():
            kernel = getattr(function, "__wrapped__", None)
            if kernel is not None and not hasattr(kernel, "__dynamo_disable"):
                kernel.__dynamo_disable = uncompiled("it is an operator's kernel")(kernel)


def spared(optimiser: type[OptimizerT]) -> type[OptimizerT]:
    """Return the same optimiser as a class whose methods do not load the compiler. PyTorch's methods load it at the
    first call, to leave themselves out of graphs."""
    methods: dict[str, Callable[..., object]] = {}
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        methods[name] = uncompiled("it is an optimiser's method")(inspect.unwrap(getattr(optimiser, name)))
    methods["step"] = torch.no_grad()(inspect.unwrap(optimiser.step))
    return type(optimiser.__name__, (optimiser,), methods)


def constant(function: F) -> F:
    """Mark a function as ``torch.compiler.assume_constant_result`` does: its result is a constant of a graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def has_triton() -> bool:
    """Return whether Triton is installed; graphs take it as a constant, as PyTorch 2.11 cannot trace the search."""
    return find_spec("triton") is not None


# Models of shapes only, built without PyTorch's compiler.
#
# On the meta device PyTorch computes draws and elementwise operations by references in Python, and the first one loads
# the compiler: 1.6 s of processor time, as much as PyTorch itself. The draws of an initialisation, and what is computed
# from them element by element, have nothing to compute there, so they are left out; every other operation is PyTorch's.

DRAWN = {torch.randn, torch.rand}
FILLED = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}
COMPUTED = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, Tensor.add, Tensor.__add__}
COMPUTED |= {Tensor.__rsub__, Tensor.pow, Tensor.__pow__, Tensor.neg, Tensor.__neg__, Tensor.exp_, Tensor.log_}
COMPUTED |= {Tensor.softmax, torch.log, torch.expm1, nn.functional.normalize}
_CHANGED = DRAWN | FILLED | COMPUTED


class _ShapesOnly(TorchFunctionMode):
    """The mode in which tensors of the meta device are neither drawn nor computed from draws."""

    def __torch_function__(
        self, func: Callable[..., object], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        if func not in _CHANGED:
            return func(*args, **(kwargs or {}))
        options = dict(kwargs or {})
        if func in DRAWN and options.get("device") is None:
            options.pop("generator", None)
            return torch.empty(*args, **options)
        tensor = args[0] if args else options.get("tensor")
        if isinstance(tensor, Tensor) and tensor.is_meta:
            if func in FILLED:
                return tensor
            form = tensor.shape, tensor.dtype
            others = ((other.shape, other.dtype) == form for other in args[1:] if isinstance(other, Tensor))
            if func in COMPUTED and tensor.is_floating_point() and all(others):
                return tensor.detach()
        return func(*args, **options)


@contextmanager
def unallocated() -> Iterator[None]:
    """Make new tensors on the meta device, so that building a model allocates and draws nothing."""
    with torch.device("meta"), _ShapesOnly():
        yield


# Operators of another runtime, which stand in for kernels while a graph is written for that runtime.

Operator = Callable[..., Any]
_operators: ContextVar[Mapping[str, Operator] | None] = ContextVar("operators", default=None)


@contextmanager
def substituting(operators: Mapping[str, Operator]) -> Iterator[None]:
    """Call ``operators`` in place of the kernels of these names within the context, with the kernels' arguments."""
    before = _operators.set(operators)
    try:
        yield
    finally:
        _operators.reset(before)


def substitute(name: str) -> Operator | None:
    """Return the operator that stands in for the kernel called ``name``; None for the kernel itself."""
    if torch.compiler.is_dynamo_compiling():  # which traces no context variable
        return None
    operators = _operators.get()
    return None if operators is None else operators.get(name)


# Formulas that PyTorch's ``FlopCounterMode`` lacks: it counts ``bmm`` and ``baddbmm``, but not ``baddbmm_`` and int8.

Shape = tuple[int, int, int]


def batched_product(total: Shape, left: Shape, right: Shape, *_: object, **__: object) -> int:
    """Return the operations of total + left @ right for shapes [batch, m, k] and [batch, k, n]: 2 batch m k n."""
    batch, rows, inner = left
    return 2 * batch * rows * inner * right[2]


def int8_product(left: tuple[int, int], right: tuple[int, int], *_: object, **__: object) -> int:
    """Return the operations of left @ right for shapes [m, k] and [k, n]: 2 m k n."""
    return 2 * left[0] * left[1] * right[1]


if torch.ops.aten.baddbmm_ not in flop_registry:
    register_flop_formula(torch.ops.aten.baddbmm_)(batched_product)
if torch.ops.aten._int_mm not in flop_registry:
    register_flop_formula(torch.ops.aten._int_mm)(int8_product)


# The temporary memory of operators, for runs on shapes only, which do not see it.

Rule = Callable[..., int]
_RULES: dict[object, Rule] = {}


def scratch(operator: OpOverloadPacket) -> Callable[[Rule], Rule]:
    """Register a function of the arguments of ``operator`` (such as ``torch.ops.kinformer.name``) that returns the
    bytes which a call allocates and frees before it returns. The arguments have shapes only."""

    def register(rule: Rule) -> Rule:
        _RULES[operator.default] = rule
        return rule

    return register


def scratch_bytes(operator: object, arguments: Iterable[object]) -> int:
    """Return the temporary bytes of a call; 0 for an operator without a registered function."""
    rule = _RULES.get(operator)
    return rule(*arguments) if rule else 0


# The entries of small integer tensors on the host, where control flow depends on them.


def has_data(x: Tensor) -> bool:
    """Return whether ``x`` is more than a shape, which is all there is when costs are counted."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def host_ints(x: Tensor, otherwise: int) -> list[int] | None:
    """Return the entries of ``x`` [n]; ``otherwise`` n times where it has none (shapes alone, as when costs are
    counted), None while a graph is captured, which must hold for all numbers."""
    if torch.compiler.is_compiling():
        return None
    if not has_data(x):
        return [otherwise] * x.shape[0]
    return x.tolist()


class HostDriven:
    """Mixin of modules whose steps follow numbers that the host reads, so that no graph holds for all inputs."""

    @property
    def host_reads(self) -> str:
        """Return the reason why the host reads numbers, as in ``it cuts segments``; empty if it does not read any."""
        raise NotImplementedError


def is_empty_mask(output_mask: Tensor) -> bool:
    """Return whether ``output_mask`` [batch, time] selects no token; for [batch, 0] without reading entries."""
    return not output_mask.numel() or not output_mask.any()


_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusted_arguments() -> Iterator[None]:
    """Skip a model's checks of its arguments within the context, where they come from the model itself."""
    before = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(before)


def arguments_trusted() -> bool:
    """Return whether arguments are trusted (see :func:`trusted_arguments`)."""
    return not torch.compiler.is_dynamo_compiling() and _trusted.get()


def checks_calls() -> bool:
    """Return whether a module checks its arguments: not while a graph is captured, and not where they are trusted."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or _trusted.get())


def checks_values(values: Tensor) -> bool:
    """Return whether a model looks at its input's ``values``: on a CPU alone, as a GPU would have to be waited for."""
    plain = type(values) is Tensor and values.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not arguments_trusted()


# Tensors sharded over processes: parameters outside their modules' forward, gradients and norms.
#
# They are PyTorch's DTensor. Its module takes half a second to load, so this file does not import it.


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether each process has a part of the tensor only."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor; any other tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor; where it is sharded, all processes must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` sharded over processes as ``parameter`` is, where it has its shape."""
    if not is_sharded(parameter) or is_sharded(value) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def replicated(parameter: Tensor, value: Tensor) -> Tensor:
    """Return the full ``value``, which all processes have, as an operand for tensors sharded like ``parameter``."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor :func:`gathered`, on the CPU, sharing no memory."""
    return gathered(tensor.detach()).to("cpu", copy=True)
