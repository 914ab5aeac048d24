"""The text of a run's data, or another, with the expert that a layer of the run sends each token to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kinformer.blocks.experts import Experts
from kinformer.core.model import StackedModel
from kinformer.figures.coloured_text import ColouredText
from kinformer.runs.drawing.options import DrawOptions
from kinformer.runs.drawing.text import TRACED, pieces_of, text_run, tokens_of
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


def text_by_experts(options: DrawOptions) -> tuple[ColouredText, dict[str, object]]:
    """Return the first ``options.length`` tokens of the text, coloured by the expert of largest weight, and facts:
    ``layer``, the number of ``tokens`` of every expert, and its ``share`` of all weights."""
    run = text_run(options, "experts", "head")
    model = run.model(options.set).eval()
    layer, mixture = _mixture(model, options, str(run.folder))
    tokens = tokens_of(run, options)[: options.length or TRACED]
    experts, weights = _chosen(model, mixture, torch.from_numpy(tokens[None]))
    first = experts.gather(-1, weights.argmax(-1, keepdim=True))[0, :, 0]
    count: int = mixture.config.num_experts
    members = first.bincount(minlength=count).tolist()
    share = torch.zeros(count, dtype=torch.float64).index_add_(0, experts.flatten(), weights.double().flatten())
    share = share / share.sum()
    title = (
        f"{run.folder.name} ({run.member}), layer {layer}: the first expert of {plural(len(tokens), 'token')}; "
        f"{sum(map(bool, members))} of {count} are used"
    )
    coloured = ColouredText(
        title=title,
        pieces=pieces_of(run, tokens.tolist(), first.tolist()),
        legend="expert",
        labels=[f"{number}  {number_of / len(tokens):.0%}" for number, number_of in enumerate(members, start=1)],
        ordered=False,
    )
    return coloured, {"layer": layer, "tokens": members, "share": share.tolist()}


def _mixture(model: StackedModel, options: DrawOptions, folder: str) -> tuple[int, Experts]:
    """Return the layer of ``options``, or the first that has experts, and its mixture."""
    mixtures: dict[int, Experts] = {}
    for number, layer in enumerate(model.stack.layers, start=1):
        for module in layer.modules():
            if isinstance(module, Experts):
                mixtures.setdefault(number, module)
    layer_number = options.layer or min(mixtures, default=0)
    if layer_number in mixtures:
        return layer_number, mixtures[layer_number]
    if not mixtures:
        raise KinformerError(
            f"{folder}: no layer of this run has experts; give a run of mixtral, or of deepseek's kind."
        )
    raise KinformerError(
        f"`layer` {layer_number}: has no experts; those that have some are {', '.join(map(str, mixtures))}."
    )


def _chosen(model: nn.Module, mixture: Experts, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts [1, time, topk] of ``tokens`` [1, time] and their weights."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = mixture.selection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    try:
        with torch.inference_mode():
            model(tokens)
    finally:
        hook.remove()
    return seen[0]
