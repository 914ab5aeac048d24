"""Weights for inference: in 16 and 8 bits, and packed for products of few rows.

Weights in 16 and 8 bits take less memory, and products of few rows read fewer bytes.

    w ~ s q,    s >= max |w| / 127,    q = round(w / s) in -127 .. 127        one scale s for each row of a matrix w

:func:`as_weights` stores the weights of all linear products and tables of vectors so, embeddings and heads included.
The matrices of experts and their routers, the vectors of product-key memories, and matrices that a mixer reads itself
(:class:`UnpackedLinear`) keep the model's dtype.

Products of few rows run in C (:mod:`kinformer.generation.native`): weights are widened as they are read, and sums are
float32. Inputs are not rounded, except that a processor with VNNI multiplies 8-bit weights by inputs of 16 bits, which
share one scale in each block of 512 columns. PyTorch multiplies more rows, such as a prompt's. With 8-bit weights it
multiplies in bfloat16 if the processor can. Without a C compiler PyTorch's product of 8-bit weights takes and gives
bfloat16.

bf16 converts the model, inputs and states included. On x86 without AVX-512 and bfloat16 its products are emulated.
There only the weights have 16 bits if the products run in C; inputs, sums and states are float32.

``benchmarks/llama_cpp.py`` compares them with llama.cpp.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.parts import UnpackedLinear, is_plain
from kinformer.generation import native
from kinformer.generation.native import is_native
from kinformer.generation.recording import Derived, Unchanged
from kinformer.generation.session import LONG
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import emulates_bfloat16, product_dtype

Model = TypeVar("Model", bound=nn.Module)

FEW = 128
"""Rows up to which the operator in C multiplies. For more the matrix is unpacked for PyTorch's product, which is faster
in 16 bits from 192 rows on (``products`` in ``llama_cpp.json``)."""
FEW_IN_PYTORCH, MULTIPLE = 16, 32
"""PyTorch's product of 8-bit weights is used for at most so many rows; its columns are a multiple of the second."""


