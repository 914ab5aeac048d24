"""The trace of a trained run on one text: attention weights, hidden states, buckets, spans, exits and steps of every
token, as tensors, as an interactive page and in words.

``core.probe`` reads the weights from the mixer's own kernels. The weights of softmax attention are its probabilities.
The weights of kernel attention are *implied* (Katharopoulos et al. 2020, equation 4; Ali et al. 2024).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, ReadsSource
from kinformer.core.encoder import EncoderMixer
from kinformer.core.model import CausalModel, Model, SourceModel, device_of
from kinformer.core.parts import Span, TokenSpan
from kinformer.core.probe import Keys, NoWeights, weights_of
from kinformer.core.stack import ModelConfig, Stack
from kinformer.lab.data.buckets import NO_ENDS, BosEos, lay
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.datastore.attach import attach_store
from kinformer.lab.evaluation.depths import early_exit_stack
from kinformer.lab.runs.options import PredictOptions, TraceOptions
from kinformer.lab.runs.run import Run, open_run
from kinformer.lab.tasks.texts import check_sequence, ends_of, mask_token_of
from kinformer.models.encoder import EncoderDecoder
from kinformer.runtime.errors import KinformerError, marked, plural, require_finite
from kinformer.runtime.files import write_atomic
from kinformer.runtime.parsing import with_finite_numbers
from kinformer.runtime.progress import note
from kinformer.stacks.sequential import Universal

Mixer: TypeAlias = CausalMixer | EncoderMixer


def kind_of(mixer: nn.Module) -> str:
    """Return the kind of a mixer, as configs name it."""
    return getattr(getattr(type(mixer), "Config", None), "kind", type(mixer).__name__)


# The tensors that tracing returns.


@dataclass(frozen=True, kw_only=True)
class AttentionTrace:
    """The trace of one mixer in one use of a layer.

    place: the mixer's place, as in "layer 2", or "encoder, layer 1", "layer 2, step 3", "layer 2, source".
    layer, use: numbers from 1; a stack that applies its layers more than once has more uses than layers.
    mixer: the kind of mixer, such as "softmax" or "lsh".
    heads: the numbers of the traced heads, from 1.
    weights: [heads, queries, keys], or None for a mechanism without weights. A row of softmax attention sums to 1, or
        to 0 for a query that sees no key. If something beside the text takes a share, ``note`` names it.
    values, outputs, constant: [heads, keys, width], [heads, queries, width] and [heads, queries, width], before the
        output projection: outputs = weights @ values + constant. The constant is 0 except for values by distance
        (Shaw) and for keys beside the text, such as compressed memories.
    implied: whether another mechanism implies the weights. Such weights are not probabilities, and ``note`` says so.
    buckets: int64 [heads, rounds, tokens] of attention within buckets or clusters, -1 for heads without buckets; None
        for a mixer without buckets.
    spans: the spans of heads in tokens: [heads] if each head learns a span, [heads, tokens] if each token has a span;
        None for a mixer without learnt spans.
    keys: the source of the keys: the tokens of the "text" itself or of the "source", or Linformer's "summaries".
    """

    place: str
    layer: int
    use: int
    mixer: str
    heads: tuple[int, ...] = ()
    weights: Tensor | None = None
    values: Tensor | None = None
    outputs: Tensor | None = None
    constant: Tensor | None = None
    implied: bool = False
    note: str = ""
    buckets: Tensor | None = None
    spans: Tensor | None = None
    keys: Keys = "text"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One model over one sequence: its ``ids`` int64 [tokens] and the ``tokens`` as text.

    hidden_states: one tensor [tokens, dim] after every use of a layer; the last tensor is before the model's last norm.
    attention: the traces of the mixers in the chosen layers, in order.
    exits: int64 [tokens], the number of layers of each token; None for a model without early exits.
    steps: int64 [tokens], the number of steps of each token; None for a model whose tokens do not halt.
    """

    ids: Tensor
    tokens: tuple[str, ...]
    hidden_states: tuple[Tensor, ...]
    attention: tuple[AttentionTrace, ...]
    exits: Tensor | None = None
    steps: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Trace(Reading):
    """The trace of a run on a text. For an encoder-decoder it covers the target, and ``source`` covers the encoder."""

    title: str
    source: Reading | None = None


