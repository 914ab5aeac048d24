"""A key map: which tensors of a folder are which of ours, and in which layout. It is read in both directions.

A key names modules by their places in the model or in a layer; weight and bias of a module go together. Several of
their tensors may be one of ours (queries, keys and values), and a *layout* says how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, Any]


class Layout:
    """The layout of one tensor of ours beside theirs; this one is the same on both sides.

    ``layer`` is the config, as data, of the layer that the tensor belongs to, or of the model; it holds ``dim``.
    """

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        """Return our tensor of their ``tensors``."""
        (tensor,) = tensors
        return tensor

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        """Return their tensors of our ``tensor``."""
        return [tensor]


class Transposed(Layout):
    """Their products are [in, out], ours [out, in]."""

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        (tensor,) = tensors
        return tensor.mT.contiguous() if tensor.dim() == 2 else tensor

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        return [self.read([tensor], layer)]


class Rows(Layout):
    """Their tensors are rows of ours, one after the other; ``counts`` gives how many each has."""

    def __init__(self, counts: Callable[[Config], Sequence[int]]) -> None:
        self.counts = counts

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        import torch

        counts = list(self.counts(layer))
        if [len(tensor) for tensor in tensors] != counts:
            raise ValueError(f"tensors of {counts} rows have {[len(tensor) for tensor in tensors]}")
        return torch.cat(list(tensors))

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        return [part.contiguous() for part in tensor.split(list(self.counts(layer)))]


class ByHead(Layout):
    """The rows of their one product are [heads, 3, head_dim], ours [3, heads, head_dim]."""

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        (tensor,) = tensors
        return tensor.unflatten(0, (layer["mixer"]["num_heads"], 3, -1)).transpose(0, 1).flatten(0, 2)

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        return [tensor.unflatten(0, (3, layer["mixer"]["num_heads"], -1)).transpose(0, 1).flatten(0, 2)]


class OnePlus(Layout):
    """Their norm multiplies by 1 + w, ours by w."""

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        (tensor,) = tensors
        return 1 + tensor

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        return [tensor - 1]


class Behind(Layout):
    """Our table is theirs without its first ``rows``, which belong to no token."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def read(self, tensors: Sequence[Tensor], layer: Config) -> Tensor:
        (tensor,) = tensors
        return tensor[self.rows :]

    def write(self, tensor: Tensor, layer: Config) -> list[Tensor]:
        import torch

        return [torch.cat([tensor.new_zeros(self.rows, tensor.shape[1]), tensor])]


def head_rows(layer: Config) -> tuple[int, int, int]:
    """Return how many rows queries, keys and values have in the product of the layer's mixer."""
    mixer = layer["mixer"]
    projection = mixer.get("projection", {})
    projection = projection.get("inner", projection)
    rows, heads = _rows(mixer, layer), mixer["num_heads"]
    keys = rows * projection.get("num_kv_heads", heads) // heads
    return rows, keys, keys


def cross_rows(layer: Config) -> tuple[int, int]:
    """Return how many rows keys and values have in the product of the layer's cross-attention."""
    (mixer,) = layer["further_mixers"]
    rows = _rows(mixer, layer)
    return rows, rows


def _rows(mixer: Config, layer: Config) -> int:
    """Return how wide all heads are together: as the model where the config names no width of one."""
    return mixer["num_heads"] * mixer["head_dim"] if mixer.get("head_dim") else layer["dim"]


def gate_rows(layer: Config) -> tuple[int, int]:
    """Return how many rows the gate and what it multiplies have in the feed-forward's first product."""
    width = layer["feed_forward"]["hidden_dim"]
    return width, width


SAME = Layout()
TRANSPOSED, BY_HEAD, ONE_PLUS = Transposed(), ByHead(), OnePlus()
QKV, CROSS_KV, GATE_UP = Rows(head_rows), Rows(cross_rows), Rows(gate_rows)