class NarrowWeight(Tensor):
    """A constant matrix [rows, columns] of few bits in place of a weight of ``dtype``. It has no gradient.

    A linear product and an embedding read the narrow numbers. Every other operation reads the whole matrix in
    ``dtype``. ``matrix``: the numbers, int8 with ``scales`` [rows], or bfloat16 with None; ``packed``: the same for the
    operator in C. A weight of products alone stores one of both, a table of vectors ``matrix``, and ``packed`` once a
    product needs it.
    """

    matrix: Tensor | None
    scales: Tensor | None
    packed: Tensor | None
    _dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, bits: int, table: bool = False) -> NarrowWeight:
        """Return ``weight`` in 8 or 16 ``bits``; ``table``: its rows are looked up."""
        matrix, scales = weight.detach().bfloat16(), None
        if bits == 8:
            wide = weight.detach().float()
            scales = (wide.abs().amax(1) / 127).bfloat16()
            # Up to the next bfloat16, so that no integer exceeds 127. A row of zeros has the scale 1.
            low = scales.float() * 127 < wide.abs().amax(1)
            scales = torch.where(low, torch.nextafter(scales, scales.new_tensor(torch.inf)), scales)
            scales = scales.where(scales != 0, 1)  # of a row with NaN it stays NaN
            matrix = (wide / scales.float()[:, None]).round().to(torch.int8)
        return cls._of(matrix, scales, weight.dtype, table)

    @classmethod
    def _of(cls, matrix: Tensor, scales: Tensor | None, dtype: torch.dtype, table: bool) -> NarrowWeight:
        made: NarrowWeight = Tensor._make_subclass(cls, matrix.new_empty(1).expand(matrix.shape))
        made.matrix, made.scales, made.packed, made._dtype = matrix, scales, None, dtype
        if not table and matrix.device.type == "cpu" and is_native():
            made.matrix, made.packed = None, native.pack(matrix)
        return made

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._dtype

    def is_floating_point(self) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> NarrowWeight:
        return self

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice) and self.matrix is not None:
            scales = None if self.scales is None else self.scales[index]
            return self._of(self.matrix[index], scales, self._dtype, table=True)
        return self.widened()[index]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return NarrowWeight._of, (self._numbers(), self.scales, self._dtype, self.matrix is not None)

    def widened(self) -> Tensor:
        """Return the whole matrix in ``dtype``."""
        return self._wide(self._numbers(), self.scales)

    def _numbers(self) -> Tensor:
        if self.matrix is not None:
            return self.matrix
        assert self.packed is not None
        return native.unpack(self.packed, *self.shape)

    def _wide(self, numbers: Tensor, scales: Tensor | None) -> Tensor:
        wide = numbers.float()
        return (wide if scales is None else wide * scales.float()[..., None]).to(self._dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias [..., rows] of x [..., columns], in the dtype of x."""
        if is_few(x) and is_native():
            if self.packed is None:
                self.packed = native.pack(self._numbers())
            return _product(x, self.packed, len(self), self.scales, bias)
        if self.scales is None:
            return functional.linear(x, self.widened().to(x.dtype), bias)
        y = self._by_bfloat16(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(self)).to(x.dtype)
        return y if bias is None else y + bias

    def _by_bfloat16(self, x: Tensor) -> Tensor:
        assert self.scales is not None
        narrow, numbers = x.bfloat16(), self._numbers()
        if len(x) <= FEW_IN_PYTORCH and x.shape[1] % MULTIPLE == 0 and x.device.type == "cpu":
            return torch._weight_int8pack_mm(narrow, numbers.contiguous(), self.scales)
        dtype = product_dtype(narrow)  # bfloat16 holds 8-bit numbers exactly
        return functional.linear(narrow.to(dtype), numbers.to(dtype)).to(x.dtype) * self.scales.to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids`` [...] int64, [..., columns] in ``dtype``."""
        if self.matrix is None:
            return self.widened()[ids]
        return self._wide(self.matrix[ids], None if self.scales is None else self.scales[ids])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, weight = kwargs or {}, args[1] if len(args) > 1 else None
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear and isinstance(weight, NarrowWeight):
                return weight.product(args[0], *args[2:], **kwargs)
            if func is functional.embedding and isinstance(weight, NarrowWeight):
                return weight.rows(args[0])
            if func in _FACTS:
                return func(*args, **kwargs)
            name, target = func.__name__, kwargs.get("out", args[0] if args else None)
            # Functions that change a tensor end in one underscore.
            writes = name in ("__set__", "__setitem__") or name.endswith("_") != name.endswith("__") or "out" in kwargs
            if writes and isinstance(target, NarrowWeight):
                raise KinformerError("narrow weights cannot be changed; change float32 weights and narrow them again.")
            return func(*map(_wide, args), **{name: _wide(item) for name, item in kwargs.items()})


_NAMES = "shape device ndim layout requires_grad is_leaf is_meta is_sparse is_nested is_cpu is_cuda grad_fn _version"
_FACTS: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _NAMES.split()),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "data_ptr", "is_inference", "stride", "__len__")),
}
"""The attributes and methods that do not read the numbers."""


def _wide(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(_wide, argument))
    return argument.widened() if isinstance(argument, NarrowWeight) else argument


def as_weights(model: Model, weights: str) -> Model:
    """Return ``model`` with its weights in the type ``weights``: "fp32" (they stay), "bf16" or "int8".

    The model itself changes. With 8-bit weights, and with 16-bit weights where bfloat16 is emulated, it is for
    inference only, on its device and in its dtype; anything else is refused. On a GPU 8-bit weights save memory but no
    time.

    Errors: ``KinformerError`` for another type.
    """
    if weights not in ("fp32", "bf16", "int8"):
        raise KinformerError(f"weights is {weights!r}, but must be one of fp32, bf16 and int8.")
    on_cpu = next(model.parameters()).device.type == "cpu"
    if weights == "bf16" and not (on_cpu and emulates_bfloat16() and is_native()):
        return model.to(torch.bfloat16)
    if weights != "fp32":
        _narrow(model, 8 if weights == "int8" else 16)
    return model


def _narrow(model: nn.Module, bits: int) -> None:
    products = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding) and not isinstance(module, UnpackedLinear)
        if module._parameters.get("weight") is not None
    ]
    tables = {id(module.weight) for module in products if isinstance(module, nn.Embedding)}
    made: dict[int, NarrowWeight] = {}
    with torch.inference_mode(False), torch.no_grad():
        for module in products:
            weight = module.weight
            if id(weight) not in made:
                made[id(weight)] = NarrowWeight.of(weight, bits, id(weight) in tables)
            del module.weight
            module.weight = made[id(weight)]
            # An empty parameter of its dtype and on its device, of which a model is asked by its parameters.
            module.register_parameter("narrow", nn.Parameter(weight.new_empty(0), requires_grad=False))
            module.register_state_dict_pre_hook(_refuse_saving)
            module.register_load_state_dict_pre_hook(_refuse_saving)
    for part in model.modules():
        part._apply = partial(_refuse_moving, part)  # type: ignore[method-assign]
    model.requires_grad_(False).eval()
    model.train = partial(_refuse_training, model)  # type: ignore[method-assign]


