"""Mechanisms as plain layers, ``y = layer(x)``: causal, bidirectional, and made by name."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor, nn

from kinformer.blocks.layer import LayerConfig
from kinformer.core.config import C, Config, describe, field_types, from_dict, override
from kinformer.core.contract import (
    AS_THEY_ARE,
    Alignment,
    CausalMixer,
    Chunk,
    MixerConfig,
    ReadsSource,
    RecomputesKV,
    StateOptions,
    left_align,
    require_input,
    select_valid,
)
from kinformer.core.encoder import (
    EncoderLayerConfig,
    EncoderMixer,
    EncoderMixerConfig,
    SequenceContext,
    global_positions,
)
from kinformer.core.stack import Stack, StackConfig
from kinformer.core.state import State, form
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.record import Growth
from kinformer.family.table import FAMILY, member
from kinformer.runtime.compiling import checks_calls
from kinformer.runtime.errors import KinformerError, choose, close_names, nearest

# The plain interface of causal mixers, layers and stacks: ``y = layer(x)``, with a state on request.
#
# The interface is a thin shell over the contract (``core.contract``): the arguments become one ``Chunk``. The layer
# runs the code of the mixer, so the tests of a mixer (``kinformer.testing``) hold for its layer.

# Masks and packed sequences as other libraries write them: ``key_padding_mask`` and ``cu_seqlens``.


def padding_of(key_padding_mask: Tensor | None) -> Tensor | None:
    """Return the opposite of a mask [batch, time] bool: ``valid`` from ``key_padding_mask``, or the reverse."""
    return None if key_padding_mask is None else ~key_padding_mask


def require_mask(name: str, mask: Tensor, x: Tensor) -> None:
    """Raise unless ``mask`` is bool and of the first two sizes of ``x``."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        what = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else f"of the type {type(mask).__name__}"
        raise KinformerError(f"{name} is {what}, but must be torch.bool [batch, time] = {list(x.shape[:2])}.")


def masked(name: str, *others: object) -> None:
    """Raise where packed sequences come with a mask, a context or a grid of ``others``."""
    if any(other is not None for other in others):
        raise KinformerError(
            f"{name}: packed sequences do not go with padding, resets, a context or a grid; leave these out, or "
            "give rows [batch, time, dim] with key_padding_mask."
        )


class Packing(NamedTuple):
    """Sequences one after the other in one row of ``time`` tokens: the first position and the length of each."""

    begins: Tensor
    lengths: Tensor
    time: int

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor) -> Packing:
        """Return the packing of x [1, time, dim] by ``cu_seqlens`` [n + 1] int, which rise from 0 to time.

        Errors: ``KinformerError`` for numbers that do not rise from 0 to time, and for more than one row.
        """
        if x.shape[0] != 1:
            raise KinformerError(
                f"cu_seqlens: packed sequences stand in one row, but x has {x.shape[0]}; give [1, time, dim]."
            )
        ends = torch.as_tensor(cu_seqlens, device=x.device)
        integers = ends.dim() == 1 and len(ends) > 1 and not ends.is_floating_point()
        if not integers or int(ends[0]) != 0 or int(ends[-1]) != x.shape[1] or not bool((ends.diff() > 0).all()):
            raise KinformerError(
                f"cu_seqlens is {ends.tolist()}, but must be whole numbers that rise from 0 to the time {x.shape[1]}, "
                "the ends of the sequences before each."
            )
        ends = ends.long()
        return cls(ends[:-1], ends.diff(), x.shape[1])

    def starts(self) -> Tensor:
        """Return the first tokens of the sequences, [1, time] bool."""
        starts = torch.zeros(1, self.time, dtype=torch.bool, device=self.begins.device)
        starts[0, self.begins] = True
        return starts

    def padding(self) -> Tensor:
        """Return where the rows of :meth:`rows` are padding, [n, longest] bool."""
        index = torch.arange(int(self.lengths.max()), device=self.begins.device)
        return index >= self.lengths[:, None]

    def rows(self, x: Tensor) -> Tensor:
        """Return x [1, time, ...] with a row per sequence, [n, longest, ...], zero where it is padding."""
        padding = self.padding()
        rows = x.new_zeros(*padding.shape, *x.shape[2:])
        return rows.masked_scatter(~padding.view(*padding.shape, *[1] * (x.dim() - 2)), x[0])

    def packed(self, rows: Tensor) -> Tensor:
        """Return rows [n, longest, ...] as one row [1, time, ...]; the inverse of :meth:`rows`."""
        return rows[~self.padding()][None]


