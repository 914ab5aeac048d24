"""The uses that transformers has classes for, and what a model of ours is used for.

A use ends the name of a class: ``CausalLM`` is that of ``AutoModelForCausalLM``, and of our ``KinformerForCausalLM``.
"""

from __future__ import annotations

from typing import Any

from kinformer.core.model import CausalModel, SourceModel, WholeModel
from kinformer.core.model_config import ModelConfig

GENERATE = ("CausalLM", "Seq2SeqLM")
"""The uses that generate."""


def use_of(config: ModelConfig) -> str | None:
    """Return the use of a model of ``config``; None for one that transformers has no class for."""
    model: Any = config
    reads_ids = model.input.kind == "tokens"
    if model.input.kind == "frames":
        return "CTC" if model.head.kind == "ctc" else None
    if model.protocol is CausalModel:
        return "CausalLM" if reads_ids else None
    if model.protocol is SourceModel:
        source = model.encoder.input
        return "Seq2SeqLM" if reads_ids and (source is None or source.kind == "tokens") else None
    if model.protocol is not WholeModel:
        return None
    if model.head.kind == "masked_language":
        return "MaskedLM" if reads_ids else None
    if not hasattr(model.head, "classes") or not (reads_ids or model.input.whole):
        return None
    if model.head.per_position:
        return "TokenClassification" if reads_ids else None
    return "SequenceClassification" if reads_ids else "ImageClassification"


def auto_class_of(use: str) -> str:
    """Return the class of transformers that loads models of a ``use``."""
    return f"AutoModelFor{use}"


def model_class_of(use: str) -> str:
    """Return our class for a ``use``."""
    return f"KinformerFor{use}"
