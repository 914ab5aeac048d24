"""The subject of an examination: a mixer or a whole model behind one narrow interface, so that each law is written
once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import State, detach, difference, fork, rebuilt, tensors, value
from kinformer.runtime.draws import private_numbers

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
    """Check that two states of one structure agree on their valid slots within ``tolerance`` times their largest
    entry."""
    sizes = [float(leaf.detach().double().abs().max()) for leaf in tensors(value(want)) if leaf.numel()]
    gap = difference(got, want)
    limit = tolerance * max([1.0, *sizes])
    require(gap <= limit, f"{place}: the states differ by {gap:.6g}; at most {limit:.1g} is allowed.")


M = TypeVar("M", bound=nn.Module)

JITTER = 0.1
"""Noise added to every parameter, so that weights that begin at zero or one hide nothing."""


def draw(function: Callable[[torch.Generator], Tensor], seed: int) -> Tensor:
    """Return the tensor that ``function`` draws with a CPU generator, moved to PyTorch's default device: the numbers
    are the same on every device."""
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


class Subject(ABC):
    """The interface of the module under examination: how to build it, make inputs for it, and run it.

    ``batch`` rows of ``time`` tokens are enough to cross every window and segment; ``make`` must be repeatable under
    a fixed seed. Outputs are [batch, time, ...].
    """

    zero_at_padding: bool

    def __init__(self, make: Callable[[], nn.Module], batch: int, time: int) -> None:
        self.make, self.batch, self.time = make, batch, time

    def build(self, dtype: torch.dtype = torch.float64, make: Callable[[], nn.Module] | None = None) -> Any:
        """Return a fresh module in eval mode with the same weights on every call."""
        return built(make or self.make, dtype)

    def run(
        self, module: nn.Module, inputs: Tensor, state: State, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Absorb one chunk after a copy of ``state``, so that a module that writes into its state does not spoil other
        checks."""
        return self.call(module, inputs, None if state is None else fork(state), valid, reset)

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
        """Return a validity mask [batch, time] with ``counts`` [batch] valid
        tokens per row, as this subject may get it."""

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
    for field, item in zip(fields, state, strict=True):
        yield from named_leaves(item, f"{name}.{field}", field in getattr(state, "slots", ()))
