"""Decoders of other libraries with the sizes of ours, timed beside them where they are installed.

Each is built as its authors show, in float32 and without dropout, and answers like a model of ours: ``logits, state =
model(tokens, state)``, the state being its own cache. So the gate of correctness is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kinformer.compare.works import DECODED, Work, forward, step, tokens_for
from kinformer.core.model import CausalModel


class PeerModel(nn.Module):
    """A decoder of another library; ``works`` are those that can be timed of it."""

    package: str
    works: tuple[str, ...] = ("forward", "step")

    def __init__(self, model: nn.Module, vocab_size: int, max_length: int) -> None:
        super().__init__()
        self.model, self.max_length = model, max_length
        self.input = SimpleNamespace(vocab_size=vocab_size)
        self.config = SimpleNamespace(protocol=CausalModel, input=self.input)

    @property
    def version(self) -> str:
        """Of the package that it is from."""
        return version(self.package)


class HuggingFace(PeerModel):
    """GPT2LMHeadModel of transformers, with its cache; attention is PyTorch's fused one."""

    package = "transformers"
    works = ("forward", "step", "prefill", "decode")

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        found = self.model(tokens, past_key_values=state, use_cache=not self.training)
        return found.logits, found.past_key_values

    def last(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Logits [batch, vocab] behind the last token alone."""
        found = self.model(tokens, past_key_values=state, use_cache=True, logits_to_keep=1)
        return found.logits[:, -1], found.past_key_values


class XTransformers(PeerModel):
    """The decoder of x-transformers with its option for PyTorch's fused attention."""

    package = "x-transformers"

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        before = tokens if state is None else torch.cat([state, tokens], 1)  # its cache is not used
        return self.model(before)[:, -tokens.shape[1] :], before


def installed() -> dict[str, Callable[[Any], PeerModel]]:
    """What builds those that are installed, with the sizes of a gpt's config."""
    return {name: build for name, (module, build) in PEERS.items() if find_spec(module) is not None}


def _prefill(peer: Any, batch: int, length: int) -> Work:
    tokens = tokens_for(peer, batch, length)

    def work() -> None:
        peer.eval()
        with torch.inference_mode():
            peer.last(tokens)

    return work


def _decode(peer: Any, batch: int, length: int) -> Work:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        logits, state = peer.eval().last(tokens_for(peer, batch, length))

    def work() -> None:
        nonlocal logits, state
        with torch.inference_mode():
            for _ in range(DECODED):
                drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(logits.device)
                logits, state = peer.last(drawn, state)

    return work


WORKS: dict[str, Callable[[Any, int, int], Work]] = {  # as ``works.WORKS`` of ours
    "forward": forward, "step": step, "prefill": _prefill, "decode": _decode,
}  # fmt: skip


def _hugging_face(config: Any) -> PeerModel:
    module, layer, length = import_module("transformers"), config.layers[0], config.position.max_length
    own = module.GPT2Config(
        vocab_size=config.input.vocab_size,
        n_positions=length,
        n_embd=config.dim,
        n_layer=len(config.layers),
        n_head=layer.mixer.num_heads,
        n_inner=layer.feed_forward.hidden_dim,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return HuggingFace(module.GPT2LMHeadModel(own), config.input.vocab_size, length)


def _x_transformers(config: Any) -> PeerModel:
    module, layer, length = import_module("x_transformers"), config.layers[0], config.position.max_length
    layers = module.Decoder(
        dim=config.dim,
        depth=len(config.layers),
        heads=layer.mixer.num_heads,
        attn_dim_head=config.dim // layer.mixer.num_heads,
        ff_mult=layer.feed_forward.hidden_dim / config.dim,
        attn_flash=True,
    )
    vocab = config.input.vocab_size
    model = module.TransformerWrapper(num_tokens=vocab, max_seq_len=length, attn_layers=layers)
    return XTransformers(model, vocab, length)


PEERS: dict[str, tuple[str, Callable[[Any], PeerModel]]] = {
    "transformers' GPT-2": ("transformers", _hugging_face),
    "x-transformers": ("x_transformers", _x_transformers),
}
"""The module that must be there, and what builds the peer."""