class PlainLayer(nn.Module):
    """The base of causal and of bidirectional layers: a module x [batch, time, dim] -> y [batch, time, dim] around
    ``inner``, a mixer, layer or stack of width ``dim``. A subclass names the class of its mixers, ``mixer_class``."""

    mixer_class: type[CausalMixer] | type[EncoderMixer]

    def __init__(self, inner: nn.Module, dim: int, config: Config | None = None) -> None:
        """Wrap ``inner``, whose mixers are of the class ``mixer_class`` and which ``config`` describes."""
        super().__init__()
        self.inner, self.dim, self.config = inner, dim, config

    @property
    def mixers(self) -> tuple[CausalMixer | EncoderMixer, ...]:
        """Return the mixers inside, each once."""
        return tuple(module for module in self.inner.modules() if isinstance(module, self.mixer_class))

    @property
    def max_length(self) -> int | None:
        """Return the largest number of tokens of a sequence, None for any number."""
        return min((mixer.max_length for mixer in self.mixers if mixer.max_length is not None), default=None)

    def extra_repr(self) -> str:
        """Return the width, the direction and the mixer's settings for ``print(layer)``."""
        causal = "causal" if isinstance(self, CausalLayer) else "bidirectional"
        return ", ".join([f"dim={self.dim}", causal, *(_summary(_mixer_config(self.config)) if self.config else ())])


