"""Encoders: full sequences in, a prediction for tokens or for each sequence out, no state; and the encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kinformer.blocks.residual import Initialisation, LayerNorm, NormConfig
from kinformer.core.config import Config
from kinformer.core.contract import ReadsSource, StateOptions, left_align, select_valid
from kinformer.core.crossing import Crossing, Row
from kinformer.core.encoder import (
    NEEDS_PATCHES,
    EncoderLayerConfig,
    EncoderMixer,
    GridOnly,
    SequenceContext,
    global_positions,
)
from kinformer.core.model import Encoded, SourceModel, WholeModel
from kinformer.core.parts import Input, InputConfig, PositionConfig
from kinformer.core.stack import StackConfig
from kinformer.inputs.tokens import GlobalInputConfig
from kinformer.models.decoder import CommonConfig, CommonModel, Decoder, DecoderState, Trunk
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.sequential import Sequential

# The trunk of encoders: it left-aligns rows, places global tokens and a global input, and applies its stack.


class ReaderConfig(Config):
    """The fields of all encoders of full sequences. Without ``kinds`` the first ``global_tokens`` tokens are global."""

    LEAST = {"global_tokens": 0}

    layers: tuple[EncoderLayerConfig, ...]
    global_tokens: int = 0
    global_input: GlobalInputConfig | None = None
    embedding_norm: NormConfig | None = LayerNorm()


class Reader(Trunk):
    """A trunk of encoder layers, whose ``config`` has the fields of :class:`ReaderConfig` too.

    ``crossing``: set if it reads one stretch of each row and other processes have the others. The valid tokens of a row
    are then its first tokens.
    """

    config: Any
    crossing: Crossing | None = None

    def _build_entrance(self, dim: int) -> None:
        config = self.config
        self.global_tokens = config.global_tokens
        self.global_input = config.global_input.build(dim) if config.global_input else None
        self.embedding_norm = config.embedding_norm.build(dim) if config.embedding_norm else nn.Identity()

    def _check_mixers(self) -> None:
        """Refuse mixers that cannot take such global tokens, and a stack without mixers."""
        input = getattr(self.input, "config", None)
        patches_only = getattr(input, "whole", False) and not getattr(input, "before", 0)
        for mixer in self.stack.modules():
            if isinstance(mixer, EncoderMixer):
                mixer.check(self.config.global_tokens > 0, self.config.global_input is not None)
                if isinstance(mixer, GridOnly) and not patches_only:
                    raise KinformerError(f"the mixer {type(mixer).__name__} {NEEDS_PATCHES}")
        if isinstance(self.stack, GridOnly) and not patches_only:
            raise KinformerError(f"the stack {self.config.stack.kind!r} {NEEDS_PATCHES}")

    def hidden(
        self,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        kinds: Tensor | None = None,
        types: Tensor | None = None,
        sentences: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Encoded:
        """Return the last hidden states, and the outputs of the layers in ``taps``."""
        self._check(values, {"valid": valid}, {"kinds": kinds, "types": types, "sentences": sentences})
        row = Row.of(self.crossing, valid)
        order = None if valid is None or bool(valid.all()) else left_align(valid)
        if order is not None and self.input.grid(values) is not None:
            raise KinformerError("valid: an image does not have padding: all of its patches are real; leave it out.")
        valid = None if order is None else order.valid
        if order is not None:
            values = order.align(values)
            kinds, types, sentences = (
                None if item is None else order.align(item) for item in (kinds, types, sentences)
            )
        length = self.input.length(values)
        begin = 0 if row is None else row.begin(length)
        positions = torch.arange(begin, begin + length, device=values.device).expand(len(values), -1)
        positions = positions if valid is None else positions.masked_fill(~valid, 0)
        global_positions = self._global_positions(values, kinds, valid)
        x, context = self._enter(values, positions, valid, types, sentences, global_positions)
        context, count = context._replace(row=row), context.num_global

        def before(x: Tensor, use: int) -> Tensor:
            added = self.position.layer_input(positions, use)
            return x if added is None else select_valid(x + pad(added.to(x.dtype), (0, 0, count, 0)), context.valid)

        x, tapped = self.stack.read(x, context, before, taps)
        outputs = [item[:, count:] for item in (self.norm(x), *tapped)]
        if order is not None:
            outputs = [order.restore(item) for item in outputs]
        global_input = x[:, :count] if count else None
        standing = context.valid[:, :count] if count and context.valid is not None else None
        return Encoded(outputs[0], global_input, standing, tuple(outputs[1:]))

    def hidden_of(self, values: Tensor, chosen: Tensor | None = None, **others: Tensor) -> Tensor:
        """Return the last hidden states [batch, n, dim] of ``values`` without padding or global tokens.

        chosen: int64 [batch, n], the positions that there are, as if there were no others; None for all. Where some are
        chosen, mixers must know where a token stands by its vector alone. others: what else the input reads.
        """
        self._check(values, {}, {})
        positions = torch.arange(self.input.length(values), device=values.device).expand(len(values), -1)
        x, context = self._embedded(values, positions, None, **others), SequenceContext(grid=self.input.grid(values))
        if chosen is not None:
            x, positions, context = (
                x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])),
                chosen,
                SequenceContext(),
            )

        def before(x: Tensor, use: int) -> Tensor:
            added = self.position.layer_input(positions, use)
            return x if added is None else x + added.to(x.dtype)

        x, _ = self.stack.read(self._entered(self.embedding_norm(x), None), context, before)
        return self.norm(x)

    def _global_positions(self, values: Tensor, kinds: Tensor | None, valid: Tensor | None) -> Tensor | None:
        if kinds is not None:
            return global_positions(kinds, valid)
        count = min(self.global_tokens, self.input.length(values))
        if not count:
            return None
        first = torch.arange(count, device=values.device).expand(len(values), -1)
        return first if valid is None else torch.where(valid[:, :count], first, -1)

    def _enter(
        self,
        values: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        types: Tensor | None,
        sentences: Tensor | None,
        global_positions: Tensor | None,
    ) -> tuple[Tensor, SequenceContext]:
        """Return the vectors of the tokens, global input first, and their :class:`SequenceContext`."""
        batch, time = len(values), self.input.length(values)
        x = self._embedded(values, positions, valid, **({} if types is None else {"types": types}))
        context = SequenceContext(valid, global_positions, grid=self.input.grid(values))
        if self.global_input is not None:
            has_sentences = sentences is not None
            sentences = sentences if has_sentences else self.global_input.sentences(batch, time, values.device)
            sentences = sentences if sentences is None or valid is None else sentences.masked_fill(~valid, -1)
            count = self.global_input.count(sentences if has_sentences else None, time)
            x = torch.cat([self.global_input.embed(batch, count).to(x.dtype), x], dim=1)
            context = _with_global_input(context, sentences, count, positions, has_sentences)
        return self._entered(self.embedding_norm(x), context.valid), context


def _with_global_input(
    context: SequenceContext, sentences: Tensor | None, count: int, positions: Tensor, has_sentences: bool
) -> SequenceContext:
    """Return ``context`` after ``count`` global tokens; if they stand for sentences, tokens without one are invalid."""
    batch, time = positions.shape
    valid = (
        context.valid
        if context.valid is not None
        else torch.ones(batch, time, dtype=torch.bool, device=positions.device)
    )
    if sentences is None:
        sentence_valid = torch.ones(batch, count, dtype=torch.bool, device=positions.device)
        joined = None if context.valid is None else torch.cat([sentence_valid, valid], 1)
        return SequenceContext(joined, context.global_positions, None, count)
    numbers = torch.arange(count, device=positions.device).expand(batch, -1)
    sentence_valid = numbers <= sentences.amax(1, keepdim=True)
    all_valid = context.valid is None and not (has_sentences and not bool(sentence_valid.all()))
    joined = None if all_valid else torch.cat([sentence_valid, valid], 1)
    return SequenceContext(joined, context.global_positions, torch.cat([numbers, sentences], 1), count)


class Encoder(Reader, CommonModel):
    """An encoder: input -> stack -> head; ``logits = model(tokens)`` with tokens [batch, time] int64.

    ``valid`` [batch, time] bool marks padding, ``kinds`` (``core.encoder``: LOCAL, GLOBAL) global tokens, ``types``
    segments as BERT's, ``sentences`` [batch, time] int64 the sentence that each token belongs to. Without ``kinds``
    the first ``global_tokens`` tokens are global. ``global_input`` puts further global tokens before the caller's.
    """

    class Config(CommonConfig, ReaderConfig):
        kind = "encoder"
        protocol = WholeModel
        layers: tuple[EncoderLayerConfig, ...]
        initialisation: Initialisation = Initialisation(residual="plain")

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._check_mixers()

    def forward(
        self,
        values: Tensor,
        *,
        valid: Tensor | None = None,
        kinds: Tensor | None = None,
        types: Tensor | None = None,
        sentences: Tensor | None = None,
    ) -> Tensor:
        """Return logits of tokens [batch, time, ...] (zero where not ``valid``) or of sequences [batch, classes]."""
        encoded = self.hidden(values, valid=valid, kinds=kinds, types=types, sentences=sentences)
        hidden_states = encoded.long_input
        if self.crossing is not None and not self.config.head.per_position:  # the head reads the whole row
            hidden_states, valid = self.crossing.row(hidden_states, 1), self.crossing.valid_row(valid)
        logits = self.logits(hidden_states, valid)
        return select_valid(logits, valid) if logits.dim() == 3 else logits

    def logits(self, hidden_states: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the head's logits of hidden states; a head per position takes any shape [..., dim]."""
        return self.head(hidden_states, self.input, valid)


