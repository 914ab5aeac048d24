"""Pictures of a trained run: its exits, buckets, experts, spans, chosen blocks, and attention to an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.blocks.experts import Experts
from kinformer.core.encoder import EncoderMixer, SequenceContext
from kinformer.core.model import CausalModel, StackedModel
from kinformer.core.span import Span, TokenSpan
from kinformer.inputs.images import Patches
from kinformer.lab.drawing.image import HeatOver, ImageDrawing, WindowsOver
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.panels import MOST_CELLS, HeatPanel, PatternPanel, numbered
from kinformer.lab.drawing.text import ColouredText
from kinformer.lab.evaluation.bits import Windows, cut
from kinformer.lab.evaluation.exits import EarlyExitRecorder, Exited, early_exit_stack
from kinformer.lab.runs.run import Run, open_run
from kinformer.lab.runs.trace import AttentionTrace, trace, weights_of
from kinformer.lab.runs.trace_options import TraceOptions
from kinformer.lab.tasks.answers import classes_of
from kinformer.lab.tasks.evaluation import EvaluationSettings
from kinformer.lab.tasks.images import pictures
from kinformer.lab.tasks.texts import held_out, main_windows
from kinformer.lab.tasks.vision import probabilities_of
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.chosen_blocks import ChosenBlocks
from kinformer.mixers.windows import WindowAttention
from kinformer.runtime.errors import KinformerError, marked, plural

# What all pictures of a run's text share: the run, its tokens, and the pieces of text that they stand for.

TOKENS, MAX_TOKENS = 1200, 6000
TRACED = 512
"""Tokens of a text that is read as a whole, where no length was asked: its attention takes the square of them."""


def text_run(options: DrawOptions, what: str, *unread: str) -> Run:
    """Return the run whose text the option ``what`` draws; refuse options that it does not read, ``unread`` among them,
    and runs that read no text."""
    others = ("pattern", "position", *unread, "image_width")
    if wrong := [marked(name) for name in others if getattr(options, name)]:
        raise KinformerError(f"`{what}` draws a text, and knows no {', '.join(wrong)}; leave them out.")
    run = open_run(options.subject)
    if not run.task.data.tokenized or run.tokenizer is None:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}, which reads no text.")
    return run


def tokens_of(run: Run, options: DrawOptions, length: int = TOKENS) -> np.ndarray:
    """Return the first ids of the text to draw, one more than ``options.length``, or ``length`` if that is not set."""
    split = held_out(run, EvaluationSettings(data=options.data)).split
    split.require(2, "a drawing")
    count = min(options.length or length, MAX_TOKENS, len(split) - 1)
    return np.array(split.tokens(0, count + 1), np.int64)


def pieces_of(run: Run, tokens: list[int], groups: Sequence[int | None]) -> list[tuple[str, int | None]]:
    """Return each token's text with its group; characters of several tokens stand with the last."""
    assert run.tokenizer is not None
    stream = run.tokenizer.stream()
    pieces = [(stream.feed(token), group) for token, group in zip(tokens, groups, strict=True)]
    return [*pieces, (stream.finish(), None)]


# The text of a run's data, or another, with the bucket or cluster that a head of the run sorts each token into.


def text_by_buckets(options: DrawOptions) -> tuple[ColouredText, dict[str, object]]:
    """Return the first ``options.length`` tokens of the text, coloured by the bucket of the first round, and facts:
    ``layer``, ``head`` and the number of ``tokens`` in every bucket."""
    run = text_run(options, "buckets")
    assert run.tokenizer is not None
    tokens = tokens_of(run, options)[: options.length or TRACED].tolist()
    layers = None if options.layer is None else str(options.layer)
    text = run.tokenizer.decode(tokens)
    settings = TraceOptions(layers=layers, max_tokens=len(tokens), set=options.set, seed=options.seed, device="cpu")
    traced = trace(run.folder, text, settings)
    site = next((item for item in traced.attention if item.buckets is not None), None)
    if site is None:
        raise KinformerError(
            f"{run.folder}: no head of {'this layer' if layers else 'this run'} attends within buckets or clusters; "
            "give a run of reformer or routing."
        )
    head, groups = _head(site, options)
    count = max(groups) + 1
    members = [groups.count(group) for group in range(count)]
    title = (
        f"{run.folder.name} ({run.member}), layer {site.layer}, head {head}: {plural(len(groups), 'token')} in "
        f"{plural(sum(map(bool, members)), 'group')}"
    )
    coloured = ColouredText(
        title=title,
        pieces=pieces_of(run, traced.ids.tolist(), groups),
        legend="group",
        labels=[f"{group + 1}  {number / len(groups):.0%}" for group, number in enumerate(members)],
        ordered=False,
    )
    return coloured, {"layer": site.layer, "head": head, "tokens": members}


