"""Masks and packed sequences as other libraries write them: ``key_padding_mask`` and ``cu_seqlens``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kinformer.runtime.errors import KinformerError


def padding_of(key_padding_mask: Tensor | None) -> Tensor | None:
    """Return ``valid`` [batch, time] bool of a mask that is True at padding, or the mask of a valid one."""
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
    """Sequences that stand one after the other in one row of ``time`` tokens: where each begins, and its length."""

    begins: Tensor
    lengths: Tensor
    time: int

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor) -> Packing:
        """Return the packing of x [1, time, dim] by ``cu_seqlens`` [n + 1] int, which rise from 0 to time.

        Errors: ``KinformerError`` where they do not, and for more than one row.
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
