"""DeiT (Touvron et al. 2020) as the library transformers saves it, as our ``deit``.

With a teacher it has two classifiers, whose mean counts; without one the distillation token is there and unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinformer.interop import images, vit
from kinformer.interop.architecture import Settings
from kinformer.interop.key_map import ConfigData, ConfigView, KeyMap, key
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = ("cls_token", "distillation_token")
KEYS = vit.key_map("deit.", TOKENS, key("head.output", "classifier"))
DISTILLED_KEYS = vit.key_map(
    "deit.", TOKENS, key("head.output", "cls_classifier"), key("head.distilled", "distillation_classifier")
)
HEADS = {
    "DeiTForImageClassificationWithTeacher": "distilled",
    "DeiTForImageClassification": "linear_classification",
}


def model_config(config: Settings, place: Path) -> ConfigData:
    """Return the model config, as data, of DeiT's ``config.json``."""
    heads = [HEADS[name] for name in config.get("architectures") or () if name in HEADS]
    if not heads:
        raise KinformerError(
            f"{place}: architectures is {config.get('architectures')!r}, but only {' and '.join(HEADS)} can be "
            "imported."
        )
    head = {"kind": heads[0], "classes": images.count(config, place)}
    return vit.encoder(config, place, head, distillation_token=True)


def key_map(model: ConfigView) -> KeyMap:
    """Return the key map of a ``model`` config, as data: with one classifier or two."""
    return DISTILLED_KEYS if model["head"]["kind"] == "distilled" else KEYS


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; an unknown one is an error."""
    return vit.read(key_map(model), tensors, model, folder, "DeiT")
