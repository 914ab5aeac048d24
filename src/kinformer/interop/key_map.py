"""A key map: which tensors of a folder are which of ours, and in which layout. It is read in both directions.

A key names modules by their places in the model or in a layer; weight and bias of a module go together. Several of
their tensors may be one or several of ours (queries, keys and values), and a *layout* says how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError, plural

# Layouts of tensors elsewhere beside ours, each read in both directions.


ConfigData: TypeAlias = dict[str, Any]
"""A config of ours, or a part of one, as data, which ``core.config.from_dict`` checks."""
ConfigView: TypeAlias = Mapping[str, Any]
"""A config of ours, or a part of one, as data to read only."""


class Layout:
    """The layout of tensors of ours beside theirs.

    ``layer`` is the config, as data, of the layer that the tensors belong to, or of the model; it holds ``dim``.
    """

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        """Return our tensors of their ``tensors``."""
        raise NotImplementedError

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        """Return their tensors of our ``tensors``."""
        raise NotImplementedError


def _same(tensor: Tensor, layer: ConfigView) -> Tensor:
    return tensor


@dataclass(frozen=True)
class OneByOne(Layout):
    """A layout of one tensor on either side: ``ours`` of theirs, and ``theirs`` of ours, with the layer's config."""

    ours: Callable[[Tensor, ConfigView], Tensor] = _same
    theirs: Callable[[Tensor, ConfigView], Tensor] = _same

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return [self.ours(tensor, layer) for tensor in tensors]

    def write(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        return [self.theirs(tensor, layer) for tensor in tensors]


def _transpose(tensor: Tensor, layer: ConfigView) -> Tensor:
    return tensor.mT.contiguous() if tensor.dim() > 1 else tensor


SAME = OneByOne()
TRANSPOSED = OneByOne(_transpose, _transpose)
"""Their products are [in, out], ours [out, in]; products of experts are the other way round."""
ONE_PLUS = OneByOne(lambda tensor, _: 1 + tensor, lambda tensor, _: tensor - 1)
"""Their norm multiplies by 1 + w, ours by w."""


def behind(rows: int) -> Layout:
    """Return the layout of a table of theirs whose first ``rows`` belong to no token, and which ours does not have."""
    return OneByOne(
        lambda tensor, _: tensor[rows:], lambda tensor, _: torch.cat([tensor.new_zeros(rows, tensor.shape[1]), tensor])
    )


class ClosedLoop(Layout):
    """Comba's decay d and correction D in flash-linear-attention, beside our feedback and correction.

    Its kernel norms the erasing key again, so that sigmoid(d) scales the correction alone: our feedback is 1, and our
    correction D sigmoid(d).
    """

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        decay, correction = tensors
        return [torch.full_like(decay, 40.0), correction * decay.sigmoid()]  # sigmoid(40) is 1 in every dtype


@dataclass(frozen=True)
class Product:
    """A tensor of the rows of several ``blocks``, one letter each.

    The blocks stand one after the other. With ``by_head`` all blocks' rows of a head stand together.
    """

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

    Theirs may be cut anywhere: transformers saves OLMo Hybrid's in equal parts.
    """

    def read(self, tensors: Sequence[Tensor], layer: ConfigView) -> list[Tensor]:
        heads, rows = self.sizes(layer)
        counts = [sum(rows[block] for block in product.blocks) for product in self.there]
        whole = torch.cat(list(tensors))
        taps = super().read(whole.reshape(len(whole), -1).mT.flip(0).mT.split(counts), layer)
        ours = [tensor.mT.unflatten(1, (heads, -1)).contiguous() for tensor in taps]
        return ours if whole.dim() > 1 else [bias[0] for bias in ours]

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
    """The gate (``g``) of the feed-forward's first product, and the rows that it multiplies (``u``)."""
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
    return tuple(Product(block) for block in blocks)


CLOSED_LOOP = ClosedLoop()
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
TAPS_OF_KEYS = Taps(_apart("qk"), (Product("qk", True),), _kernel)
CHANNEL_TAPS = Taps(_apart("x"), _apart("x"), lambda layer: (1, {"x": layer["dim"]}))
MAMBA_PRODUCTS = Blocks((Product("gvkqa"),), (Product("qkv"), Product("g"), Product("a")), _kernel)
"""Mamba's gate, values, keys, queries and steps are one product there."""
MAMBA_TAPS = Taps((Product("vkq"),), (Product("qkv", True),), _kernel)


@dataclass(frozen=True)
class Key:
    """Our modules, ``ours``, and the modules of the same tensors elsewhere, ``theirs``, in the order of the layout.

    ``tensors``: the names of tensors in the modules; an empty one means that ``ours`` and ``theirs`` name tensors.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout
    tensors: tuple[str, ...]


def key(
    ours: str | tuple[str, ...], *theirs: str, layout: Layout = SAME, tensors: tuple[str, ...] = ("weight", "bias")
) -> Key:
    """Return the key of our module ``ours`` and ``theirs``, by default with a weight and a bias, laid out alike."""
    return Key((ours,) if isinstance(ours, str) else ours, theirs, layout, tensors)


def ends_of_model(embedding: str, norm: str, head: str = "lm_head", layout: Layout = SAME) -> tuple[Key, ...]:
    """Return the keys of a decoder outside its layers; ``layout``: the layout of the weights of the norm."""
    return key("input.embedding", embedding), key("norm", norm, layout=layout), key("head.output", head)


GATED = (
    key("feed_forward.gate_up", "mlp.gate_proj", "mlp.up_proj", layout=GATE_UP),
    key("feed_forward.down", "mlp.down_proj"),
)
"""The keys of a gated feed-forward, as most decoders call them."""
HEADS = ("lm_head", "embed_out", "cls", "classifier", "cls_classifier", "distillation_classifier")
"""Modules of heads, which stand beside the model of the prefix."""


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """The keys of a ``model`` and of each ``layer``, which may depend on the layer's config.

    ``layers``: the name before a layer's number there. ``prefix``: the prefix that every name may have, except for the
    modules ``beside`` it. ``left_out``: the names, without the prefix, of tensors that are not weights.
    """

    model: tuple[Key, ...]
    layer: tuple[Key, ...] | Callable[[ConfigView], tuple[Key, ...]]
    layers: str = "layers"
    prefix: str = "model."
    left_out: re.Pattern[str] = re.compile(r".*rotary_emb\.inv_freq")
    beside: tuple[str, ...] = HEADS

    def read(self, tensors: Mapping[str, Tensor], model: ConfigView, folder: Path, title: str) -> dict[str, Tensor]:
        """Return the weights under our names; ``model`` is our config as data."""
        weights: dict[str, Tensor] = {}
        parts: dict[tuple[str, int, Key, str], dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            plain = self._plain(name)
            if self.left_out.fullmatch(plain):
                continue
            where, number, inner = self._place(plain, self.layers)
            entry = _match(self._keys(number, model), inner, lambda one: one.theirs)
            if entry is None:
                raise KinformerError(
                    f"{folder}: holds {name[:99]!r}, which a {title} of "
                    f"{plural(len(model['layers']), 'layer')} does not have; import one without further heads."
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
            place = f"stack.layers.{number}." if where else ""
            try:
                ours = one.layout.read(ordered, _of_layer(model, number))
                weights |= {_name(place + name, kind): tensor for name, tensor in zip(one.ours, ours, strict=True)}
            except (RuntimeError, ValueError, IndexError) as error:
                shapes = " and ".join(str(list(tensor.shape)) for tensor in ordered)
                raise KinformerError(
                    f"{folder}: {_name(where + one.theirs[0], kind)} is {shapes}, which is not what config.json says; "
                    "restore both from a copy."
                ) from error
        return weights

    def write(self, weights: Mapping[str, Tensor], model: ConfigView) -> dict[str, Tensor]:
        """Return our ``weights`` under their names: the inverse of :meth:`read`."""
        tensors: dict[str, Tensor] = {}
        parts: dict[tuple[int, Key, str], dict[int, Tensor]] = {}
        for name, weight in weights.items():
            _, number, inner = self._place(name, "stack.layers")
            entry = _match(self._keys(number, model), inner, lambda one: one.ours)
            assert entry is not None, name
            one, kind, index = entry
            parts.setdefault((number, one, kind), {})[index] = weight
        for (number, one, kind), some in parts.items():
            ordered = [some[index] for index in range(len(one.ours))]
            where = f"{self.layers}.{number}." if number >= 0 else ""
            for theirs, part in zip(one.theirs, one.layout.write(ordered, _of_layer(model, number)), strict=True):
                full = _name(where + theirs, kind)
                tensors[full if theirs.split(".")[0] in self.beside else self.prefix + full] = part.contiguous()
        return tensors

    def _plain(self, name: str) -> str:
        """Return ``name`` without the prefix, or what there is of its end."""
        for part in self.prefix.split(".")[:-1]:
            name = name.removeprefix(f"{part}.")
        return name

    def _keys(self, number: int, model: ConfigView) -> tuple[Key, ...]:
        """Return the keys of the layer ``number``, or of the model (-1); none for a layer that does not exist."""
        if number < 0:
            return self.model
        if number >= len(model["layers"]):
            return ()
        return self.layer(model["layers"][number]) if callable(self.layer) else self.layer

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


def _of_layer(model: ConfigView, number: int) -> ConfigView:
    return model if number < 0 else {"dim": model["dim"], **model["layers"][number]}
