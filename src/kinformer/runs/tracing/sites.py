"""The places where values enter the mixers: there a probe stands in for them, by which weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk
from kinformer.kernels.attention import Projected
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.bidirectional_linear import BidirectionalLinear
from kinformer.mixers.bidirectional_lsh import BidirectionalLSH
from kinformer.mixers.bidirectional_lstm import BidirectionalLSTM
from kinformer.mixers.bidirectional_routing import BidirectionalRouting
from kinformer.mixers.causal_sinkhorn import CausalSinkhornAttention
from kinformer.mixers.channel_mix import CausalChannelMix
from kinformer.mixers.chosen_blocks import ChosenBlocks
from kinformer.mixers.compressive import Compressive
from kinformer.mixers.cross import CrossAttention
from kinformer.mixers.cross_linear import LinearCrossAttention
from kinformer.mixers.cross_linformer import LinformerCrossAttention, SourceSummaries
from kinformer.mixers.cross_local import LocalCrossAttention
from kinformer.mixers.cross_predictive import PredictiveCrossAttention
from kinformer.mixers.etc import EtcAttention
from kinformer.mixers.latent import LatentAttention
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.linformer import Linformer
from kinformer.mixers.lsh import LSHAttention
from kinformer.mixers.lstm import LSTM
from kinformer.mixers.memorizing import Memorizing
from kinformer.mixers.outer_product import OuterProduct
from kinformer.mixers.routing import RoutingAttention
from kinformer.mixers.rwkv7 import RWKV7
from kinformer.mixers.segment_memory import SegmentMemory
from kinformer.mixers.separable_convolution import SeparableConvolution
from kinformer.mixers.separable_transition import CausalTransition, TwoSidedConvolution
from kinformer.mixers.single_head import SingleHead
from kinformer.mixers.sinkhorn import SinkhornAttention
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.mixers.star import StarAttention
from kinformer.mixers.tensorized import BidirectionalTensorized, TensorizedAttention
from kinformer.mixers.tensorized_memory import TensorizedMemory
from kinformer.mixers.windows import WindowAttention
from kinformer.projections.by_piece import Pieces
from kinformer.projections.source import AlignedState, CrossState
from kinformer.runs.tracing.probe import Probe
from kinformer.runtime.errors import KinformerError

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
