"""The most probable classes of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from kinformer.core.model import device_of
from kinformer.data.buckets import STEP_OF_WIDTH, lay
from kinformer.data.items import TextItem, TextSource
from kinformer.runtime.errors import require_finite
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural
from kinformer.tasks.predictions import Predicted, PredictionSettings
from kinformer.tasks.runs import LoadedRun
from kinformer.tasks.shared.arriving import in_batches
from kinformer.tasks.shared.classes import ClassProbability, classes_of, most_probable, spell_classes
from kinformer.tasks.shared.text import ends_of, texts_in, whole_length


class TextClassifier:
    """A run that predicts the classes of texts.

    Texts are cut to the length that the run was trained at, as evaluation cuts them; ``cut`` counts the longer ones.
    """

    def __init__(self, subject: LoadedRun, top_k: int) -> None:
        self.model, self.top_k = subject.model, top_k
        self.names, self.ends = classes_of(subject.run), ends_of(subject.model.config)
        self.length = whole_length(subject.run, subject.model)
        self.cut = 0

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[Predicted]:
        """Return the predictions of texts that come with their ids."""
        room = self.length - self.ends.size
        texts = [ids[:room] for _, ids in batch]
        self.cut += sum(len(ids) > room for _, ids in batch)
        longest = max(map(len, texts)) + self.ends.size
        width = min(self.length, -(-longest // STEP_OF_WIDTH) * STEP_OF_WIDTH)
        tokens, valid = (None if item is None else torch.from_numpy(item) for item in lay(texts, self.ends, width))
        assert tokens is not None
        device = device_of(self.model)
        with torch.inference_mode():
            logits = self.model(tokens.to(device), valid=None if valid is None else valid.to(device)).float().cpu()
        require_finite(bool(logits.isfinite().all()))
        return [
            _predicted(item, most_probable(row, self.names, self.top_k))
            for (item, _), row in zip(batch, logits.softmax(-1), strict=True)
        ]


def predict(
    subject: LoadedRun, source: TextSource, settings: PredictionSettings, encode: Callable[[TextItem], np.ndarray]
) -> Iterator[Predicted]:
    """Yield the classes of the texts of ``source``, in order; ``encode`` makes ids of a text, and raises for one that
    the task cannot read."""
    classifier = TextClassifier(subject, settings.top_k)
    inputs = texts_in(source, settings, encode)
    pairs = ((item, encode(item)) for item in inputs.items)
    yield from in_batches(
        pairs, settings.batch_size, lambda pair: len(pair[1]), classifier, inputs.total, settings.quiet
    )
    if classifier.cut:
        note(
            f"note: {plural(classifier.cut, 'text')} of more than {classifier.length} tokens, the training length, "
            "counted by their beginning only."
        )


def _predicted(item: TextItem, classes: list[ClassProbability]) -> Predicted:
    label = {} if item.label is None else {"label": item.label}
    return Predicted({"text": item.text} | label | {"classes": classes}, f"{spell_classes(classes)}\t{item.text}")