class CausalLayer(PlainLayer):
    """A causal mixer, layer or stack as a module x [batch, time, dim] -> y [batch, time, dim].

        y = layer(x)                                           # a full sequence
        y, state = layer(x, return_state=True)                 # the same, and the state for later tokens
        y, state = layer(x, state, return_state=True)          # the next chunk, of any length from 1 token on

    No output depends on a later token, and the chunks of a sequence give the outputs of the full sequence. A state is a
    ``NamedTuple`` of tensors, batch first; ``kinformer.nn.states`` moves, selects, repeats, measures and saves states.
    """

    mixer_class = CausalMixer
    if TYPE_CHECKING:

        @property
        def mixers(self) -> tuple[CausalMixer, ...]: ...

    @property
    def reads_context(self) -> bool:
        """Return whether the layer attends to a context beside x (cross-attention)."""
        return any(isinstance(mixer, ReadsSource) for mixer in self.mixers)

    def initial_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        context: Tensor | None = None,
        context_key_padding_mask: Tensor | None = None,
    ) -> State:
        """Return the state of ``batch`` new sequences, on the device of the weights and in their dtype unless given.

        context: [batch, length, width], the sequence that a layer with cross-attention attends to; it is projected
            once, here.
        context_key_padding_mask: [batch, length] bool, True where the context is padding.
        """
        if self.reads_context != (context is not None):
            raise KinformerError(
                "the layer attends to a context beside x, but has none; give context=[batch, length, width]."
                if self.reads_context
                else "context: this layer attends to x alone; leave it out, or take a layer with cross-attention, such "
                'as kinformer.layer("cross", ...).'
            )
        options: dict[str, object] = {"device": device, "dtype": dtype}
        if context is not None:
            if context_key_padding_mask is not None:
                require_mask("context_key_padding_mask", context_key_padding_mask, context)
            options |= {"source": context, "source_valid": padding_of(context_key_padding_mask)}
        return self.inner.initial_state(batch, **options)  # type: ignore[operator]

    @overload
    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        return_state: Literal[False] = False,
        key_padding_mask: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: Tensor | None = None,
        context_key_padding_mask: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        return_state: Literal[True],
        key_padding_mask: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: Tensor | None = None,
        context_key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]: ...

    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        return_state: bool = False,
        key_padding_mask: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: Tensor | None = None,
        context_key_padding_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """Return y [batch, time, dim], and with ``return_state`` also the state after x.

        x: [batch, time, dim], with one row and one token at least.
        state: the state that an earlier call returned, or None to begin new sequences. A state has as many rows as x,
            and is on the device of x. n neighbouring rows of x may share the context of a row
            (``states.repeat_rows(state, n, sources=False)``).
        key_padding_mask: [batch, time] bool, True where x is padding, as in ``torch.nn.MultiheadAttention``. Padding
            may stand anywhere; y is 0 at padding, and the state is the same as without the padding.
        reset: [batch, time] bool, True where a new sequence begins in its row: no later token sees an earlier one.
        cu_seqlens: [n + 1] int, from 0 to time: n sequences packed in one row, x [1, time, dim], as in flash-attention
            and fla. The ``state`` and the returned state then have n rows.
        context, context_key_padding_mask: as of :meth:`initial_state`, for new sequences.

        Errors: ``KinformerError`` for shapes, dtypes and states that do not fit.
        """
        if checks_calls():
            self._check(x, state, key_padding_mask, reset, context)
        if cu_seqlens is not None:
            masked("cu_seqlens", key_padding_mask, reset, context)
            packing = Packing.of(x, cu_seqlens)
            if state is None and not return_state:
                return self(x, reset=packing.starts())
            y, after = self(packing.rows(x), state, return_state=True, key_padding_mask=packing.padding())
            return (packing.packed(y), after) if return_state else packing.packed(y)
        if state is None:
            state = self.initial_state(
                x.shape[0], device=x.device, context=context, context_key_padding_mask=context_key_padding_mask
            )
        y, after = self._absorb(x, state, padding_of(key_padding_mask), reset)
        return (y, after) if return_state else y

    if TYPE_CHECKING:
        __call__ = forward

    def _absorb(self, x: Tensor, state: State, valid: Tensor | None, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y and the state after x [batch, time, dim], whose ``valid`` tokens may stand anywhere in their row."""
        norm = (AS_THEY_ARE,) if isinstance(self.inner, RecomputesKV) else ()
        if valid is None:
            return self.inner(Chunk(x, None, reset), state, *norm)
        order = left_align(valid)
        chunk = Chunk(
            select_valid(order.align(x), order.valid), order.valid, None if reset is None else order.align(reset)
        )
        y, after = self.inner(chunk, state, *norm)
        return order.restore(y), after

    def _check(
        self, x: Tensor, state: State, key_padding_mask: Tensor | None, reset: Tensor | None, context: Tensor | None
    ) -> None:
        """Raise for arguments of wrong shapes or types, and for a state of another layer."""
        require_input(x, self.dim)
        for name, mask in (("key_padding_mask", key_padding_mask), ("reset", reset)):
            if mask is not None:
                require_mask(name, mask, x)
        if state is None:
            return
        if context is not None:
            raise KinformerError("context: the state has one already; leave it out, or begin with state=None.")
        if self._form is not None and form(state) != self._form:
            raise KinformerError(
                "state: it is not one of this layer's (its tensors are of other types or sizes); give what this layer "
                "returned, or None to begin new sequences."
            )

    @cached_property
    def _form(self) -> object:
        """Return the form of this layer's states; None with a context, whose length is part of it."""
        return None if self.reads_context else form(self.initial_state(1, device=torch.device("meta")))


class BidirectionalLayer(PlainLayer):
    """An encoder's mixer, layer or stack as a module x [batch, time, dim] -> y [batch, time, dim] of full sequences,
    without a state. Every token may see earlier and later tokens."""

    mixer_class = EncoderMixer
    if TYPE_CHECKING:

        @property
        def mixers(self) -> tuple[EncoderMixer, ...]: ...

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        global_mask: Tensor | None = None,
        num_global: int = 0,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return y [batch, time, dim].

        x: [batch, time, dim], with one row and one token at least.
        key_padding_mask: [batch, time] bool, True where x is padding, as in ``torch.nn.MultiheadAttention``. Padding
            may stand anywhere; y is 0 there.
        cu_seqlens: [n + 1] int, from 0 to time: n sequences packed in one row, x [1, time, dim].
        global_mask: [batch, time] bool, True at tokens that see all others and are seen by all (Longformer, Big Bird).
        num_global: the number of tokens of the global input, which come first in x and do not have positions (ETC).
        grid: rows and columns of the patches of an image, where x is the patches row by row (Swin); not with padding.

        Errors: ``KinformerError`` for shapes and dtypes that do not fit, for global tokens of a mixer without them, and
        for padding of an image.
        """
        if checks_calls():
            self._check(x, key_padding_mask, global_mask, num_global, grid)
        if cu_seqlens is not None:
            masked("cu_seqlens", key_padding_mask, grid)
            packing = Packing.of(x, cu_seqlens)
            marks = None if global_mask is None else packing.rows(global_mask)
            y = self(packing.rows(x), key_padding_mask=packing.padding(), global_mask=marks, num_global=num_global)
            return packing.packed(y)
        valid = padding_of(key_padding_mask)
        order = None if valid is None else _aligned(valid, num_global)
        if order is not None:
            x = select_valid(order.align(x), order.valid)
            global_mask = None if global_mask is None else order.align(global_mask)
        y = self.inner(x, self._context(global_mask, num_global, grid, order))
        return y if order is None else order.restore(y)

    if TYPE_CHECKING:
        __call__ = forward

    def _context(
        self, global_mask: Tensor | None, num_global: int, grid: tuple[int, int] | None, order: Alignment | None
    ) -> SequenceContext:
        """Return the context of the tokens for the mixers: the padding, the global tokens and the grid."""
        context = SequenceContext(None if order is None else order.valid, num_global=num_global, grid=grid)
        if global_mask is None:
            return context
        chosen = global_positions(global_mask[:, num_global:].long(), context.long_valid)
        return context._replace(global_positions=chosen)

    def _check(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        global_mask: Tensor | None,
        num_global: int,
        grid: tuple[int, int] | None,
    ) -> None:
        """Raise for arguments of wrong shapes and types, and for global tokens where a mixer does not support them."""
        require_input(x, self.dim)
        for name, mask in (("key_padding_mask", key_padding_mask), ("global_mask", global_mask)):
            if mask is not None:
                require_mask(name, mask, x)
        # Aligning the valid tokens would move patches to other rows and columns.
        if grid is not None and key_padding_mask is not None and bool(key_padding_mask.any()):
            raise KinformerError(
                "key_padding_mask: the patches of an image are all real, so that none is padding; leave it out, or "
                "leave `grid` out."
            )
        if not 0 <= num_global < x.shape[1]:
            raise KinformerError(f"num_global is {num_global}, but must be from 0 to {x.shape[1] - 1}, less than time.")
        for mixer in self.mixers:
            mixer.check(global_mask is not None, num_global > 0)


def _aligned(valid: Tensor, num_global: int) -> Alignment:
    """Return the order in which valid tokens come first, within the global input and within the long input."""
    if not num_global:
        return left_align(valid)
    first, second = left_align(valid[:, :num_global]), left_align(valid[:, num_global:])
    pairs = ((first.order, second.order + num_global), (first.inverse, second.inverse + num_global))
    order, inverse = (torch.cat(pair, dim=1) for pair in pairs)
    return Alignment(order, inverse, torch.cat([first.valid, second.valid], dim=1))


# One layer of any member, by name: ``layer("gated-deltanet", dim=512, num_heads=8)``.

Layer = CausalLayer | BidirectionalLayer


@dataclasses.dataclass(frozen=True, repr=False)
class LayerRecord:
    """A name that :func:`layer` takes, and the facts of the layer.

    ``title`` describes the layer in a few words. ``causal``: the layer is a ``CausalLayer`` unless ``causal=False`` is
    given. ``growth``: the growth of the state with the tokens, None for a mixer without a member. ``settings``: the
    mixer's settings, name -> default. ``bidirectional``: the layer exists with ``causal=False``.
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

    @property
    def bidirectional(self) -> bool:
        """Return whether ``layer(name, dim, causal=False)`` exists."""
        try:
            with torch.device("meta"):
                layer_config(self.name, 64, causal=False).build(64)
        except KinformerError:
            return False
        return True

    def __repr__(self) -> str:
        both = "causal or bidirectional" if self.bidirectional else "causal"
        return f"<{self.name}: {both if self.causal else 'bidirectional'}>"

    def __str__(self) -> str:
        defaults = (f"    {name} = {_short(value)}" for name, value in self.settings.items())
        return "\n".join([f"{repr(self)[1:-1]}; {self.title}", *defaults])


def layers() -> list[LayerRecord]:
    """Return the records of all names that :func:`layer` takes: the members, then mixers of other names.

    ``print(kinformer.layers())`` shows which are causal, bidirectional, or both; ``print(record)`` also shows the
    settings and their defaults.
    """
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
    whole: bool = False,
    causal: bool | None = None,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: object,
) -> CausalLayer | Any:  # a BidirectionalLayer by the name of an encoder; type checkers then require no check
    """Build one layer of a member for a model of your own: a module [batch, time, dim] -> [batch, time, dim].

        layer = kinformer.layer("gated-deltanet", dim=512, num_heads=8)
        y = layer(x)                                             # a full sequence
        y, state = layer(x, state=None, return_state=True)       # any chunk; see ``kinformer.nn.CausalLayer``

    name: a member or mixer (see :func:`layers`), or a config of parts, such as ``kinformer.nn.SoftmaxAttention(...)``.
    dim: the width.
    whole: build the member's whole layer, with norms, residuals and feed-forward, instead of its mixer alone.
    causal: False for the bidirectional form, which reads whole sequences, where the mechanism has one.
    recipe: the recipe of the member for missing settings. If its number of heads does not divide dim, the next smaller
        divisor is taken.
    settings: settings of the mixer and of the parts inside by name, such as ``num_heads``, ``window``, ``num_kv_heads``
        and ``features``; with ``whole`` also the layer's. A part may be a name (``position="rope"``), a mapping
        (``pattern={"kind": "local", "window": 64}``) or a config.
    set: settings inside parts by their paths, such as ``{"pattern.window": 64}``.
    device, dtype: the device and type of the weights, which PyTorch's global generator initialises.

    Positions that a member adds to its tokens, outside attention, are not part of a layer.

    Errors: ``KinformerError`` for unknown names and settings, and sizes that do not fit each other.
    """
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise KinformerError(f"dim is {dim!r}, but must be a whole number of 1 or more, the width of the layer.")
    config = layer_config(name, dim, whole=whole, causal=causal, recipe=recipe, set=set, **settings)
    with nullcontext() if device is None else torch.device(device):
        inner = config.build(dim)
    return wrap(inner if dtype is None else inner.to(dtype), dim, config)


