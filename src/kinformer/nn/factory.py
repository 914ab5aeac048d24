"""One layer of any member, by name: ``layer("gated-deltanet", dim=512, num_heads=8)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import nn

from kinformer.blocks.layer import LayerConfig
from kinformer.core.config import C, Config, describe, field_types, from_dict, override
from kinformer.core.contract import Chunk, MixerConfig
from kinformer.core.encoder import EncoderLayerConfig, EncoderMixerConfig, SequenceContext, StateOptions
from kinformer.core.stack import Stack, StackConfig
from kinformer.core.state import State
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.record import Growth
from kinformer.family.table import FAMILY, member
from kinformer.nn.bidirectional import BidirectionalLayer
from kinformer.nn.causal import CausalLayer
from kinformer.runtime.errors import KinformerError, nearest

Layer = CausalLayer | BidirectionalLayer


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """A name that :func:`layer` takes, and the facts of the layer.

    ``title`` describes the layer in a few words. ``causal``: the layer is a ``CausalLayer``. ``growth``: the growth of
    the state with the tokens, None for a mixer without a member. ``settings``: the mixer's settings, name -> default.
    """

    name: str
    title: str
    causal: bool
    growth: Growth | None

    @cached_property
    def config(self) -> MixerConfig | EncoderMixerConfig:
        """Return the config of the mixer in the member's recipe ``small``."""
        return _mixer_config(_layer_config(self.name, "small"))

    @property
    def settings(self) -> dict[str, object]:
        """Return the default of every setting of the mixer, by name."""
        return {name: getattr(self.config, name) for name in field_types(type(self.config))}

    def __str__(self) -> str:
        defaults = (f"    {name} = {_short(value)}" for name, value in self.settings.items())
        return "\n".join([f"{self.name}: {self.title}", *defaults])


def layers() -> list[LayerRecord]:
    """Return the records of all names that :func:`layer` takes: the members, then the mixers without a member of the
    same name."""
    members = [member(name) for name in FAMILY]
    records = [LayerRecord(record.name, record.title, record.causal, record.growth) for record in members]
    table, names = kinds(), {record.name for record in records}
    for slot, causal in (("mixer", True), ("encoder_mixer", False)):
        for kind in table[slot]:
            if kind not in names:
                names.add(kind)
                records.append(LayerRecord(kind, f"the mixer {kind!r}", causal, None))
    return records


def layer(
    name: str | Config,
    dim: int,
    *,
    block: bool = False,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: object,
) -> CausalLayer | Any:
    """Return one layer of a member as a module; see :func:`kinformer.layer`."""
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise KinformerError(f"dim is {dim!r}, but must be a whole number of 1 or more, the width of the layer.")
    config = layer_config(name, dim, block=block, recipe=recipe, set=set, **settings)
    with nullcontext() if device is None else torch.device(device):
        inner = config.build(dim)
    return wrap(inner if dtype is None else inner.to(dtype), dim)


def layer_config(
    name: str | Config,
    dim: int | None = None,
    *,
    block: bool = False,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    **settings: object,
) -> LayerConfig | EncoderLayerConfig | MixerConfig | EncoderMixerConfig:
    """Return the config that :func:`layer` builds; without ``dim``, and in a config, the number of heads stays."""
    if not isinstance(block, bool):  # some mixers have a setting of this name
        raise KinformerError(
            f"block is {block!r}, but must be True (a whole layer) or False (its mixer alone); a mixer's own setting "
            f'`block` is given by set={{"block": {block!r}}}.'
        )
    config = _layer_config(name, recipe)
    if not block:
        config = _mixer_config(config)
    elif isinstance(config, MixerConfig | EncoderMixerConfig):
        raise KinformerError(f"block: {describe(config)} is a mixer without a layer around it; leave `block` out.")
    heads = {} if dim is None or isinstance(name, Config) else _heads(config, dim)
    return _changed(config, heads | _paths(config, settings) | dict(set or {}))


