"""BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019) as the library transformers saves them, as our ``bert``.

RoBERTa counts positions from behind the padding token's number and has an exact gelu in its head. There a padding token
in the middle of a text has no position of its own; here ``valid`` alone says what is padding.
"""

from __future__ import annotations

from pathlib import Path

from kinformer.interop.encoder import Family
from kinformer.interop.encoder_keys import CLASSIFIER, CLS, LM_HEAD, POOLED, HeadKeys
from kinformer.interop.layouts import ConfigData
from kinformer.interop.settings import Settings


def _mixers(full: Settings, place: Path) -> list[ConfigData]:
    return [{}] * full["num_hidden_layers"]


BERT = Family(
    title="BERT",
    member="bert",
    prefix="bert.",
    heads=HeadKeys(CLS, POOLED),
    mixers=_mixers,
    defaults={"vocab_size": 30522, "pad_token_id": 0},
    activated=("masked_language",),
)
ROBERTA = Family(
    title="RoBERTa",
    member="bert",
    prefix="roberta.",
    heads=HeadKeys(LM_HEAD, CLASSIFIER),
    mixers=_mixers,
    defaults={"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    shifted=True,
    tokens={"bos_token": "bos_token_id", "eos_token": "eos_token_id"},
)
