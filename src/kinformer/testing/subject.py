"""The checks of an examination, and its subject: a mixer or a model behind one narrow interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError

from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import State, detach, difference, fork, join_rows, nbytes, rebuilt, tensors, value
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, choose

# The errors of the battery when a law is broken: which check, which values, where.

VALUES = 1e-9
GRADIENTS = 1e-7
BITS = 1e-12


class ContractError(AssertionError):
    """A check of the battery failed; ``check`` is its name."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"[{check}] {message}")
        self.check = check


class BrokenLawError(AssertionError):
    """The error of a broken law, before the running check adds its name."""


def require(holds: bool, message: str) -> None:
    """Raise a :class:`BrokenLawError` with ``message`` unless the law ``holds``."""
    if not holds:
        raise BrokenLawError(message)


def agree(place: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Check that two tensors of one shape agree within ``tolerance * max(1, max |want|)``; NaN never agrees."""
    require(got.shape == want.shape, f"{place}: the shape is {tuple(got.shape)}, expected {tuple(want.shape)}.")
    if got.numel() == 0:
        return
    left, right = got.detach().double(), want.detach().double()
    limit = tolerance * max(1.0, float(right.abs().max()))
    gap = (left - right).abs().nan_to_num(nan=torch.inf)
    worst = int(gap.argmax())
    if not bool((gap <= limit).all()):
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), gap.shape))
        raise BrokenLawError(
            f"{place}: {float(left.flatten()[worst]):.6g} instead of {float(right.flatten()[worst]):.6g} at {index} "
            f"of {tuple(got.shape)}; a difference of at most {limit:.1g} is allowed."
        )


def agree_states(place: str, got: object, want: object, tolerance: float = VALUES) -> None:
    """Check that two states of one structure agree on valid slots within ``tolerance`` times their largest entry."""
    sizes = [float(leaf.detach().double().abs().max()) for leaf in tensors(value(want)) if leaf.numel()]
    gap = difference(got, want)
    limit = tolerance * max([1.0, *sizes])
    require(gap <= limit, f"{place}: the states differ by {gap:.6g}; at most {limit:.1g} is allowed.")


# The checks of the battery, and the report of an examination.


@dataclass(frozen=True)
class Check:
    """A law under its name. ``needs`` are the checks that must pass first, without which this check does not add
    information: the check of ragged rows, for example, compares with rows alone in chunks of another length."""

    name: str
    law: Callable[[Any], None]
    needs: tuple[str, ...] = ()

    def __call__(self, subject: object) -> None:
        """Raise :class:`ContractError` when the subject breaks the law, or breaks down under it."""
        try:
            self.law(subject)
        except AssertionError as error:
            raise ContractError(self.name, str(error)) from error
        except Exception as error:
            raise ContractError(self.name, f"{type(error).__name__} was raised: {error}") from error


def named_checks(*checks: Check) -> dict[str, Check]:
    """Return checks by their names, in order."""
    return {check.name: check for check in checks}


@dataclass
class Report:
    """The outcome of every check: passed, failed with its error, skipped and why, or not run for a missing need."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, ContractError] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    not_judged: dict[str, str] = field(default_factory=dict)


def examine(checks: Mapping[str, Check], subject: object, skip: Mapping[str, str] | None = None) -> Report:
    """Run every check in order, unless a check that it needs failed or was not run; a skipped need counts as met."""
    report = Report(skipped=_reasons(skip or {}, checks))
    for name, check in checks.items():
        if name in report.skipped:
            continue
        unmet = [need for need in check.needs if need in report.failed or need in report.not_judged]
        if unmet:
            report.not_judged[name] = unmet[0]
            continue
        try:
            check(subject)
        except ContractError as error:
            report.failed[name] = error
        else:
            report.passed.append(name)
    return report


def verdict(report: Report) -> Report:
    """Return a report without failures, or raise the :class:`ContractError` of the first failed check."""
    if not report.failed:
        return report
    first, *others = report.failed.values()
    if others:
        names = ", ".join(error.check for error in others)
        raise ContractError(first.check, f"{str(first).split('] ', 1)[1]} Also failed: {names}.") from first
    raise first


def _reasons(skip: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    for name, reason in skip.items():
        choose(name, names, "skip")
        if not reason.strip():
            raise KinformerError(
                f"skip: {name!r} does not have a reason; say in a few words why the property is lacking."
            )
    return dict(skip)


# The subjects.

M = TypeVar("M", bound=nn.Module)

JITTER = 0.1
"""Noise added to every parameter, so that weights that begin at zero or one hide nothing."""


def draw(function: Callable[[torch.Generator], Tensor], seed: int) -> Tensor:
    """Return the tensor that ``function`` draws with a CPU generator, moved to PyTorch's default device."""
    with torch.device("cpu"):
        drawn = function(torch.Generator().manual_seed(seed))
    return drawn.to(torch.get_default_device())


def built(make: Callable[[], M], dtype: torch.dtype) -> M:
    """Return the module of ``make`` in eval mode, always with the same weights; noise moves them away from 0 and 1."""
    with private_numbers(0):
        module = make()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=JITTER)
    return module.to(dtype).eval()


class Examined:
    """The module under examination. ``batch`` rows of ``time`` tokens are enough to cross every window and segment;
    ``make`` must be repeatable under a fixed seed."""

    def __init__(self, make: Callable[[], nn.Module], batch: int, time: int) -> None:
        self.make, self.batch, self.time = make, batch, time

    def build(self, dtype: torch.dtype = torch.float64, make: Callable[[], nn.Module] | None = None) -> Any:
        """Return a fresh module in eval mode with the same weights on every call."""
        return built(make or self.make, dtype)


def leaves_of(module: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a copy of ``inputs``, and the leaves of its gradients by name: the trained weights of ``module``, and the
    copy itself if it holds floating-point numbers."""
    weights = ((name, weight) for name, weight in module.named_parameters() if weight.requires_grad)
    leaves: dict[str, Tensor] = {f"parameter {name}": weight for name, weight in weights}
    inputs = inputs.clone()
    if inputs.is_floating_point():
        leaves["inputs"] = inputs.requires_grad_()
    return inputs, leaves


class Subject(Examined, ABC):
    """The interface of the module under examination: how to make inputs for it, and how to run it. Outputs are
    [batch, time, ...]."""

    zero_at_padding: bool

    def run(self, module: nn.Module, inputs: Tensor, state: State, *masks: Tensor | None) -> tuple[Tensor, State]:
        """Absorb one chunk after a copy of ``state``, so that a module that writes into its state does not spoil other
        checks; ``masks`` as of :meth:`call`."""
        return self.call(module, inputs, None if state is None else fork(state), *masks)

    def started(self, module: nn.Module, batch: int, time: int = 9) -> State:
        """Return a detached state after ``time`` tokens."""
        with torch.no_grad():
            return detach(self.run(module, self.inputs(batch, time, seed=7), self.start(module, batch))[1])

    @abstractmethod
    def inputs(self, batch: int, time: int, seed: int) -> Tensor:
        """Return random inputs [batch, time, ...]."""

    @abstractmethod
    def start(self, module: nn.Module, batch: int) -> State:
        """Return the state of ``batch`` new sequences."""

    def anew(self, module: nn.Module, state: State, batch: int = 1) -> State:
        """Return the state of ``batch`` new sequences that follow a reset of ``state``."""
        return _keeping(self.start(module, batch), state)

    @abstractmethod
    def call(
        self, module: nn.Module, inputs: Tensor, state: State, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Absorb one chunk after ``state`` itself."""

    @abstractmethod
    def mask(self, counts: Tensor, time: int, seed: int) -> Tensor:
        """Return a mask [batch, time] that the subject may get, with ``counts`` [batch] valid tokens per row."""

    @abstractmethod
    def spoil(self, inputs: Tensor, valid: Tensor) -> Tensor:
        """Return ``inputs`` with values at invalid positions that must never be read."""

    @abstractmethod
    def disturb(self, inputs: Tensor, since: int, factor: float) -> Tensor:
        """Return ``inputs`` with every token from ``since`` on changed strongly."""


class MixerSubject(Subject):
    """A :class:`CausalMixer` of width ``dim``; ``impls`` are other makers of the same mixer, by name."""

    zero_at_padding = True

    def __init__(
        self,
        make: Callable[[], CausalMixer],
        *,
        dim: int = 16,
        batch: int = 3,
        time: int = 23,
        impls: Mapping[str, Callable[[], CausalMixer]] | None = None,
    ) -> None:
        super().__init__(make, batch, time)
        self.dim, self.impls = dim, dict(impls or {})
        self.time = max(time, (self.build().retained or 0) + 12)

    def inputs(self, batch: int, time: int, seed: int) -> Tensor:
        shape = (batch, time, self.dim)
        return draw(lambda generator: torch.randn(shape, generator=generator, dtype=torch.float64), seed)

    def start(self, module: Any, batch: int) -> State:
        return module.initial_state(batch, dtype=torch.float64)

    def call(
        self, module: nn.Module, inputs: Tensor, state: State, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        return module(Chunk(inputs, valid, reset), state)

    def mask(self, counts: Tensor, time: int, seed: int) -> Tensor:
        return torch.arange(time) < counts[:, None]

    def spoil(self, inputs: Tensor, valid: Tensor) -> Tensor:
        return inputs.masked_fill(~valid[..., None], torch.nan)

    def disturb(self, inputs: Tensor, since: int, factor: float) -> Tensor:
        noise = self.inputs(inputs.shape[0], inputs.shape[1], seed=11)
        return torch.cat([inputs[:, :since], (inputs * factor + noise)[:, since:]], dim=1)


class LayerSubject(MixerSubject):
    """A plain layer of width ``dim``, as of ``kinformer.layer``: ``y, state = layer(x, state, return_state=True)``.

    At this edge the mask, ``key_padding_mask``, is True at padding and may be any.
    """

    def __init__(self, make: Callable[[], nn.Module], *, dim: int = 16, batch: int = 3, time: int = 23) -> None:
        Subject.__init__(self, make, batch, time)
        self.dim, self.impls = dim, {}

    def call(
        self, module: nn.Module, inputs: Tensor, state: State, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        mask = None if valid is None else ~valid
        return module(inputs, state, return_state=True, key_padding_mask=mask, reset=reset)

    def mask(self, counts: Tensor, time: int, seed: int) -> Tensor:
        return scattered(counts, time, seed)


class ModelSubject(Subject):
    """A causal model of tokens, ``logits, state = model(tokens, state, valid=, reset=)``; the state None is new.

    At this edge ``valid`` may be any mask: padding on the left, on the right and in between.
    """

    zero_at_padding = False

    def __init__(self, make: Callable[[], nn.Module], vocab_size: int, *, batch: int = 3, time: int = 23) -> None:
        super().__init__(make, batch, time)
        self.vocab_size = vocab_size

    def inputs(self, batch: int, time: int, seed: int) -> Tensor:
        shape = (batch, time)
        return draw(lambda generator: torch.randint(self.vocab_size, shape, generator=generator), seed)

    def start(self, module: nn.Module, batch: int) -> None:
        return None

    def call(
        self, module: nn.Module, inputs: Tensor, state: State, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        return module(inputs, state, valid=valid, reset=reset)

    def mask(self, counts: Tensor, time: int, seed: int) -> Tensor:
        return scattered(counts, time, seed)

    def spoil(self, inputs: Tensor, valid: Tensor) -> Tensor:
        return torch.where(valid, inputs, self.inputs(inputs.shape[0], inputs.shape[1], seed=13))

    def disturb(self, inputs: Tensor, since: int, factor: float) -> Tensor:
        step = 1 + self.inputs(inputs.shape[0], inputs.shape[1], seed=int(17 + factor)) % (self.vocab_size - 1)
        return torch.cat([inputs[:, :since], ((inputs + step) % self.vocab_size)[:, since:]], dim=1)


class SourceModelSubject(ModelSubject):
    """A model whose sequences begin over a source of ``source_length`` tokens: ``model.begin(source, valid)``. All rows
    have the same source, so that a row is the same alone and among others; its third token is padding."""

    def __init__(
        self, make: Callable[[], nn.Module], vocab_size: int, *, batch: int = 3, time: int = 23, source_length: int = 9
    ) -> None:
        super().__init__(make, vocab_size, batch=batch, time=time)
        self.source_length = source_length

    def start(self, module: Any, batch: int) -> State:
        source = self.inputs(1, self.source_length, seed=5).expand(batch, -1)
        valid = (torch.arange(self.source_length) != 2).expand(batch, -1)
        with torch.no_grad():
            return module.begin(source, valid)


def scattered(counts: Tensor, time: int, seed: int) -> Tensor:
    """Return a mask [batch, time] with ``counts`` [batch] tokens anywhere in each row."""
    order = draw(lambda generator: torch.rand(len(counts), time, generator=generator), seed).argsort(dim=1)
    return order < counts[:, None]


def _keeping(new: State, old: State) -> State:
    """Return ``new`` with the parts of ``old`` that outlive a reset."""
    if not isinstance(new, tuple) or old is None:
        return new
    if getattr(type(new), "outlives_reset", False):
        return old
    return rebuilt(new, [_keeping(*pair) for pair in zip(new, old, strict=True)])


def named_leaves(state: State, name: str = "state", is_slots: bool = False) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name, tensor, and whether its third axis counts past slots, of every leaf of a value state."""
    if isinstance(state, Tensor):
        yield name, state, is_slots
        return
    fields = getattr(state, "_fields", range(len(state)))
    for leaf, item in zip(fields, state, strict=True):
        yield from named_leaves(item, f"{name}.{leaf}", leaf in getattr(state, "slots", ()))


# The check of analytic derivatives against numerical derivatives. A custom kernel may raise an error for second
# derivatives and for forward-mode derivatives, but must not return wrong ones.

Function = Callable[..., tuple[Tensor, ...]]

_STEP = 1e-5
_CLOSE = 1e-4
"""Allowed error of a derivative along a direction, relative to its norm, by central differences in float64."""
_MISSING = (RuntimeError, KinformerError)
"""The errors that a missing derivative may raise."""


def dense_gradients(loss: Tensor, points: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Return the gradients of ``loss`` by ``points``: dense, and zeros where the loss does not depend on a point."""
    gradients = torch.autograd.grad(
        loss, list(points), create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]


def agree_gradients(function: Function, points: Sequence[Tensor], module: nn.Module, inputs: str, where: str) -> None:
    """Check the gradients of ``function`` at ``points`` (float64: the ``inputs``, then ``module``'s weights)."""
    try:
        torch.autograd.gradcheck(function, points, fast_mode=True, atol=1e-6, rtol=1e-4)
    except GradcheckError as error:
        names = ", ".join([inputs, *(name for name, _ in module.named_parameters())])
        raise BrokenLawError(f"gradients by [{names}]{where}: {error}") from error


def agree_derivatives(place: str, function: Function, points: Sequence[Tensor]) -> None:
    """Check the derivatives of ``function`` at ``points`` (float64 leaves) along a random direction."""
    generator = torch.Generator("cpu").manual_seed(81)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").to(x.device)

    direction = [like(point) for point in points]
    upstream = [like(item) for item in function(*points)]

    def gradient(at: Sequence[Tensor], further: bool = False) -> tuple[Tensor, ...]:
        loss = sum(((y * u).sum() for y, u in zip(function(*at), upstream, strict=True)), torch.zeros(()))
        return tuple(dense_gradients(loss, at, create_graph=further))

    def curvature() -> tuple[Tensor, ...]:
        slopes = gradient(points, further=True)
        along = sum(((g * u).sum() for g, u in zip(slopes, direction, strict=True)), torch.zeros(()))
        if not along.requires_grad:
            return tuple(torch.zeros_like(point) for point in points)
        return torch.autograd.grad(along, list(points), allow_unused=True, materialize_grads=True)

    def with_tangents() -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p.detach(), u) for p, u in zip(points, direction, strict=True)]
            pairs = [forward_ad.unpack_dual(item) for item in function(*duals)]
            return tuple(torch.zeros_like(y) if tangent is None else tangent for y, tangent in pairs)

    plain = tuple(point.detach() for point in points)
    slopes = _difference(lambda *at: gradient([item.requires_grad_() for item in at]), points, direction)
    _agree(f"{place}, the second derivative", curvature, slopes)
    rates = _difference(function, points, direction)
    _agree(f"{place}, forward mode (torch.autograd.forward_ad)", with_tangents, rates)
    by_func = partial(torch.func.jvp, function, plain, tuple(direction))
    _agree(f"{place}, forward mode (torch.func.jvp)", lambda: by_func()[1], rates)


def _difference(function: Function, points: Sequence[Tensor], direction: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivative along ``direction`` by central differences."""
    ahead, behind = (
        function(*(p.detach() + step * u for p, u in zip(points, direction, strict=True))) for step in (_STEP, -_STEP)
    )
    return [((a - b) / (2 * _STEP)).detach() for a, b in zip(ahead, behind, strict=True)]


def _agree(place: str, derivative: Callable[[], tuple[Tensor, ...]], want: Sequence[Tensor]) -> None:
    try:
        got = derivative()
    except _MISSING:
        return
    gap, size = (
        float(torch.stack([x.square().sum() for x in item]).sum().sqrt())
        for item in ([g.detach() - w for g, w in zip(got, want, strict=True)], want)
    )
    require(
        gap <= _CLOSE * max(1.0, size),
        f"{place} is off by {gap:.3g} where its norm is {size:.3g}; it must be right or raise (see core.derivatives).",
    )


# The declarations of a mixer about its state, compared with measurements.

GROWTHS = ("none", "constant", "window", "linear")
FAR = 1_000_000


def structure(subject: MixerSubject) -> None:
    """Check that states are (named) tuples of tensors, batch first, zero or empty at the start, alike after a step."""
    module = subject.build()
    require(isinstance(module, CausalMixer), f"{type(module).__name__} is no CausalMixer.")
    require(module.growth in GROWTHS, f"growth is {module.growth!r}, expected one of {', '.join(GROWTHS)}.")
    start = subject.start(module, subject.batch)
    _check_leaves(start, subject.batch, "the initial state")
    for name, leaf, _ in named_leaves(start):
        require(not bool(leaf.any()), f"the initial {name} is neither empty nor zero.")
    one_by_one = join_rows([subject.start(module, 1) for _ in range(subject.batch)])
    agree_states("initial states of single rows joined", one_by_one, start, 0.0)

    state = start
    for size in (1, 4, subject.time):
        y, state = subject.run(module, inputs := subject.inputs(subject.batch, size, seed=61), state)
        require(y.shape == inputs.shape, f"outputs are {tuple(y.shape)} for inputs of {tuple(inputs.shape)}.")
        require(y.dtype == inputs.dtype, f"outputs are {y.dtype} for inputs of {inputs.dtype}.")
        _check_leaves(state, subject.batch, f"the state after a chunk of {size}")
        alike(state, start, f"after a chunk of {size}")


def _check_leaves(state: State, batch: int, place: str) -> None:
    require(not isinstance(state, Tensor), f"{place} is a bare tensor, expected a NamedTuple or tuple of tensors.")
    if not isinstance(state, tuple):
        require(False, f"{place} holds a {type(state).__name__}, expected a NamedTuple or tuple of tensors.")
    for item in state:
        if not isinstance(item, Tensor):
            _check_leaves(item, batch, place)
            continue
        require(item.dim() > 0 and item.shape[0] == batch, f"a leaf of {place} is {tuple(item.shape)}: batch is first.")
        if not item.is_floating_point() and not item.is_complex():
            require(
                item.dtype in (torch.int64, torch.bool, torch.int8),
                f"a leaf of {place} is {item.dtype}, expected int64.",
            )


def alike(state: State, start: object, place: str) -> None:
    """Check for the same names, dtypes and shapes (except for the number of past slots)."""
    require(_skeleton(state) == _skeleton(start), f"the structure of the state changed {place}.")
    for (name, leaf, is_slots), (_, first, _) in zip(named_leaves(state), named_leaves(start), strict=True):
        require(leaf.dtype == first.dtype, f"{name} became {leaf.dtype} {place}; it was {first.dtype} at the start.")
        shapes = [tuple(n for axis, n in enumerate(item.shape) if axis != 2 or not is_slots) for item in (leaf, first)]
        require(
            shapes[0] == shapes[1],
            f"{name} became {tuple(leaf.shape)} {place}; it was {tuple(first.shape)}, and only the third axis of "
            "leaves named in `slots` may change.",
        )


def _skeleton(state: State) -> object:
    return None if isinstance(state, Tensor) else (type(state), tuple(_skeleton(item) for item in state))


def state_size(subject: MixerSubject) -> None:
    """Check that measured bytes equal the declared bytes, at every length and dtype, and grow by ``growth``."""
    lengths = sorted({1, 2, 5, subject.time // 2, subject.time})
    for dtype in (torch.float32, torch.float64):
        module = subject.build(dtype)
        for sizes in (*([length] for length in lengths), [1] * subject.time):
            for length, got in _measured(subject, module, sizes, dtype):
                want = module.state_bytes(length, dtype=dtype)
                cut = "one chunk" if len(sizes) == 1 else "chunks of one token"
                require(
                    got == want, f"state_bytes says {want} bytes after {length} tokens, {cut} of {dtype} keep {got}."
                )
    _check_growth(subject.build())


def _measured(
    subject: MixerSubject, module: CausalMixer, sizes: list[int], dtype: torch.dtype
) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens, and the bytes that a row's state holds, after every chunk of ``sizes``."""
    state, length = module.initial_state(2, dtype=dtype), 0
    for size in sizes:
        with torch.no_grad():
            _, state = subject.run(module, subject.inputs(2, size, seed=62).to(dtype), state)
        length += size
        yield length, nbytes(value(state)) // 2


def _check_growth(module: CausalMixer) -> None:
    near, far, farther = (module.state_bytes(length) for length in (1, FAR, 2 * FAR))
    if module.growth == "linear":
        require(
            abs(farther / far - 2) < 0.01, f"growth is 'linear', but bytes go from {far} to {farther} at {FAR} x 2."
        )
        return
    if module.growth == "window":
        if module.retained is None:
            require(False, "growth is 'window', but retained is None; expected a number of positions.")
        near = module.state_bytes(int(module.retained or 0))
    place = f"from {module.retained} tokens on" if module.growth == "window" else "at all lengths"
    require(near == far == farther, f"growth is {module.growth!r}, but bytes {place} are {near}, {far}, {farther}.")
