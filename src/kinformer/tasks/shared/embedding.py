"""Vectors of texts: the last hidden states of a trained run, one vector for each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import CausalModel, StackedCausalModel, StackedWholeModel, device_of
from kinformer.data.buckets import STEP_OF_WIDTH, BosEos, lay
from kinformer.data.items import TextItem, TextSource, read_texts, refuse_empty
from kinformer.data.tables import Columns
from kinformer.data.tokenizer import prompt_ids
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural
from kinformer.tasks.predictions import Embedded, EmbeddingSettings
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.arriving import in_batches
from kinformer.tasks.shared.text import ends_of, whole_length


def embed_texts(subject: LoadedRun, source: TextSource, settings: EmbeddingSettings) -> Iterator[Embedded]:
    """Yield the texts of ``source`` (a file or a folder, "-", or a list) in order, each with its vector.

    Errors: ``KinformerError`` for a run that reads no text, and for a text that is empty or not UTF-8.
    """
    run = subject.run
    if run.tokenizer is None:
        raise KinformerError(f"{run.folder}: its model reads no text; give a run that does.")
    embedder = TextEmbedder(run, subject.model, settings.pooling)
    columns = Columns(settings.text_field)
    inputs = read_texts(source, columns, settings.format, settings.max_items, refuse_empty)
    pairs = ((item, embedder.encode(item.text)) for item in inputs.items)
    yield from in_batches(pairs, settings.batch_size, lambda pair: len(pair[1]), embedder, inputs.total, settings.quiet)
    if embedder.cut:
        note(
            f"note: {plural(embedder.cut, 'text')} of more than {embedder.length} tokens, the training length, "
            "counted by their beginning only."
        )


class TextEmbedder:
    """A run that makes vectors of texts by ``pooling`` its last hidden states: their mean, the first or the last.

    Texts are cut to the length that the run was trained at; ``cut`` counts the ones that were longer.
    """

    def __init__(self, run: TrainedRun, model: StackedCausalModel | StackedWholeModel, pooling: str) -> None:
        assert run.tokenizer is not None
        self.tokenizer, self.model, self.pooling = run.tokenizer, model, pooling
        self.causal = run.config.protocol is CausalModel
        self.ends = BosEos() if self.causal else ends_of(model.config)
        self.length = whole_length(run, model)
        self.cut = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [tokens]."""
        return prompt_ids(self.tokenizer, text)

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[Embedded]:
        """Return the vectors of texts that come with their ids."""
        room = self.length - self.ends.size
        texts = [ids[:room] for _, ids in batch]
        self.cut += sum(len(ids) > room for _, ids in batch)
        longest = max(map(len, texts)) + self.ends.size
        tokens, valid = lay(texts, self.ends, min(self.length, -(-longest // STEP_OF_WIDTH) * STEP_OF_WIDTH))
        device = device_of(self.model)
        real = torch.from_numpy(np.ones(tokens.shape, bool) if valid is None else valid).to(device)
        with torch.inference_mode():
            encoded = self.model.hidden(torch.from_numpy(tokens).to(device), valid=None if valid is None else real)
            vectors = pooled(encoded[0], real, self.pooling)
        return [Embedded("text", item.text, row) for (item, _), row in zip(batch, vectors.numpy(), strict=True)]


def pooled(hidden_states: Tensor, valid: Tensor, pooling: str) -> Tensor:
    """Return vectors float32 [batch, dim], on the CPU, of ``hidden_states`` [batch, time, dim], whose ``valid``
    [batch, time] ones stand first.

    Errors: ``KinformerError`` where a vector is not finite.
    """
    states, counts = hidden_states.float(), valid.sum(1)
    if pooling == "first":
        vectors = states[:, 0]
    elif pooling == "last":
        vectors = states[torch.arange(len(counts), device=counts.device), counts - 1]
    else:
        vectors = (states * valid[..., None]).sum(1) / counts[:, None]
    require_finite(bool(vectors.isfinite().all()))
    return vectors.cpu()
