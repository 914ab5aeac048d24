"""A decoder whose head takes neighbours that another, frozen one retrieves from a store (SPALM, Yogatama et al. 2021).

Both read the same tokens, and the state is that of both; the store is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid
from kinformer.core.head import Neighbours
from kinformer.core.input import Input
from kinformer.core.model import Hidden
from kinformer.core.state import State
from kinformer.datastore.attached import KeyedDecoder, KeyedStates
from kinformer.datastore.exact import ExactSearch
from kinformer.datastore.lists import ListSearch
from kinformer.models.decoder import Decoder


class RetrievingState(NamedTuple):
    """The state: ``decoder`` is that of the model itself, ``retriever`` that of the model that makes its queries."""

    decoder: State
    retriever: State


class RetrievingDecoder(nn.Module):
    """A language model: ``decoder`` with the ``neighbours`` nearest entries of ``searcher`` at every token.

    ``retriever`` made the store's keys; it is frozen. Only :meth:`logits` searches the store.
    """

    def __init__(
        self, decoder: Decoder, retriever: KeyedDecoder, searcher: ExactSearch | ListSearch, neighbours: int
    ) -> None:
        super().__init__()
        self.decoder, self.retriever = decoder, retriever.requires_grad_(False)
        self.searcher, self.neighbours = searcher, neighbours
        self.train(decoder.training)

    def train(self, mode: bool = True) -> RetrievingDecoder:
        super().train(mode)
        self.retriever.eval()
        return self

    @property
    def input(self) -> Input:
        return self.decoder.input

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def max_length(self) -> int | None:
        """Return the length at which the positions of either end."""
        ends = [end for end in (self.decoder.max_length, self.retriever.decoder.max_length) if end is not None]
        return min(ends, default=None)

    def initial_state(self, batch: int, *, dtype: torch.dtype | None = None, **options: Any) -> RetrievingState:
        """Return the state of ``batch`` new sequences; ``dtype`` is of the decoder's part."""
        return RetrievingState(
            self.decoder.initial_state(batch, dtype=dtype, **options),
            self.retriever.decoder.initial_state(batch, **options),
        )

    def forward(
        self,
        values: Tensor,
        state: RetrievingState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, RetrievingState]:
        """Return logits [batch, time, vocab] (zero where not ``valid``) and the state after the chunk."""
        inputs, state = self.head_inputs(values, state, valid=valid, reset=reset)
        return select_valid(self.logits(inputs), valid), state

    def hidden(
        self,
        values: Tensor,
        state: RetrievingState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Return the decoder's hidden states and taps, and the state after the chunk."""
        before = state or RetrievingState(None, None)
        hidden_states, after, tapped = self.decoder.hidden(values, before.decoder, valid=valid, reset=reset, taps=taps)
        with torch.no_grad():
            _, retriever_state, _ = self.retriever.decoder.hidden(values, before.retriever, valid=valid, reset=reset)
        return Hidden(hidden_states, RetrievingState(after, retriever_state), tapped)

    def head_inputs(
        self,
        values: Tensor,
        state: RetrievingState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[KeyedStates, RetrievingState]:
        """Return the decoder's hidden states and the retriever's keys, and the state after the chunk."""
        before = state or RetrievingState(None, None)
        hidden_states, after, _ = self.decoder.hidden(values, before.decoder, valid=valid, reset=reset)
        with torch.no_grad():
            _, keys, retriever_state = self.retriever(values, before.retriever, valid=valid, reset=reset)
        return KeyedStates(hidden_states, keys), RetrievingState(after, retriever_state)

    def logits(self, inputs: KeyedStates) -> Tensor:
        """Return logits [batch, time, vocab] of head inputs [batch, time, ...]."""
        result = self.searcher.search(inputs.keys.flatten(0, -2).detach(), self.neighbours)
        neighbours = following(result).view(*inputs.hidden_states.shape[:-1], -1)
        return self.decoder.head(inputs.hidden_states, self.decoder.input, neighbours=neighbours)


def following(neighbours: Neighbours) -> Tensor:
    """Return the tokens [n, k] that followed, -1 where there is no neighbour."""
    return neighbours.tokens.masked_fill(neighbours.entries < 0, -1)