def _refuse_training(model: Model, mode: bool = True) -> Model:
    if mode:
        raise KinformerError("this model has narrow weights, which cannot be trained; load it with weights of fp32.")
    return nn.Module.train(model, False)


def _refuse_saving(module: nn.Module, *_: object) -> None:
    raise KinformerError("narrow weights cannot be saved or exchanged; load the model with weights of fp32.")


def _refuse_moving(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for part in module.modules():  # all, before anything is changed
        if (before := part._parameters.get("narrow")) is not None:
            after = change(before)
            if (before.device, before.dtype) != (after.device, after.dtype):
                raise KinformerError(
                    "narrow weights stay in their dtype on their device; move or convert the model before."
                )
    return type(module)._apply(module, change, recurse)


# Packed weights: laid out once for products of few rows in C.


class PackedLinear(nn.Module):
    """A linear product [..., in] -> [..., out] with packed weights; for inference on a CPU only.

    ``weight`` is empty: modules look up its dtype and its device.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach().new_empty(0)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed = native.pack(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        if is_few(x):
            return _product(x, self.packed, self.out_features, None, self.bias)
        return functional.linear(x, native.unpack(self.packed, self.out_features, self.in_features), self.bias)


def is_few(x: Tensor) -> bool:
    """Return whether the operator in C multiplies ``x`` [..., columns], where it runs."""
    return x.numel() <= FEW * x.shape[-1] and x.device.type == "cpu" and not torch.compiler.is_compiling()


def _product(x: Tensor, packed: Tensor, out: int, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    taken = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    scales, bias = (native.NONE if item is None else item for item in (scales, bias))
    return native.product(taken.contiguous(), packed, out, scales, bias).to(x.dtype)


def can_pack(model: nn.Module) -> bool:
    """Return whether ``model`` can be packed here: on a CPU, in float32 or bfloat16, with a C compiler."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and is_native()


def pack(model: Model) -> Model:
    """Return a copy of ``model`` for generation with packed linear products. Return ``model`` itself if it has none, or
    if :func:`can_pack` is False.

    The copy is for inference; it cannot be trained or saved, and it shares all weights with ``model`` that are not
    packed. Chunks of any length still work.
    """
    if not can_pack(model) or not any(map(_is_product, model.modules())):
        return model
    with torch.no_grad():
        model = _shared_copy(model)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if _is_product(child):
                    setattr(module, name, PackedLinear(child))
    return model


def _is_product(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether ``module`` is a product whose weight may get another layout."""
    plain = isinstance(module, nn.Linear) and not isinstance(module, UnpackedLinear) and is_plain(module)
    return plain and "weight" in module._parameters  # narrow weights have a layout already


class InferenceCopies(Derived, dict[str | None, tuple[Unchanged, nn.Module]]):
    """The copies of a model by the type of their weights."""


def inference_copy(model: Model, steps: int, weights: str | None = None) -> Model:
    """Return a copy of ``model`` to draw ``steps`` tokens; on a GPU and for few steps, ``model`` itself.

    ``weights``: the type of its weights (:func:`as_weights`), None for the model's. The model stores the copies for
    the next calls, until a call finds that it has changed. A copy has the bytes of the packed or narrow weights and
    shares the others. With hooks the model itself draws.
    """
    if not isinstance(model, nn.Module):
        return model
    copies: InferenceCopies = vars(model).setdefault("_inference_copies", InferenceCopies())
    for key, (unchanged, copied) in list(copies.items()):  # other threads may change them
        if not unchanged.holds():
            copies.pop(key, None)
        elif key == weights:
            return copied  # type: ignore[return-value]
    # A copy takes the time of some tens of steps.
    if weights is None and (steps < LONG or not Unchanged([model]).holds()):
        return model
    unchanged = Unchanged([model])
    ready = pack(model if weights is None else as_weights(_shared_copy(model), weights))
    if ready is not model:
        copies[weights] = unchanged, ready
    return ready


def _shared_copy(model: Model) -> Model:
    """Return a copy of ``model`` with the same weights in memory, without gradients."""
    shared = {id(buffer): buffer for buffer in model.buffers()}
    shared |= {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, shared).requires_grad_(False)
