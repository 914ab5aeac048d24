"""Layouts of tensors elsewhere beside ours, each read in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


ConfigData: TypeAlias = dict[str, Any]
"""A config of ours, or a part of one, as data, which ``core.config.from_dict`` checks."""
ConfigView: TypeAlias = Mapping[str, Any]
"""A config of ours, or a part of one, as data that is only read."""


class Layout:
    """The layout of tensors of ours beside theirs; this one is the same on both sides.

    ``layer`` is the config, as data, of the layer that the tensors belong to, or of the model; it holds ``dim``.
    A layout of one tensor on either side says what ``ours`` and ``theirs`` of it is.
    """

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        """Return our tensors of their ``tensors``."""
        return [self.ours(tensor, layer) for tensor in tensors]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        """Return their tensors of our ``tensors``."""
        return [self.theirs(tensor, layer) for tensor in tensors]

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        """Return our tensor of their ``tensor``."""
        return tensor

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        """Return their tensor of our ``tensor``."""
        return tensor


class Transposed(Layout):
    """Their products are [in, out], ours [out, in]."""

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor.mT.contiguous() if tensor.dim() == 2 else tensor

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return self.ours(tensor, layer)


class OnePlus(Layout):
    """Their norm multiplies by 1 + w, ours by w."""

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return 1 + tensor

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor - 1


class Behind(Layout):
    """Our table is theirs without its first ``rows``, which belong to no token."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def ours(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        return tensor[self.rows :]

    def theirs(self, tensor: Tensor, layer: ConfigView) -> Tensor:
        import torch

        return torch.cat([tensor.new_zeros(self.rows, tensor.shape[1]), tensor])


@dataclass(frozen=True)
class Product:
    """A tensor whose rows are those of several ``blocks``, one letter each: one block after the other, or ``by_head``,
    the blocks' rows of one head after those of another."""

    blocks: str
    by_head: bool = False


