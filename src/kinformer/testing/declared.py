"""The declarations of a mixer about its state, compared with measurements."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kinformer.core import state as states
from kinformer.core.contract import CausalMixer
from kinformer.core.state import State
from kinformer.testing.errors import agree_states, require
from kinformer.testing.subject import MixerSubject, named_leaves

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
    one_by_one = states.join_rows([subject.start(module, 1) for _ in range(subject.batch)])
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
            "leaves that are named in `slots` may change.",
        )


def _skeleton(state: State) -> object:
    return None if isinstance(state, Tensor) else (type(state), tuple(_skeleton(item) for item in state))


def state_size(subject: MixerSubject) -> None:
    """Check that measured bytes are the declared ones, at every length and dtype, and grow as ``growth`` says."""
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
        yield length, states.nbytes(states.value(state)) // 2


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
