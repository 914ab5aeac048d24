"""The keys of a datastore: the vectors that a decoder makes of contexts, and the run whose decoder made them.

The key of a context is the input of the last layer's feed-forward (after its pre-norm if it has one), which Khandelwal
et al. 2020 found best. In a post-norm layer the norm follows the attention sublayer, so this input is normed too. The
keys of a decoder without such a sublayer are its final hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kinformer.core.contract import Chunk, left_align, select_valid
from kinformer.core.model import CausalModel
from kinformer.core.state import State
from kinformer.lab.tasks.evaluation import TrainedRun
from kinformer.models.decoder import Decoder
from kinformer.runtime.errors import KinformerError

FEED_FORWARD, HIDDEN = "feed-forward input of the last layer", "final hidden states"


class KeyedStates(NamedTuple):
    """The inputs of a head that searches a store: ``hidden_states`` [batch, time, dim] for the decoder's own
    prediction, ``keys`` [batch, time, key width] to search with."""

    hidden_states: Tensor
    keys: Tensor


class KeyedDecoder(nn.Module):
    """A decoder that also returns the key of every context: its ``representation`` in words, and its ``width``."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if getattr(decoder, "exit_heads", None) is not None:
            raise KinformerError(
                "the decoder's exits have separate heads, but a datastore works with one head; give a run with "
                "tied classifiers (stack.classifiers=tied)."
            )
        self.decoder = decoder
        self.representation, self.width = HIDDEN, decoder.config.width
        # The keys are the last layer's feed-forward inputs, where these are one vector a token.
        stack = decoder.stack
        if not stack.adaptive and isinstance(getattr(stack.units[-1], "feed_forward", None), nn.Module):
            with torch.no_grad(), self._tapped() as seen:
                decoder.hidden(decoder.input.example(1, 2, decoder.input.device))
            if seen and seen[-1].shape[:-1] == (1, 2):
                self.representation, self.width = FEED_FORWARD, seen[-1].shape[-1]

    def forward(
        self, tokens: Tensor, state: State = None, *, valid: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[KeyedStates, State]:
        """Absorb ``tokens`` [batch, time]; hidden states and keys are zero where not ``valid``."""
        if self.representation == HIDDEN:
            hidden_states, state, _ = self.decoder.hidden(tokens, state, valid=valid, reset=reset)
            return KeyedStates(hidden_states, hidden_states), state
        with self._tapped() as seen:
            hidden_states, state, _ = self.decoder.hidden(tokens, state, valid=valid, reset=reset)
        keys = seen[-1]
        if valid is not None:
            back = left_align(valid).inverse[..., None].expand(-1, -1, keys.shape[-1])
            keys = select_valid(keys.gather(1, back), valid)
        return KeyedStates(hidden_states, keys), state

    @contextmanager
    def _tapped(self) -> Iterator[list[Tensor]]:
        """Tap the last layer's feed-forward input within the context (the last use counts)."""
        seen: list[Tensor] = []
        feed_forward = self.decoder.stack.units[-1].get_submodule("feed_forward")

        def hook(_: nn.Module, inputs: tuple[Tensor | Chunk, *tuple[object, ...]]) -> None:
            seen.append(inputs[0].x if isinstance(inputs[0], Chunk) else inputs[0])

        with feed_forward.register_forward_pre_hook(hook):
            yield seen


class StoredRun(TrainedRun, Protocol):
    """The protocol of a run with a datastore, made from the run or used by its model."""

    def model(self, changes: Mapping[str, object] | None = None) -> Any: ...
    def weights_digest(self) -> str: ...


OpenRun = Callable[[str | Path], StoredRun]
"""A function that opens the run in a folder."""


def keyed(run: StoredRun, model: Decoder) -> KeyedDecoder:
    """Return the model with its keys exposed. Raise unless the model is causal and reads tokens."""
    if run.config.protocol is not CausalModel:
        raise KinformerError(f"{run.folder}: {run.member!r} is not a causal decoder, which a datastore needs.")
    if run.tokenizer is None or run.config.input.kind != "tokens":
        raise KinformerError(
            f"{run.folder}: reads {run.config.input.kind}, and a datastore is of text; give a run of a model of tokens."
        )
    return KeyedDecoder(model)
