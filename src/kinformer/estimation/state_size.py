"""The size of a model's state, from the declarations of its mixers."""

from __future__ import annotations

from typing import Any

from kinformer.core.contract import CausalMixer, ReadsSource
from kinformer.core.model import SourceModel, WholeModel
from kinformer.core.state import nbytes


def state_bytes(model: Any, length: int) -> int:
    """Return the bytes of one row's state in float32 after ``length`` tokens: those that the mixers
    declare, and the model's counters; a source has as many tokens. 0 for an encoder. Nothing is computed,
    so the model may be on the meta device."""
    if model.config.protocol is WholeModel:
        return 0
    mixers = [module for module in model.modules() if isinstance(module, CausalMixer)]

    def declared(length: int, source: int) -> int:
        total = 0
        for mixer in mixers:
            options: dict[str, Any] = {"source_length": source} if isinstance(mixer, ReadsSource) else {}
            total += mixer.state_bytes(length, **options)
        return total

    reads = model.config.protocol is SourceModel
    begun = model.begin(model.source_input.example(1, 1, "meta")) if reads else model.initial_state(1)
    return nbytes(begun) - declared(0, 1) + declared(length, length)
