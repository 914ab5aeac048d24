"""The files of a folder of speech recognition: how sound is prepared, and which symbols are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kinformer.data.sound import CHARACTERS
from kinformer.interop.encoder_routes import labels_of
from kinformer.interop.images import PREPROCESSOR
from kinformer.interop.tokenizer_files import TOKENIZER_CONFIG
from kinformer.runtime.files import write_json

BLANK = "<pad>"
"""What transformers calls class 0, which is no symbol."""
VOCABULARY = "vocab.json"


def write_speech(folder: Path, symbols: Sequence[str], unit: str, rate: int) -> dict[str, object]:
    """Write into ``folder`` how sound of ``rate`` samples a second is prepared, and of characters a tokenizer; return
    the settings of ``config.json``."""
    prepared: dict[str, object] = {"feature_size": 1, "sampling_rate": rate, "padding_value": 0.0}
    prepared |= {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False}
    write_json(folder / PREPROCESSOR, prepared | {"return_attention_mask": True})
    names = [BLANK, *symbols]
    if unit == CHARACTERS:
        write_json(folder / VOCABULARY, {name: number for number, name in enumerate(names)})
        tokens = {"pad_token": BLANK, "unk_token": BLANK, "bos_token": None, "eos_token": None}
        settings = {"tokenizer_class": "Wav2Vec2CTCTokenizer", "word_delimiter_token": " "}
        write_json(folder / TOKENIZER_CONFIG, settings | tokens)
    return {"sampling_rate": rate, "pad_token_id": 0, **labels_of(names)}
