"""Images as sequences for a causal model, and the objective of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import log
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.head import Likelihood
from kinformer.core.model import CausalModel, StackedCausalModel
from kinformer.core.state import State
from kinformer.data.images import ImageData, Images
from kinformer.data.permutation import in_epochs
from kinformer.tasks.shared.views import PixelInput
from kinformer.training.batch import Batch
from kinformer.training.data_module import DataModule
from kinformer.training.metric import BITS_PER_DIM
from kinformer.training.objective import ObjectiveOutput
from kinformer.training.settings import Settings

LEVELS, START = 256, 256


class ImageBatch(NamedTuple):
    """``values`` int64 [images, time], or [images, time, channels] where a position is a pixel; ``labels`` int64
    [images], the classes of the images, where the model is told them."""

    values: Tensor
    labels: Tensor | None = None

    @property
    def size(self) -> int:
        """Return how many positions there are."""
        return self.values.shape[0] * self.values.shape[1]


class ValuesBatch(Batch, Protocol):
    """A batch of images to draw, whose ``values`` are predicted."""

    @property
    def values(self) -> Tensor: ...


class Sequences:
    """Images as sequences in the order of a model's input, a config of pixels."""

    def __init__(self, input: PixelInput) -> None:
        self.input = input
        self.order = input.raster.order()
        self._places = np.argsort(self.order)

    def of(self, pixels: np.ndarray) -> Tensor:
        """Return ``pixels`` uint8 [images, height, width, channels] as values int64 [images, time(, channels)]."""
        cells = pixels.reshape(len(pixels), len(self.order), -1)[:, self.order]
        return torch.from_numpy((cells if self.input.joint else cells[..., 0]).astype(np.int64))

    def images(self, values: Tensor) -> np.ndarray:
        """Return ``values`` [images, time(, channels)] as pixels uint8, the inverse of :meth:`of`."""
        shape = (len(values), self.input.height, self.input.width, self.input.channels)
        return values.cpu().numpy().astype(np.uint8)[:, self._places].reshape(shape)

    def prefix(self, rows: int) -> int | None:
        """Return how many positions hold the first ``rows`` rows, None where these are no beginning of the sequence."""
        raster = self.input.raster
        return None if rows % raster.block_height and raster.block_width < raster.width else rows * raster.width


class ImageRows(DataModule):
    """Images in a new order in every epoch; the same first ones in every validation, of as many tokens as the settings
    say."""

    metrics = (BITS_PER_DIM,)

    def __init__(self, data: ImageData, settings: Settings, input: PixelInput) -> None:
        self.data, self.settings, self.sequences = data, settings, Sequences(input)
        count = max(1, settings.validation_tokens // input.raster.size)
        self.examples = max(min(settings.batch_size, len(data.validation)), min(count, len(data.validation)))

    @property
    def validations(self) -> int:
        return max(1, self.examples // self.settings.batch_size)

    def batch(self, step: int, rank: int, world: int) -> ValuesBatch:
        share = self.settings.batch_size // world
        number = np.arange(share) + step * self.settings.batch_size + rank * share
        return self._of(self.data.train, in_epochs(number, len(self.data.train), self.settings.seed))

    def _of(self, images: Images, chosen: np.ndarray) -> ValuesBatch:
        values = self.sequences.of(images.pixels[chosen])
        if not self.sequences.input.classes:
            return ImageBatch(values)
        assert images.labels is not None
        return ImageBatch(values, torch.from_numpy(images.labels[chosen].astype(np.int64)))

    def validation(self, rank: int, world: int) -> Iterator[ValuesBatch]:
        share, images = self.settings.batch_size // world, self.data.validation
        for part in range(self.validations):
            yield self._of(images, (np.arange(share) + part * self.settings.batch_size + rank * share) % len(images))

    def measured(self, means: Mapping[str, float], split: str) -> dict[str, float]:
        return {BITS_PER_DIM.name: means["nats"] / log(2)}


class PixelLoss:
    """-ln p of every value given those before it, the first included, which follows START."""

    def __init__(self, model: StackedCausalModel) -> None:
        self.nats = nats_of(model)

    def __call__(self, model: CausalModel, batch: ValuesBatch, state: State, progress: float) -> ObjectiveOutput:
        logits, state = self._read(model, batch)
        nats, count = self.nats(logits, batch.values).sum(), batch.values.numel()
        return nats / count, {"nats": nats.detach(), "predicted": torch.full_like(nats.detach(), count)}, state

    def _read(self, model: Any, batch: Any) -> tuple[Tensor, State]:
        """Return the logits of the values of ``batch``, and the state after them."""
        return model(labelled(shifted(batch.values), batch.labels))


def shifted(values: Tensor) -> Tensor:
    """Return what a model reads to predict ``values`` [images, time, ...]: START, and all of them but the last."""
    return torch.cat([torch.full_like(values[:, :1], START), values[:, :-1]], dim=1)


def labelled(values: Tensor, labels: Tensor | None) -> Tensor:
    """Return ``values`` [images, time(, channels)] with the class of each image, ``labels`` int64 [images], behind the
    values of every position, [images, time, values + 1]; as they are without labels."""
    if labels is None:
        return values
    values = values if values.dim() == 3 else values[..., None]
    return torch.cat([values, labels[:, None, None].to(values.device).expand(*values.shape[:2], 1)], -1)


def nats_of(model: StackedCausalModel) -> Callable[[Tensor, Tensor], Tensor]:
    """Return how the head of ``model`` scores values: (logits, values) -> nats of every position, [images, time]."""
    return model.head.nats if isinstance(model.head, Likelihood) else class_nats


def class_nats(logits: Tensor, values: Tensor) -> Tensor:
    """Return -ln softmax(logits)[value], of logits [images, time, 256]."""
    return functional.cross_entropy(logits.float().flatten(0, 1), values.flatten(), reduction="none").view_as(values)
