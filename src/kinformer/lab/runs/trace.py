"""A trained run on one text: attention weights, hidden states, buckets, spans, exits and steps, token by token."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, PartialOutput, ReadsSource
from kinformer.core.encoder import EncoderMixer
from kinformer.core.model import CausalModel, Model, SourceModel, device_of
from kinformer.core.span import Span, TokenSpan
from kinformer.core.stack import ModelConfig, Stack
from kinformer.kernels.attention import Projected
from kinformer.lab.data.buckets import NO_ENDS, BosEos, lay
from kinformer.lab.data.tokenizer import prompt_ids
from kinformer.lab.drawing.text import trace_page
from kinformer.lab.evaluation.exits import early_exit_stack
from kinformer.lab.runs.options import PredictOptions
from kinformer.lab.runs.run import STORES, Run, open_run
from kinformer.lab.runs.trace_options import TraceOptions, numbers_in
from kinformer.lab.tasks.texts import check_sequence, ends_of, mask_token_of
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.buckets import BidirectionalLSH, BidirectionalRouting, LSHAttention, RoutingAttention
from kinformer.mixers.chosen_blocks import ChosenBlocks
from kinformer.mixers.compressive import Compressive
from kinformer.mixers.convolutions import CausalChannelMix, CausalTransition, SeparableConvolution, TwoSidedConvolution
from kinformer.mixers.cross import (
    CrossAttention,
    LinearCrossAttention,
    LinformerCrossAttention,
    LocalCrossAttention,
    PredictiveCrossAttention,
    SourceSummaries,
)
from kinformer.mixers.encoders import BidirectionalLinear, EtcAttention, Linformer, StarAttention
from kinformer.mixers.latent import LatentAttention, SingleHead
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.memorizing import Memorizing
from kinformer.mixers.recurrent import LSTM, RWKV7, BidirectionalLSTM, OuterProduct
from kinformer.mixers.segment_memory import SegmentMemory
from kinformer.mixers.sinkhorn import CausalSinkhornAttention, SinkhornAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.mixers.tensorized import BidirectionalTensorized, TensorizedAttention, TensorizedMemory
from kinformer.mixers.windows import WindowAttention
from kinformer.models.encoder_decoder import EncoderDecoder
from kinformer.parts.bucketing import Centroids, Hashes
from kinformer.parts.projections import AlignedState, CrossState, Pieces
from kinformer.runtime.errors import KinformerError, plural, require_finite
from kinformer.runtime.files import write_atomic
from kinformer.runtime.progress import note

# A stand-in for the values of tokens, by which the weights of attention are read from its outputs.


class Probe:
    """A stand-in for the values of tokens: ``first`` None gives the values themselves, -1 zeros, any other the columns
    of the identity that belong to the tokens from ``first`` on."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.parts: dict[int, Tensor] = {}

    def __call__(self, v: Tensor, at: int = 0) -> Tensor:
        """Return what stands for v [batch, heads, time, width], whose first token is the mixer's token ``at``."""
        if self.first is None:
            self.parts.setdefault(at, v)
            return v
        out = torch.zeros_like(v)
        if self.first >= 0:
            low = max(self.first, at)
            high = max(low, min(self.first + v.shape[3], at + v.shape[2]))
            index = torch.arange(low, high, device=v.device)
            out[:, :, index - at, index - self.first] = 1
        return out

    @property
    def values(self) -> Tensor:
        """Return the values [batch, heads, tokens, width] of all tokens."""
        return torch.cat([part for _, part in sorted(self.parts.items())], 2)


# The places where values enter the mixers: there a probe stands in for them, by which weights are read.

Keys = Literal["text", "source", "summaries"]
Patch: TypeAlias = AbstractContextManager[object]
Install: TypeAlias = Callable[[Any, Probe], Patch]
SourceState: TypeAlias = CrossState | AlignedState | SourceSummaries


