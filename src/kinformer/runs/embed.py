"""Vectors of texts: the hidden states of a trained run, one vector for each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinformer.core.model import CausalModel, SourceModel, WholeModel, device_of
from kinformer.data.buckets import STEP_OF_WIDTH, BosEos, lay
from kinformer.data.items import TextItem, read_texts, refuse_empty
from kinformer.data.tables import Columns
from kinformer.runs.prediction_options import EmbedOptions
from kinformer.runs.run import Run, open_run
from kinformer.runs.stores import STORES
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural
from kinformer.tasks.shared.arriving import in_batches
from kinformer.tasks.shared.text import ends_of, whole_length


def embeddings(folder: str | Path, source: Any, options: EmbedOptions) -> Iterator[tuple[TextItem, np.ndarray]]:
    """Yield the texts of ``source`` in order, each with its vector float32 [dim], as they are computed.

    source: a file or a folder, "-" for standard input, or a list of texts.

    Errors: ``KinformerError`` for a run that reads no text, and for a text that is empty or not UTF-8.
    """
    run = open_run(folder)
    if run.tokenizer is None or run.config.protocol not in (WholeModel, CausalModel):
        kind = "translates over a source" if run.config.protocol is SourceModel else "reads no text"
        raise KinformerError(f"{run.folder}: its model {kind}; give a run of next-token, mlm or classify.")
    model = STORES.attach(run, run.model(options.set).to(options.prepare(options.seed)))
    embedder = Embedder(run, model, options.pooling)
    columns = Columns(options.text_field)
    inputs = read_texts(source, columns, options.format, options.max_items, refuse_empty)
    pairs = ((item, embedder.encode(item.text)) for item in inputs.items)
    yield from in_batches(pairs, options.batch_size, lambda pair: len(pair[1]), embedder, inputs.total, options.quiet)
    if embedder.cut:
        note(
            f"note: {plural(embedder.cut, 'text')} of more than {embedder.length} tokens, the training length, "
            "counted by their beginning only."
        )


class Embedder:
    """A run that makes vectors of texts by ``pooling`` its last hidden states: their mean, the first or the last.

    Texts are cut to the length that the run was trained at; ``cut`` counts those.
    """

    def __init__(self, run: Run, model: Any, pooling: str) -> None:
        assert run.tokenizer is not None
        self.tokenizer, self.model, self.pooling = run.tokenizer, model, pooling
        self.causal = run.config.protocol is CausalModel
        self.ends = BosEos() if self.causal else ends_of(model.config)
        self.length = whole_length(run, model)
        self.cut = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int64 [tokens]."""
        return self.tokenizer.encode(text)

    def __call__(self, batch: Sequence[tuple[TextItem, np.ndarray]]) -> list[tuple[TextItem, np.ndarray]]:
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
            vectors = pooled(encoded[0].float(), real, self.pooling).cpu()
        require_finite(bool(vectors.isfinite().all()))
        return [(item, row) for (item, _), row in zip(batch, vectors.numpy(), strict=True)]


def pooled(hidden_states: Tensor, valid: Tensor, pooling: str) -> Tensor:
    """Vectors [batch, dim] of ``hidden_states`` [batch, time, dim], whose ``valid`` [batch, time] ones stand first."""
    if pooling == "first":
        return hidden_states[:, 0]
    counts = valid.sum(1)
    if pooling == "last":
        return hidden_states[torch.arange(len(counts), device=counts.device), counts - 1]
    return (hidden_states * valid[..., None]).sum(1) / counts[:, None]