def layer_config(
    name: str | Config,
    dim: int | None = None,
    *,
    whole: bool = False,
    causal: bool | None = None,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    **settings: object,
) -> LayerConfig | EncoderLayerConfig | MixerConfig | EncoderMixerConfig:
    """Return the config that :func:`layer` builds; without ``dim``, and in a config, the number of heads stays."""
    if isinstance(settings.get("block"), bool):  # the former name of `whole`; mixers have a setting `block`, a number
        warnings.warn("kinformer.layer: `block=True` is now `whole=True`.", FutureWarning, stacklevel=3)
        whole = bool(settings.pop("block"))
    if not isinstance(whole, bool):
        raise KinformerError(f"whole is {whole!r}, but must be True for a whole layer, or False for its mixer.")
    config = _layer_config(name, recipe)
    if not whole:
        config = _mixer_config(config)
    elif isinstance(config, MixerConfig | EncoderMixerConfig):
        raise KinformerError(f"whole: {describe(config)} is a mixer without a layer around it; leave `whole` out.")
    heads = {} if dim is None or isinstance(name, Config) else _heads(config, dim)
    config = _changed(config, heads | _paths(config, settings) | dict(set or {}))
    return config if causal is None else _directed(config, causal)


_COUNTERPARTS = {"softmax": "bidirectional", "causal_sinkhorn": "sinkhorn", "decoder": "encoder"}
"""Causal mixer or layer -> its bidirectional form, where this form has another name."""