# The encoder-decoder (Vaswani et al. 2017): an encoder reads a source once, and a decoder continues from it.
#
#     state = model.begin(source, valid)        the encoder reads the source, whose vectors every layer projects once
#     logits, state = model(tokens, state)      from here on the decoder's contract: chunks of any length
#
# The encoder is made of any encoder mixers, the decoder of any causal ones, each layer with cross-attention among its
# ``further_mixers``. An encoder without ``input`` uses the decoder's input: with a tied head, one table is used three
# times (section 3.4).


class SourceEncoder(Reader):
    """The encoder of the source: values [batch, length, ...] -> [batch, length, dim], zero where not ``valid``."""

    class Config(ReaderConfig):
        """The config; ``input`` None shares the decoder's input. ``dropout`` acts on the first layer's input."""

        position: PositionConfig
        input: InputConfig | None = None
        stack: StackConfig = Sequential.Config()
        embedding_norm: NormConfig | None = None
        norm: NormConfig | None = None
        dropout: float = 0.0

        def __post_init__(self) -> None:
            if not self.layers:
                raise KinformerError("encoder.layers must hold at least one layer, but is empty.")

        @property
        def uses(self) -> tuple[EncoderLayerConfig, ...]:
            """Return the config of the layer of every use, in order."""
            return tuple(self.layers[index] for index in self.stack.uses(len(self.layers)))

    config: Config

    def __init__(self, config: Config, dim: int, input: Input) -> None:
        if config.input is not None:
            input = config.input.build(dim)
        super().__init__(config, dim, input, owns=config.input is not None)
        self._check_mixers()

    def forward(self, values: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.hidden(values, valid=valid).long_input


class EncoderDecoder(Decoder):
    """A :class:`Decoder` whose new sequences begin over a source; its config has ``encoder`` too."""

    class Config(Decoder.Config):
        kind = "encoder_decoder"
        protocol = SourceModel
        encoder: SourceEncoder.Config

        def build(self) -> EncoderDecoder:
            return self.stack.model_class(EncoderDecoder)(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not any(isinstance(module, ReadsSource) for module in self.stack.modules()):
            raise KinformerError(
                "no layer of the decoder looks at the source; give its layers cross-attention, as "
                '`set` \'layers.*.further_mixers=[{"kind": "cross"}]\', or train a decoder alone.'
            )

    def _build_entrance(self, dim: int) -> None:
        super()._build_entrance(dim)
        self.encoder = SourceEncoder(self.config.encoder, dim, self.input)

    @property
    def source_input(self) -> Input:
        """Return the input that encodes the source's values."""
        return self.encoder.input

    @property
    def max_source_length(self) -> int | None:
        """Return how long a source may be, None for any length."""
        return self.encoder.max_length

    def begin(self, source: Tensor, valid: Tensor | None = None) -> DecoderState:
        """Return the state of new sequences over ``source`` [batch, length] (or another shape that its input takes);
        ``valid`` [batch, length] bool marks real tokens (None: all)."""
        hidden, crossing = self.encoder(source, valid), self.encoder.crossing
        if crossing is None:
            return self.initial_state(len(hidden), device=hidden.device, source=hidden, source_valid=valid)
        hidden, valid = crossing.row(hidden, 1), crossing.valid_row(valid)
        state = self.initial_state(len(hidden), device=hidden.device, source=hidden, source_valid=valid)
        return state._replace(seen=crossing.before)

    def initial_state(self, batch: int, **options: Unpack[StateOptions]) -> DecoderState:
        """Return the state of ``batch`` new sequences over an encoded ``source`` [batch, length, width]."""
        if options.get("source") is None:
            raise KinformerError("this model continues a source; begin with state = model.begin(source, valid).")
        return super().initial_state(batch, **options)


PARTS = {"EncoderModel": Encoder.Config, "EncoderDecoderModel": EncoderDecoder.Config}
