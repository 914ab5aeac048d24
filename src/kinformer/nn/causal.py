"""The plain interface of causal mixers, layers and stacks: ``y = layer(x)``, with a state on request.

The interface is a thin shell over the contract (``core.contract``): the arguments become one ``Chunk``. The layer runs
the code of the mixer, so the tests of a mixer (``kinformer.testing``) hold for its layer.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from kinformer.core.contract import (
    AS_THEY_ARE,
    CausalMixer,
    Chunk,
    ReadsSource,
    RecomputesKV,
    left_align,
    require_input,
    select_valid,
)
from kinformer.core.encoder import EncoderMixer
from kinformer.core.state import State, form
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import checks_calls

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
    """The base of the plain interfaces of causal and of bidirectional layers.

    A module x [batch, time, dim] -> y [batch, time, dim] around ``inner``, a mixer, layer or stack of width ``dim``.

    A subclass names the class of its mixers, ``mixer_class``.
    """

    mixer_class: type[CausalMixer] | type[EncoderMixer]

    def __init__(self, inner: nn.Module, dim: int) -> None:
        """Wrap ``inner``, whose mixers are of the class ``mixer_class``."""
        super().__init__()
        self.inner, self.dim = inner, dim

    @property
    def mixers(self) -> tuple[CausalMixer | EncoderMixer, ...]:
        """Return the mixers inside, each once."""
        return tuple(module for module in self.inner.modules() if isinstance(module, self.mixer_class))

    @property
    def max_length(self) -> int | None:
        """Return the largest number of tokens of a sequence, None for any number."""
        return min((mixer.max_length for mixer in self.mixers if mixer.max_length is not None), default=None)

    def extra_repr(self) -> str:
        """Return the width for ``print(layer)``."""
        return f"dim={self.dim}"


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
        reset: [batch, time] bool, True where a new sequence begins in its row: no later token of the row sees an
            earlier one.
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
