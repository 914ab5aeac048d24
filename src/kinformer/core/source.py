"""Mixers over a source, the sequence that all queries attend to: how their states begin, and which of it is real."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from kinformer.core.contract import CausalMixer, ReadsSource, select_valid
from kinformer.core.crossing import Crossing
from kinformer.core.state import State
from kinformer.runtime.errors import KinformerError


class StateOptions(TypedDict, total=False):
    """What ``initial_state`` takes beside the batch size: of layers and stacks, which hand it to their mixers."""

    device: torch.device | None
    dtype: torch.dtype | None
    source: Tensor | None
    source_valid: Tensor | None


def checked_source(source: Tensor | None, valid: Tensor | None, batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Return ``source`` [batch, length, width], zero where it is padding, and ``valid`` [batch, length] bool (None:
    all of it); refuse another shape, or none."""
    if source is None:
        raise KinformerError(
            f"cross-attention has nothing to look at; begin with initial_state(batch, source=[batch, length, {width}])."
        )
    if source.dim() != 3 or source.shape[0] != batch or source.shape[2] != width:
        raise KinformerError(f"source has the shape {tuple(source.shape)}, expected [{batch}, length, {width}].")
    if valid is None:
        valid = torch.ones(source.shape[:2], dtype=torch.bool, device=source.device)
    return select_valid(source, valid), valid


class SourceMixer(ReadsSource, CausalMixer):
    """A mixer whose state holds what it made of the source, and nothing of the tokens that looked at it but how many;
    ``source_dim`` is the width of that. ``crossing``: where it absorbs one stretch of a row, that of the others."""

    source_dim: int
    crossing: Crossing | None = None

    def initial_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
    ) -> State:
        """Return the state of ``batch`` sequences over ``source`` [batch, length, source_dim], of which
        ``source_valid`` [batch, length] bool is real (None: all)."""
        source, valid = checked_source(source, source_valid, batch, self.source_dim)
        return self.over(source, valid, device, dtype)

    def over(self, source: Tensor, valid: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> State:
        """Return the state over ``source`` [batch, length, source_dim], zero where it is not ``valid`` [batch, length]
        bool, in ``dtype`` (None: that of activations)."""
        raise NotImplementedError
