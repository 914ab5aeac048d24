"""The plain interface of mixers, layers and stacks of encoders: ``y = layer(x)`` for a full sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinformer.core.contract import Alignment, left_align, require_input, select_valid
from kinformer.core.encoder import EncoderMixer, SequenceContext, global_positions
from kinformer.nn.causal import Packing, PlainLayer, masked, padding_of, require_mask
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import checks_calls


class BidirectionalLayer(PlainLayer):
    """An encoder's mixer, layer or stack as a module x [batch, time, dim] -> y [batch, time, dim], without a state.

    Every token may see earlier and later ones.
    """

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
