"""Pictures of a trained run: exits, buckets, experts, spans and chosen blocks of a text; the attention to an image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.encoder import EncoderMixer, SequenceContext
from kinformer.core.parts import Span, TokenSpan
from kinformer.core.probe import NoWeights, probing, weights_of
from kinformer.inputs.images import Patches
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.panels import MOST_CELLS, HeatPanel, PatternPanel, numbered
from kinformer.lab.drawing.pictures import ColouredText, HeatOver, Picture, SeenImage, WindowsOver, picture_of
from kinformer.lab.evaluation.bits import Windows, cut
from kinformer.lab.evaluation.depths import EarlyExitRecorder, early_exit_stack
from kinformer.lab.runs.options import TraceOptions
from kinformer.lab.runs.run import Run, open_run
from kinformer.lab.runs.trace import trace
from kinformer.lab.tasks.answers import classes_of
from kinformer.lab.tasks.evaluation import EvaluationSettings
from kinformer.lab.tasks.images import pictures
from kinformer.lab.tasks.texts import held_out, main_windows
from kinformer.lab.tasks.vision import probabilities_of
from kinformer.lab.training.logging import history_of
from kinformer.mixers.encoders import WindowAttention
from kinformer.runtime.errors import KinformerError, marked, plural

# The text of a run's data, or another text, with a colour for every token.

TEXT_OPTIONS = ("exits", "buckets", "experts", "blocks", "data")
TOKENS, MAX_TOKENS = 1200, 6000
TRACED, BLOCKS = 512, 32
"""The default length of a text, in tokens and in blocks, for pictures that read the whole text at once."""


def text_run(options: DrawOptions, what: str, *unread: str) -> Run:
    """Return the run whose text the option ``what`` draws."""
    others = ("pattern", "position", *unread, "image_width")
    if wrong := [marked(name) for name in others if getattr(options, name)]:
        raise KinformerError(f"`{what}` draws a text, and knows no {', '.join(wrong)}; leave them out.")
    run = open_run(options.subject)
    if not run.task.data.tokenized or run.tokenizer is None:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}, which reads no text.")
    return run


def tokens_of(run: Run, options: DrawOptions, length: int = TOKENS) -> np.ndarray:
    """Return the first ids of the text to draw: one id more than ``options.length``, or than ``length`` without it."""
    split = held_out(run, EvaluationSettings(data=options.data)).split
    split.require(2, "a drawing")
    count = min(options.length or length, MAX_TOKENS, len(split) - 1)
    return np.array(split.tokens(0, count + 1), np.int64)


def _text(run: Run, ids: Sequence[int], groups: Sequence[int | None], title: str, **look: Any) -> Picture:
    """Return the picture of a text with every token in the colour of its group; ``look``: fields of a
    :class:`ColouredText`. A character of several tokens belongs to the last token."""
    assert run.tokenizer is not None
    stream = run.tokenizer.stream()
    pieces = [(stream.feed(token), group) for token, group in zip(ids, groups, strict=True)]
    content = ColouredText(pieces=[*pieces, (stream.finish(), None)], **look)
    return Picture(title=f"{run.folder.name} ({run.member}){title}", content=content)


def _grouped(
    run: Run, ids: Sequence[int], groups: Sequence[int], members: Sequence[int], legend: str, title: str
) -> Picture:
    """Return the picture of a text in groups without an order; ``members`` is the number of tokens in each group."""
    labels = [f"{number}  {count / len(ids):.0%}" for number, count in enumerate(members, start=1)]
    return _text(run, ids, groups, title, legend=legend, labels=labels, ordered=False)


def text_by_buckets(options: DrawOptions) -> Picture:
    """Draw the text in the colours of the buckets or clusters of one head, in the first round."""
    run = text_run(options, "buckets")
    assert run.tokenizer is not None
    tokens = tokens_of(run, options)[: options.length or TRACED].tolist()
    layers = None if options.layer is None else str(options.layer)
    settings = TraceOptions(layers=layers, max_tokens=len(tokens), set=options.set, seed=options.seed, device="cpu")
    traced = trace(run.folder, run.tokenizer.decode(tokens), settings)
    site = next((item for item in traced.attention if item.buckets is not None), None)
    if site is None or site.buckets is None:
        where = "this layer" if layers else "this run"
        raise KinformerError(f"{run.folder}: no head of {where} has buckets; give a run of reformer or routing.")
    sorting = {head: item[0].tolist() for head, item in zip(site.heads, site.buckets, strict=True) if item.min() >= 0}
    head = options.head or min(sorting)
    if head not in sorting:
        heads = ", ".join(map(str, sorting))
        raise KinformerError(f"`head` {head}: does not attend within buckets; the heads that do are {heads}.")
    groups = sorting[head]
    members = [groups.count(group) for group in range(max(groups) + 1)]
    used = plural(sum(map(bool, members)), "group")
    title = f", layer {site.layer}, head {head}: {plural(len(groups), 'token')} in {used}"
    picture = _grouped(run, traced.ids.tolist(), groups, members, "group", title)
    return replace(picture, facts={"layer": site.layer, "head": head, "tokens": members})


def text_by_experts(options: DrawOptions) -> Picture:
    """Draw the text with each token in the colour of its expert of largest weight in one layer. The facts hold the
    number of ``tokens`` of every expert, and its ``share`` of all weights."""
    run = text_run(options, "experts", "head")
    tokens = tokens_of(run, options)[: options.length or TRACED]
    seen = _shown(run.model(options.set).eval(), "experts", torch.from_numpy(tokens[None]))
    if not seen:
        raise KinformerError(f"{run.folder}: no layer of this run has experts; give a run of mixtral or deepseek.")
    layer = options.layer or min(seen)
    if layer not in seen:
        raise KinformerError(f"`layer` {layer}: lacks experts; layers with experts are {', '.join(map(str, seen))}.")
    experts, (weights, count) = seen[layer][0], (seen[layer][1][name] for name in ("weights", "count"))
    first = experts.gather(-1, weights.argmax(-1, keepdim=True))[0, :, 0]
    members = first.bincount(minlength=count).tolist()
    share = torch.zeros(count, dtype=torch.float64).index_add_(0, experts.flatten(), weights.double().flatten())
    used = f"{sum(map(bool, members))} of {count} are used"
    title = f", layer {layer}: the first expert of {plural(len(tokens), 'token')}; {used}"
    picture = _grouped(run, tokens.tolist(), first.tolist(), members, "expert", title)
    return replace(picture, facts={"layer": layer, "tokens": members, "share": (share / share.sum()).tolist()})


def text_by_exits(options: DrawOptions) -> Picture:
    """Draw the text with each token in the colour of the exit that predicted it."""
    run = text_run(options, "exits", "layer", "head")
    model = run.model(options.set)
    stack = early_exit_stack(model)
    if stack is None:
        raise KinformerError(
            f"{run.folder}: no token of this run leaves early; calibrate it first (kinformer calibrate DIR), or give a "
            "threshold by `set` stack.rule.thresholds=[0.9]."
        )
    tokens = tokens_of(run, options)
    # Windows overlap by half, so each token after the first window has at least half a window of context.
    windows, seen = main_windows(run, model, overlap=0.5, beside_lengths=True), []
    noting = stack.left.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0][0]))
    with torch.inference_mode(), noting:
        for window in cut(len(tokens) - 1, windows or Windows(context=len(tokens) - 1)):
            model(torch.from_numpy(tokens[None, window.start : window.start + window.size]))
            seen[-1] = seen[-1][window.unscored :]
    exits, recorder = torch.cat(seen), EarlyExitRecorder(stack)
    recorder.note(exits, None)
    exited = recorder.result
    assert exited is not None
    shares = zip(exited.layers, exited.tokens, strict=True)
    labels = [f"{layers}  {count / sum(exited.tokens):.0%}" for layers, count in shares]
    title = f": {exited.layers_per_token:.2f} of {plural(exited.layers[-1], 'layer')} per token"
    groups = [None, *exits.tolist()]
    picture = _text(run, tokens.tolist(), groups, title, legend="layers", labels=labels, ordered=True)
    return replace(picture, lines=[exited.text], facts=exited.facts)


def _shown(model: Any, point: str, tokens: Tensor) -> dict[int, tuple[Tensor, dict[str, Any]]]:
    """Return each layer's first value at a point of ``core.probe`` for ``tokens`` [1, time], with its facts."""
    seen: dict[int, tuple[Tensor, dict[str, Any]]] = {}
    number = 0

    def enter(entered: int, *_: object) -> None:
        nonlocal number
        number = entered

    def observe(value: Tensor, at: int, **facts: Any) -> Tensor:
        seen.setdefault(number, (value, facts))
        return value

    with ExitStack() as hooks, probing(**{point: observe}), torch.inference_mode():
        for index, layer in enumerate(model.stack.layers, start=1):
            for module in layer.modules():
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, index)))
        model(tokens)
    return seen