# Tracing a run.

MASK = "[MASK]"
ReadHidden: TypeAlias = Callable[..., tuple[*tuple[object, ...], tuple[Tensor, ...]]]
"""A model's ``hidden(ids, taps=...)``, whose last result is the outputs of the tapped uses."""


def trace(folder: str | Path, text: str, options: TraceOptions) -> Trace:
    """Trace a run on a text; the public form is :func:`kinformer.trace`."""
    run = open_run(folder)
    if run.tokenizer is None:
        raise KinformerError(f"{run.folder}: was trained for the task {run.task.name}, which reads no text to trace.")
    if not text:
        raise KinformerError("the text to trace is empty; give one of a token or more.")
    model = attach_store(run, run.model(options.set).to(options.prepare(options.seed)), open_run)
    check_sequence(model)
    title = f"{run.folder.name} ({run.member})"
    if run.config.protocol is SourceModel:
        return _translation(run, model, text, options, title)
    if options.target is not None:
        raise KinformerError(f"`target` is for runs of the task translate, but {run.folder} is one of {run.task.name}.")
    ends = NO_ENDS if run.config.protocol is CausalModel else ends_of(run.config)
    ids = _ids(run, model, text, ends, options.max_tokens)
    return Trace(title=title, **vars(_read(run, model.stack, ids, options, model.hidden)))


def _translation(run: Run, model: EncoderDecoder, text: str, options: TraceOptions, title: str) -> Trace:
    """Trace an encoder-decoder: its encoder on the text, its decoder on the target."""
    from kinformer.lab.runs.inference import predictions

    target = options.target
    if target is None:
        settings = PredictOptions(set=options.set, seed=options.seed, device=options.device, quiet=True)
        target = str(next(iter(predictions(run.folder, [text], settings))).row["translation"])
    ends = ends_of(run.config)
    source = _ids(run, model, text, BosEos(eos=ends.eos), options.max_tokens)
    read = _ids(run, model, target, BosEos(bos=ends.bos), options.max_tokens)
    encoded = _read(run, model.encoder.stack, source, options, model.encoder.hidden, "encoder, ")
    with torch.no_grad():
        state = model.begin(source)
    decoded = _read(run, model.stack, read, options, partial(model.hidden, state=state))
    return Trace(title=title, source=encoded, **vars(decoded))


@dataclass
class _Call:
    """The call of a mixer in one use of a layer; ``first``: whether it is the first mixer of the layer."""

    mixer: Mixer
    inputs: tuple[object, ...]
    use: int
    first: bool


@dataclass
class _Records:
    """The records of hooks during one pass."""

    calls: list[_Call] = field(default_factory=list)
    exits: list[Tensor] = field(default_factory=list)
    running: list[Tensor] = field(default_factory=list)


def _read(run: Run, stack: Stack, ids: Tensor, options: TraceOptions, hidden: ReadHidden, prefix: str = "") -> Reading:
    """Run the model over ``ids`` [1, tokens] once, then call the mixers of the chosen layers again for their
    weights. The names of places begin with ``prefix``."""
    layers = numbers_in("layers", options.layers, len(stack.layers), "layers")
    with torch.no_grad(), _recording(stack) as records:
        result = hidden(ids, taps=range(len(stack.order)))
    taps = result[-1]
    require_finite(all(bool(tap.isfinite().all()) for tap in taps))
    calls = [call for call in records.calls if stack.order[call.use] + 1 in layers]
    running = [item[0].cpu() for item in records.running]
    return Reading(
        ids=ids[0].cpu(),
        tokens=tuple(labels(run, run.config, ids[0].tolist())),
        hidden_states=tuple(tap[0].float().cpu() for tap in taps),
        attention=tuple(_attention(stack, call, options.heads, prefix) for call in calls),
        exits=records.exits[0] if records.exits else None,
        steps=torch.stack(running).sum(0) if running else None,
    )


