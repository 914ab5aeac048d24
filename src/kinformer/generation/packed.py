"""Packed weights: laid out once for a CPU's matrix unit instead of at every product, which makes single tokens faster.

A product of one token with a matrix reads every weight once, so it takes at least the weights' bytes divided by the
memory's bandwidth. PyTorch's default products take far longer if there are many weights, or more rows than one;
oneDNN's layout comes closer, but a product takes some ten microseconds to begin. A matrix is packed where this pays on
the processor (:data:`LEAST`).

``benchmarks/accelerators.py`` keeps it: in ``accelerators.json`` generation with bfloat16 weights is 1.4 times as fast
packed as not (an Intel Xeon with AMX). Delete it when no row ``packed`` is above 1.1 on any processor of the table.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.parts import UnpackedLinear, is_plain
from kinformer.core.state import Leaf, State, unflattened
from kinformer.generation.recording import Unchanged, recordings_of
from kinformer.runtime.process import processor_class

Model = TypeVar("Model", bound=nn.Module)


class Least(NamedTuple):
    """The least number of elements of packed float32 matrices.

    For one row it is ``cached`` if the model's matrices have less than ``cache`` bytes, otherwise ``streamed``; for
    several rows it is ``more``. ``where`` names the machine of the measurement.

    Matrices of bfloat16 are always packed.
    """

    cached: int
    streamed: int
    more: int
    cache: int
    where: str


# Weights in the cache are read fast anyway, so only large matrices are worth oneDNN's slow start.
_ZEN5 = Least(1 << 20, 1 << 16, 1 << 17, 1 << 24, "AMD EPYC (family 26, Zen 5), 32 MiB of L3, one thread, torch 2.13")
LEAST = {
    "AVX-512 and bfloat16": _ZEN5,
    # For one row, packed products took 1.0 to 2.7 times as long at 256 x 256 to 8192 x 2048; they win at 4 to 16 rows.
    "AMX": Least(sys.maxsize, sys.maxsize, 1 << 18, 0, "Intel Xeon with AMX, one thread, torch 2.13"),
    "other": _ZEN5._replace(where="not measured, as on Zen 5"),
}


class PackedLinear(nn.Module):
    """A linear product [..., in] -> [..., out] with weights in oneDNN's layout; for inference on a CPU only.

    ``weight`` is empty: modules look up its dtype and its device.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.weight = linear.weight.detach().new_empty(0)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(model: nn.Module) -> bool:
    """Return whether this machine and build of PyTorch can pack ``model``: on a CPU, in float32 or bfloat16."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def pack(model: Model, rows: int = 1, least: int | None = None) -> Model:
    """Return a copy of ``model`` for generating ``rows`` sequences at a time, its linear products packed; or ``model``
    itself.

    The copy is for inference; it cannot be trained or saved. If :func:`can_pack` is False, or packing pays for no
    product, ``model`` is returned. Chunks of any length still work; ``rows`` only decides the layout. ``least`` is the
    least number of elements of a packed float32 matrix, None for the number that pays here (:data:`LEAST`).
    """
    if not can_pack(model):
        return model
    if least is None:
        least = _least(model, rows)
    if not any(_pays(module, least) for module in model.modules()):
        return model
    with torch.no_grad():
        model = copy.deepcopy(model).requires_grad_(False)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if _pays(child, least):
                    setattr(module, name, PackedLinear(child, rows))
    return model


def _pays(module: nn.Module, least: int) -> TypeGuard[nn.Linear]:
    """Return whether ``module`` is a product to be packed; float32 matrices need ``least`` elements or more."""
    if not isinstance(module, nn.Linear) or isinstance(module, UnpackedLinear) or not is_plain(module):
        return False
    return module.weight.dtype != torch.float32 or module.weight.numel() >= least


def _least(model: nn.Module, rows: int) -> int:
    """Return the least number of elements of packed float32 matrices of ``model`` on this machine."""
    table = LEAST[processor_class()]
    if rows > 1:
        return table.more
    total = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    return table.cached if total < table.cache else table.streamed


# The step of a model from a package of machine code, in place of a recorded step.
#
# A session finds it among the recordings of its model (``generation.recording``), so prompts, sampling and stops work
# as in any session.

Step = Callable[..., list[Tensor]]


class PackagedStep:
    """The ``step`` (token [1, 1], leaves) -> [logits, leaves] of a model; ``leaves`` describe the leaves of its
    states."""

    def __init__(self, step: Step, leaves: Sequence[Leaf], model: nn.Module) -> None:
        self.run, self.leaves = step, leaves
        self.holds = Unchanged([model]).holds

    def begin(self, state: State) -> PackagedSteps | None:
        """Return steps from ``state`` on; None for a state of several sequences, or on another device than a CPU."""
        value = states.value(state)
        tensors = list(states.tensors(value))
        if len(tensors) != len(self.leaves) or any(x.device.type != "cpu" or x.shape[0] != 1 for x in tensors):
            return None
        filled = [leaf.filled(tensor) for leaf, tensor in zip(self.leaves, tensors, strict=True)]
        if not all(leaf.accepts(tensor) for leaf, tensor in zip(self.leaves, filled, strict=True)):
            return None
        return PackagedSteps(self, value, filled)


class PackagedSteps:
    """A :class:`PackagedStep` at work, and the leaves of the state that it steps."""

    def __init__(self, packaged: PackagedStep, like: object, leaves: list[Tensor]) -> None:
        self._packaged, self._like, self._leaves = packaged, like, leaves

    @property
    def goes_on(self) -> bool:
        """Return whether the model is unchanged."""
        return self._packaged.holds()

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [1, vocab] after ``tokens`` [1, 1], which the state absorbs."""
        logits, *leaves = self._packaged.run(tokens.contiguous(), *self._leaves)
        # A package assumes the strides that it was compiled for and does not check them.
        self._leaves = [leaf.contiguous() for leaf in leaves]
        return logits[:, -1]

    def release(self) -> State:
        """Return the state, for steps in Python."""
        return unflattened(self._like, self._leaves)


def use_package(model: nn.Module, step: Step, leaves: Sequence[Leaf]) -> None:
    """Let sessions of ``model`` step by ``step``."""
    with torch.inference_mode():
        recordings_of(model).keep(PackagedStep(step, leaves, model))  # type: ignore[arg-type]
