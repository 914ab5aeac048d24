"""Images completed from some of their patches, written as a PNG beside what was seen and the images themselves."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import device_of
from kinformer.data.image_files import write_png
from kinformer.runtime.errors import require_finite
from kinformer.runtime.words import plural
from kinformer.tasks.image.generate import OCCLUDED, grid
from kinformer.tasks.mae.loss import masked_of, predict_patches, targets_of
from kinformer.tasks.mae.options import MaeGenerationOptions
from kinformer.tasks.mae.rows import MaeBatch, seen_patches
from kinformer.tasks.record import GenerationSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.made import Made
from kinformer.tasks.shared.pictures import laid, pictures, png_of
from kinformer.tasks.shared.views import PatchModule


def complete(subject: LoadedRun, options: GenerationSettings, task_options: MaeGenerationOptions) -> Made:
    """Complete pictures: a line of three for each. The patches that were seen stand in it as they are.

    Where a run predicts deviations, the mean and the deviation of a masked patch are the image's own.
    """
    run, model = subject.run, subject.model
    input: PatchModule = model.input
    out = png_of(run, task_options.out, "completed.png")
    shown = list(pictures(run, task_options.image or run.data["spec"], options.samples))
    images, started_at = laid(shown, model), time.perf_counter()
    patches = int(np.prod(input.grid(images)))
    seen = seen_patches(patches, run.options.masked, np.arange(len(images)), options.seed or 0)
    batch = MaeBatch(images, seen.to(device_of(model)))
    with torch.inference_mode():
        targets = targets_of(model, images, run.options.raw_pixels)
        made = predict_patches(model, batch).to(targets.mean.dtype) * targets.scale + targets.mean
        require_finite(bool(made.isfinite().all()))
        masked = masked_of(batch, patches)[..., None]
        original = input.cut(images)
        made = torch.where(masked, made, original)
    seconds = time.perf_counter() - started_at
    veil = masked.expand_as(original)
    lines = [_pixels(input, original, images, veil), _pixels(input, made, images), images.cpu().numpy()]
    sheet = np.stack(lines, 1).reshape(-1, *images.shape[1:]).transpose(0, 2, 3, 1)
    write_png(out, grid(np.ascontiguousarray(sheet), len(lines)))
    facts = {"run": str(run.folder), "out": str(out), "images": len(images), "seen": seen.shape[1], "patches": patches,
             "seconds": seconds, "seed": options.seed}  # fmt: skip
    of = "" if run.options.raw_pixels else "; mean and deviation of masked patches are the image's own"
    return Made(facts, f"{out}: {plural(len(images), 'image')} of {seen.shape[1]} of {patches} patches each{of}")


def _pixels(input: PatchModule, patches: Tensor, images: Tensor, veil: Tensor | None = None) -> np.ndarray:
    """Return normalised ``patches`` [images, patches, pixels] as images uint8 [images, channels, height, width], grey
    where ``veil`` is True."""
    config, (rows, columns) = input.config, input.grid(images)
    side, channels = config.patch, config.channels

    def joined(x: Tensor) -> Tensor:
        x = x.view(len(x), rows, columns, channels, side, side).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(len(x), channels, rows * side, columns * side)[..., : images.shape[2], : images.shape[3]]

    x = joined(patches)
    for numbers, change in ((config.std, torch.mul), (config.mean, torch.add)):
        if numbers:
            x = change(x, torch.tensor(numbers, dtype=x.dtype, device=x.device)[:, None, None])
    x = (255 * x).round().clamp(0, 255)
    if veil is not None:
        x = torch.where(joined(veil), x.new_tensor(float(OCCLUDED)), x)
    return x.to(torch.uint8).cpu().numpy()
