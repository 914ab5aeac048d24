"""A key map: which tensors of a folder are which of ours, and in which layout. It is read in both directions.

A key names modules by their places in the model or in a layer; weight and bias of a module go together. Several of
their tensors may be one or several of ours (queries, keys and values), and a *layout* says how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.layouts import GATE_UP, SAME, ConfigView, Layout
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Key:
    """Our modules, ``ours``, and those that hold their tensors elsewhere, ``theirs``, in the order of the layout.

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

    ``layers``: what stands before a layer's number there. ``prefix``: what may stand before every name but those of the
    modules ``beside`` it. ``left_out``: names, without the prefix, of tensors that are no weights.
    """

    model: tuple[Key, ...]
    layer: tuple[Key, ...] | Callable[[ConfigView], tuple[Key, ...]]
    layers: str = "layers"
    prefix: str = "model."
    left_out: re.Pattern[str] = re.compile(r".*rotary_emb\.inv_freq")
    beside: tuple[str, ...] = HEADS

    def read(self, tensors: Mapping[str, Tensor], model: ConfigView, folder: Path, title: str) -> dict[str, Tensor]:
        """Return the weights under our names; ``model`` is our config as data.

        Errors: ``KinformerError`` for a tensor that a ``title`` does not have, and for a missing one.
        """
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
        """Return the keys of the layer ``number``, or of the model (-1); none for a layer that is not there."""
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
