"""A trained run on one text: attention weights, hidden states, buckets, spans, exits and steps, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, ReadsSource
from kinformer.core.encoder import EncoderMixer
from kinformer.core.model import CausalModel, Model, SourceModel, device_of
from kinformer.core.model_config import ModelConfig
from kinformer.core.span import Span, TokenSpan
from kinformer.core.stack import Stack
from kinformer.data.buckets import NO_ENDS, BosEos, lay
from kinformer.data.tokenizer import prompt_ids
from kinformer.evaluation.early_exit import early_exit_stack
from kinformer.features.centroids import Centroids
from kinformer.features.hashes import Hashes
from kinformer.models.encoder_decoder import EncoderDecoder
from kinformer.runs.prediction_options import PredictOptions
from kinformer.runs.run import Run, open_run
from kinformer.runs.stores import STORES
from kinformer.runs.tracing.options import TraceOptions, numbers_in
from kinformer.runs.tracing.record import AttentionTrace, Reading, Trace
from kinformer.runs.tracing.sites import Site, kind_of, site_of
from kinformer.runs.tracing.weights import weights_of
from kinformer.runtime.errors import KinformerError, require_finite
from kinformer.runtime.progress import note
from kinformer.runtime.words import plural
from kinformer.tasks.shared.text import check_sequence, ends_of, mask_token_of

MASK = "[MASK]"
Mixer: TypeAlias = CausalMixer | EncoderMixer
ReadHidden: TypeAlias = Callable[..., tuple[*tuple[object, ...], tuple[Tensor, ...]]]
"""A model's ``hidden(ids, taps=...)``, whose last result is the outputs of the tapped uses."""
Hook: TypeAlias = Callable[..., None]


def trace(folder: str | Path, text: str, options: TraceOptions) -> Trace:
    """Trace a run on a text; the public form is :func:`kinformer.trace`."""
    run = open_run(folder)
    if run.tokenizer is None:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}, which reads no text to trace.")
    if not text:
        raise KinformerError("the text to trace is empty; give one of a token or more.")
    model = STORES.attach(run, run.model(options.set).to(options.prepare(options.seed)))
    check_sequence(model)
    title = f"{run.folder.name} ({run.member})"
    if run.config.protocol is SourceModel:
        return _translation(run, model, text, options, title)
    if options.target is not None:
        raise KinformerError(f"`target` is for runs of the task translate, but {run.folder} is one of {run.task.name}.")
    ends = NO_ENDS if run.config.protocol is CausalModel else ends_of(run.config)
    ids = _ids(run, model, text, ends, options.max_tokens)
    return Trace(title=title, **vars(_read(_Subject(run, model.stack, ""), ids, options, model.hidden)))


def _translation(run: Run, model: EncoderDecoder, text: str, options: TraceOptions, title: str) -> Trace:
    """Trace an encoder-decoder: its encoder on the text, its decoder on the target."""
    from kinformer.runs.predict import predictions

    target = options.target
    if target is None:
        settings = PredictOptions(set=options.set, seed=options.seed, device=options.device, quiet=True)
        target = str(next(iter(predictions(run.folder, [text], settings))).row["translation"])
    ends = ends_of(run.config)
    source = _ids(run, model, text, BosEos(eos=ends.eos), options.max_tokens)
    read = _ids(run, model, target, BosEos(bos=ends.bos), options.max_tokens)
    encoder = _Subject(run, model.encoder.stack, "encoder, ")
    encoded = _read(encoder, source, options, model.encoder.hidden)
    with torch.no_grad():
        state = model.begin(source)
    decoder = _Subject(run, model.stack, "")
    decoded = _read(decoder, read, options, partial(model.hidden, state=state))
    return Trace(title=title, source=encoded, **vars(decoded))


@dataclass(frozen=True)
class _Subject:
    """A stack of a run's model, and how the names of its places begin."""

    run: Run
    stack: Stack
    name: str


