"""How an encoder is fitted to masked patches: its head becomes a decoder of pixels, about a third as deep and half as
wide as the encoder, as the paper's 8 layers of 512 are to the 24 of 1,024 of ViT-L."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from kinformer.runtime.errors import KinformerError
from kinformer.tasks.mae.rows import seen_count
from kinformer.tasks.shared.views import PatchInput, input_of
from kinformer.tasks.vision.fit import check_channels, fitted

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData
    from kinformer.tasks.task import TrainingPlan

HEAD = "masked_patches"
NARROWER, SHALLOWER, HEAD_DIM = 2, 3, 32


def fitted_to_masks(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return overrides: the input as for classes, and a head that predicts pixels, unless there is one already."""
    changes = {name: value for name, value in fitted(config, data, 2).items() if not name.startswith("head")}
    if config.head.kind == HEAD:
        return changes
    heads = max(1, config.dim // NARROWER // HEAD_DIM)
    dim = max(1, config.dim // NARROWER // (4 * heads)) * 4 * heads
    norm = {"kind": "layer_norm", "eps": 1e-6}
    mixer = {"kind": "bidirectional", "num_heads": heads}
    layer = {"kind": "encoder", "mixer": mixer, "norm": norm, "residual": {"kind": "pre"}}
    layers = [layer] * max(1, len(config.layers) // SHALLOWER)
    return changes | {"head": {"kind": HEAD, "dim": dim, "layers": layers}}


def check_masks(plan: TrainingPlan) -> None:
    """Refuse a model whose layers need the patches that are left out, or where they stand."""
    check_channels(plan)
    config = plan.config
    if config.head.kind != HEAD:
        raise KinformerError(f"`set` head={config.head.kind}: predicts no pixels; leave it out.")
    input: PatchInput = input_of(config)
    seen_count(prod(input.replace(size=plan.data.shape[:2]).grid), plan.options.masked)
    placed = mixer_of_places(config)
    if placed is not None:
        raise KinformerError(
            f"the encoder leaves masked patches out, so that its layers must know a patch's place by its vector "
            f"alone, but the mixer {placed!r} here goes by neighbours or distances; give a member such as vit or deit."
        )


def mixer_of_places(config: ModelConfig) -> str | None:
    """Return the kind of a mixer of ``config`` that knows patches by their places, None where there is none."""
    for layer in config.layers:
        mixer = layer.mixer
        parts = [getattr(getattr(mixer, name, None), "kind", None) for name in ("pattern", "position")]
        if parts != ["full", "none"]:
            return str(mixer.kind)
    return None
