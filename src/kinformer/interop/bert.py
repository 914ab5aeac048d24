"""BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019) as the library transformers saves them, as our ``bert``.

RoBERTa counts positions from behind the padding token's number and has an exact gelu in its head. There a padding token
in the midst of a text has no position of its own; here ``valid`` alone says what is padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinformer.interop.encoder import Family

BERT = Family(defaults={"vocab_size": 30522, "pad_token_id": 0}, activated=("masked_language",))
ROBERTA = Family(
    defaults={"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    shifted=True,
    tokens={"bos_token": "bos_token_id", "eos_token": "eos_token_id"},
)


def bert_config(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the model config, as data and without its head, of BERT's ``config.json``."""
    return _model_config(BERT, config, place)


def roberta_config(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the model config, as data and without its head, of RoBERTa's ``config.json``."""
    return _model_config(ROBERTA, config, place)


def _model_config(family: Family, config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    full = family.settings(config, place)
    return family.model(full, place, [{}] * full["num_hidden_layers"])