def _directed(config: Any, causal: bool) -> Any:
    """Return a config that is causal, or the bidirectional form of it."""
    mixer = _mixer_config(config)
    if isinstance(mixer, MixerConfig) == causal:
        return config
    if causal:
        raise KinformerError(
            f"causal is True, but {describe(mixer)} reads whole sequences; choose a causal member, such as 'gpt'."
        )
    table = kinds()
    kind = table["encoder_mixer"].get(_COUNTERPARTS.get(mixer.kind, mixer.kind))
    if kind is None:
        raise KinformerError(
            f"causal is False, but {describe(mixer)} has no bidirectional form; print(kinformer.layers()) shows the "
            "members that have one, such as 'gpt' and 'linear-transformer'."
        )
    both = _in_kind(mixer, kind)
    if config is mixer:
        return both
    return _in_kind(config, table["encoder_layer"][_COUNTERPARTS.get(config.kind, config.kind)], mixer=both)


def _in_kind(config: Any, kind: type[Config], **settings: object) -> Any:
    """Return the settings of ``config`` as a config of the bidirectional ``kind``, except for these ``settings``."""
    fields = field_types(kind)
    default = {field.name: field.default for field in dataclasses.fields(config)}
    for name in field_types(type(config)):
        value = getattr(config, name)
        if name in settings or name == "impl":
            continue
        if name in fields:
            settings[name] = _both_sides(value) if isinstance(value, Config) else value
        elif value != default[name]:
            raise KinformerError(
                f"causal is False, but {describe(config)} with {name} = {_short(value)} has no bidirectional form; "
                f"the settings with one are {', '.join(fields)}."
            )
    return kind(**settings)


