"""Weights for inference: in 16 and 8 bits, and packed for products of few rows.

Narrow weights come first (:func:`as_weights`), then packed weights (:func:`pack`), then the copies for inference that
a model stores (:func:`inference_copy`).

Weights in 16 and 8 bits take less memory, and products of few rows read fewer bytes.

    w ~ s q,    s >= max |w| / 127,    q = round(w / s) in -127 .. 127        one scale s for each row of a matrix w

:func:`as_weights` stores the weights of all linear products and tables of vectors so, embeddings and heads included.
The matrices of experts and their routers, the vectors of product-key memories, and matrices that a mixer reads itself
(:class:`UnpackedLinear`) keep the model's dtype.

How a product with 8-bit weights is computed depends on the processor:

* On x86 without AVX-512 and VNNI, FBGEMM multiplies matrices of many columns with integers. A row x of the input
  becomes two rows of 7 bits, x ~ t (h + l / 126), so that 13 bits of x count. The sums are exact, so the number of rows
  changes nothing.
* Otherwise PyTorch's product takes and gives bfloat16, and sums in float32.

bf16 converts the model, inputs and states included. On x86 without AVX-512 and VNNI bfloat16 is emulated. There only
the weights have 16 bits; inputs, sums and states are float32. FBGEMM reads the weights in float16, which holds every
bfloat16 number between 6e-5 and 65504, and smaller ones with an error of at most 3e-8.

``benchmarks/llama_cpp.py`` compares them with llama.cpp.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.parts import UnpackedLinear, is_plain
from kinformer.generation.recording import PackagedStep, Unchanged, recordings_of
from kinformer.generation.session import LONG
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import emulates_bfloat16, multiplies_int8, processor, processor_class

Model = TypeVar("Model", bound=nn.Module)

FEW = 16
"""Rows up to which PyTorch's product of 8-bit weights is used on a CPU; for more, every product makes a wide matrix."""
MULTIPLE = 32
"""The numbers of columns that this product takes are multiples of this number."""
WIDE = 512
"""Columns from which on FBGEMM multiplies 8-bit weights where it is used; a row of fewer columns takes longer to split
than the product gains (:func:`uses_fbgemm`)."""


@cache
def uses_fbgemm() -> bool:
    """Return whether FBGEMM computes the products: on x86 with AVX2, without AVX-512 and VNNI.

    Measured on an AMD EPYC (family 25, Zen 3), one thread, torch 2.13, microseconds a product of 1 and of 8 rows:

        768 x 2304    float32 760, 2271    bfloat16 530, 3416    float16 428, 836    8 bits 264, 546
        256 x 768     float32 138, 260     bfloat16  88, 430     float16  92, 138    8 bits  98, 109

    PyTorch's product of 8-bit weights takes 534 and 1301, and 40 and 124.
    """
    flags = processor() or ""
    measured = emulates_bfloat16() and "avx2" in flags and "avx512" not in flags and not multiplies_int8("cpu")
    operators = hasattr(torch.ops.quantized, _PRODUCT) and hasattr(torch, "_make_per_channel_quantized_tensor")
    return measured and operators and "fbgemm" in torch.backends.quantized.supported_engines


_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"


