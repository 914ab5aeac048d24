"""Longformer as the library transformers saves it, as our member ``longformer`` (Beltagy et al. 2020).

Its ``attention_window`` counts both sides. No token is global unless ``kinds`` mark it, except for the first one of a
classifier of texts.
"""

from __future__ import annotations

from pathlib import Path

from kinformer.interop.encoder import Family
from kinformer.interop.encoder_keys import CLASSIFIER, LM_HEAD, HeadKeys
from kinformer.interop.layouts import ConfigData
from kinformer.interop.settings import Settings
from kinformer.runtime.errors import KinformerError


def _mixers(full: Settings, place: Path) -> list[ConfigData]:
    return [
        {"projection": {"kind": "multi_head_global"}, "pattern": {"kind": "window", "window": sides // 2}}
        for sides in _windows(full, place)
    ]


def _windows(full: Settings, place: Path) -> list[int]:
    windows, depth = full["attention_window"], full["num_hidden_layers"]
    windows = [windows] * depth if isinstance(windows, int) else windows
    if not isinstance(windows, list) or len(windows) != depth:
        raise KinformerError(f"{place}: attention_window is {windows!r}, but must be one number or one per layer.")
    for window in windows:
        if not isinstance(window, int) or isinstance(window, bool) or window < 2 or window % 2:
            raise KinformerError(f"{place}: attention_window has {window!r}, but must be even numbers of 2 or more.")
    return windows


LONGFORMER = Family(
    title="Longformer",
    member="longformer",
    prefix="longformer.",
    heads=HeadKeys(LM_HEAD, CLASSIFIER),
    mixers=_mixers,
    defaults={
        "vocab_size": 30522,
        "attention_window": 512,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    shifted=True,
    first_is_global=True,
    tokens={"bos_token": "bos_token_id", "eos_token": "eos_token_id"},
)
