"""How an encoder-decoder is fitted to images and to what they are made smaller to: the inputs of both its halves."""

from __future__ import annotations

from typing import Any

from torch import nn

from kinformer.core.config import to_dict
from kinformer.data.images import ImageData
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.image.fit import ABSOLUTE, INPUT, check_blocks_of, check_image, image_changes, patterns_of, resized
from kinformer.tasks.task import TrainingPlan


def enlarging_changes(config: Any, data: ImageData | None) -> dict[str, Any]:
    """Changes of ``config`` to a model that draws the images of ``data`` (None: not known yet). A model of text gets
    pixels in place of its tokens and positions, on both sides."""
    changes = image_changes(config, None if data is None else data.shape)
    if config.input.kind != INPUT and config.position.kind in ABSOLUTE:
        changes["position"] = "none"
    if getattr(config.encoder.input, "kind", None) != INPUT:
        changes["encoder.input"] = {"kind": INPUT, "shifted": False, "channels": 3}
        if config.encoder.position.kind in ABSOLUTE:
            changes["encoder.position"] = "none"
    return changes


def source_changes(config: Any, data: ImageData, factor: int) -> dict[str, Any]:
    """Changes of a fitted ``config`` to an encoder of the images of ``data`` made ``factor`` times smaller."""
    height, width, channels = data.shape
    input = to_dict(config.encoder.input)
    if channels == 1:
        input = {name: value for name, value in input.items() if name not in ("joint", "per_channel")}
    sizes = {"height": height // factor, "width": width // factor, "channels": channels}
    cells = {"height": height // factor, "width": width // factor * (1 if input.get("joint") else channels)}
    changes = resized(patterns_of(config.encoder.layers), cells, "encoder.")
    return {"encoder.input": input | sizes} | changes


def require_pixels(config: Any) -> None:
    """Refuse a model whose halves do not both read pixels."""
    for name, input in (("input", config.input), ("encoder.input", config.encoder.input)):
        if getattr(input, "kind", None) != INPUT:
            raise KinformerError(
                f"`set` {name}={getattr(input, 'kind', None)}: the task super-resolution needs the input pixels; leave "
                "it out, or choose another task."
            )


def check_enlarging(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model for images of other shapes, or whose attention runs through other cells than its inputs."""
    config, data = plan.config, plan.data
    encoder: Any = model.encoder
    check_image(config, data, nn.ModuleList([model.stack]))  # type: ignore[list-item]
    check_blocks_of(encoder.stack, config.encoder.input)
    source, factor = config.encoder.input, plan.options.factor
    shape = (source.height * factor, source.width * factor, source.channels)
    if shape != data.shape or source.shifted:
        raise KinformerError(
            f"`set` encoder.input: is for images of {source.height} x {source.width} x {source.channels}, shifted "
            f"{str(source.shifted).lower()}, and not for those of {data.name} made {factor} times smaller; leave it "
            "out, it follows the data."
        )
    for name, input in (("input", config.input), ("encoder.input", source)):
        if input.classes:
            raise KinformerError(f"`set` {name}.classes={input.classes}: is for the task image; leave it out.")
