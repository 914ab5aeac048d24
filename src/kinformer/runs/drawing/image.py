"""What a trained model looks at in an image: attention roll-out, or the windows of its stages.

Roll-out (Abnar and Zuidema 2020, section 3): A_l = (mean over heads of the probabilities + I) / 2 for each layer, and
R = A_L ... A_1; a row of R is how much of each patch has reached a token by attention and residual connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kinformer.core.encoder import EncoderMixer, SequenceContext
from kinformer.figures.image import HeatOver, ImageDrawing, WindowsOver
from kinformer.inputs.patches import Patches
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.windows import WindowAttention
from kinformer.runs.drawing.options import DrawOptions
from kinformer.runs.run import open_run
from kinformer.runs.tracing.weights import weights_of
from kinformer.runtime.errors import KinformerError, marked
from kinformer.tasks.shared.classes import classes_of
from kinformer.tasks.shared.pictures import pictures
from kinformer.tasks.vision.predict import probabilities_of

TASK = "vision"


@dataclass(frozen=True)
class _Call:
    """What a mixer was called with while the model read the image."""

    mixer: EncoderMixer
    x: Tensor
    text: SequenceContext


OF_OTHERS = (
    "pattern",
    "position",
    "spans",
    "exits",
    "buckets",
    "experts",
    "blocks",
    "data",
    "length",
    "layer",
    "head",
    "image_width",
)
"""Options that other drawings read."""


def looked_at(options: DrawOptions) -> ImageDrawing:
    """Return a drawing of the image ``options.image``, or of the first that it names, with what the run looks at."""
    if unread := [marked(name) for name in OF_OTHERS if getattr(options, name)]:
        raise KinformerError(f"{', '.join(unread)}: is not for `image`, which draws what a run sees; leave it out.")
    assert options.image is not None
    run = open_run(options.subject)
    if run.task.name != TASK:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}; `image` is for the task {TASK}.")
    model, names = run.model(options.set), classes_of(run)
    picture = next(pictures(run, options.image, 1))
    calls: list[_Call] = []
    shares: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda mixer, arguments: calls.append(_Call(mixer, arguments[0], *arguments[1:]))
        )
        for module in model.stack.modules()
        if isinstance(module, EncoderMixer)
    ]
    if (gate := getattr(model.head, "gate", None)) is not None:
        hooks.append(gate.register_forward_hook(lambda gate, arguments, result: shares.append(result[0])))
    try:
        share, index = probabilities_of(model, [picture])[0].max(-1)
    finally:
        for hook in hooks:
            hook.remove()
    panels: Sequence[HeatOver | WindowsOver]
    if all(isinstance(call.mixer, WindowAttention) for call in calls):
        panels = _windows(calls, model.config.input.patch)
    elif all(_rolls(call) for call in calls):
        rolled = rollout([weights_of(call.mixer, (call.x, call.text)).weights for call in calls])
        panels = _rolled(rolled, shares, calls[0], model.config.input)
    else:
        raise KinformerError(
            f"{run.folder}: `image` draws attention between all patches, as in vit and deit, or windows, as in swin, "
            f"but {run.member} mixes otherwise; give a run of those."
        )
    title = f"{picture.name.rsplit('/')[-1]}: {names[int(index)]} {float(share):.1%} ({run.member}, {run.folder.name})"
    return ImageDrawing(title=title, pixels=picture.pixels, panels=panels)


def rollout(layers: Sequence[Tensor]) -> Tensor:
    """Return the roll-out [time, time] of the probabilities [heads, time, time] of all layers, the first one first."""
    output = torch.eye(layers[0].shape[-1], dtype=torch.float64)
    for layer in layers:
        mean = layer.double().cpu().mean(0) + torch.eye(layer.shape[-1], dtype=torch.float64)
        output = mean / mean.sum(-1, keepdim=True) @ output
    return output


def _rolls(call: _Call) -> bool:
    """Return whether the roll-out of the mixer's probabilities says what reaches its outputs."""
    mixer, text = call.mixer, call.text
    if not isinstance(mixer, BidirectionalAttention) or text.num_global or text.global_positions is not None:
        return False
    relative = mixer.position.relative(0, 0)
    return relative is None or relative.values is None


def _rolled(rolled_so_far: Tensor, shares: Sequence[Tensor], call: _Call, input: Patches.Config) -> list[HeatOver]:
    """Return the heat of attention roll-out over the patches, relative to the mean patch: one map per token before the
    patches or, where there is none, one of the patches' mean, weighted by the head's ``shares`` if it has some."""
    grid = call.text.grid
    assert grid is not None
    rows = rolled_so_far[: input.before] if input.before else rolled_so_far.mean(0, keepdim=True)
    names = ("class token", "distillation token") if input.before else ("mean of all patches",)
    if shares:
        rows, names = shares[0].double().cpu()[None] @ rolled_so_far, ("gated mean",)
    heat = rows[:, input.before :]
    heat = heat / heat.mean(-1, keepdim=True)
    return [
        HeatOver(name=f"roll-out, {name}", values=row.unflatten(0, grid).numpy(), patch=input.patch)
        for name, row in zip(names, heat, strict=False)
    ]


def _windows(calls: Sequence[_Call], patch: int) -> list[WindowsOver]:
    """Return the windows of every stage, apart for shifted layers; patches double in width from stage to stage."""
    windows: dict[tuple[int, int, int], list[int]] = {}
    widest = calls[0].x.shape[-1]
    for layer, call in enumerate(calls):
        assert isinstance(call.mixer, WindowAttention) and call.text.grid is not None
        stage = (call.x.shape[-1] // widest).bit_length() - 1
        windows.setdefault((stage, *call.mixer.sizes(call.text.grid)), []).append(layer + 1)
    return [
        WindowsOver(
            name=f"stage {stage + 1}, layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
            f"\n{side} x {side} patches{f', shifted by {shift}' if shift else ''}",
            patch=patch << stage,
            side=side,
            shift=shift,
        )
        for (stage, side, shift), layers in windows.items()
    ]
