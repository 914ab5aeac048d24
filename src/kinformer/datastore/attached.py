"""A decoder whose head searches a store, by keys that the model makes of the context.

The key of a context is the input of the last layer's feed-forward (after its pre-norm where it has one), as Khandelwal
et al. 2020 found best; in a post-norm layer, whose norm stands behind the attention sublayer, that input is normed too.
A decoder without such a sublayer gives its final hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk, left_align, select_valid
from kinformer.core.input import Input
from kinformer.core.model import Hidden
from kinformer.core.state import State
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError

FEED_FORWARD, HIDDEN = "feed-forward input of the last layer", "final hidden states"


class Keyed(NamedTuple):
    """The results: ``hidden_states`` [batch, time, dim], ``keys`` [batch, time, key
    width] and the state after the chunk."""

    hidden_states: Tensor
    keys: Tensor
    state: State


class KeyedStates(NamedTuple):
    """The inputs of a head that searches a store: ``hidden_states`` [batch, time, dim] for the decoder's own
    prediction, ``keys`` [batch, time, key width] to search with."""

    hidden_states: Tensor
    keys: Tensor


class KeyedDecoder(nn.Module):
    """A decoder that also returns the key of every context. ``representation`` names which, ``width`` is its size."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if decoder.exit_heads is not None:
            raise KinformerError(
                "the decoder's exits have heads of their own, of which a datastore knows one only; give a run with "
                "tied classifiers (stack.classifiers=tied)."
            )
        self.decoder = decoder
        self.representation, self.width = HIDDEN, decoder.config.width
        seen = self._probe()
        if seen is not None:
            self.representation, self.width = FEED_FORWARD, seen

    def forward(
        self, tokens: Tensor, state: State = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> Keyed:
        """Absorb ``tokens`` [batch, time]; hidden states and keys are zero where not ``valid``."""
        if self.representation == HIDDEN:
            hidden_states, state, _ = self.decoder.hidden(tokens, state, valid=valid, reset=reset)
            return Keyed(hidden_states, hidden_states, state)
        with self._tapped() as seen:
            hidden_states, state, _ = self.decoder.hidden(tokens, state, valid=valid, reset=reset)
        keys = seen[-1]
        if valid is not None:
            back = left_align(valid).inverse[..., None].expand(-1, -1, keys.shape[-1])
            keys = select_valid(keys.gather(1, back), valid)
        return Keyed(hidden_states, keys, state)

    def _probe(self) -> int | None:
        """Return the width of the last layer's feed-forward input; None unless that is one vector of every token."""
        stack = self.decoder.stack
        skips = bool(stack.exits) or stack.halting is not None
        if skips or not isinstance(getattr(stack.units[-1], "feed_forward", None), nn.Module):
            return None
        tokens = self.decoder.input.example(1, 2, self.decoder.input.device)
        with torch.no_grad(), self._tapped() as seen:
            self.decoder.hidden(tokens)
        return seen[-1].shape[-1] if seen and seen[-1].shape[:-1] == (1, 2) else None

    @contextmanager
    def _tapped(self) -> Iterator[list[Tensor]]:
        """Tap the last layer's feed-forward input within the context (the last
        time counts where a layer is used again)."""
        seen: list[Tensor] = []
        feed_forward = self.decoder.stack.units[-1].get_submodule("feed_forward")

        def hook(_: nn.Module, inputs: tuple[Tensor | Chunk, *tuple[object, ...]]) -> None:
            seen.append(inputs[0].x if isinstance(inputs[0], Chunk) else inputs[0])

        handle = feed_forward.register_forward_pre_hook(hook)
        try:
            yield seen
        finally:
            handle.remove()


class AttachedDecoder(nn.Module):
    """A language model like its decoder, except for its logits, which ``head`` (logits [n, vocab], keys [n, width])
    makes.

    The state is the decoder's; the head's store is no part of it.
    """

    def __init__(self, decoder: Decoder, head: nn.Module) -> None:
        super().__init__()
        self.keyed, self.head = KeyedDecoder(decoder), head
        self.train(decoder.training)

    @property
    def decoder(self) -> Decoder:
        return self.keyed.decoder

    @property
    def input(self) -> Input:
        return self.decoder.input

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def max_length(self) -> int | None:
        return self.decoder.max_length

    def initial_state(self, batch: int, **options: Any) -> State:
        """Return the state of ``batch`` new sequences."""
        return self.decoder.initial_state(batch, **options)

    def forward(
        self, values: Tensor, state: State = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return logits [batch, time, vocab] (zero where not ``valid``) and the state after the chunk."""
        inputs, state = self.head_inputs(values, state, valid=valid, reset=reset)
        return select_valid(self.logits(inputs), valid), state

    def hidden(
        self,
        values: Tensor,
        state: State = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Return the decoder's hidden states, its state and its taps."""
        return self.decoder.hidden(values, state, valid=valid, reset=reset, taps=taps)

    def head_inputs(
        self, values: Tensor, state: State = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[KeyedStates, State]:
        """Return hidden states and keys, and the state after the chunk."""
        hidden_states, keys, state = self.keyed(values, state, valid=valid, reset=reset)
        return KeyedStates(hidden_states, keys), state

    def logits(self, inputs: KeyedStates) -> Tensor:
        """Return logits [batch, time, vocab] of head inputs [batch, time, ...]."""
        logits = self.decoder.logits(inputs.hidden_states)
        return self.head(logits.flatten(0, -2), inputs.keys.flatten(0, -2)).view(logits.shape)