@contextmanager
def _recording(stack: Stack) -> Iterator[_Records]:
    """Record the calls of a stack's mixers, and the exits and steps of tokens."""
    records = _Records()
    with ExitStack() as hooks:

        def on(module: nn.Module, hook: Callable[..., None]) -> None:
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))

        def note_call(uses: Iterator[int], first: bool, mixer: Mixer, inputs: Any, named: dict[str, object]) -> None:
            records.calls.append(_Call(mixer, (*inputs, *named.values()), next(uses), first))

        for layer in stack.layers:
            uses = [use for use, index in enumerate(stack.order) if stack.layers[index] is layer]
            for number, mixer in enumerate(_mixers(layer)):
                on(mixer, partial(note_call, iter(uses), number == 0))
        early_exit = early_exit_stack(stack)
        if early_exit is not None:
            layers = torch.tensor([use + 1 for use in early_exit.exits])
            on(early_exit.left, lambda _, inputs, __: records.exits.append(layers[inputs[0][0].cpu()]))
        halting = stack.halting if isinstance(stack, Universal) else None
        if halting is not None:
            on(halting, lambda _, inputs, __: records.running.append(inputs[0].running))
        yield records


def _mixers(module: nn.Module) -> Iterator[Mixer]:
    """Yield the mixers inside a layer, without mixers inside another mixer."""
    for child in module.children():
        if isinstance(child, CausalMixer | EncoderMixer):
            yield child
        else:
            yield from _mixers(child)


def _attention(stack: Stack, call: _Call, heads: str | None, prefix: str) -> AttentionTrace:
    mixer, x = call.mixer, call.inputs[0]
    x = x.x if isinstance(x, Chunk) else x
    assert isinstance(x, Tensor)  # the vectors [1, tokens, dim] that the mixer read
    layer, steps = stack.order[call.use] + 1, len(stack.order) // len(stack.layers)
    place = f"{prefix}layer {layer}"
    if steps > 1:
        place += f", step {call.use // len(stack.layers) + 1}"
    if not call.first:
        place += ", source" if isinstance(mixer, ReadsSource) else f", {kind_of(mixer)}"
    untraced = AttentionTrace(place=place, layer=layer, use=call.use + 1, mixer=kind_of(mixer))
    try:
        read = weights_of(mixer, call.inputs)
    except NoWeights as reason:
        return replace(untraced, note=str(reason))
    chosen = numbers_in("heads", heads, len(read.weights), "heads")
    index = torch.tensor(chosen) - 1
    before = getattr(call.inputs[1], "num_global", 0)
    tokens = slice(before, x.shape[1])
    keys = tokens if read.keys == "text" else slice(None)
    constant, lacking = read.constant, read.lacking
    if before and read.keys == "text":
        constant = constant + read.weights[..., :before] @ read.values[:, :before]
    if before:
        lacking += f" What a row lacks of 1 is on the global input, {plural(before, 'token')} before the text."
    buckets, span, spans = read.buckets, getattr(mixer, "span", None), None
    if buckets is not None:  # only the last heads have buckets, and the others get -1
        rest = len(read.weights) - len(buckets)
        buckets = torch.cat([buckets.new_full((rest, *buckets.shape[1:]), -1), buckets])[index]
    if isinstance(span, Span):
        spans = torch.tensor(span.spans())[index]
    elif isinstance(span, TokenSpan):
        with torch.no_grad():
            spans = span.of(x)[0].cpu()[index]
    return replace(
        untraced,
        heads=chosen,
        weights=read.weights[:, tokens, keys].cpu()[index],
        values=read.values[:, keys].cpu()[index],
        outputs=read.outputs[:, tokens].cpu()[index],
        constant=constant[:, tokens].cpu()[index],
        implied=bool(read.implied),
        keys=read.keys,
        note=(f"These weights are {read.implied}." if read.implied else lacking).strip(),
        buckets=buckets,
        spans=spans,
    )