def stack(
    layers: Sequence[str | Config | nn.Module],
    dim: int,
    *,
    stack: StackConfig | Mapping[str, object] | str = "sequential",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> CausalLayer | Any:
    """Return several layers of width ``dim`` as one module with the interface of one layer, applied by ``stack``.

    layers: names of members, configs of layers, or modules that :func:`layer` made with ``block=True``; all causal or
        all bidirectional.
    stack: "sequential", "reversible", or "universal": one layer again and again, with adaptive computation time if its
        config has ``halting``, as in ``{"kind": "universal", "steps": 6, "halting": "act"}``. A reversible stack has
        two streams, and its y has both, [batch, time, 2 * dim].
    """
    modules = [
        item if isinstance(item, nn.Module) else layer(item, dim, block=True, device=device, dtype=dtype)
        for item in layers
    ]
    if not modules:
        raise KinformerError("layers: a stack without layers; give one at least.")
    plain = [item for item in modules if isinstance(item, Layer)]
    if len(plain) != len(modules) or len({type(item) for item in plain}) > 1:
        raise KinformerError(
            "layers: they are not all causal, or not all bidirectional; give layers of one sort, made by "
            "kinformer.layer."
        )
    built = from_dict(StackConfig, stack, kinds(), "stack").build_model([item.inner for item in plain], dim)
    wrapper = _CausalStack if isinstance(plain[0], CausalLayer) else _BidirectionalStack
    return type(plain[0])(wrapper(built), dim)


class _CausalStack(nn.Module):
    """A stack of causal layers with the interface of one layer."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        """Return one state per use of a layer."""
        return self.stack.initial_state(batch, **options)

    def forward(self, chunk: Chunk, state: tuple[State, ...]) -> tuple[torch.Tensor, tuple[State, ...]]:
        """Return y [batch, time, dim] and the states after."""
        y, after, _ = self.stack.absorb(chunk, state, _as_it_is)
        return y, after


class _BidirectionalStack(nn.Module):
    """A stack of an encoder's layers with the interface of one layer."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: torch.Tensor, text: SequenceContext) -> torch.Tensor:
        """Return y [batch, time, dim]."""
        return self.stack.read(x, text, _as_it_is)[0]


def _as_it_is(x: torch.Tensor, use: int) -> torch.Tensor:
    """Return ``x``: no position enters between layers."""
    return x


def wrap(inner: nn.Module, dim: int) -> Layer:
    """Return the plain interface of a built mixer or layer."""
    for layer in (CausalLayer(inner, dim), BidirectionalLayer(inner, dim)):
        if layer.mixers:
            return layer
    raise KinformerError(
        f"{type(inner).__name__} does not mix tokens, so a mixer's interface does not fit it; use the module that "
        "its config's build(dim) returns."
    )


def _layer_config(name: str | Config, recipe: str) -> Any:
    """Return the config of a member's layer, or of a mixer by its kind, or ``name`` itself where it is a config."""
    if isinstance(name, Config):
        return name
    if not isinstance(name, str):
        raise KinformerError(f"name is of the type {type(name).__name__}; give the name of a member, or a config.")
    if name not in FAMILY:
        table = kinds()
        for slot in ("mixer", "encoder_mixer"):
            if name in table[slot]:
                return table[slot][name]()
    record = member(name)
    layers = configure(record.name, recipe).layers
    return layers[min(record.layer, len(layers) - 1)]


def _mixer_config(config: object) -> Any:
    """Return the config of the mixer in the config of a layer, or the config of a mixer itself."""
    return getattr(config, config.main_field) if hasattr(config, "main_field") else config


def _paths(config: Any, settings: Mapping[str, object]) -> dict[str, object]:
    """Return ``settings`` by their paths in ``config``: its fields or, in a layer, the fields of its mixer."""
    outer, mixer = field_types(type(config)), _mixer_config(config)
    deeper = field_types(type(mixer)) if mixer is not config else {}
    for name in settings:
        if name not in outer and name not in deeper:
            raise KinformerError(f"{name!r} is not a setting of {describe(config)}; {nearest(name, [*outer, *deeper])}")
    return {name if name in outer else f"{config.main_field}.{name}": value for name, value in settings.items()}


def _heads(config: Any, dim: int) -> dict[str, int]:
    """Return a change of the number of heads to the next smaller divisor of ``dim``, where the recipe's number does not
    divide ``dim``."""
    mixer = _mixer_config(config)
    heads = getattr(mixer, "num_heads", None)
    if heads is None or getattr(mixer, "head_dim", None) is not None or dim % heads == 0:
        return {}
    path = "num_heads" if mixer is config else f"{config.main_field}.num_heads"
    return {path: next(number for number in range(heads, 0, -1) if dim % number == 0)}


def _changed(config: C, changes: Mapping[str, object]) -> C:
    """Return ``config`` after ``changes``. The table of all kinds takes a while to import, so it is read only where a
    change names a part."""
    plain = all(value is None or isinstance(value, bool | int | float | Config) for value in changes.values())
    return override(config, changes, {} if plain else kinds())


def _short(value: object) -> str:
    """Return the text of a default in a call: the kind of a config, or the value."""
    return repr(value.kind) if isinstance(value, Config) else repr(value)
