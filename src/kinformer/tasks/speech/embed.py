"""Vectors of sound files: the last hidden states of a run of speech, one vector for each file."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kinformer.core.model import device_of
from kinformer.data.filterbank import Filterbank
from kinformer.data.resample import Resampler
from kinformer.tasks.predictions import Embedded, EmbeddingSettings, FileSource
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.embedding import pooled
from kinformer.tasks.speech.generate import writing_of
from kinformer.tasks.speech.predict import sounds
from kinformer.tasks.speech.rows import features_of


def embed(subject: LoadedRun, source: FileSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
    """Yield the vectors of the files of ``source`` (a WAV or FLAC file, a folder, or a list of paths), in order."""
    model, heard_rate = subject.model, writing_of(subject.run)[2]
    bank = Filterbank(heard_rate, model.config.input.mels)
    for file, samples, rate in sounds(source, settings.max_items, settings.quiet, "embedding"):
        heard = Resampler(rate, heard_rate).feed(torch.from_numpy(samples), True)
        frames = features_of(heard, bank, model.config)[None].to(device_of(model))
        with torch.inference_mode():
            states = model.hidden(frames)[0]
            vectors = pooled(states, states.new_ones(states.shape[:2], dtype=torch.bool), settings.pooling)
        yield Embedded("audio", str(file), vectors[0].numpy())
