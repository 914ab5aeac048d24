"""The timed works of a model of tokens: a forward, a training step, reading a prompt, decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import override
from kinformer.core.model import CausalModel, WholeModel
from kinformer.core.stack import ModelConfig
from kinformer.family.kinds import kinds
from kinformer.generation.packed import pack
from kinformer.generation.session import Session
from kinformer.lab.comparison import options
from kinformer.runtime.errors import KinformerError

Work = Callable[[], object]
Begin = Callable[[Any, int, int], Work]
"""Makes a work from a model (a member or a peer), a number of rows and a number of tokens."""


class ModelFacts(Protocol):
    """The config of a member or of a peer."""

    protocol: ClassVar[type]

    @property
    def input(self) -> object: ...


class Timed(Protocol):
    """A model of tokens, a member or a peer. A call returns logits; a causal model returns logits and a state."""

    @property
    def config(self) -> ModelFacts: ...
    @property
    def input(self) -> Any: ...
    @property
    def max_length(self) -> int | None: ...
    def __call__(self, tokens: Tensor, state: Any = None, /) -> Any: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def to(self, device: str, /) -> Self: ...
    def train(self, mode: bool = True) -> Self: ...
    def eval(self) -> Self: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


TOLERANCE = 2e-3
DECODED = 16
"""Tokens that one measurement of decoding draws."""
WARM = 2 * DECODED
"""The tokens drawn before the measurement, so that a session has recorded its step before the clock starts."""


def reads_tokens(config: ModelFacts) -> bool:
    """Return whether a model of ``config`` reads only token ids."""
    return config.protocol in (CausalModel, WholeModel) and getattr(config.input, "vocab_size", None) is not None


def generates(config: ModelFacts) -> bool:
    """Return whether a model of ``config`` continues sequences of tokens."""
    return config.protocol is CausalModel and reads_tokens(config)


def tokens_for(model: Timed, batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random ids [batch, length] on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.input.vocab_size, (batch, length), generator=generator).to(
        next(model.parameters()).device
    )


def logits_of(model: Timed, tokens: Tensor) -> Tensor:
    """Return the model's logits of ``tokens``."""
    out = model(tokens)
    return out[0] if model.config.protocol is CausalModel else out


def forward(model: Timed, batch: int, length: int) -> Work:
    """Return the work of one forward without gradients."""
    tokens = tokens_for(model, batch, length)

    def work() -> None:
        model.eval()
        with torch.inference_mode():
            logits_of(model, tokens)

    return work


def step(model: Timed, batch: int, length: int) -> Work:
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

    def work() -> None:
        Session(model.eval(), batch, seed=0).feed(tokens)

    return work


def decode(model: Any, batch: int, length: int) -> Work:
    """Return the work of drawing ``DECODED`` tokens one by one, after a prompt of at least ``length`` tokens."""
    session = Session(pack(model.eval(), batch), batch, room=64 * DECODED, seed=0, temperature=1.0)
    session.feed(tokens_for(model, batch, length))
    for _ in range(WARM):
        session.step()

    def work() -> None:
        for _ in range(DECODED):
            session.step()

    return work


WORKS: dict[str, Begin] = dict(zip(options.WORKS, (forward, step, prefill, decode), strict=True))


def works_of(config: ModelFacts) -> dict[str, Begin]:
    """Return the works of a model of ``config``."""
    return {name: work for name, work in WORKS.items() if name in ("forward", "step") or generates(config)}


def room_for(model: Timed, kind: str, length: int, rounds: int) -> bool:
    """Return whether the model's positions suffice for a work and its repetitions."""
    drawn = WARM + DECODED * (rounds + 1) if kind == "decode" else 0
    return model.max_length is None or length + drawn <= model.max_length


def check_correct(model: Timed, length: int = 48) -> None:
    """Check a model before it is timed.

    The outputs of every model must be finite. A causal model must predict the same for a text in chunks, token by token
    and as a whole, and its predictions must not depend on later tokens.

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


def _check_reference(model: Timed, tokens: Tensor, whole: Tensor) -> None:
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


def _check_chunks(model: Timed, tokens: Tensor, whole: Tensor) -> None:
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
