"""Vectors of texts, images and sounds: the last hidden states of a trained run, one vector for each item."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kinformer.runs.prediction_options import EmbedOptions
from kinformer.runs.run import open_run
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError, marked
from kinformer.tasks.predictions import Embedded
from kinformer.tasks.runs import LoadedRun


def embeddings(folder: str | Path, source: object, options: EmbedOptions) -> Iterator[Embedded]:
    """Yield the items of ``source`` in order, each with its vector, as they are computed.

    source: a file or a folder, "-" for standard input, or a list of texts or of paths.

    Errors: ``KinformerError`` for a run that reads neither text, images nor sound, and for a bad item.
    """
    run = open_run(folder)
    for option in ("text_field", "format"):
        value = getattr(options, option)
        if value is not None and run.tokenizer is None:
            raise KinformerError(
                f"{marked(option)} {value}: says how texts are written, and {run.folder} reads none; leave it out."
            )
    model = STORES.attach(run, run.model(options.set).to(options.prepare(options.seed)))
    yield from run.task.embed(LoadedRun(run, model), source, options)