def numbers_in(name: str, text: str | None, highest: int, what: str) -> tuple[int, ...]:
    """Return the numbers from 1 to ``highest`` that the text of the option ``name`` lists, in order; all for None."""
    if text is None:
        return tuple(range(1, highest + 1))
    parts = [part.strip() for part in text.split(",")]
    valid = [str(number) for number in range(1, highest + 1)]
    for part in parts:
        if part not in valid:
            raise KinformerError(f"{marked(name)} {text}: {part!r} is none of the {what} 1 to {highest}; list some.")
    return tuple(sorted({int(part) for part in parts}))


def _ids(run: Run, model: Model, text: str, ends: BosEos, limit: int) -> Tensor:
    """Return the ids [1, tokens] of a text's first tokens; MASK in the text becomes the model's mask token, if any."""
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
    """Yield the text of every token; a character of several tokens belongs to the last token."""
    assert run.tokenizer is not None
    ends = ends_of(config)
    special = {mask_token_of(config): MASK, ends.bos: "[BOS]", ends.eos: "[EOS]"}
    stream = run.tokenizer.stream()
    for token in ids:
        yield special[token] if token in special else stream.feed(token)


# A trace as one self-contained interactive page (in the manner of BertViz, Vig 2019), and as arrays.

ENDINGS = (".html", ".npz")
ASSETS = Path(__file__).parent / "assets"
STEPS = 32767


def check(path: Path) -> None:
    """Refuse a file name whose ending is neither .html nor .npz."""
    if path.suffix.lower() not in ENDINGS:
        raise KinformerError(f"`out` {path}: ends in neither .html (a page) nor .npz (arrays); name it so.")
    if path.is_dir():
        raise KinformerError(f"`out` {path}: is a folder; give the name of a file.")