@dataclass(frozen=True)
class Blocks(Layout):
    """Both sides hold the rows of the same blocks, in the products ``there`` and ``here``.

    ``sizes`` of a layer: how many heads the rows that stand by head have, and each block's number of rows.
    """

    there: tuple[Product, ...]
    here: tuple[Product, ...]
    sizes: Callable[[ConfigView], tuple[int, Mapping[str, int]]]

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return self._moved(tensors, self.there, self.here, layer)

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return self._moved(tensors, self.here, self.there, layer)

    def _moved(
        self, tensors: Sequence[Tensor], source: Sequence[Product], target: Sequence[Product], layer: ConfigView
    ) -> list[Tensor]:
        import torch

        heads, rows = self.sizes(layer)
        blocks: dict[str, Tensor] = {}
        for tensor, product in zip(tensors, source, strict=True):
            counts = [rows[name] for name in product.blocks]
            if product.by_head:
                parts = tensor.unflatten(0, (heads, -1)).split([count // heads for count in counts], dim=1)
                parts = tuple(part.flatten(0, 1) for part in parts)
            else:
                parts = tensor.split(counts)
            blocks |= dict(zip(product.blocks, parts, strict=True))
        joined = []
        for product in target:
            parts = tuple(blocks[name] for name in product.blocks)
            if product.by_head:
                parts = tuple(part.unflatten(0, (heads, -1)) for part in parts)
            whole = torch.cat(parts, dim=int(product.by_head))
            joined.append(whole.flatten(0, 1) if product.by_head else whole)
        return joined


@dataclass(frozen=True)
class Taps(Blocks):
    """Their convolutions of blocks are [channels, 1, width] and end with the token itself, ours is [width, heads,
    channels] and begins with it.

    Theirs may be cut anywhere, as transformers saves those of OLMo Hybrid in equal parts.
    """

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        import torch

        heads, rows = self.sizes(layer)
        counts = [sum(rows[block] for block in product.blocks) for product in self.there]
        joined = super().read(torch.cat(list(tensors)).squeeze(1).split(counts), layer)
        return [tensor.mT.flip(0).unflatten(1, (heads, -1)).contiguous() for tensor in joined]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        parts = super().write([tensor.flatten(1).flip(0).mT for tensor in tensors], layer)
        return [part.unsqueeze(1) for part in parts]


def head_rows(layer: ConfigView) -> tuple[int, int, int]:
    """Return how many rows queries, keys and values have in the product of the layer's mixer."""
    mixer = layer["mixer"]
    projection = mixer.get("projection", {})
    projection = projection.get("inner", projection)
    rows, heads = _rows(mixer, layer), mixer["num_heads"]
    keys = rows * projection.get("num_kv_heads", heads) // heads
    return rows, keys, keys


def _rows(mixer: ConfigView, layer: ConfigView) -> int:
    """Return how wide all heads are together: as the model where the config names no width of one."""
    return mixer["num_heads"] * mixer["head_dim"] if mixer.get("head_dim") else layer["dim"]


def _softmax(layer: ConfigView) -> tuple[int, dict[str, int]]:
    """The blocks of softmax attention: queries, keys, values, and a gate (``g``) of every feature."""
    q, k, v = head_rows(layer)
    return layer["mixer"]["num_heads"], {"q": q, "k": k, "v": v, "g": q}


def _cross(layer: ConfigView) -> tuple[int, dict[str, int]]:
    """The keys and values of the layer's cross-attention."""
    (mixer,) = layer["further_mixers"]
    rows = _rows(mixer, layer)
    return mixer["num_heads"], {"k": rows, "v": rows}


def _gated(layer: ConfigView) -> tuple[int, dict[str, int]]:
    """The gate of the feed-forward's first product, and what it multiplies (``u``)."""
    width = layer["feed_forward"]["hidden_dim"]
    return 1, {"g": width, "u": width}


def _kernel(layer: ConfigView) -> tuple[int, dict[str, int]]:
    """The blocks of kernel attention by heads of keys: queries, keys, values, their output gate (``g``), and of every
    head of values the strength (``b``) and the decay (``a``)."""
    mixer = layer["mixer"]
    heads, key_heads = mixer["num_heads"], mixer.get("key_heads") or mixer["num_heads"]
    keys, values = key_heads * mixer["head_dim"], heads * (mixer.get("value_dim") or mixer["head_dim"])
    return key_heads, {"q": keys, "k": keys, "v": values, "g": values, "b": heads, "a": heads}


def _apart(blocks: str) -> tuple[Product, ...]:
    """Return one product for each of the ``blocks``."""
    return tuple(Product(block) for block in blocks)


SAME = Layout()
TRANSPOSED, ONE_PLUS = Transposed(), OnePlus()
QKV = Blocks(_apart("qkv"), (Product("qkv"),), _softmax)
BY_HEAD = Blocks((Product("qkv", True),), (Product("qkv"),), _softmax)
"""Theirs is one product, [heads, 3, head_dim]."""
GATED_QKV = Blocks((Product("qg", True), *_apart("kv")), (Product("qkv"), Product("g")), _softmax)
"""Their queries and gates are one product, head by head."""
CROSS_KV = Blocks(_apart("kv"), (Product("kv"),), _cross)
GATE_UP = Blocks(_apart("gu"), (Product("gu"),), _gated)
KERNEL_QKV = Blocks(_apart("qkv"), (Product("qkv"),), _kernel)
DELTA = Blocks(_apart("qkvb"), (Product("qkvb", True),), _kernel)
"""With the delta rule, ours has a key head's rows together."""
DELTA_JOINED = Blocks((Product("qkv"), Product("b")), (Product("qkvb", True),), _kernel)
DELTA_FUSED = Blocks(
    (Product("qkvg", True), Product("ba", True)), (Product("qkvb", True), Product("g"), Product("a")), _kernel
)
TAPS, TAPS_JOINED = (Taps(there, (Product("qkv", True),), _kernel) for there in (_apart("qkv"), (Product("qkv"),)))
