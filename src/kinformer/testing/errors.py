"""The errors of the battery when a law is broken: which check, which values, where."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core import state as states

VALUES = 1e-9
GRADIENTS = 1e-7
BITS = 1e-12


class ContractError(AssertionError):
    """A check of the battery failed; ``check`` is its name."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"[{check}] {message}")
        self.check = check


class BrokenLawError(AssertionError):
    """A broken law, before the running check has put its name to it."""


def require(holds: bool, message: str) -> None:
    """Raise a :class:`BrokenLawError` with ``message`` unless the law ``holds``."""
    if not holds:
        raise BrokenLawError(message)


def agree(place: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Check that two tensors of one shape agree within ``tolerance * max(1, max |want|)``; NaN agrees with nothing."""
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
    """Check that two states of one structure agree on their valid slots within
    ``tolerance`` times their largest entry."""
    sizes = [float(leaf.detach().double().abs().max()) for leaf in states.tensors(states.value(want)) if leaf.numel()]
    gap = states.difference(got, want)
    limit = tolerance * max([1.0, *sizes])
    require(gap <= limit, f"{place}: the states differ by {gap:.6g}; at most {limit:.1g} is allowed.")