@dataclass(frozen=True)
class Site:
    """Where values enter a mixer: ``install(mixer, probe)`` puts a probe there. ``implied`` says what weights are that
    are no probabilities; ``lacking``, what probabilities leave out of the text; ``keys``, what the keys are."""

    install: Install
    implied: str = ""
    lacking: str = ""
    keys: Keys = "text"


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., object], before: bool = False) -> Iterator[None]:
    handle = (module.register_forward_pre_hook if before else module.register_forward_hook)(hook)
    try:
        yield
    finally:
        handle.remove()


def _by_position(mixer: SoftmaxAttention | SegmentMemory | BidirectionalAttention, probe: Probe) -> Patch:
    """Replace the values where the position passes them on, the last thing that happens to them."""
    values = mixer.position.values
    return patch.object(mixer.position, "values", lambda v: probe(values(v)))


@contextmanager
def _bidirectional(mixer: BidirectionalAttention, probe: Probe) -> Iterator[None]:
    """Replace the values, and those of global queries, which are projected within attention."""
    attend: Callable[..., object] = mixer._attend

    def replaced(q: Tensor, k: Tensor | Projected, v: Tensor | Projected, *rest: object, **options: object) -> object:
        if isinstance(k, Projected) and isinstance(v, Projected):
            k, v = k.made(q.shape[1]), probe(v.made(q.shape[1]))
        return attend(q, k, v, *rest, **options)

    with _by_position(mixer, probe), patch.object(mixer, "_attend", replaced):
        yield


