"""How an encoder-decoder is fitted to images and to what they are made smaller to: the inputs of both its halves."""

from __future__ import annotations

from torch import nn

from kinformer.core.config import to_dict
from kinformer.core.model_config import ModelConfig
from kinformer.data.images import ImageData
from kinformer.runtime.errors import KinformerError
from kinformer.tasks.image.fit import ABSOLUTE, INPUT, check_blocks_of, check_image, image_changes, patterns_of, resized
from kinformer.tasks.shared.views import PixelInput, encoder_of, input_of, part_of
from kinformer.tasks.task import TrainingPlan


def enlarging_changes(config: ModelConfig, data: ImageData | None) -> dict[str, object]:
    """Return the changes of ``config`` to a model that draws the images of ``data`` (None: not known yet). A model of
    text gets pixels in place of its tokens and positions, on both sides."""
    changes = image_changes(config, None if data is None else data.shape)
    if config.input.kind != INPUT and config.position.kind in ABSOLUTE:
        changes["position"] = "none"
    encoder = encoder_of(config)
    if getattr(encoder.input, "kind", None) != INPUT:
        changes["encoder.input"] = {"kind": INPUT, "shifted": False, "channels": 3}
        if encoder.position.kind in ABSOLUTE:
            changes["encoder.position"] = "none"
    return changes


def source_changes(config: ModelConfig, data: ImageData, factor: int) -> dict[str, object]:
    """Return the changes of a fitted ``config`` to an encoder of the images of ``data`` made ``factor`` times
    smaller."""
    encoder, (height, width, channels) = encoder_of(config), data.shape
    input = to_dict(encoder.input)
    if channels == 1:
        input = {name: value for name, value in input.items() if name not in ("joint", "per_channel")}
    sizes = {"height": height // factor, "width": width // factor, "channels": channels}
    cells = {"height": height // factor, "width": width // factor * (1 if input.get("joint") else channels)}
    changes = resized(patterns_of(encoder.layers), cells, "encoder.")
    return {"encoder.input": input | sizes} | changes


def require_pixels(config: ModelConfig) -> None:
    """Refuse a model whose halves do not both read pixels."""
    for name, input in (("input", config.input), ("encoder.input", encoder_of(config).input)):
        if getattr(input, "kind", None) != INPUT:
            raise KinformerError(
                f"`set` {name}={getattr(input, 'kind', None)}: the task super-resolution needs the input pixels; leave "
                "it out, or choose another task."
            )


def check_enlarging(plan: TrainingPlan, model: nn.Module) -> None:
    """Refuse a model for images of other shapes, or whose attention runs through other cells than its inputs."""
    config, data, factor = plan.config, plan.data, plan.options.factor
    large: PixelInput = input_of(config)
    source: PixelInput = input_of(encoder_of(config))
    check_image(config, data, nn.ModuleList([part_of(model, "stack")]))
    check_blocks_of(part_of(model, "encoder").stack, source)
    shape = (source.height * factor, source.width * factor, source.channels)
    if shape != data.shape or source.shifted:
        raise KinformerError(
            f"`set` encoder.input: is for images of {source.height} x {source.width} x {source.channels}, shifted "
            f"{str(source.shifted).lower()}, and not for those of {data.name} made {factor} times smaller; leave it "
            "out, it follows the data."
        )
    for name, input in (("input", large), ("encoder.input", source)):
        if input.classes:
            raise KinformerError(f"`set` {name}.classes={input.classes}: is for the task image; leave it out.")
