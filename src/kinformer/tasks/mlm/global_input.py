"""What an encoder's global input is worth: measured with it, with its vectors zero, and without it.

The global input is that of Ainslie et al. 2020, ETC: before the long input a token for each of its sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, log
from typing import Any

import torch
from torch import Tensor

from kinformer.core.model import device_of
from kinformer.data.masked_text import MaskedText
from kinformer.runtime.errors import require_finite
from kinformer.runtime.progress import ProgressCallback
from kinformer.tasks.mlm.cpc import MaskedLanguageCpc
from kinformer.tasks.mlm.rows import MaskedBatch, masked_tokens
from kinformer.training.batch import map_fields


@dataclass(frozen=True, kw_only=True)
class GlobalInputMeasurement:
    """Bits of a masked token, the ``bits`` of the whole model beside those with the vectors of its global tokens
    ``zeroed`` and those ``without`` any.

    ``accuracy``: of ``sentences`` that were masked as a whole, the share whose global token was nearest to that of the
    sentence alone, among the sentences masked in the same rows; ``chance``: that share by guessing.
    """

    bits: float
    zeroed: float
    without: float
    sentences: int
    accuracy: float
    chance: float


def has_global_input(model: Any) -> bool:
    """Whether ``model`` has a global token for every sentence of the long input."""
    return hasattr(getattr(model, "global_input", None), "length")


def measure_global_input(
    model: Any, text: MaskedText, rows: int, progress: ProgressCallback | None = None
) -> GlobalInputMeasurement:
    """Measure ``model`` (in eval mode) on all windows of ``text``, ``rows`` at a time, which come from all over it."""
    device, objective = device_of(model), MaskedLanguageCpc.of(model)
    totals: dict[str, float] = {}
    done = 0
    for shown in text.in_order(rows, shuffled=True):
        batch = map_fields(MaskedBatch.of(shown.rows), lambda field: field.to(device))
        none = torch.full_like(batch.tokens, -1)
        with torch.inference_mode():
            nats = {"": _nats(model, batch), "without_": _nats(model, batch, sentences=none)}
            nats["sentences_"] = objective(model, batch, None, 1.0)[1]
        with silenced(model), torch.inference_mode():
            nats["zeroed_"] = _nats(model, batch)
        for name, metrics in nats.items():
            for key, value in metrics.items():
                totals[name + key] = totals.get(name + key, 0.0) + float(value)
        require_finite(isfinite(sum(totals.values())))
        done += len(shown.rows.tokens)
        if progress is not None:
            progress(done, len(text))
    sentences = totals.get("sentences_cpc_predicted", 0.0)
    bits = [totals[f"{name}nats"] / log(2) / max(1.0, totals["predicted"]) for name in ("", "zeroed_", "without_")]
    return GlobalInputMeasurement(
        bits=bits[0],
        zeroed=bits[1],
        without=bits[2],
        sentences=int(sentences),
        accuracy=totals.get("sentences_cpc_correct", 0.0) / max(1.0, sentences),
        chance=totals.get("sentences_cpc_by_chance", 0.0) / max(1.0, sentences),
    )


@contextmanager
def silenced(model: Any) -> Iterator[None]:
    """``model`` whose global tokens have the vector 0."""
    weight: Tensor = model.global_input.table.weight
    weight_before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.zero_()
        yield
    finally:
        with torch.no_grad():
            weight.copy_(weight_before)


def _nats(model: Any, batch: MaskedBatch, **inputs: Tensor) -> dict[str, Tensor]:
    """Return the sums of masked language modelling over ``batch``: nats, tokens and how many are right."""
    return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid, **inputs).long_input, batch)[1]
