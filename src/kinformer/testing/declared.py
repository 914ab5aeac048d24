"""The declarations of a mixer about its state, compared with measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError

from kinformer.core.contract import CausalMixer
from kinformer.core.state import State, join_rows, nbytes, value
from kinformer.runtime.errors import KinformerError
from kinformer.testing.subject import BrokenLawError, MixerSubject, agree_states, named_leaves, require

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
    """Check the gradients of ``function`` at ``points`` (float64 leaves: the ``inputs``, then the weights of
    ``module``)."""
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

    def by_func() -> tuple[Tensor, ...]:
        plain = tuple(point.detach() for point in points)
        return torch.func.jvp(function, plain, tuple(direction))[1]

    slopes = _difference(lambda *at: gradient([item.requires_grad_() for item in at]), points, direction)
    _agree(f"{place}, the second derivative", curvature, slopes)
    rates = _difference(function, points, direction)
    for name, forward in (("torch.autograd.forward_ad", with_tangents), ("torch.func.jvp", by_func)):
        _agree(f"{place}, forward mode ({name})", forward, rates)


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


GROWTHS = ("none", "constant", "window", "linear")
FAR = 1_000_000


def structure(subject: MixerSubject) -> None:
    """Check that states are (named) tuples of tensors, batch first, zero or empty at the
    start, alike before and after a step."""
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
    _check_growth(subject, subject.build())


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


def _check_growth(subject: MixerSubject, module: CausalMixer) -> None:
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