def _head(site: AttentionTrace, options: DrawOptions) -> tuple[int, list[int]]:
    """Return the head of ``options``, or the first that has buckets, and the buckets of its first round."""
    assert site.buckets is not None
    sorting = {
        number: item[0].tolist() for number, item in zip(site.heads, site.buckets, strict=True) if item.min() >= 0
    }
    head = options.head or min(sorting)
    if head not in sorting:
        raise KinformerError(
            f"`head` {head}: does not attend within buckets or clusters; those that do are "
            f"{', '.join(map(str, sorting))}."
        )
    return head, sorting[head]


# The text of a run's data, or another, with the exits by which its tokens were predicted.


@dataclass(frozen=True)
class _Windows:
    """The options of reading in windows as the run was trained, which overlap by half, or with the state carried."""

    context: None = None
    overlap: float = 0.5


def text_by_exits(options: DrawOptions) -> tuple[ColouredText, Exited]:
    """Return the first ``options.length`` tokens of the text, coloured by the exits by which they were predicted, and
    the number of tokens by exit."""
    run = text_run(options, "exits", "layer", "head")
    model = run.model(options.set)
    if early_exit_stack(model) is None:
        raise KinformerError(
            f"{run.folder}: no token of this run leaves early; calibrate it first (kinformer calibrate DIR), or "
            "give a threshold by `set` stack.rule.thresholds=[0.9]."
        )
    tokens = tokens_of(run, options)
    exits, exited = _exits(run, model, tokens)
    total = sum(exited.tokens)
    shares = zip(exited.layers, exited.tokens, strict=True)
    depth = f"{exited.layers_per_token:.2f} of {plural(exited.layers[-1], 'layer')} per token"
    text = ColouredText(
        title=f"{run.folder.name} ({run.member}): {depth}",
        pieces=pieces_of(run, tokens.tolist(), [None, *exits]),
        legend="layers",
        labels=[f"{layers}  {tokens / total:.0%}" for layers, tokens in shares],
        ordered=True,
    )
    return text, exited


def _exits(run: Run, model: CausalModel, tokens: np.ndarray) -> tuple[list[int], Exited]:
    """Return the exits of all but the last of ``tokens``, read with half a window or more of text before each."""
    windows, seen = main_windows(run, model, _Windows(), beside_lengths=True), []
    stack = early_exit_stack(model)
    assert stack is not None
    hook = stack.left.register_forward_hook(lambda _, unread, __: seen.append(unread[0][0]))
    try:
        with torch.inference_mode():
            for window in cut(len(tokens) - 1, windows or Windows(context=len(tokens) - 1)):
                model(torch.from_numpy(tokens[None, window.start : window.start + window.size]))
                seen[-1] = seen[-1][window.unscored :]
    finally:
        hook.remove()
    recorder = EarlyExitRecorder(stack)
    recorder.note(torch.cat(seen), None)
    assert recorder.result is not None
    return torch.cat(seen).tolist(), recorder.result


# The text of a run's data, or another, with the expert that a layer of the run sends each token to.


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


# How far the heads of a trained model look back, where that was learnt: span by layer and head.


def span_panel(model: nn.Module, title: str) -> HeatPanel:
    """Return the spans in tokens, [layers, heads], of the layers of ``model`` that learn them, in order."""
    spans = [module.spans() for module in model.modules() if isinstance(module, Span)]
    if any(isinstance(module, TokenSpan) for module in model.modules()):
        raise KinformerError(
            f"`spans`: the spans of {title} follow from its tokens, so that no table says them; draw a run whose heads "
            "have spans of their own (span=soft_span)."
        )
    if not spans:
        raise KinformerError(
            f"`spans`: {title} learns no spans; train one that does, as adaptive-span or with "
            "`set` layers.*.mixer.span=soft_span."
        )
    if len({len(heads) for heads in spans}) > 1:
        raise KinformerError(f"`spans`: the layers of {title} differ in heads, which is no table; draw another model.")
    return HeatPanel(
        place="",
        name="learnt span in tokens",
        values=np.array(spans),
        rows="layer",
        columns="head",
        signed=False,
        first=1,
    )


# The blocks of keys that the queries of a trained run chose on a text, by layer and head.

Choose: TypeAlias = Callable[..., tuple[Tensor | None, Tensor]]
BLOCKS = 32
"""Blocks of a text, where no length was asked."""


