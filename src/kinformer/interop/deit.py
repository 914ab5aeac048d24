"""DeiT (Touvron et al. 2020) as the library transformers saves it, as our ``deit``.

With a teacher it has two classifiers, whose mean counts; without one the distillation token is there and unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.interop import images, vit
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "layernorm": "norm",
    "classifier": "head.output",
    "cls_classifier": "head.output",
    "distillation_classifier": "head.distilled",
}
HEADS = {
    "DeiTForImageClassificationWithTeacher": "distilled",
    "DeiTForImageClassification": "linear_classification",
}


def model_config(config: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the model config, as data, of DeiT's ``config.json``."""
    heads = [HEADS[name] for name in config.get("architectures") or () if name in HEADS]
    if not heads:
        raise KinformerError(
            f"{place}: architectures is {config.get('architectures')!r}, but only {' and '.join(HEADS)} can be "
            "imported."
        )
    head = {"kind": heads[0], "classes": len(images.classes(config, place))}
    return vit.encoder(config, place, head, distillation_token=True)


def convert(tensors: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return the weights under our names; an unknown one is an error."""
    plain = images.plain(tensors, "deit")
    if "embeddings.distillation_token" not in plain:
        raise KinformerError(f"{folder}: lacks the distillation token; restore it from a copy.")
    return vit.converted(plain, NAMES, folder, "DeiT")