@dataclass
class _Call:
    """What a mixer was called with while the model read the text, in which use of a layer, and whether it is the
    ``first`` of that layer's mixers."""

    mixer: Mixer
    inputs: tuple[object, ...]
    use: int
    first: bool

    @property
    def x(self) -> Tensor:
        """The vectors [1, tokens, dim] that the mixer read."""
        x = self.inputs[0].x if isinstance(self.inputs[0], Chunk) else self.inputs[0]
        assert isinstance(x, Tensor)
        return x


@dataclass
class _Records:
    """What hooks record of one pass."""

    calls: list[_Call] = field(default_factory=list)
    exits: list[Tensor] = field(default_factory=list)
    running: list[Tensor] = field(default_factory=list)


def _read(subject: _Subject, ids: Tensor, options: TraceOptions, hidden: ReadHidden) -> Reading:
    """Run the model over ``ids`` [1, tokens] once, and its mixers of the chosen layers again for their weights."""
    stack = subject.stack
    layers = numbers_in("layers", options.layers, len(stack.layers), "layers")
    with torch.no_grad(), _recording(stack) as records:
        result = hidden(ids, taps=range(len(stack.order)))
    taps = result[-1]
    require_finite(all(bool(tap.isfinite().all()) for tap in taps))
    attention = [
        _attention(subject, call, options.heads) for call in records.calls if stack.order[call.use] + 1 in layers
    ]
    exits = [torch.tensor([use + 1 for use in stack.exits])[item[0].cpu()] for item in records.exits]
    steps = torch.stack([item[0].cpu() for item in records.running]).sum(0) if records.running else None
    return Reading(
        ids=ids[0].cpu(),
        tokens=tuple(labels(subject.run, subject.run.config, ids[0].tolist())),
        hidden_states=tuple(tap[0].float().cpu() for tap in taps),
        attention=tuple(attention),
        exits=exits[0] if exits else None,
        steps=steps,
    )


@contextmanager
def _recording(stack: Stack) -> Iterator[_Records]:
    """Note the calls of a stack's mixers, the exits of tokens and their steps."""
    records = _Records()
    with ExitStack() as hooks:

        def on(module: nn.Module, hook: Hook) -> None:
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

        for layer in stack.layers:
            uses = [use for use, index in enumerate(stack.order) if stack.layers[index] is layer]
            for number, mixer in enumerate(_mixers(layer)):
                on(mixer, _Recorder(records, uses, number == 0))
        left = getattr(early_exit_stack(stack), "left", None)
        if left is not None:
            on(left, lambda _, inputs, __: records.exits.append(inputs[0]))
        if stack.halting is not None:
            on(stack.halting, lambda _, inputs, __: records.running.append(inputs[0].running))
        yield records


def _mixers(module: nn.Module) -> Iterator[Mixer]:
    """Yield the mixers inside a layer, not those inside another mixer."""
    for child in module.children():
        if isinstance(child, CausalMixer | EncoderMixer):
            yield child
        else:
            yield from _mixers(child)


