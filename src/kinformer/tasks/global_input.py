"""What an encoder's global input is worth: measured with it, with its vectors zero, and without it.

The global input is that of Ainslie et al. 2020, ETC: beside the document a token for each of its units.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, log
from typing import Any

import torch
from torch import Tensor

from kinformer.core.errors import KinformerError
from kinformer.core.model import device_of
from kinformer.core.progress import Progress
from kinformer.data.masked_text import MaskedText
from kinformer.tasks.cpc import MaskedLanguageCpc
from kinformer.tasks.masked_rows import MaskedBatch, masked_tokens
from kinformer.training.batch import map_fields


@dataclass(frozen=True, kw_only=True)
class GlobalInputMeasurement:
    """Bits of a masked token, the ``bits`` of the whole model beside those with the vectors of its global tokens
    ``zeroed`` and those ``without`` any.

    Of ``units`` masked as a whole, the global tokens of the share ``told`` were nearest to those of the units alone;
    ``chance`` is the share that guessing tells.
    """

    bits: float
    zeroed: float
    without: float
    units: int
    told: float
    chance: float


def has_global_input(model: Any) -> bool:
    """Whether ``model`` has a token on its side for every unit of a document."""
    return hasattr(getattr(model, "side", None), "length")


def measure_global_input(
    model: Any, text: MaskedText, rows: int, progress: Progress | None = None
) -> GlobalInputMeasurement:
    """Measure ``model`` (in eval mode) on all windows of ``text``, ``rows`` at a time, which come from all over it.

    Units are told from those of the same rows.
    """
    device, objective = device_of(model), MaskedLanguageCpc.of(model)
    totals: dict[str, float] = {}
    done = 0
    for shown in text.in_order(rows, shuffled=True):
        batch = map_fields(MaskedBatch.of(shown.rows), lambda field: field.to(device))
        nowhere = torch.full_like(batch.tokens, -1)
        with torch.inference_mode():
            found = {"": _nats(model, batch), "without_": _nats(model, batch, units=nowhere)}
            found["units_"] = objective(model, batch, None, 1.0)[1]
        with silenced(model), torch.inference_mode():
            found["zeroed_"] = _nats(model, batch)
        for name, metrics in found.items():
            for key, value in metrics.items():
                totals[name + key] = totals.get(name + key, 0.0) + float(value)
        if not isfinite(sum(totals.values())):
            raise KinformerError("the model's predictions are not finite numbers; its weights are damaged.")
        done += len(shown.rows.tokens)
        if progress is not None:
            progress(done, len(text))
    units = totals.get("units_cpc_predicted", 0.0)
    bits = [totals[f"{name}nats"] / log(2) / max(1.0, totals["predicted"]) for name in ("", "zeroed_", "without_")]
    return GlobalInputMeasurement(
        bits=bits[0],
        zeroed=bits[1],
        without=bits[2],
        units=int(units),
        told=totals.get("units_cpc_correct", 0.0) / max(1.0, units),
        chance=totals.get("units_cpc_by_chance", 0.0) / max(1.0, units),
    )


@contextmanager
def silenced(model: Any) -> Iterator[None]:
    """``model`` whose global tokens have the vector 0."""
    weight: Tensor = model.side.table.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.zero_()
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def _nats(model: Any, batch: MaskedBatch, **inputs: Tensor) -> dict[str, Tensor]:
    """Metrics of masked tokens."""
    return masked_tokens(model, model.hidden(batch.tokens, valid=batch.valid, **inputs).document, batch)[1]