class NarrowWeight(Tensor):
    """A matrix [rows, columns] of few bits in place of a weight of ``dtype``; it does not change and has no gradient.

    A linear product and an embedding read the narrow numbers. Every other operation reads the whole matrix in
    ``dtype``. ``matrix``: the numbers, int8 with ``scales`` [rows], or bfloat16 with None; ``packed``: the same for
    FBGEMM. A weight of products alone stores one of both, a table of vectors ``matrix``, and ``packed`` once a product
    needs it.
    """

    matrix: Tensor | None
    scales: Tensor | None
    packed: torch.ScriptObject | None
    by_fbgemm: bool
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
        on_cpu = matrix.device.type == "cpu"
        made.by_fbgemm = on_cpu and uses_fbgemm() and (scales is None or matrix.shape[1] >= WIDE)
        if made.by_fbgemm and not table:
            made._pack()
            made.matrix = None
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
        if self.scales is None:
            return torch.ops.quantized.linear_unpack_fp16(self.packed)[0].half()
        return torch.ops.quantized.linear_unpack(self.packed)[0].int_repr()

    def _wide(self, numbers: Tensor, scales: Tensor | None) -> Tensor:
        wide = numbers.float()
        return (wide if scales is None else wide * scales.float()[..., None]).to(self._dtype)

    def _pack(self) -> torch.ScriptObject:
        if self.packed is None:
            assert self.matrix is not None
            if self.scales is None:
                self.packed = torch.ops.quantized.linear_prepack_fp16(self.matrix.float(), None)
            else:
                zeros = torch.zeros(len(self.scales), dtype=torch.int64)
                with warnings.catch_warnings():  # PyTorch warns that it may remove tensors of quantised numbers
                    warnings.simplefilter("ignore", UserWarning)
                    numbers = torch._make_per_channel_quantized_tensor(self.matrix, self.scales.double(), zeros, 0)
                    self.packed = torch.ops.quantized.linear_prepack(numbers, None)
        return self.packed

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias [..., rows] of x [..., columns], in the dtype of x."""
        few = x.reshape(-1, x.shape[-1])
        if self.by_fbgemm:
            y = self._by_fbgemm(few.float())
        elif self.scales is None:
            y = functional.linear(few, self.widened())
        else:
            y = self._by_bfloat16(few)
        y = y.view(*x.shape[:-1], len(self)).to(x.dtype)
        return y if bias is None else y + bias

    def _by_fbgemm(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._pack())
        scale = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).mul(1 / _MOST).clamp_min(_LEAST)
        x = x / scale
        # The product itself rounds to whole numbers, half to even like ``round``.
        both = torch.cat([x, (x - x.round()) * (2 * _MOST)])
        y = getattr(torch.ops.quantized, _PRODUCT)(both, 1.0, _MOST + 1, self._pack())
        high, low = y.chunk(2)
        return torch.add(high, low, alpha=0.5 / _MOST) * scale

    def _by_bfloat16(self, x: Tensor) -> Tensor:
        assert self.matrix is not None and self.scales is not None
        narrow = x.bfloat16()
        if len(x) <= FEW and x.shape[1] % MULTIPLE == 0 and x.device.type == "cpu":
            return torch._weight_int8pack_mm(narrow, self.matrix, self.scales)
        # The same roundings, so that a text may be cut into any chunks.
        return (narrow.to(x.dtype) @ self.widened().to(x.dtype).mT).bfloat16()

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


_MOST = 63
"""The largest number of 7 bits. With 8 bits, FBGEMM's sums of two products would exceed 16 bits."""
_LEAST = 1e-30

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

    The model itself changes. With 8-bit weights, and with 16-bit weights by FBGEMM, it is for inference only, on its
    device and in its dtype; anything else is refused. On a GPU 8-bit weights save memory but no time.

    Errors: ``KinformerError`` for another type.
    """
    if weights not in ("fp32", "bf16", "int8"):
        raise KinformerError(f"weights is {weights!r}, but must be one of fp32, bf16 and int8.")
    on_cpu = next(model.parameters()).device.type == "cpu"
    if weights == "bf16" and not (on_cpu and uses_fbgemm()):
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


# Packed weights: laid out once for products of few rows instead of at every product, which makes tokens faster.
#
# A product of one token with a matrix reads every weight once, so it takes at least the weights' bytes divided by the
# memory's bandwidth. PyTorch's default products take far longer if there are many weights, or more rows than one;
# oneDNN's layout comes closer, but a product takes some ten microseconds to begin. Elsewhere a matrix is read faster
# column by column. A matrix gets the layout that pays on the processor (:data:`LEAST`).
#
# ``benchmarks/accelerators.py`` keeps it: in ``accelerators.json`` generation with bfloat16 weights is 1.4 times as
# fast packed as not (an Intel Xeon with AMX). Delete it when no row ``packed`` is above 1.1 on any processor of the
# table.


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

    ``weights``: the type of its weights (:func:`as_weights`), None for the model's. The model stores the copies for
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
