"""The timed works of a model of tokens: a forward, a training step, reading a prompt, decoding; and the peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import override
from kinformer.core.model import CausalModel, WholeModel
from kinformer.core.stack import ModelConfig
from kinformer.core.state import State
from kinformer.family.kinds import kinds
from kinformer.generation.session import Session
from kinformer.generation.weights import pack
from kinformer.lab.comparison import options
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.process import few_rows

Work = Callable[[], object]
Begin = Callable[[Any, int, int], Work]
"""Makes a work from a model (a member or a peer), a number of rows and a number of tokens."""

TOLERANCE = 2e-3
DECODED = 16
"""Tokens that one measurement of decoding draws."""
WARM = 2 * DECODED
"""The tokens drawn before the measurement, so that a session has recorded its step before the clock starts."""


def reads_tokens(config: Any) -> bool:
    """Return whether a model of ``config`` reads only token ids."""
    return config.protocol in (CausalModel, WholeModel) and getattr(config.input, "vocab_size", None) is not None


def generates(config: Any) -> bool:
    """Return whether a model of ``config`` continues sequences of tokens."""
    return config.protocol is CausalModel and reads_tokens(config)


def tokens_for(model: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random ids [batch, length] on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.input.vocab_size, (batch, length), generator=generator)
    return tokens.to(next(model.parameters()).device)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the model's logits of ``tokens``."""
    out = model(tokens)
    return out[0] if model.config.protocol is CausalModel else out


def forward(model: Any, batch: int, length: int) -> Work:
    """Return the work of one forward without gradients."""
    tokens = tokens_for(model, batch, length)
    return torch.inference_mode()(lambda: logits_of(model.eval(), tokens))


def step(model: Any, batch: int, length: int) -> Work:
    """Return the work of one forward with cross-entropy and the backward; the weights do not change."""
    tokens = tokens_for(model, batch, length)

    def work() -> None:
        model.train()
        logits = logits_of(model, tokens).float()
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        functional.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        model.zero_grad(set_to_none=True)

    return work


def prefill(model: Any, batch: int, length: int) -> Work:
    """Return the work of reading a prompt for generation, with the state."""
    tokens = tokens_for(model, batch, length)
    return lambda: Session(model.eval(), batch, seed=0).feed(tokens)


def decode(model: Any, batch: int, length: int) -> Work:
    """Return the work of drawing ``DECODED`` tokens one by one, after a prompt of at least ``length`` tokens."""
    session = Session(pack(model.eval()), batch, room=64 * DECODED, seed=0, temperature=1.0)
    session.feed(tokens_for(model, batch, length))
    for _ in range(WARM):
        session.step()

    def work() -> None:
        for _ in range(DECODED):
            session.step()

    return work


WORKS: dict[str, Begin] = dict(zip(options.WORKS, (forward, step, prefill, decode), strict=True))


def works_of(config: Any) -> dict[str, Begin]:
    """Return the works of a model of ``config``."""
    return {name: work for name, work in WORKS.items() if name in ("forward", "step") or generates(config)}


def room_for(model: Any, kind: str, length: int, rounds: int) -> bool:
    """Return whether the model's positions suffice for a work and its repetitions."""
    drawn = WARM + DECODED * (rounds + 1) if kind == "decode" else 0
    return model.max_length is None or length + drawn <= model.max_length


def check_correct(model: Any, length: int = 48) -> None:
    """Check a model before it is timed: its outputs must be finite. A causal model must predict the same for a text in
    chunks, token by token and as a whole, and its predictions must not depend on later tokens.

    Errors: ``KinformerError`` that names the difference.
    """
    length = min(length, model.max_length or length)
    tokens = tokens_for(model, 2, length, seed=1)
    with torch.inference_mode():
        whole = logits_of(model.eval(), tokens)
        if not bool(whole.isfinite().all()):
            raise KinformerError("its outputs are not finite; it is not timed.")
        if generates(model.config):
            _check_chunks(model, tokens, whole)
        _check_reference(model, tokens, whole)
    step(model, 1, length)()


def _check_reference(model: Any, tokens: Tensor, whole: Tensor) -> None:
    """Raise unless the same model with reference mixers, if there are any, returns the same logits."""
    if not isinstance(model.config, ModelConfig):
        return
    try:
        config = override(model.config, {"layers.*.mixer.impl": "reference"}, kinds())
        reference = config.build().to(tokens.device).eval()
    except KinformerError:
        return
    assert isinstance(model, nn.Module)
    reference.load_state_dict(model.state_dict())
    _require_equal("by the reference", logits_of(reference, tokens), whole)


def _require_equal(what: str, got: Tensor, want: Tensor) -> None:
    gap = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-9)
    if not gap <= TOLERANCE:
        raise KinformerError(f"{what} its outputs differ by {gap:.1g} of the largest; it is not timed.")


def _check_chunks(model: Any, tokens: Tensor, whole: Tensor) -> None:
    half = tokens.shape[1] // 2
    first, state = model(tokens[:, :half])
    rest = [first]
    for index in range(half, tokens.shape[1]):
        logits, state = model(tokens[:, index : index + 1], state)
        rest.append(logits)
    later = tokens.clone()
    later[:, half:] = (later[:, half:] + 1) % model.input.vocab_size
    _require_equal("in chunks", torch.cat(rest, dim=1), whole)
    _require_equal("when later tokens change", logits_of(model, later)[:, :half], whole[:, :half])


# Peers: decoders of other libraries with the sizes of gpt, which are timed beside members if they are installed.
#
# A peer is built as its authors recommend, in float32 and without dropout. It is called like a member,
# ``logits, state = model(tokens, state)``, and its state is its own cache. So the same check of correctness applies.


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
        raise KinformerError("peers have the parts of gpt; leave out what `set` changes of them, or `peers`.")
    heads = layer.mixer.num_heads
    return PeerShape(
        layers=len(config.layers),
        dim=config.dim,
        heads=heads,
        head_dim=config.dim // heads,
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
    return torch.inference_mode()(lambda: peer.eval().last(tokens))


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


class PeerModel(nn.Module):
    """A decoder of another library with the sizes ``shape``; ``works`` are the works that can be timed."""

    package: str
    works: Mapping[str, Begin] = {"forward": forward, "step": step}

    def __init__(self, model: nn.Module, shape: PeerShape) -> None:
        super().__init__()
        self.model, self.max_length = model, shape.length
        self.input = SimpleNamespace(vocab_size=shape.vocab)
        self.config = SimpleNamespace(input=self.input, protocol=CausalModel)  # the fields that timing reads

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