@dataclass(frozen=True)
class Key:
    """One of our modules, ``ours``, and those that hold its tensors elsewhere, ``theirs``, in the order of the layout.

    ``tensors``: the names of tensors in the modules; an empty one means that ``ours`` and ``theirs`` name tensors.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    tensors: tuple[str, ...]


def key(ours: str, *theirs: str, layout: Layout = SAME, tensors: tuple[str, ...] = ("weight", "bias")) -> Key:
    """Return the key of our module ``ours`` and ``theirs``, by default with a weight and a bias, laid out alike."""
    return Key(ours, theirs, layout, tensors)


HEADS = ("lm_head", "embed_out", "cls", "classifier", "cls_classifier", "distillation_classifier")
"""Modules of heads, which stand beside the model of the prefix."""


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """The keys of a model and of each of its layers.

    ``layers``: what stands before a layer's number there. ``prefix``: what may stand before every name but those of the
    modules ``beside`` it. ``left_out``: names, without the prefix, of tensors that are no weights.
    """

    model: tuple[Key, ...]
    layer: tuple[Key, ...]
    layers: str = "layers"
    prefix: str = "model."
    left_out: re.Pattern[str] = re.compile(r".*rotary_emb\.inv_freq")
    beside: tuple[str, ...] = HEADS

    def read(self, tensors: Mapping[str, Tensor], model: Config, folder: Path, title: str) -> dict[str, Tensor]:
        """Return the weights under our names; ``model`` is our config as data.

        Errors: ``KinformerError`` for a tensor that a ``title`` has not, or lacks.
        """
        weights: dict[str, Tensor] = {}
        parts: dict[tuple[str, int, Key, str], dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            plain = self._plain(name)
            if self.left_out.fullmatch(plain):
                continue
            where, number, inner = self._place(plain, self.layers)
            entry = _match(self._keys(number), inner, lambda one: one.theirs)
            if entry is None or number >= len(model["layers"]):
                raise KinformerError(
                    f"{folder}: holds {name[:99]!r}, which a {title} of "
                    f"{plural(len(model['layers']), 'layer')} has not; import one without further heads."
                )
            one, kind, index = entry
            some = parts.setdefault((where, number, one, kind), {})
            if index in some:
                raise KinformerError(f"{folder}: holds {plain[:99]} with {self.prefix!r} before it and without.")
            some[index] = tensor
        for (where, number, one, kind), some in parts.items():
            if missing := [name for index, name in enumerate(one.theirs) if index not in some]:
                raise KinformerError(f"{folder}: lacks {_name(where + missing[0], kind)}; restore it from a copy.")
            ordered = [some[index] for index in range(len(one.theirs))]
            place = f"stack.layers.{number}.{one.ours}" if where else one.ours
            try:
                weights[_name(place, kind)] = one.layout.read(ordered, _of_layer(model, number))
            except (RuntimeError, ValueError, IndexError) as error:
                shapes = " and ".join(str(list(tensor.shape)) for tensor in ordered)
                raise KinformerError(
                    f"{folder}: {_name(where + one.theirs[0], kind)} is {shapes}, which is not what config.json says; "
                    "restore both from a copy."
                ) from error
        return weights

    def write(self, weights: Mapping[str, Tensor], model: Config) -> dict[str, Tensor]:
        """Return our ``weights`` under their names: the inverse of :meth:`read`."""
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            _, number, inner = self._place(name, "stack.layers")
            entry = _match(self._keys(number), inner, lambda one: (one.ours,))
            assert entry is not None, name
            one, kind, _ = entry
            where = f"{self.layers}.{number}." if number >= 0 else ""
            for theirs, part in zip(one.theirs, one.layout.write(weight, _of_layer(model, number)), strict=True):
                full = _name(where + theirs, kind)
                tensors[full if theirs.split(".")[0] in self.beside else self.prefix + full] = part.contiguous()
        return tensors

    def _plain(self, name: str) -> str:
        """Return ``name`` without the prefix, or what there is of its end."""
        for part in self.prefix.split(".")[:-1]:
            name = name.removeprefix(f"{part}.")
        return name

    def _keys(self, number: int) -> tuple[Key, ...]:
        return self.model if number < 0 else self.layer

    @staticmethod
    def _place(name: str, layers: str) -> tuple[str, int, str]:
        """Return the layer's prefix in ``name``, its number (-1 of none) and the rest of the name."""
        match = re.fullmatch(rf"({re.escape(layers)}\.([0-9]{{1,5}})\.)(.+)", name)
        return ("", -1, name) if match is None else (match[1], int(match[2]), match[3])


def _match(keys: Sequence[Key], name: str, side: Callable[[Key], tuple[str, ...]]) -> tuple[Key, str, int] | None:
    """Return the key of the tensor ``name``, the tensor's name in its module, and the module's number in the key."""
    stem, _, kind = name.rpartition(".")
    for one in keys:
        for module, tensor in ((stem, kind), (name, "")):
            if tensor in one.tensors and module in side(one):
                return one, tensor, side(one).index(module)
    return None


def _name(module: str, tensor: str) -> str:
    return f"{module}.{tensor}" if tensor else module


def _of_layer(model: Config, number: int) -> Config:
    return model if number < 0 else {"dim": model["dim"], **model["layers"][number]}