# The blocks of keys that the queries of a trained run choose on a text, by layer and head.


def chosen_blocks(options: DrawOptions) -> Picture:
    """Draw the keys that queries see through chosen blocks, among the first tokens of the text, with a panel for each
    layer and group of heads that choose together."""
    run = text_run(options, "blocks")
    model = run.model(options.set).eval()
    blocks = [facts["block"] for _, facts in _shown(model, "choices", torch.zeros(1, 1, dtype=torch.int64)).values()]
    if not blocks:
        raise KinformerError(f"{run.folder}: no layer of this run chooses blocks; give a run of moba or nsa.")
    length = options.length or min(MAX_TOKENS, max(TRACED, BLOCKS * max(blocks)))
    tokens = torch.from_numpy(tokens_of(run, options, length)[:length])
    chosen = _shown(model, "choices", tokens[None])
    if options.layer is not None and options.layer not in chosen:
        layers = ", ".join(map(str, chosen))
        raise KinformerError(f"`layer` {options.layer}: chooses no blocks; the layers that do are {layers}.")
    panels = []
    for number in chosen if options.layer is None else [options.layer]:
        choices, facts = chosen[number]
        if options.head is not None and options.head > facts["heads"]:
            raise KinformerError(f"`head` {options.head}: the layer has {plural(facts['heads'], 'head')}.")
        together = facts["heads"] // choices.shape[1]
        for index, choice in enumerate(choices[0]):
            heads = range(index * together, (index + 1) * together)
            if options.head is None or options.head - 1 in heads:
                panels.append(_choice_panel(choice, facts, f"layer {number}, {numbered('head', heads)}"))
    title = f"{run.folder.name} ({run.member}): blocks that {plural(len(tokens), 'token')} chose"
    return picture_of("run", title, panels)