def _both_sides(part: Any) -> Any:
    """Return a causal pattern, or biases of the past, for both sides."""
    if part.kind == "causal":
        return kinds()["pattern"]["full"]()
    if part.kind in ("local", "dilated"):
        return dataclasses.replace(part, ahead=part.ahead or part.window - 1)
    if part.kind == "t5":
        return dataclasses.replace(part, bidirectional=True)
    if part.slot == "pattern" and part.build().ahead == 0:
        raise KinformerError(
            f"causal is False, but the pattern {part.kind!r} hides later tokens; give a pattern for whole sequences, "
            "such as 'local' or 'full'."
        )
    return part


def stack(
    layers: Sequence[str | Config | nn.Module],
    dim: int,
    *,
    stack: StackConfig | Mapping[str, object] | str = "sequential",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> CausalLayer | Any:
    """Return several layers of width ``dim`` as one module with the interface of one layer, applied by ``stack``.

    layers: names of members, configs of layers, or modules that :func:`layer` made with ``whole=True``; all causal or
        all bidirectional.
    stack: "sequential", "reversible", or "universal": one layer again and again, with adaptive computation time if its
        config has ``halting``, as in ``{"kind": "universal", "steps": 6, "halting": "act"}``. A reversible stack has
        two streams, and its y has both, [batch, time, 2 * dim].
    """
    modules = [
        item if isinstance(item, nn.Module) else layer(item, dim, whole=True, device=device, dtype=dtype)
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
    return type(plain[0])(_StackedLayers(built), dim)


class _StackedLayers(nn.Module):
    """A stack with the interface of one layer, of a decoder or of an encoder; no position enters between layers."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> tuple[State, ...]:
        """Return one state per use of a layer."""
        return self.stack.initial_state(batch, **options)

    def forward(self, x: Chunk | Tensor, context: Any) -> Any:
        """Return y [batch, time, dim], and the states after where x is a chunk and ``context`` the states before."""
        if isinstance(x, Chunk):
            return self.stack.absorb(x, context, lambda x, use: x)[:2]
        return self.stack.read(x, context, lambda x, use: x)[0]


def wrap(inner: nn.Module, dim: int, config: Config | None = None) -> Layer:
    """Return the plain interface of a built mixer or layer."""
    for layer in (CausalLayer(inner, dim, config), BidirectionalLayer(inner, dim, config)):
        if layer.mixers:
            return layer
    raise KinformerError(
        f"{type(inner).__name__} does not mix tokens, so a mixer's interface does not fit it; use the module that its "
        "config's build(dim) returns."
    )


def _layer_config(name: str | Config, recipe: str) -> Any:
    """Return the config of a member's layer, or of a mixer by its kind, or ``name`` itself where it is a config."""
    if isinstance(name, Config):
        return name
    if not isinstance(name, str):
        raise KinformerError(f"name is of the type {type(name).__name__}; give the name of a member, or a config.")
    if name not in FAMILY:
        mixers = {**kinds()["encoder_mixer"], **kinds()["mixer"]}
        names = [*FAMILY, *mixers]
        if name in mixers or (name.lower() not in FAMILY and close_names(name, names)):
            return from_dict(mixers[choose(name, names, "layer")], {"kind": name}, kinds(), "layer")
    record = member(name)
    layers = configure(record.name, recipe).layers
    return layers[min(record.layer, len(layers) - 1)]


def _mixer_config(config: object) -> Any:
    """Return the config of the mixer in the config of a layer, or the config of a mixer itself."""
    return getattr(config, config.main_field) if hasattr(config, "main_field") else config


_OTHER_NAMES = {"block_size": "block", "window_size": "window", "num_features": "features"}
"""Names of settings in other libraries -> names here."""
_OTHER_KINDS = {"num_kv_heads": ("projection", "grouped"), "window": ("pattern", "local")}
"""Settings of a part that replaces the plain part of a mixer -> the slot and the kind of this part."""


def _paths(config: Any, settings: Mapping[str, object]) -> dict[str, object]:
    """Return ``settings`` by their paths in ``config``: fields of the config, of its mixer, or of any part inside."""
    return dict(_place(config, _OTHER_NAMES.get(name, name), value) for name, value in settings.items())


def _place(config: Any, name: str, value: object) -> tuple[str, object]:
    """Return the path of a setting, and its value there."""
    mixer = _mixer_config(config)
    prefix = "" if mixer is config else f"{config.main_field}."
    outer, fields = field_types(type(config)), field_types(type(mixer))
    if name in outer:
        return name, value
    if name in fields:
        return prefix + name, value
    inside = list(_inside(config))
    paths = [path for path in inside if path.endswith(f".{name}")]
    if len(paths) > 1:
        raise KinformerError(
            f"{name!r} is a setting of several parts; give set={{...}} with one of {', '.join(paths)}."
        )
    if paths:
        return paths[0], value
    slot, kind = _OTHER_KINDS.get(name, ("", ""))
    if slot in fields and getattr(mixer, slot).kind in ("multi_head", "causal", "full"):
        part = {"kind": kind, name: value}
        if slot == "pattern" and mixer.slot == "encoder_mixer" and isinstance(value, int):
            part["ahead"] = value - 1
        return prefix + slot, part
    names = [*outer, *fields, *(path.rpartition(".")[2] for path in inside)]
    raise KinformerError(f"{name!r} is not a setting of {describe(config)}; {nearest(name, names)}")


def _inside(config: Config, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the fields of all parts inside ``config``."""
    for name in field_types(type(config)):
        part = getattr(config, name)
        if isinstance(part, Config):
            yield from (f"{prefix}{name}.{inner}" for inner in field_types(type(part)))
            yield from _inside(part, f"{prefix}{name}.")


_SHOWN = {"num_heads", "window", "ahead", "feature_map", "features", "num_kv_heads", "block", "segment", "memory"}
"""Settings that ``print(layer)`` always shows; it shows others where they differ from the default."""


def _summary(config: Config) -> list[str]:
    """Return the settings of ``config`` for ``print(layer)``."""
    default, shown = type(config)(), []
    for name in field_types(type(config)):
        value = getattr(config, name)
        if value != getattr(default, name) or (name in _SHOWN and value is not None):
            text = f"{value.kind}({', '.join(_summary(value))})" if isinstance(value, Config) else repr(value)
            shown.append(f"{name}={text}")
    return shown


def _heads(config: Any, dim: int) -> dict[str, int]:
    """Return a change of the number of heads to the next smaller divisor of ``dim``, where it is none."""
    mixer = _mixer_config(config)
    heads = getattr(mixer, "num_heads", None)
    if heads is None or getattr(mixer, "head_dim", None) is not None or dim % heads == 0:
        return {}
    path = "num_heads" if mixer is config else f"{config.main_field}.num_heads"
    return {path: next(number for number in range(heads, 0, -1) if dim % number == 0)}


def _changed(config: C, changes: Mapping[str, object]) -> C:
    """Return ``config`` after ``changes``. Importing all kinds is slow, so only a change that names a part does it."""
    plain = all(value is None or isinstance(value, bool | int | float | Config) for value in changes.values())
    return override(config, changes, {} if plain else kinds())


def _short(value: object) -> str:
    """Return the text of a default in a call: the kind of a config, or the value."""
    return repr(value.kind) if isinstance(value, Config) else repr(value)
