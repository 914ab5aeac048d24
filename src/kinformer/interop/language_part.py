"""The language model of a folder that also reads images, as the library transformers saves it: Qwen3.5 and Gemma 3.

Its settings are a table within ``config.json``, its tensors stand under a prefix, and all others are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop.settings import Settings
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

PARTS = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text"}
"""The ``model_type`` of a folder to that of its language model."""
PREFIX = re.compile(r"(?:model\.)?language_model\.(?:model\.)?")
IMAGES = re.compile(r"(?:model\.)?(visual|vision_tower|multi_modal_projector)\..*")
"""What only images pass through."""
OUTSIDE = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Settings of the language model that may stand beside the table."""


def settings(config: Settings, place: Path) -> Settings:
    """Return the settings of the language model within ``config``, which stands at ``place``."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise KinformerError(f"{place}: text_config is no table of settings; restore the file from a copy.")
    outside = {name: config[name] for name in OUTSIDE if config.get(name) is not None}
    return {**inner, **outside, "model_type": PARTS[config["model_type"]]}


def tensors_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the language model's ``tensors`` under their names there, and a note on those that are left out."""
    part, left_out = {}, set()
    for name, tensor in tensors.items():
        if match := IMAGES.fullmatch(name):
            left_out.add(match[1])
            continue
        plain = PREFIX.sub("", name, count=1) if PREFIX.match(name) else name
        part[plain if plain == name or plain.startswith("lm_head.") else f"model.{plain}"] = tensor
    notes = (f"{', '.join(sorted(left_out))} left out: the run reads tokens alone",) if left_out else ()
    return part, notes