class _Recorder:
    """A hook that notes the calls of one mixer, which happen once in every one of the ``uses`` of its layer."""

    def __init__(self, records: _Records, uses: list[int], first: bool) -> None:
        self.records, self.uses, self.first = records, iter(uses), first

    def __call__(self, mixer: Mixer, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        self.records.calls.append(_Call(mixer, (*inputs, *named.values()), next(self.uses), self.first))


def _attention(subject: _Subject, call: _Call, heads: str | None) -> AttentionTrace:
    """Return what one call of a mixer attended to."""
    mixer, site, stack = call.mixer, site_of(call.mixer), subject.stack
    layer, steps = stack.order[call.use] + 1, len(stack.order) // len(stack.layers)
    place = f"{subject.name}layer {layer}"
    if steps > 1:
        place += f", step {call.use // len(stack.layers) + 1}"
    if not call.first:
        place += ", source" if isinstance(mixer, ReadsSource) else f", {kind_of(mixer)}"
    untraced = AttentionTrace(
        place=place,
        layer=layer,
        use=call.use + 1,
        mixer=kind_of(mixer),
        heads=(),
        weights=None,
        values=None,
        outputs=None,
        constant=None,
    )
    if not isinstance(site, Site):
        return replace(untraced, note=site)
    with _bucketing(mixer) as sorted_into:
        read = weights_of(mixer, call.inputs, site)
    chosen = numbers_in("heads", heads, len(read.weights), "heads")
    index = torch.tensor(chosen) - 1
    before = getattr(call.inputs[1], "num_global", 0)
    tokens = slice(before, call.x.shape[1])
    keys = tokens if site.keys == "text" else slice(None)
    constant = read.constant
    if before and site.keys == "text":
        constant = constant + read.weights[..., :before] @ read.values[:, :before]
    lacking = site.lacking
    if before:
        lacking += f" What a row lacks of 1 is on the global input, {plural(before, 'token')} before the text."
    return replace(
        untraced,
        heads=chosen,
        weights=read.weights[:, tokens, keys].cpu()[index],
        values=read.values[:, keys].cpu()[index],
        outputs=read.outputs[:, tokens].cpu()[index],
        constant=constant[:, tokens].cpu()[index],
        implied=bool(site.implied),
        keys=site.keys,
        note=(f"These weights are {site.implied}." if site.implied else lacking).strip(),
        buckets=_buckets(sorted_into, len(read.weights), index),
        spans=_spans(mixer, call.x, index),
    )


@contextmanager
def _bucketing(mixer: nn.Module) -> Iterator[list[Tensor]]:
    """Note the buckets or clusters [heads, rounds, tokens] that a mixer sorts its tokens into."""
    records: list[Tensor] = []

    def hook(module: nn.Module, _: object, result: Tensor) -> None:
        records.append(result[0] if isinstance(module, Hashes) else result[0].argmax(-1)[:, None])

    handles = [part.register_forward_hook(hook) for part in mixer.modules() if isinstance(part, Hashes | Centroids)]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _buckets(records: list[Tensor], heads: int, index: Tensor) -> Tensor | None:
    """Return the buckets of the heads ``index``, -1 of those without; the last of all heads have some."""
    if not records:
        return None
    first = records[0].cpu()
    return torch.cat([first.new_full((heads - len(first), *first.shape[1:]), -1), first])[index]


def _spans(mixer: nn.Module, x: Tensor, index: Tensor) -> Tensor | None:
    """Return the spans that the heads ``index`` learnt, or that they have at every token."""
    span = getattr(mixer, "span", None)
    if isinstance(span, Span):
        return torch.tensor(span.spans())[index]
    if isinstance(span, TokenSpan):
        with torch.no_grad():
            return span.of(x)[0].cpu()[index]
    return None


def _ids(run: Run, model: Model, text: str, ends: BosEos, limit: int) -> Tensor:
    """Return the ids [1, tokens] of a text's first tokens; MASK stands for the model's mask, where it has one."""
    assert run.tokenizer is not None
    mask = mask_token_of(run.config)
    first, *others = text.split(MASK) if mask is not None else [text]
    parts = [prompt_ids(run.tokenizer, first), *map(run.tokenizer.encode, others)]
    pieces = [parts[0], *(np.array([mask, *part]) for part in parts[1:])]
    ids = np.concatenate(pieces).astype(np.int64)
    room = min(limit, model.max_length or limit) - ends.size
    if len(ids) > room:
        note(f"note: the text has {plural(len(ids), 'token')}; the first {room} are traced.")
    tokens, _ = lay([ids[: max(1, room)]], ends, min(len(ids), max(1, room)) + ends.size)
    return torch.from_numpy(tokens).to(device_of(model))


def labels(run: Run, config: ModelConfig, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text of every token; the bytes of one character stand with the last of them."""
    assert run.tokenizer is not None
    ends = ends_of(config)
    special = {mask_token_of(config): MASK, ends.bos: "[BOS]", ends.eos: "[EOS]"}
    stream = run.tokenizer.stream()
    for token in ids:
        yield special[token] if token in special else stream.feed(token)
