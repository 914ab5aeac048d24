"""Peers: decoders of other libraries with the sizes of gpt, which are timed beside members if they are installed.

A peer is built as its authors recommend, in float32 and without dropout. It is called like a member, ``logits, state =
model(tokens, state)``, and its state is its own cache. So the same check of correctness applies to peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kinformer.core.model import CausalModel
from kinformer.core.state import State
from kinformer.lab.comparison.works import DECODED, Begin, Work, forward, step, tokens_for
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.matmul import few_rows


@dataclass(frozen=True, kw_only=True)
class PeerShape:
    """The sizes of a decoder; ``length`` is the least number of positions."""

    layers: int
    dim: int
    heads: int
    head_dim: int
    hidden: int
    length: int
    vocab: int = 256


def shape_of(config: Any) -> PeerShape:
    """Return the sizes of a config of gpt, whose parts must be unchanged."""
    layer = config.layers[0]
    if config.position.kind != "learned" or layer.mixer.kind != "softmax" or layer.feed_forward.kind != "mlp":
        raise KinformerError(
            "peers have the parts of gpt, which `set` must not change; leave the change or `peers` out."
        )
    return PeerShape(
        layers=len(config.layers),
        dim=config.dim,
        heads=layer.mixer.num_heads,
        head_dim=config.dim // layer.mixer.num_heads,
        hidden=layer.feed_forward.hidden_dim,
        length=config.position.max_length,
        vocab=config.input.vocab_size,
    )


def gpt2(shape: PeerShape) -> nn.Module:
    """Return a GPT2LMHeadModel of transformers, which requires heads x head_dim = dim."""
    module = import_module("transformers")
    config = module.GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.length,
        n_embd=shape.dim,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.hidden,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return module.GPT2LMHeadModel(config)


def x_transformers(shape: PeerShape, flash: bool) -> nn.Module:
    """Return the decoder of x-transformers; ``flash``: whether it uses PyTorch's fused attention, off by default."""
    module = import_module("x_transformers")
    layers = module.Decoder(
        dim=shape.dim,
        depth=shape.layers,
        heads=shape.heads,
        attn_dim_head=shape.head_dim,
        ff_mult=shape.hidden / shape.dim,
        attn_flash=flash,
    )
    return module.TransformerWrapper(num_tokens=shape.vocab, max_seq_len=shape.length, attn_layers=layers)


def _prefill(peer: HuggingFace, batch: int, length: int) -> Work:
    tokens = tokens_for(peer, batch, length)

    def work() -> None:
        peer.eval()
        with torch.inference_mode():
            peer.last(tokens)

    return work


def _decode(peer: HuggingFace, batch: int, length: int) -> Work:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        logits, state = peer.eval().last(tokens_for(peer, batch, length))

    def work() -> None:
        nonlocal logits, state
        with torch.inference_mode(), few_rows(logits.device):
            for _ in range(DECODED):
                drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(logits.device)
                logits, state = peer.last(drawn, state)

    return work


@dataclass(frozen=True)
class PeerInput:
    """The input of a peer, with the size of the vocabulary at the same attribute as in members."""

    vocab_size: int


@dataclass(frozen=True)
class PeerConfig:
    """The config of a peer, with the fields that timing reads from the config of a member."""

    input: PeerInput
    protocol: ClassVar[type] = CausalModel


class PeerModel(nn.Module):
    """A decoder of another library with the sizes ``shape``; ``works`` are the works that can be timed."""

    package: str
    works: Mapping[str, Begin] = {"forward": forward, "step": step}

    def __init__(self, model: nn.Module, shape: PeerShape) -> None:
        super().__init__()
        self.model, self.max_length = model, shape.length
        self.input = PeerInput(shape.vocab)
        self.config = PeerConfig(self.input)

    @property
    def version(self) -> str:
        """The version of the model's package."""
        return version(self.package)


class HuggingFace(PeerModel):
    """GPT2LMHeadModel of transformers, with its cache and PyTorch's fused attention."""

    package = "transformers"
    works = {"forward": forward, "step": step, "prefill": _prefill, "decode": _decode}

    def __init__(self, shape: PeerShape) -> None:
        super().__init__(gpt2(shape), shape)

    def forward(self, tokens: Tensor, state: State = None) -> tuple[Tensor, State]:
        logits, *cache = self.model(tokens, state, use_cache=not self.training).to_tuple()
        return logits, cache[0] if cache else None

    def last(self, tokens: Tensor, state: State = None) -> tuple[Tensor, State]:
        """Return logits [batch, vocab] after the last token alone."""
        logits, cache = self.model(tokens, state, use_cache=True, logits_to_keep=1).to_tuple()
        return logits[:, -1], cache


class XTransformers(PeerModel):
    """The decoder of x-transformers, with its option for PyTorch's fused attention on."""

    package = "x-transformers"

    def __init__(self, shape: PeerShape) -> None:
        super().__init__(x_transformers(shape, flash=True), shape)

    def forward(self, tokens: Tensor, state: State = None) -> tuple[Tensor, State]:
        before = tokens if state is None else torch.cat([state, tokens], 1)  # the cache of x-transformers is not used
        return self.model(before)[:, -tokens.shape[1] :], before


def installed() -> dict[str, Callable[[PeerShape], PeerModel]]:
    """Return the builders of the installed peers."""
    return {name: build for name, (module, build) in PEERS.items() if find_spec(module) is not None}


PEERS: dict[str, tuple[str, Callable[[PeerShape], PeerModel]]] = {
    "transformers' GPT-2": ("transformers", HuggingFace),
    "x-transformers": ("x_transformers", XTransformers),
}
"""The required module of each peer, and the builder of the peer."""
