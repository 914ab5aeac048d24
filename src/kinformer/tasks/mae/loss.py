"""The objective of masked patches (He et al. 2022, MAE, section 3).

    loss = mean over masked patches i of |t_i - d(e(x_seen))_i|^2 / pixels,    t = (x - mean x) / sqrt(var x + 1e-6)

e is the model up to its head, which gets the seen patches alone; d is its head. Mean and variance are those of the
patch itself; with ``raw_pixels`` t = x.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kinformer.core.model import StackedWholeModel
from kinformer.core.state import State
from kinformer.tasks.mae.options import MaeOptions
from kinformer.tasks.mae.rows import MaeBatch
from kinformer.tasks.shared.views import PatchModule, part_of
from kinformer.training.objective import ObjectiveOutput

EPS = 1e-6


class PatchModel(StackedWholeModel, Protocol):
    """An encoder of patches, which may read some of them alone."""

    def hidden_of(self, values: Tensor, chosen: Tensor | None = None, **others: Tensor) -> Tensor:
        """Return the hidden states of the positions ``chosen`` [rows, n] (None: of all)."""
        ...


class Targets(NamedTuple):
    """The targets ``values`` [rows, patches, pixels]: the pixels less ``mean``, divided by ``scale``."""

    values: Tensor
    mean: Tensor
    scale: Tensor


def targets_of(model: PatchModel, images: Tensor, raw_pixels: bool) -> Targets:
    """Return the targets of all patches."""
    input: PatchModule = part_of(model, "input")
    pixels = input.cut(images)
    pixels = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
    if raw_pixels:
        nothing = torch.zeros_like(pixels[..., :1])
        return Targets(pixels, nothing, nothing + 1)
    mean = pixels.mean(-1, keepdim=True)
    # As in the authors' code, whose variance is the unbiased one; a patch of one pixel has none.
    variance = pixels.var(-1, keepdim=True, correction=min(1, pixels.shape[-1] - 1))
    scale = (variance + EPS).sqrt()
    return Targets((pixels - mean) / scale, mean, scale)


def predict_patches(model: PatchModel, batch: MaeBatch) -> Tensor:
    """Return the targets of all patches as the model predicts them from the seen ones, [rows, patches, pixels]."""
    input: PatchModule = part_of(model, "input")
    before = input.config.before
    tokens = torch.arange(before, device=batch.seen.device).expand(len(batch.seen), -1)
    chosen = torch.cat([tokens, batch.seen + before], 1)
    states = model.hidden_of(batch.images, chosen)
    return model.head(states, input, chosen=chosen, grid=input.grid(batch.images))


def masked_of(batch: MaeBatch, patches: int) -> Tensor:
    """Return which patches are not seen, bool [rows, patches]."""
    everything = torch.ones(len(batch.seen), patches, dtype=torch.bool, device=batch.seen.device)
    return everything.scatter(1, batch.seen, False)


class MaskedPatches:
    """The objective; a metric is summed over masked patches."""

    def __init__(self, options: MaeOptions) -> None:
        self.options = options

    def __call__(self, model: PatchModel, batch: MaeBatch, state: State, progress: float) -> ObjectiveOutput:
        targets = targets_of(model, batch.images, self.options.raw_pixels).values
        errors = (predict_patches(model, batch).to(targets.dtype) - targets).square().mean(-1)
        masked = masked_of(batch, errors.shape[1])
        error, count = torch.where(masked, errors, errors.new_zeros(())).sum(), masked.sum()
        return error / count, {"error": error.detach(), "predicted": count}, None
