"""How an encoder is fitted to corrupted patches: its head predicts their colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinformer.core.encoder import GridOnly
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.shared.views import part_of
from kinformer.tasks.vision.fit import check_images_read, fitted

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.model_config import ModelConfig
    from kinformer.data import ImageData
    from kinformer.tasks.task import TrainingPlan

HEAD, STAGES = "patch_colours", "stages"


def fitted_to_colours(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return overrides: the input as for classes, and a head that predicts colours, unless there is one already."""
    changes = {name: value for name, value in fitted(config, data, 2).items() if not name.startswith("head")}
    return changes if config.head.kind == HEAD else changes | {"head": HEAD}


def keeps_patches(config: ModelConfig) -> bool:
    """Return whether an encoder of ``config`` ends with the patches that it began with, and nothing else."""
    return config.stack.kind != STAGES and not _has_global_tokens(config)


def _has_global_tokens(config: ModelConfig) -> bool:
    return bool(part_of(config, "global_tokens")) or part_of(config, "global_input") is not None


def check_colours(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model that predicts something else, or whose last layer has other positions than its first."""
    check_images_read(plan, model)
    config = plan.config
    if config.head.kind != HEAD:
        raise KinformerError(f"`set` head={config.head.kind}: predicts no colours; leave it out.")
    if isinstance(model.stack, GridOnly):
        raise KinformerError(
            f"the stack {config.stack.kind!r} merges patches, so that none is left to have a colour; give a member "
            "such as vit or deit."
        )
    if _has_global_tokens(config):
        raise KinformerError("the task mpp is for encoders without global tokens; give a member such as vit or deit.")