def _choice_panel(chosen: Tensor, facts: dict[str, Any], place: str) -> PatternPanel:
    """Return the panel of the choices ``chosen`` [time, n]: the share of visible pairs in every cell."""
    (time, others), size = chosen.shape, facts["block"]
    blocks = -(-time // size)
    per_cell = -(-blocks // MOST_CELLS)
    cells, index = -(-blocks // per_cell), torch.arange(time)
    seen = torch.zeros(cells * per_cell * size, cells * per_cell + 1, dtype=torch.float64)  # keys, by query and block
    # A missing choice, -1, goes into the additional last column, which is dropped below.
    seen[:time].scatter_(1, torch.where(chosen < 0, cells * per_cell, chosen), float(size))
    # A query sees its own block only up to itself.
    seen[index, index // size] = (index % size + 1).double()
    pairs = seen[:, :-1].view(cells, per_cell * size, cells, per_cell).sum((1, 3))
    always = [f"{facts[name]} {name}" for name in ("first", "near") if facts.get(name)]
    name = f"blocks of {size}: its own and {others} others"
    return PatternPanel(
        place=place,
        name=f"{name}\n{' and '.join(always)} among them" if always else name,
        shares=(pairs / (per_cell * size) ** 2).numpy(),
        tokens_per_cell=per_cell * size,
        causal=True,
        length=cells * per_cell * size,
        allowed_pairs=int(pairs.sum()),
    )


# The spans of heads that learn how far they look back.


def learnt_spans(options: DrawOptions) -> Picture:
    """Draw the spans of a run by layer and head."""
    others = ("pattern", "position", "length", "layer", "head", "image_width", *TEXT_OPTIONS)
    if unread := [marked(name) for name in others if getattr(options, name)]:
        raise KinformerError(f"`spans` draws all spans of a run, and knows no {', '.join(unread)}; leave them out.")
    run = open_run(options.subject)
    title = f"{run.folder.name} ({run.member}, trained)"
    return picture_of("run", title, [span_panel(run.model(options.set), title)])


def span_panel(model: nn.Module, title: str) -> HeatPanel:
    """Return the spans in tokens, [layers, heads], of the layers of ``model`` that learn them, in order."""
    spans = [module.spans() for module in model.modules() if isinstance(module, Span)]
    if any(isinstance(module, TokenSpan) for module in model.modules()):
        raise KinformerError(
            f"`spans`: the spans of {title} follow from its tokens; draw a run whose heads learn one span each "
            "(span=soft_span)."
        )
    if not spans:
        raise KinformerError(f"`spans`: {title} learns no spans; train one with `set` layers.*.mixer.span=soft_span.")
    if len({len(heads) for heads in spans}) > 1:
        raise KinformerError(f"`spans`: the layers of {title} differ in their number of heads; draw another model.")
    values, name = np.array(spans), "learnt span in tokens"
    return HeatPanel(place="", name=name, values=values, rows="layer", columns="head", signed=False, first=1)


# The attention of a trained model to an image: attention roll-out, or the windows of its stages.
#
# Roll-out (Abnar and Zuidema 2020, section 3): A_l = (mean over heads of the probabilities + I) / 2 for each layer,
# and R = A_L ... A_1. A row of R holds the share of each patch that reaches a token by attention and residual
# connections.

TASK = "vision"
OF_OTHERS = ("pattern", "position", "spans", *TEXT_OPTIONS, "length", "layer", "head", "image_width")
"""Options of other drawings, which the drawing of an image refuses."""


class _Call(NamedTuple):
    """The arguments of a mixer while the model read the image."""

    mixer: EncoderMixer
    x: Tensor
    text: SequenceContext


def looked_at(options: DrawOptions) -> Picture:
    """Draw the image ``options.image``, or the first of several images, under the run's attention."""
    if unread := [marked(name) for name in OF_OTHERS if getattr(options, name)]:
        raise KinformerError(f"{', '.join(unread)}: is not for `image`, which draws a run's attention; leave it out.")
    assert options.image is not None
    run = open_run(options.subject)
    if run.task.name != TASK:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}; `image` is for the task {TASK}.")
    model, names = run.model(options.set), classes_of(run)
    picture = next(pictures(run, options.image, 1))
    calls: list[_Call] = []
    shares: list[Tensor] = []
    with ExitStack() as hooks:
        for module in model.stack.modules():
            if isinstance(module, EncoderMixer):
                hook = module.register_forward_pre_hook(lambda mixer, inputs: calls.append(_Call(mixer, *inputs)))
                hooks.enter_context(hook)
        if (gate := getattr(model.head, "gate", None)) is not None:
            hooks.enter_context(gate.register_forward_hook(lambda _, inputs, output: shares.append(output[0])))
        share, index = probabilities_of(model, [picture])[0].max(-1)
    over: Sequence[HeatOver | WindowsOver]
    if all(isinstance(call.mixer, WindowAttention) for call in calls):
        over = _windows(calls, model.config.input.patch)
    elif None not in (layers := [_probabilities(call) for call in calls]):
        over = _rolled(rollout([layer for layer in layers if layer is not None]), shares, calls[0], model.config.input)
    else:
        raise KinformerError(
            f"{run.folder}: `image` draws attention between all patches, as in vit and deit, or windows, as in swin, "
            f"but {run.member} mixes otherwise; give a run of vit, deit or swin."
        )
    title = f"{picture.name.rsplit('/')[-1]}: {names[int(index)]} {float(share):.1%} ({run.member}, {run.folder.name})"
    lines = [item.name.replace("\n", ", ") for item in over]
    content = SeenImage(pixels=picture.pixels, over=over)
    return Picture(title=title, content=content, lines=lines, facts={"image": title, "panels": lines})


def learning_curve(options: DrawOptions) -> Picture:
    """Return the curve of a run's training and validations."""
    run = open_run(options.subject)
    history = history_of(run.folder, run.task.metrics)
    if not (history.training or history.validation):
        raise KinformerError(f"{run.folder}: its metrics.jsonl lacks a curve; give a run that was trained here.")
    last = [
        f"{name}: {history.metric.text(points[-1][1])} at step {points[-1][0]:,}"
        for name, points in (("training, smoothed", history.training), ("validation", history.validation))
        if points
    ]
    title = f"{run.folder.name} ({run.member}, {run.recipe})"
    return Picture(title=title, content=history, lines=last, facts=history._asdict() | {"metric": history.metric.name})


def rollout(layers: Sequence[Tensor]) -> Tensor:
    """Return the roll-out [time, time] of the probabilities [heads, time, time] of ``layers``, from first to last."""
    output = torch.eye(layers[0].shape[-1], dtype=torch.float64)
    for layer in layers:
        mean = layer.double().cpu().mean(0) + torch.eye(layer.shape[-1], dtype=torch.float64)
        output = mean / mean.sum(-1, keepdim=True) @ output
    return output


def _probabilities(call: _Call) -> Tensor | None:
    """Return the mixer's probabilities [heads, time, time]; None if its outputs also depend on anything else."""
    try:
        read = weights_of(call.mixer, (call.x, call.text))
    except NoWeights:
        return None
    alone = read.keys == "text" and not read.implied and not read.constant.any()
    return read.weights if alone and not call.text.num_global and call.text.global_positions is None else None


def _rolled(rolled_so_far: Tensor, shares: Sequence[Tensor], call: _Call, input: Patches.Config) -> list[HeatOver]:
    """Return maps of attention roll-out over the patches, relative to the mean patch: one for each token before the
    patches, such as the class token, or one of the mean of all patches, or weighted by the ``shares`` of a gated
    head."""
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
    """Return the windows of every stage, shifted layers apart. The width of patches doubles from stage to stage."""
    windows: dict[tuple[int, int, int], list[int]] = {}
    widest = calls[0].x.shape[-1]
    for number, call in enumerate(calls, start=1):
        assert isinstance(call.mixer, WindowAttention) and call.text.grid is not None
        stage = (call.x.shape[-1] // widest).bit_length() - 1
        windows.setdefault((stage, *call.mixer.sizes(call.text.grid)), []).append(number)
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
