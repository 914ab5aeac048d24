"""The objective of masked patch prediction (Dosovitskiy et al. 2020, ViT, appendix B.1.2).

    loss = mean over corrupted patches i of -log p(colour of i),    colour = floor(2^bits mean of i), by channel

The mean is that of the patch's pixels, from 0 to 1, before it was corrupted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.state import State
from kinformer.tasks.mae.loss import PatchModel
from kinformer.tasks.mpp.rows import MppBatch
from kinformer.tasks.shared.views import PatchInput, input_of, part_of
from kinformer.training.objective import ObjectiveOutput


def colours_of(images: Tensor, patch: int, bits: int) -> Tensor:
    """Return the colours int64 [rows, patches] of the patches of ``images`` [rows, channels, height, width], in base
    2^bits, the first channel first. A patch over the border has the mean of its pixels inside."""
    scale = 255 if images.dtype == torch.uint8 else 1
    pixels = images.to(torch.promote_types(images.dtype, torch.float32)) / scale
    means = functional.avg_pool2d(pixels, patch, ceil_mode=True).flatten(2)
    levels = (means * 2**bits).floor().clamp(0, 2**bits - 1).long()
    places = 2 ** (bits * torch.arange(levels.shape[1], device=images.device))
    return (levels * places[:, None]).sum(1)


def sizes_of(model: PatchModel) -> tuple[int, int]:
    """Return the pixels of a patch's side, and the bits of a channel's colour."""
    input: PatchInput = input_of(model.config)
    return input.patch, part_of(model.config.head, "bits")


def predict_colours(model: PatchModel, batch: MppBatch) -> Tensor:
    """Return the logits [rows, patches, colours] that the model predicts from the corrupted images."""
    states = model.hidden_of(batch.images, sources=batch.sources, mask=part_of(model.head, "mask"))
    return model.head(states, model.input)


class PatchColours:
    """The objective; metrics are summed over corrupted patches."""

    def __call__(self, model: PatchModel, batch: MppBatch, state: State, progress: float) -> ObjectiveOutput:
        colours = colours_of(batch.images, *sizes_of(model))
        nats, right = nats_of(model, batch, colours)
        chosen, zero = batch.corrupted, nats.new_zeros(())
        total, count = torch.where(chosen, nats, zero).sum(), chosen.sum()
        return total / count, {"nats": total.detach(), "right": (right & chosen).sum(), "predicted": count}, None


def nats_of(model: PatchModel, batch: MppBatch, colours: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every patch -log p of its colour, and whether that is the most probable one, [rows, patches];
    ``colours`` are those of ``batch``."""
    logits = predict_colours(model, batch)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = functional.cross_entropy(logits.flatten(0, 1), colours.flatten(), reduction="none")
    return nats.view_as(colours), logits.argmax(-1) == colours