def write(traced: Trace, path: Path) -> None:
    """Write a trace as a page (.html) or as its tensors by name (.npz); the ending of ``path`` decides."""
    if path.suffix.lower() == ".html":
        page = _page(traced)
        write_atomic(path, lambda target: target.write_text(page, encoding="utf-8"))
        return
    parts = [(reading, "encoder, " if reading is not traced else "") for reading in readings(traced)]
    arrays: dict[str, Any] = {name: value for reading, before in parts for name, value in _arrays(reading, before)}

    def save(target: Path) -> None:
        with target.open("wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomic(path, save)


def readings(traced: Trace) -> list[Reading]:
    """Return the readings of the source, if any, and of the text."""
    return [traced] if traced.source is None else [traced.source, traced]


def _arrays(reading: Reading, before: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a reading by name, as in "layer 1/weights"."""
    for name in ("ids", "exits", "steps"):
        if (value := getattr(reading, name)) is not None:
            yield before + name, value.numpy()
    for number, hidden_states in enumerate(reading.hidden_states, start=1):
        yield f"{before}hidden_states/{number}", hidden_states.numpy()
    for item in reading.attention:
        for name in ("weights", "values", "outputs", "constant", "buckets", "spans"):
            if (value := getattr(item, name)) is not None:
                yield f"{item.place}/{name}", value.numpy()


def _page(traced: Trace) -> str:
    """Return the page, whose data are ``readings`` (name, tokens, exits, steps) and ``places`` (see ``_place``). Tokens
    may come from untrusted text, so the page escapes tokens."""
    if find_spec("jinja2") is None:
        raise KinformerError("pages need jinja2, which is not installed; pip install 'kinformer[plot]' gets it.")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    several = readings(traced)
    names = ["Text"] if len(several) == 1 else ["Source", "Target"]
    pairs = zip(names, several, strict=True)
    data = {
        "readings": [{"name": name} | _plain(item, "tokens", "exits", "steps") for name, item in pairs],
        "places": [_place(item, number) for number, reading in enumerate(several) for item in reading.attention],
    }
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    # A token such as "</script>" would end the script, so "<" is escaped.
    text = json.dumps(with_finite_numbers(data), ensure_ascii=True, separators=(",", ":"))
    embedded = Markup(text.replace("<", "\\u003c"))  # noqa: S704
    style, script = (Markup((ASSETS / f"trace.{name}").read_text(encoding="utf-8")) for name in ("css", "js"))  # noqa: S704
    template = environment.get_template("trace.html")
    return template.render(title=traced.title, style=style, script=script, data=embedded)


def _place(item: AttentionTrace, reading: int) -> dict[str, object]:
    """Return the data of one mixer for the page: weights as int16 in steps of ``unit``, deflated, in base64."""
    facts = _plain(item, "place", "mixer", "heads", "note", "keys", "implied")
    facts |= {"reading": reading} | _plain(item, "buckets", "spans")
    if item.weights is None:
        return facts | {"weights": None, "queries": 0, "count": 0, "unit": 0.0}
    largest = max(float(item.weights.abs().max()), 1e-12)
    steps = (item.weights.double() / largest * STEPS).round().to(torch.int16).numpy().astype("<i2")
    packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode("ascii")
    _, queries, count = item.weights.shape
    return facts | {"weights": packed, "queries": queries, "count": count, "unit": largest / STEPS}


def _plain(item: Reading | AttentionTrace, *names: str) -> dict[str, object]:
    """Return fields as JSON-ready data."""
    values = ((name, getattr(item, name)) for name in names)
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values}


# A trace as JSON-ready facts and in words.


def facts_of(traced: Trace) -> dict[str, object]:
    """Return a trace without its tensors as JSON-ready data, with the mean distance and the perplexity of each head."""
    facts: dict[str, object] = {"title": traced.title}
    for name, reading in zip(("source", "text") if traced.source else ("text",), readings(traced), strict=True):
        attention = [_facts(item) for item in reading.attention]
        facts[name] = _plain(reading, "tokens", "exits", "steps") | {"attention": attention}
    return facts


def _facts(item: AttentionTrace) -> dict[str, object]:
    facts = _plain(item, "place", "mixer", "keys", "implied", "note", "buckets", "spans")
    if item.weights is None:
        return facts | {"heads": []}
    distances = mean_distance(item.weights).tolist() if item.keys == "text" else [None] * len(item.heads)
    columns = zip(item.heads, distances, perplexity(item.weights).tolist(), strict=True)
    names = ("head", "mean_distance", "effective_keys")
    return facts | {"heads": [dict(zip(names, column, strict=True)) for column in columns]}


def lines_of(traced: Trace) -> Iterator[str]:
    """Yield a trace in words, a line for each mixer."""
    for reading in readings(traced):
        for item in reading.attention:
            if item.weights is None:
                yield f"{item.place}: {item.note}"
                continue
            line = f"{item.place} ({item.mixer}): a query looks at {_listed(perplexity(item.weights))} keys"
            if item.keys == "text":
                line += f", {_listed(mean_distance(item.weights))} tokens away"
            yield f"{line}{' by head' if len(item.heads) > 1 else ''}"
        if reading.exits is not None:
            yield f"exits: {reading.exits.double().mean().item():.2f} layers per token"
        if reading.steps is not None:
            yield f"halting: {reading.steps.double().mean().item():.2f} steps per token"


def _listed(values: Tensor) -> str:
    return ", ".join(f"{value:.1f}" for value in values.tolist())


def mean_distance(weights: Tensor) -> Tensor:
    """Return the mean distance in tokens from a query to its keys, [heads], weighted by the size of the weights."""
    _, queries, keys = weights.shape
    away = (torch.arange(queries)[:, None] - torch.arange(keys)).abs().to(weights.dtype)
    size = weights.abs()
    return (size * away).sum((1, 2)) / size.sum((1, 2)).clamp_min(1e-12)


def perplexity(weights: Tensor) -> Tensor:
    """Return the mean effective number of keys of a head's queries, [heads]. A row of ``weights`` [heads, queries,
    keys] is scaled so that its magnitudes sum to 1. Its effective number of keys is 2 to the power of its entropy in
    bits."""
    size = weights.abs()
    total = size.sum(-1, keepdim=True)
    shares = size / total.clamp_min(1e-12)
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1)
    some = total[..., 0] > 0
    return (entropy.exp() * some).sum(-1) / some.sum(-1).clamp_min(1)
