"""Small images and the large ones that they are made of, and the objective of drawing these."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from kinformer.core.model import SourceModel
from kinformer.core.model_config import ModelConfig
from kinformer.core.state import State
from kinformer.data.image_floors import reduced
from kinformer.data.images import ImageData, Images
from kinformer.tasks.image.rows import ImageRows, PixelLoss, Sequences, shifted
from kinformer.tasks.shared.views import PixelInput, encoder_of, input_of
from kinformer.training.settings import Settings


class EnlargingBatch(NamedTuple):
    """``values`` int64 [images, time(, channels)] of the large images, ``source`` int64 [images, length(, channels)] of
    the small ones."""

    values: Tensor
    source: Tensor

    @property
    def size(self) -> int:
        """Return how many positions there are, of both."""
        return len(self.values) * (self.values.shape[1] + self.source.shape[1])


class EnlargingSequences:
    """Large and small images as sequences, in the orders of the two inputs of ``config``, an encoder-decoder's."""

    def __init__(self, config: ModelConfig) -> None:
        large: PixelInput = input_of(config)
        small: PixelInput = input_of(encoder_of(config))
        self.large, self.small, self.factor = Sequences(large), Sequences(small), large.height // small.height

    def of(self, pixels: np.ndarray) -> EnlargingBatch:
        """Return the batch of images uint8 [images, height, width, channels], which are made smaller here."""
        return EnlargingBatch(self.large.of(pixels), self.small.of(reduced(pixels, self.factor)))


class EnlargingRows(ImageRows):
    """Images in a new order in every epoch; the same first ones in every validation."""

    def __init__(self, data: ImageData, settings: Settings, config: ModelConfig) -> None:
        super().__init__(data, settings, input_of(config))
        self.both = EnlargingSequences(config)

    def _of(self, images: Images, chosen: np.ndarray) -> EnlargingBatch:
        return self.both.of(images.pixels[chosen])


class EnlargingLoss(PixelLoss):
    """-ln p of every value of a large image, after those before it and over the small one."""

    def _read(self, model: SourceModel, batch: EnlargingBatch) -> tuple[Tensor, State]:
        return model(shifted(batch.values), model.begin(batch.source))
