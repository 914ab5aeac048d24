"""Decoders whose tokens may leave early, built from a decoder's config with a stack of exits (``adaptive.stack``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.adaptive.stack import ExitStack
from kinformer.core.contract import Chunk
from kinformer.core.encoder import checked_source
from kinformer.core.model import Hidden, SourceModel
from kinformer.models.decoder import Decoder, DecoderState
from kinformer.models.encoder_decoder import EncoderDecoder
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.host import has_data


class SourceMean(NamedTuple):
    """The mean vector of each row's source, ``mean`` [batch, dim]; n neighbouring rows of a chunk may share one vector,
    as the hypotheses of a beam do."""

    mean: Tensor

    outlives_reset = True  # type: ignore[misc]


class ExitInputs(NamedTuple):
    """The head inputs of a model with separate heads: ``hidden_states`` [batch, time, dim], and ``by`` [batch, time]
    int64, the number of the exit that each token left by."""

    hidden_states: Tensor
    by: Tensor


class ExitDecoder(Decoder):
    """A decoder whose tokens may leave for the head by an exit before the last layer.

    With ``classifiers = "separate"`` of the stack's config, ``exit_heads`` are the heads of all exits but the last,
    whose head is the model's; otherwise all exits share the model's head.
    """

    stack: ExitStack

    def __init__(self, config: Decoder.Config) -> None:
        super().__init__(config)
        rule = self.stack.rule
        if rule is not None and rule.reads_source and config.protocol is not SourceModel:
            kind = self.stack.config.rule.kind  # type: ignore[union-attr]
            raise KinformerError(
                f"the stack's rule {kind!r} reads the source of a translation, but this model has none; use it in an "
                "encoder-decoder (vanilla), or another rule (multinomial, geometric)."
            )

    def _build_head(self) -> None:
        super()._build_head()
        self.exit_heads: nn.ModuleList | None = None
        if self.stack.config.classifiers == "tied" or len(self.stack.exits) == 1:
            return
        config = self.config
        heads = (config.head.build(config.width, self.input) for _ in self.stack.exits[:-1])
        self.exit_heads = nn.ModuleList(heads)
        if not any(parameter.dim() > 1 for parameter in self.exit_heads.parameters()):
            raise KinformerError(
                f"the head {config.head.kind!r} is tied to the table of the input, so exits cannot "
                "have separate matrices; give `set` head.tied=false, or `set` stack.classifiers=tied."
            )

    def exit_logits(self, x: Tensor, number: int) -> Tensor:
        """Return the logits [..., vocab] of exit ``number``, counted from 0, for the outputs x [..., dim] of its
        layer."""
        return self._head_of(number)(self.norm(x), self.input)

    def _head_of(self, exit: int) -> nn.Module:
        return self.head if self.exit_heads is None or exit >= len(self.exit_heads) else self.exit_heads[exit]

    def logits(self, inputs: Tensor | ExitInputs) -> Tensor:
        if isinstance(inputs, Tensor):
            return self.head(inputs, self.input)
        x, by = inputs
        if by.is_meta:
            # Costs are counted as if no token left early.
            return self.head(x, self.input)
        if torch.compiler.is_compiling() or not has_data(by):
            every = torch.stack([self._head_of(exit)(x, self.input) for exit in range(len(self.stack.exits))], dim=-2)
            return every.gather(-2, by[..., None, None].expand(*by.shape, 1, every.shape[-1]))[..., 0, :]
        exits: list[int] = torch.unique(by).tolist()
        if len(exits) == 1:
            return self._head_of(exits[0])(x, self.input)
        logits = None
        for number in exits:
            head_logits = self._head_of(number)(x[by == number][None], self.input)[0]
            logits = head_logits.new_empty(*by.shape, head_logits.shape[-1]) if logits is None else logits
            logits = logits.index_put((by == number,), head_logits)
        assert logits is not None
        return logits

    def head_inputs(
        self,
        values: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor | ExitInputs, DecoderState]:
        """Return the last hidden states [batch, time, dim], with separate heads as :class:`ExitInputs`, and the state
        after the chunk."""
        if self.exit_heads is None:
            return super().head_inputs(values, state, valid=valid, reset=reset)
        chunk, state, order = self._begin(values, state, valid, reset)
        (x, state, _), by = self._absorb_by_exits(chunk, state, ())
        if order is not None:
            x, by = order.restore(x), None if by is None else order.restore(by)
        return x if by is None else ExitInputs(x, by), state

    def _absorb(self, chunk: Chunk, state: DecoderState, taps: Sequence[int]) -> Hidden:
        return self._absorb_by_exits(chunk, state, taps)[0]

    def _absorb_by_exits(self, chunk: Chunk, state: DecoderState, taps: Sequence[int]) -> tuple[Hidden, Tensor | None]:
        """Absorb ``chunk`` of values; also return the exit of each token, [batch, time] int64, None where all tokens go
        through all layers."""
        chunk, before, seen = self._place(chunk, state.seen)
        source = source_means(state, chunk.x.shape[0])
        (x, layers, tapped), by = self.stack.absorb_by_exits(
            chunk, state.layers, before, taps, self.exit_logits, source
        )
        # Not ``state._replace``: PyTorch 2.11 cannot return a NamedTuple from a graph that met its class as an input's.
        return Hidden(self.norm(x), DecoderState(layers, seen, state.source), tapped), by


class ExitEncoderDecoder(ExitDecoder, EncoderDecoder):
    """An encoder-decoder whose decoder has early exits; a rule may read the mean of the encoded source."""

    def initial_state(self, batch: int, *, source: Tensor | None = None, **options: Any) -> DecoderState:
        """Return the state of ``batch`` new sequences over an encoded ``source`` [batch, length, width]."""
        state = super().initial_state(batch, source=source, **options)
        if source is None or not self.stack.reads_source:
            return state
        source, valid = checked_source(source, options.get("source_valid"), batch, source.shape[-1])
        mean = source.sum(1) / valid.sum(1, keepdim=True).clamp_min(1)
        return state._replace(source=SourceMean(mean.to(state.seen.device)))  # type: ignore[call-arg]


def source_means(state: DecoderState, rows: int) -> Tensor | None:
    """Return the mean of each row's source, [rows, dim]; None where the stack reads no source."""
    if not isinstance(state.source, SourceMean):
        return None
    mean = state.source.mean
    count = mean.shape[0]
    return mean if count == rows else mean.repeat_interleave(rows // count, dim=0)