def _by_projection(mixer: Compressive | SinkhornAttention | CausalSinkhornAttention, probe: Probe) -> Patch:
    """Replace the values that a mixer projects piece by piece, in order."""
    seen = [0]

    def hook(_: nn.Module, __: object, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv
        v = probe(v, seen[0])
        seen[0] += v.shape[2]
        return q, k, v

    return _hooked(mixer.projection, hook)


def _by_piece(mixer: EtcAttention, probe: Probe) -> Patch:
    """Replace the values of the global and of the long input, for either's queries."""
    pieces = mixer.projection.pieces

    def replaced(x: Tensor, num_global: int) -> Pieces:
        made = pieces(x, num_global)
        (l2l, l2g, g2g, g2l) = made[2:]
        return made._replace(
            l2l=(l2l[0], probe(l2l[1], num_global)),
            l2g=(l2g[0], probe(l2g[1])),
            g2g=(g2g[0], probe(g2g[1])),
            g2l=(g2l[0], probe(g2l[1], num_global)),
        )

    return patch.object(mixer.projection, "pieces", replaced)


def _rows(module: str, shape: Callable[[Any], tuple[int, int, int]]) -> Install:
    """Replace the last part of the rows of the linear map ``module``; ``shape(mixer)`` is parts, heads, width."""

    def install(mixer: nn.Module, probe: Probe) -> Patch:
        def hook(_: nn.Module, __: object, rows: Tensor) -> Tensor:
            parts = rows.unflatten(-1, shape(mixer)).clone()
            parts[..., -1, :, :] = probe(parts[..., -1, :, :].transpose(1, 2)).transpose(1, 2)
            return parts.flatten(-3)

        return _hooked(getattr(mixer, module), hook)

    return install


def _routing(mixer: RoutingAttention, probe: Probe) -> Patch:
    """Replace the values of local and of routed heads."""
    first, second = [mixer.local] * 3 + [mixer.routed] * 2, [mixer.local, mixer.routed]

    def hook(_: nn.Module, __: object, rows: Tensor) -> Tensor:
        q, k, v, routed_q, routed_v = rows.unflatten(-1, (-1, mixer.head_dim)).split(first, 2)
        replaced = probe(torch.cat([v, routed_v], 2).transpose(1, 2)).transpose(1, 2).split(second, 2)
        return torch.cat([q, k, replaced[0], routed_q, replaced[1]], 2).flatten(2)

    return _hooked(mixer.qkv, hook)


def _kernel(mixer: LinearAttention | RWKV7, probe: Probe) -> Patch:
    """Replace the values as they enter the state."""
    if isinstance(mixer, LinearAttention) and mixer.config.steps > 1:
        raise KinformerError(
            f"a token writes {mixer.config.steps} values in this layer, so no weight belongs to a token; trace a model "
            "with steps = 1."
        )
    update: Callable[..., object] = mixer._update

    def updated(tokens: tuple[Tensor, ...], *rest: object) -> object:
        q, k, v, *strengths = tokens
        return update((q, k, probe(v), *strengths), *rest)

    return patch.object(mixer, "_update", updated)


def _single_head(mixer: SingleHead, probe: Probe) -> Patch:
    """Replace the values, which are the keys themselves."""
    mix = mixer._mix
    return patch.object(mixer, "_mix", lambda q, k, v, visibility: mix(q, k, probe(v), visibility))


def _chosen(mixer: ChosenBlocks, probe: Probe) -> Patch:
    """Replace the values, of which those of blocks are the means."""
    project = mixer._project

    def replaced(chunk: Chunk, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(chunk, positions)
        return q, k, probe(v)

    return patch.object(mixer, "_project", replaced)


@contextmanager
def _latent(mixer: LatentAttention, probe: Probe) -> Iterator[None]:
    """Replace the values that the expanded form makes of latents."""
    keys_values = mixer._keys_values

    def replaced(slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = keys_values(slots)
        return k, probe(v)

    with patch.object(mixer, "_keys_values", replaced), patch.object(mixer, "form", "expanded"):
        yield


def _cross(mixer: nn.Module, probe: Probe) -> Patch:
    """Replace the values of the source in the state, where those of local attention stand beside a counter."""

    def hook(_: nn.Module, inputs: tuple[Chunk, SourceState]) -> tuple[Chunk, SourceState]:
        chunk, state = inputs
        if isinstance(state, AlignedState):
            return chunk, state._replace(source=state.source._replace(v=probe(state.source.v)))
        return chunk, state._replace(v=probe(state.v))

    return _hooked(mixer, hook, before=True)


def _summaries(mixer: Linformer, probe: Probe) -> Patch:
    """Replace the values of the summaries of the text."""
    summaries = mixer._summaries

    def replaced(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = summaries(x, valid)
        return k, probe(v)

    return patch.object(mixer, "_summaries", replaced)


_SORTED = "implied by attention to sorted blocks: its probabilities times what each token adds to each sorted block"
_KERNEL = "implied by kernel attention, which computes no probabilities: what each value adds to the output"
SITES: dict[type, Site] = {
    SoftmaxAttention: Site(_by_position),
    SegmentMemory: Site(_by_position),
    BidirectionalAttention: Site(_bidirectional),
    EtcAttention: Site(_by_piece),
    Compressive: Site(
        _by_projection, lacking="What a row lacks of 1 is on compressed memories, which are no tokens of the text."
    ),
    Memorizing: Site(
        _rows("qkv", lambda mixer: (3, mixer.num_heads, mixer.head_dim)),
        lacking="The window's probabilities and the memories' are mixed by the gate of their head.",
    ),
    LSHAttention: Site(_rows("qv", lambda mixer: (2, mixer.num_heads, mixer.head_dim))),
    BidirectionalLSH: Site(_rows("qv", lambda mixer: (2, mixer.num_heads, mixer.head_dim))),
    RoutingAttention: Site(_routing),
    BidirectionalRouting: Site(_rows("qkv", lambda mixer: mixer.shape)),
    SingleHead: Site(_single_head),
    LatentAttention: Site(_latent),
    ChosenBlocks: Site(_chosen, lacking="Where there are several branches, each counts by the gate of its head."),
    CrossAttention: Site(_cross, keys="source"),
    LocalCrossAttention: Site(_cross, keys="source"),
    PredictiveCrossAttention: Site(_cross, lacking="What a row lacks of 1, the Gaussian takes away.", keys="source"),
    LinformerCrossAttention: Site(_cross, keys="summaries"),
    LinearAttention: Site(_kernel, _KERNEL),
    RWKV7: Site(_kernel, _KERNEL),
    BidirectionalLinear: Site(_rows("qkv", lambda mixer: mixer.shape), _KERNEL),
    Linformer: Site(_summaries, keys="summaries"),
    SinkhornAttention: Site(_by_projection, _SORTED),
    CausalSinkhornAttention: Site(_by_projection, _SORTED),
}
"""Where values enter a mixer, by its class; a mixer of another package adds its own."""
NO_WEIGHTS: dict[type, str] = {
    LSTM: "An LSTM has no attention: what it remembers of a token is no weighted sum.",
    BidirectionalLSTM: "An LSTM has no attention: what it remembers of a token is no weighted sum.",
    StarAttention: "A star attends twice in one layer, to neighbours and through its relay, so no weights between two "
    "tokens say what reaches an output.",
    **dict.fromkeys(
        (TensorizedAttention, TensorizedMemory, BidirectionalTensorized),
        "Tensorized attention multiplies queries, keys and values in a core tensor; it weighs no tokens by "
        "probabilities.",
    ),
    OuterProduct: "Fast weights behind an activation hold no sum of values that tokens add.",
    LinearCrossAttention: "Linear cross-attention holds sums over the source, which do not say what each of its tokens "
    "adds.",
    **dict.fromkeys(
        (SeparableConvolution, TwoSidedConvolution, CausalTransition),
        "A convolution has no attention: its weights are the same for every text.",
    ),
    CausalChannelMix: "A token shift has no attention: it mixes every token with the one before in the same shares.",
    WindowAttention: "Attention within the windows of an image has no tokens of a text; draw an image instead.",
}
"""Why a mixer has no attention weights of a text, by its class."""


def kind_of(mixer: nn.Module) -> str:
    """Return the kind that configs call a mixer by."""
    return getattr(getattr(type(mixer), "Config", None), "kind", type(mixer).__name__)


def site_of(mixer: nn.Module) -> Site | str:
    """Return where values enter ``mixer``, or a sentence that says why it has no attention weights."""
    if getattr(mixer, "differential", None) is not None:
        return "Differential attention takes the difference of two probabilities and a norm of what it reads."
    if getattr(mixer, "exclusive", None) is not None:
        return "Exclusive attention takes a token's own value out of what its heads read."
    if getattr(mixer, "value_summary", None) is not None:
        return "A perceptron sums up the values of blocks, which no weights of tokens do (compression = mean has them)."
    for kind in type(mixer).__mro__:
        if kind in SITES:
            return SITES[kind]
        if kind in NO_WEIGHTS:
            return NO_WEIGHTS[kind]
    return f"{type(mixer).__name__} is a mixer of another package, which does not say where its values enter."


# What tracing returns: plain tensors, their shapes and what they mean.


@dataclass(frozen=True, kw_only=True)
class AttentionTrace:
    """One mixer of one use of a layer on the text.

    place: where it stands, as in "layer 2", or "encoder, layer 1", "layer 2, step 3", "layer 2, source".
    layer, use: numbers from 1; a stack that applies its layers more than once has more uses than layers.
    mixer: its kind, such as "softmax" or "lsh".
    heads: which heads the tensors hold, numbers from 1.
    weights: [heads, queries, keys], or None where the mechanism has none. Rows of softmax attention sum to 1, or to 0
        where a query sees nothing; ``note`` says where something beside the text takes a share.
    values, outputs, constant: [heads, keys, width], [heads, queries, width] and [heads, queries, width], before the
        output projection: outputs = weights @ values + constant, which is 0 except for values by distance (Shaw) and
        for what is seen beside the text, such as compressed memories.
    implied: whether the weights are no probabilities but implied by another mechanism; ``note`` says so in words.
    buckets: int64 [heads, rounds, tokens] of attention within buckets or clusters, of the heads that have some, else
        None.
    spans: how far back heads look in tokens, [heads] where they learnt it, [heads, tokens] where each token has spans
        of its own, else None.
    keys: what the keys are: the tokens of the "text" itself, those of the "source", or Linformer's "summaries".
    """

    place: str
    layer: int
    use: int
    mixer: str
    heads: tuple[int, ...]
    weights: Tensor | None
    values: Tensor | None
    outputs: Tensor | None
    constant: Tensor | None
    implied: bool = False
    note: str = ""
    buckets: Tensor | None = None
    spans: Tensor | None = None
    keys: Keys = "text"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One model over one sequence: its ``ids`` int64 [tokens] and the ``tokens`` as text.

    hidden_states: one tensor [tokens, dim] after every use of a layer, the last before the model's last norm.
    attention: of the layers that were chosen, in order.
    exits: int64 [tokens], how many layers each token went through, where tokens may leave early, else None.
    steps: int64 [tokens], how many steps each token took, where tokens halt, else None.
    """

    ids: Tensor
    tokens: tuple[str, ...]
    hidden_states: tuple[Tensor, ...]
    attention: tuple[AttentionTrace, ...]
    exits: Tensor | None = None
    steps: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Trace(Reading):
    """What a run makes of a text. Of an encoder-decoder it is that of the target; ``source`` is the encoder's."""

    title: str
    source: Reading | None = None


# The attention weights of a mixer, read off the mixer itself: what each token's value adds to each output.
#
# The heads' outputs are linear in the values, y_i = sum_j w_ij v_j (+ what depends on no value). With the values of a
# block of tokens replaced by the columns of an identity, the mixer's own kernels return the columns w_ij of these
# tokens, whatever the mechanism computes and in whatever order. So the weights are those that the model used, and they
# exist for every mechanism in which values enter so: of softmax attention they are its probabilities, of kernel
# attention the
# *implied* weights (Katharopoulos et al. 2020, equation 4; Ali et al. 2024).


class Weights(NamedTuple):
    """The weights [heads, queries, keys] of one call, in float32 or better, with the ``values`` [heads, keys, width],
    the heads' ``outputs`` [heads, queries, width] and the ``constant`` of that shape that depends on none of the
    values: outputs = weights @ values + constant. It is 0 except for values by distance and compressed memories."""

    weights: Tensor
    values: Tensor
    outputs: Tensor
    constant: Tensor


@torch.no_grad()
def weights_of(mixer: nn.Module, inputs: Sequence[object], site: Site | None = None) -> Weights:
    """Return the weights of the call ``mixer(*inputs)`` of one sequence, by as many further calls as the tokens have
    values' widths in them.

    inputs: what the mixer was called with, a chunk and a state without a past or, of an encoder, x and its context.
    """
    where = site or site_of(mixer)
    assert isinstance(where, Site), where
    if isinstance(mixer, PartialOutput):
        inputs = inputs[:2]  # outputs of all tokens
    probe = Probe()
    outputs = _heads(mixer, inputs, probe, where)
    values, columns = probe.values, []
    probe.first = -1
    constant = _heads(mixer, inputs, probe, where)
    count, width = values.shape[2:]
    for probe.first in range(0, count, width):
        columns.append((_heads(mixer, inputs, probe, where) - constant)[..., : count - probe.first])
    weights = torch.cat(columns, -1)[0]
    values = values[0].to(outputs.dtype).repeat_interleave(len(weights) // values.shape[1], 0)
    return Weights(weights, values, outputs[0], constant[0])


def _heads(mixer: nn.Module, inputs: Sequence[object], probe: Probe, site: Site) -> Tensor:
    """Return the heads' outputs [1, heads, time, width] before they are joined and projected."""
    calls: list[Tensor] = []
    with _captured(mixer, probe, calls), site.install(mixer, probe):
        mixer(*inputs)
    parts = [part.float() if part.dtype.itemsize < 4 else part for part in calls]
    if isinstance(mixer, EtcAttention):
        parts.reverse()  # the long input's are computed first, but stand behind the global input's
    return torch.cat(parts, 2)


@contextmanager
def _captured(mixer: nn.Module, probe: Probe, calls: list[Tensor]) -> Iterator[None]:
    """Collect the heads' outputs of a call."""
    if isinstance(mixer, SingleHead):
        mix: Callable[..., Tensor] = mixer._mix

        def mixed(*call: object) -> Tensor:
            y = mix(*call)
            calls.append(y)
            return y

        with patch.object(mixer, "_mix", mixed):
            yield
        return
    if isinstance(mixer, LinearAttention | RWKV7):
        output: Callable[..., Tensor] = mixer._output

        def passed_on(y: Tensor, *rest: object) -> Tensor:
            calls.append(y)
            return output(y, *rest)

        with patch.object(mixer, "_output", passed_on):
            yield
        return

    def joined(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls.append(inputs[0].unflatten(-1, (-1, probe.values.shape[3])).transpose(1, 2))

    # Weights are those before a norm and a gate, which is a parameter of Memorizing's.
    behind = (getattr(mixer, name, None) for name in ("head_norm", "gate", "out"))
    first = next(module for module in behind if isinstance(module, nn.Module))
    outs = {first, getattr(mixer, "global_out", None) or first}
    handles = [out.register_forward_pre_hook(joined) for out in outs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# A trace in words, as JSON-ready facts, as an interactive page, and as arrays.

ENDINGS = (".html", ".npz")
STEPS = 32767


def check(path: Path) -> None:
    """Refuse a file's name with an ending other than .html and .npz."""
    if path.suffix.lower() not in ENDINGS:
        raise KinformerError(f"`out` {path}: ends in neither .html (a page) nor .npz (arrays); name it so.")
    if path.is_dir():
        raise KinformerError(f"`out` {path}: is a folder; give the name of a file.")


def write(traced: Trace, path: Path) -> None:
    """Write a trace as the ending of ``path`` says: the page, or its tensors by name."""
    if path.suffix.lower() == ".html":
        page = trace_page(traced.title, page_data(traced))
        write_atomic(path, lambda target: target.write_text(page, encoding="utf-8"))
        return
    arrays: dict[str, Any] = {
        name: value for reading in readings(traced) for name, value in _arrays(reading, reading is not traced)
    }

    def save(target: Path) -> None:
        with target.open("wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomic(path, save)


def readings(traced: Trace) -> list[Reading]:
    """Return the source's reading, if there is one, and the text's."""
    return [traced] if traced.source is None else [traced.source, traced]


def _arrays(reading: Reading, of_source: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a reading by name, as in "layer 1/weights"."""
    before = "encoder, " if of_source else ""
    for name in ("ids", "exits", "steps"):
        if (value := getattr(reading, name)) is not None:
            yield before + name, value.numpy()
    for number, hidden_states in enumerate(reading.hidden_states, start=1):
        yield f"{before}hidden_states/{number}", hidden_states.numpy()
    for item in reading.attention:
        for name in ("weights", "values", "outputs", "constant", "buckets", "spans"):
            if (value := getattr(item, name)) is not None:
                yield f"{item.place}/{name}", value.numpy()


def page_data(traced: Trace) -> dict[str, object]:
    """Return what the page draws, see :func:`kinformer.lab.drawing.text.trace_page`."""
    several = readings(traced)
    names = ["Text"] if len(several) == 1 else ["Source", "Target"]
    return {
        "readings": [
            {"name": name, "tokens": list(item.tokens), "exits": _list(item.exits), "steps": _list(item.steps)}
            for name, item in zip(names, several, strict=True)
        ],
        "places": [_place(item, number) for number, reading in enumerate(several) for item in reading.attention],
    }


def _place(item: AttentionTrace, reading: int) -> dict[str, object]:
    facts: dict[str, object] = {
        name: getattr(item, name) for name in ("place", "mixer", "heads", "note", "keys", "implied")
    }
    facts |= {"reading": reading, "buckets": _list(item.buckets), "spans": _list(item.spans)}
    if item.weights is None:
        return facts | {"weights": None, "queries": 0, "count": 0, "unit": 0.0}
    largest = max(float(item.weights.abs().max()), 1e-12)
    steps = (item.weights.double() / largest * STEPS).round().to(torch.int16).numpy().astype("<i2")
    packed = base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode("ascii")
    _, queries, count = item.weights.shape
    return facts | {"weights": packed, "queries": queries, "count": count, "unit": largest / STEPS}


def _list(tensor: Tensor | None) -> list[object] | None:
    return None if tensor is None else tensor.tolist()


def facts_of(traced: Trace) -> dict[str, object]:
    """Return a trace without its tensors as JSON-ready data: tokens, exits, steps, and of each head how far and how
    widely it looks."""
    facts: dict[str, object] = {"title": traced.title}
    for name, reading in zip(("source", "text") if traced.source else ("text",), readings(traced), strict=True):
        facts[name] = {
            "tokens": list(reading.tokens),
            "exits": _list(reading.exits),
            "steps": _list(reading.steps),
            "attention": [_facts(item) for item in reading.attention],
        }
    return facts


def _facts(item: AttentionTrace) -> dict[str, object]:
    facts: dict[str, object] = {name: getattr(item, name) for name in ("place", "mixer", "keys", "implied", "note")}
    facts |= {"buckets": _list(item.buckets), "spans": _list(item.spans), "heads": []}
    if item.weights is not None:
        distance, spread = mean_distance(item.weights), perplexity(item.weights)
        facts["heads"] = [
            {
                "head": head,
                "mean_distance": distance[index].item() if item.keys == "text" else None,
                "effective_keys": spread[index].item(),
            }
            for index, head in enumerate(item.heads)
        ]
    return facts


def mean_distance(weights: Tensor) -> Tensor:
    """Return how many tokens away the mean of a head's weights [heads, queries, keys] is, [heads], in magnitude."""
    _, queries, keys = weights.shape
    away = (torch.arange(queries)[:, None] - torch.arange(keys)).abs().to(weights.dtype)
    size = weights.abs()
    return (size * away).sum((1, 2)) / size.sum((1, 2)).clamp_min(1e-12)


def perplexity(weights: Tensor) -> Tensor:
    """Return the mean number of keys that a head's queries look at, [heads]: 2 to the entropy of a row of
    ``weights`` [heads, queries, keys] in bits, their magnitudes scaled to sum to 1."""
    size = weights.abs()
    total = size.sum(-1, keepdim=True)
    shares = size / total.clamp_min(1e-12)
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1)
    some = total[..., 0] > 0
    return (entropy.exp() * some).sum(-1) / some.sum(-1).clamp_min(1)


def lines_of(traced: Trace) -> Iterator[str]:
    """Yield a trace in words, a line for each mixer."""
    for reading in readings(traced):
        for item in reading.attention:
            if item.weights is None:
                yield f"{item.place}: {item.note}"
                continue
            spread = ", ".join(f"{value:.1f}" for value in perplexity(item.weights).tolist())
            line = f"{item.place} ({item.mixer}): a query looks at {spread} keys"
            if item.keys == "text":
                line += (
                    ", " + ", ".join(f"{value:.1f}" for value in mean_distance(item.weights).tolist()) + " tokens away"
                )
            yield f"{line}{' by head' if len(item.heads) > 1 else ''}"
        if reading.exits is not None:
            yield f"exits: {reading.exits.double().mean().item():.2f} layers per token"
        if reading.steps is not None:
            yield f"halting: {reading.steps.double().mean().item():.2f} steps per token"


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
    from kinformer.lab.runs.inference import predictions

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