def chosen_panels(options: DrawOptions) -> tuple[list[PatternPanel], str]:
    """Return a panel for every layer and for all heads in it that choose together, of what they see of the first
    ``options.length`` tokens, without the branches that choose nothing; and a title."""
    run = text_run(options, "blocks")
    model = run.model(options.set).eval()
    mixers = _mixers(model, options, str(run.folder))
    block = max(mixer.config.block for mixer in mixers.values())
    length = options.length or min(MAX_TOKENS, max(TRACED, BLOCKS * block))
    tokens = torch.from_numpy(tokens_of(run, options, length)[:length])
    chosen, panels = _choices(model, mixers, tokens[None]), []
    for number, mixer in mixers.items():
        for heads, choice in _by_head(mixer, chosen[number][0], options):
            place = f"layer {number}, {numbered('head', heads)}"
            panels.append(_panel(mixer.config, choice, place))
    return panels, f"{run.folder.name} ({run.member}): blocks that {plural(len(tokens), 'token')} chose"


def _mixers(model: StackedModel, options: DrawOptions, folder: str) -> dict[int, ChosenBlocks]:
    """Return the mixers that choose blocks by the number of their layer: the one that was asked for, or all."""
    mixers = {
        number: module
        for number, layer in enumerate(model.stack.layers, start=1)
        for module in layer.modules()
        if isinstance(module, ChosenBlocks)
    }
    if not mixers:
        raise KinformerError(f"{folder}: no layer of this run chooses blocks; give a run of moba or nsa.")
    if options.layer is None:
        return mixers
    if options.layer not in mixers:
        raise KinformerError(
            f"`layer` {options.layer}: chooses no blocks; those that do are {', '.join(map(str, mixers))}."
        )
    return {options.layer: mixers[options.layer]}


def _choices(model: nn.Module, mixers: dict[int, ChosenBlocks], tokens: Tensor) -> dict[int, Tensor]:
    """Return what each mixer's queries chose, [1, choosers, time, count] as ``kernels.chosen.choose`` has it."""
    chosen: dict[int, Tensor] = {}
    with ExitStack() as stack, torch.inference_mode():
        for number, mixer in mixers.items():
            choose: Choose = mixer._choose

            def choose_and_record(
                *call: object, number: int = number, choose: Choose = choose
            ) -> tuple[Tensor | None, Tensor]:
                compressed, chosen[number] = choose(*call)
                return compressed, chosen[number]

            stack.enter_context(patch.object(mixer, "_choose", choose_and_record))
        model(tokens)
    return chosen


def _by_head(mixer: ChosenBlocks, chosen: Tensor, options: DrawOptions) -> Iterator[tuple[list[int], Tensor]]:
    """Yield heads (from 0) that choose together, and their choice [time, count]; of ``options.head`` alone if set."""
    together = mixer.config.num_heads // len(chosen)
    if options.head is not None and options.head > mixer.config.num_heads:
        raise KinformerError(f"`head` {options.head}: the layer has {plural(mixer.config.num_heads, 'head')}.")
    for index, choice in enumerate(chosen):
        heads = list(range(index * together, (index + 1) * together))
        if options.head is None or options.head - 1 in heads:
            yield heads, choice


def _panel(config: ChosenBlocks.Config, chosen: Tensor, place: str) -> PatternPanel:
    """Return the panel of a choice [time, count]: of every cell of queries and keys, the share of pairs seen."""
    time, size = len(chosen), config.block
    blocks = -(-time // size)
    per_cell = -(-blocks // MOST_CELLS)
    cells, index = -(-blocks // per_cell), torch.arange(time)
    seen = torch.zeros(cells * per_cell * size, cells * per_cell + 1, dtype=torch.float64)  # keys, by query and block
    seen[:time].scatter_(1, torch.where(chosen < 0, cells * per_cell, chosen), float(size))
    seen[index, index // size] = (index % size + 1).double()
    pairs = seen[:, :-1].view(cells, per_cell * size, cells, per_cell).sum((1, 3))
    always = [f"{getattr(config, name)} {name}" for name in ("first", "near") if getattr(config, name)]
    others = f"{' and '.join(always)} among them" if always else ""
    name = f"blocks of {size}: its own and {config.count - 1} others"
    return PatternPanel(
        place=place,
        name=f"{name}\n{others}" if others else name,
        shares=(pairs / (per_cell * size) ** 2).numpy(),
        tokens_per_cell=per_cell * size,
        causal=True,
        length=cells * per_cell * size,
        allowed_pairs=int(pairs.sum()),
    )


# What a trained model looks at in an image: attention roll-out, or the windows of its stages.
#
# Roll-out (Abnar and Zuidema 2020, section 3): A_l = (mean over heads of the probabilities + I) / 2 for each layer,
# and R = A_L ... A_1; a row of R is how much of each patch has reached a token by attention and residual connections.

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
