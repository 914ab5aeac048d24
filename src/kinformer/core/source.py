"""What a mixer over a source is given: the sequence that all queries attend to, and which of it is real."""

from __future__ import annotations

import torch
from torch import Tensor

from kinformer.core.contract import select_valid
from kinformer.runtime.errors import KinformerError


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
