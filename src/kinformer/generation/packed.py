"""Packed weights: laid out once for products of few rows instead of at every product, which makes tokens faster.

A product of one token with a matrix reads every weight once, so it takes at least the weights' bytes divided by the
memory's bandwidth. PyTorch's default products take far longer if there are many weights, or more rows than one;
oneDNN's layout comes closer, but a product takes some ten microseconds to begin. Elsewhere a matrix is read faster
column by column. A matrix gets the layout that pays on the processor (:data:`LEAST`).

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
from kinformer.generation.session import LONG
from kinformer.generation.weights import as_weights
from kinformer.runtime.process import processor_class

Model = TypeVar("Model", bound=nn.Module)


class Least(NamedTuple):
    """The least number of elements of float32 matrices in oneDNN's layout.

    For one row it is ``cached`` if the model's matrices have less than ``cache`` bytes, otherwise ``streamed``; for
    several rows it is ``more``. ``where`` names the machine of the measurement. With ``columns``, smaller matrices
    [rows, columns] with at least as many rows as columns are stored column by column.

    Matrices of bfloat16 are always in oneDNN's layout.
    """

    cached: int
    streamed: int
    more: int
    cache: int
    where: str
    columns: bool = False


# Weights in the cache are read fast anyway, so only large matrices are worth oneDNN's slow start.
_ZEN5 = Least(1 << 20, 1 << 16, 1 << 17, 1 << 24, "AMD EPYC (family 26, Zen 5), 32 MiB of L3, one thread, torch 2.13")
LEAST = {
    "AVX-512 and bfloat16": _ZEN5,
    # For one row, packed products took 1.0 to 2.7 times as long at 256 x 256 to 8192 x 2048; they win at 4 to 16 rows.
    "AMX": Least(sys.maxsize, sys.maxsize, 1 << 18, 0, "Intel Xeon with AMX, one thread, torch 2.13"),
    # For one row, oneDNN's layout took 0.9 to 1.7 times as long; columns took 0.45 to 0.95 where rows >= columns.
    "other": Least(
        sys.maxsize, sys.maxsize, 1 << 19, 0, "AMD EPYC (family 25, Zen 3), one thread, torch 2.13", columns=True
    ),
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

    The copy is for inference; it cannot be trained or saved, and it shares all weights with ``model`` that are not
    packed. If :func:`can_pack` is False, or packing pays for no product, ``model`` is returned. Chunks of any length
    still work; ``rows`` only decides the layout. ``least`` is the least number of elements of a float32 matrix in
    oneDNN's layout, None for the number that pays here (:data:`LEAST`).
    """
    if not can_pack(model):
        return model
    columns = least is None and LEAST[processor_class()].columns
    least = _least(model, rows) if least is None else least
    if not any(_pays(module, least) or (columns and _is_tall(module)) for module in model.modules()):
        return model
    with torch.no_grad():
        model = _shared_copy(model)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if _pays(child, least):
                    setattr(module, name, PackedLinear(child, rows))
                elif columns and _is_tall(child):
                    child.weight = nn.Parameter(child.weight.T.contiguous().T, requires_grad=False)
    return model


def _pays(module: nn.Module, least: int) -> TypeGuard[nn.Linear]:
    """Return whether ``module`` is a product to be packed; float32 matrices need ``least`` elements or more."""
    if not _is_product(module):
        return False
    return module.weight.dtype != torch.float32 or module.weight.numel() >= least


def _is_tall(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether ``module`` is a product with as many rows of weights as columns or more."""
    return _is_product(module) and module.out_features >= module.in_features


def _is_product(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether ``module`` is a product whose weight may get another layout."""
    plain = isinstance(module, nn.Linear) and not isinstance(module, UnpackedLinear) and is_plain(module)
    return plain and "weight" in module._parameters  # narrow weights have a layout already


def _least(model: nn.Module, rows: int) -> int:
    """Return the least number of elements of packed float32 matrices of ``model`` on this machine."""
    table = LEAST[processor_class()]
    if rows > 1:
        return table.more
    total = sum(module.weight.nbytes for module in model.modules() if _is_product(module))
    return table.cached if total < table.cache else table.streamed


class InferenceCopies(dict[tuple[bool, str | None], tuple[Unchanged, nn.Module]]):
    """The copies of a model for one row or several and a type of weights. They are not copied or saved with it."""

    def __deepcopy__(self, memo: object) -> InferenceCopies:
        return InferenceCopies()

    def __reduce__(self) -> tuple[type[InferenceCopies], tuple[()]]:
        return InferenceCopies, ()


def inference_copy(model: Model, rows: int, steps: int, weights: str | None = None) -> Model:
    """Return a copy of ``model`` to draw ``steps`` tokens of ``rows`` sequences; on a GPU and for few steps, ``model``
    itself.

    ``weights``: the type of its weights (``generation.weights``), None for the model's. The model stores the copies for
    the next calls, until a call finds that it has changed. A copy has the bytes of the packed or narrow weights and
    shares the others. With hooks the model itself draws.
    """
    if not isinstance(model, nn.Module) or any(isinstance(step, PackagedStep) for step in recordings_of(model)):
        return model
    copies: InferenceCopies = vars(model).setdefault("_inference_copies", InferenceCopies())
    for key, (unchanged, copied) in list(copies.items()):  # other threads may change them
        if not unchanged.holds():
            copies.pop(key, None)
        elif key == (rows > 1, weights):
            return copied  # type: ignore[return-value]
    # A copy takes the time of some tens of steps.
    if weights is None and (steps < LONG or not Unchanged([model]).holds()):
        return model
    unchanged = Unchanged([model])
    ready = pack(model if weights is None else as_weights(_shared_copy(model), weights), rows)
    if ready is not model:
        copies[rows > 1, weights] = unchanged, ready
    return ready


def _shared_copy(model: Model) -> Model:
    """Return a copy of ``model`` with the same weights in memory, without gradients."""
    shared = {id(buffer): buffer for buffer in model.buffers()}
    shared |= {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, shared).requires_grad_(False)


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
