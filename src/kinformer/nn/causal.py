"""The plain interface of what absorbs a sequence in order: ``y = layer(x)``, with a state where one is wanted.

It is a thin shell over the contract (``core.contract``): the arguments become one ``Chunk``, and what the battery
proves of a mixer holds of the layer, which runs the same code.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from kinformer.core import state as states
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
from kinformer.core.state import State
from kinformer.nn.packed import Packing, masked, padding_of, require_mask
from kinformer.nn.plain import PlainLayer
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import checks_calls


class CausalLayer(PlainLayer):
    """A causal mixer, layer or stack as a module x [batch, time, dim] -> y [batch, time, dim].

        y = layer(x)                                           # a full sequence
        y, state = layer(x, return_state=True)                 # the same, and what later tokens need of it
        y, state = layer(x, state, return_state=True)          # the next chunk, of any length from 1 token on

    No output depends on a later token, and the chunks of a sequence give what the full sequence gives. A state is a
    ``NamedTuple`` of tensors, batch first; ``kinformer.nn.states`` moves, selects, repeats, measures and saves any.
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

        context: [batch, length, width], what a layer with cross-attention attends to; it is projected once, here.
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
        state: what an earlier call returned, or None to begin new sequences. A state has as many rows as x, and
            is on the device of x. n neighbouring rows of x may share the context of a row
            (``states.repeat_rows(state, n, sources=False)``).
        key_padding_mask: [batch, time] bool, True where x is padding, as in ``torch.nn.MultiheadAttention``. Padding
            may stand anywhere; y is 0 there, and the state is as if it were not there.
        reset: [batch, time] bool, True where a new sequence begins in its row: nothing before is visible from there on.
        cu_seqlens: [n + 1] int, from 0 to time: n sequences packed in one row, x [1, time, dim], as flash-attention and
            fla have it. A state that is given or returned then has n rows.
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
        """Refuse arguments of other shapes, types or layers."""
        require_input(x, self.dim)
        for name, mask in (("key_padding_mask", key_padding_mask), ("reset", reset)):
            if mask is not None:
                require_mask(name, mask, x)
        if state is None:
            return
        if context is not None:
            raise KinformerError("context: the state has one already; leave it out, or begin with state=None.")
        if self._form is not None and states.form(state) != self._form:
            raise KinformerError(
                "state: it is not one of this layer's (its tensors are of other types or sizes); give what this layer "
                "returned, or None to begin new sequences."
            )

    @cached_property
    def _form(self) -> object:
        """Return the form of this layer's states; None with a context, whose length is part of it."""
        return None if self.reads_context else states.form(self.initial_state(1, device=torch.device("meta")))
