"""The decoder: a chunk of tokens in, next-token logits out, with a state that carries all earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kinformer.blocks.ahead import Ahead
from kinformer.blocks.layer import LayerConfig
from kinformer.blocks.residual import LayerNorm, NormConfig
from kinformer.core import state as states
from kinformer.core.contract import Chunk, ReadsSource, advance, left_align, positions_of, select_valid
from kinformer.core.model import CausalModel, Hidden, SourceModel
from kinformer.core.stack import BeforeUse
from kinformer.core.state import form, require_rows
from kinformer.models.base import CommonConfig, CommonModel
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.host import arguments_trusted, has_data

# The state of a decoder: of its layers, of its counters, and what its stack reads of a source.


class SourceMean(NamedTuple):
    """The mean vector of each row's source, ``mean`` [batch, dim]; n neighbouring rows of a chunk share one, as
    hypotheses of a beam do."""

    mean: Tensor

    outlives_reset = True  # type: ignore[misc]


class DecoderState(NamedTuple):
    """The state: ``layers``, one state per use of a layer, ``seen`` [batch] int64, the tokens of each row's sequence,
    and ``source``, what the stack itself reads of a source (``()``: nothing)."""

    layers: tuple[states.State, ...]
    seen: Tensor
    source: SourceMean | tuple[()] = ()

    def reserve(self, length: int) -> DecoderState:
        """Return a single-owner state with room for ``length`` more tokens (see ``core.state.reserve``)."""
        return self._replace(layers=states.reserve(self.layers, length))

    def fork(self) -> DecoderState:
        """Return an independent copy of the state."""
        return states.fork(self)


def source_means(state: DecoderState, rows: int) -> Tensor | None:
    """Return the mean of each row's source, [rows, dim]; None where the stack reads none."""
    if not isinstance(state.source, SourceMean):
        return None
    mean = state.source.mean
    count = mean.shape[0]
    return mean if count == rows else mean.repeat_interleave(rows // count, dim=0)


class Left(NamedTuple):
    """The head inputs where exits have heads of their own: ``hidden_states`` [batch, time, dim], and ``by`` [batch,
    time] int64, the number of the exit that each token left by."""

    hidden_states: Tensor
    by: Tensor


class Decoder(CommonModel):
    """A decoder: input -> stack -> norm -> head.

    ``logits, state = model(tokens, state)`` with tokens [batch, time] int64 (or whatever else the input takes) and
    logits [batch, time, vocab]; ``state=None`` begins new sequences. Chunks may have any length: a prompt, a
    segment, or one token. With ``ahead`` the model has parts that predict that many tokens beyond the next
    (:class:`Ahead`); the objective multi-token trains them, and generation may use them as drafts.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(CommonConfig):
        kind = "decoder"
        protocol = CausalModel
        layers: tuple[LayerConfig, ...]
        embedding_norm: NormConfig | None = None
        norm: NormConfig | None = LayerNorm()
        ahead: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.ahead < 0 or (self.ahead and self.input.kind != "tokens"):
                raise KinformerError(
                    f"ahead is {self.ahead} but must be 0, or of a model that reads tokens how many it predicts beyond "
                    "the next."
                )
            if self.input.whole:
                raise KinformerError(
                    f"the input {self.input.kind!r} is read at once, which a decoder cannot; use it in an encoder."
                )
            if not self.head.per_position:
                raise KinformerError(
                    f"the head {self.head.kind!r} reads a whole sequence at once, which a decoder must not; use it in "
                    "an encoder, or a head of single positions such as language."
                )

        def build(self) -> Decoder:
            return Decoder(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if self.stack.reads_source and config.protocol is not SourceModel:
            stack: Any = config.stack
            raise KinformerError(
                f"the stack's rule {stack.rule.kind!r} reads the source of a translation, but this model has "
                "none; use it in an encoder-decoder (vanilla), or another rule (multinomial, geometric)."
            )
        self.ahead = nn.ModuleList(Ahead(config.width, config.dim) for _ in range(config.ahead)) or None
        if self.ahead is not None:
            config.initialisation.apply(self.ahead)

    def _build_entrance(self, dim: int) -> None:
        norm = self.config.embedding_norm
        self.embedding_norm = norm.build(dim) if norm else None

    def _embedded(self, values: Tensor, positions: Tensor, valid: Tensor | None, **others: Tensor) -> Tensor:
        x = super()._embedded(values, positions, valid, **others)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def initial_state(
        self,
        batch: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: Tensor | None = None,
        source_valid: Tensor | None = None,
    ) -> DecoderState:
        """Return the state of ``batch`` new sequences.

        ``source`` [batch, length, width], of which ``source_valid`` [batch, length] is real (None: all), is what
        cross-attention attends to; it is projected here, once.
        """
        device = device or self.input.device
        layers = self.stack.initial_state(batch, device=device, dtype=dtype, source=source, source_valid=source_valid)
        return DecoderState(layers, torch.zeros(batch, dtype=torch.int64, device=device))

    def forward(
        self,
        values: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """Return logits [batch, time, vocab] (zero where not ``valid``) and the state after the chunk."""
        inputs, state = self.head_inputs(values, state, valid=valid, reset=reset)
        return select_valid(self.logits(inputs), valid), state

    def logits(self, inputs: Tensor | Left) -> Tensor:
        """Return logits [batch, time, vocab] of head inputs (see
        :meth:`head_inputs`) or hidden states [batch, time, dim]."""
        if isinstance(inputs, Tensor):
            return self.head(inputs, self.input)
        x, by = inputs
        if by.is_meta:  # costs are counted as if no token left early
            return self.head(x, self.input)
        if torch.compiler.is_compiling() or not has_data(by):
            every = torch.stack([self._head_of(exit)(x, self.input) for exit in range(len(self.stack.exits))], dim=-2)
            return every.gather(-2, by[..., None, None].expand(*by.shape, 1, every.shape[-1]))[..., 0, :]
        heads: list[int] = torch.unique(by).tolist()
        if len(heads) == 1:
            return self._head_of(heads[0])(x, self.input)
        logits = None
        for number in heads:
            head_logits = self._head_of(number)(x[by == number][None], self.input)[0]
            logits = head_logits.new_empty(*by.shape, head_logits.shape[-1]) if logits is None else logits
            logits = logits.index_put((by == number,), head_logits)
        assert logits is not None
        return logits

    def exit_logits(self, x: Tensor, number: int) -> Tensor:
        """Return the logits [..., vocab] of exit ``number``, counted from 0, for its layer's outputs x [..., dim]."""
        return self._head_of(number)(self.norm(x), self.input)

    def _head_of(self, exit: int) -> nn.Module:
        return self.head if self.exit_heads is None or exit >= len(self.exit_heads) else self.exit_heads[exit]

    def head_inputs(
        self,
        values: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor | Left, DecoderState]:
        """Return the last hidden states [batch, time, dim], where exits have heads of their own as
        :class:`Left`, and the state after the chunk."""
        (x, state, _), exits = self._read(values, state, valid, reset, ())
        return x if exits is None or self.exit_heads is None else Left(x, exits), state

    def hidden(
        self,
        values: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Return the normed last hidden states [batch, time, dim], the state,
        and the outputs of the uses in ``taps``."""
        return self._read(values, state, valid, reset, taps)[0]

    def _read(
        self,
        values: Tensor,
        state: DecoderState | None,
        valid: Tensor | None,
        reset: Tensor | None,
        taps: Sequence[int],
    ) -> tuple[Hidden, Tensor | None]:
        """Return the results of :meth:`hidden`, and by which exit each token left, [batch,
        time] int64, where they may leave early."""
        if state is None or not arguments_trusted():
            self._check(values, {"valid": valid, "reset": reset}, {})
            state = self._checked_state(state, values)
        if valid is None:
            return self._absorb(Chunk(values, None, reset), state, taps)
        order = left_align(valid)
        chunk = Chunk(order.align(values), order.valid, None if reset is None else order.align(reset))
        (x, state, tapped), exits = self._absorb(chunk, state, taps)
        exits = None if exits is None else order.restore(exits)
        return Hidden(order.restore(x), state, tuple(map(order.restore, tapped))), exits

    @cached_property
    def _form(self) -> object:
        """Return the form of this model's states; None of one with a source, whose states also depend on its length."""
        if any(isinstance(module, ReadsSource) for module in self.modules()):
            return None
        return form(self.stack.initial_state(1, device=torch.device("meta")))

    def _checked_state(self, state: DecoderState | None, values: Tensor) -> DecoderState:
        """Return ``state`` for use here, a copy where its tensors may not be shared, or one of new sequences; refuse
        one of another model, or of another number of rows than ``values``."""
        batch = values.shape[0]
        if state is None:
            return self.initial_state(batch, device=values.device)
        if not isinstance(state, DecoderState) or len(state.layers) != len(self.stack.order):
            what = (
                plural(len(state.layers), "layer")
                if isinstance(state, DecoderState)
                else f"the type {type(state).__name__}"
            )
            raise KinformerError(
                f"the state is one of {what}, but this model's have {plural(len(self.stack.order), 'layer')}; give "
                "what this model returned, or None to begin new sequences."
            )
        require_rows(state, batch, values.device)
        if torch.compiler.is_compiling():
            return state
        if self._form is not None and form(state.layers) != self._form:
            raise KinformerError(
                "the state is another model's (its layers' states are of other types or sizes); give what this model "
                "returned, or None to begin new sequences."
            )
        if state.seen.is_inference() and not torch.is_inference_mode_enabled():
            return state.fork()  # autograd must not keep tensors of inference mode, nor may they be written into
        return state

    def further(self, number: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return hidden states [batch, time, width] that predict the tokens after ``tokens`` [batch, time].

        hidden: [batch, time, width], which predict ``tokens``: the model's for ``number`` 1, else those of number - 1.
        """
        assert self.ahead is not None
        return self.ahead[number - 1](hidden, self.input(tokens, torch.zeros_like(tokens)))

    def guesses(self, hidden: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """Return the most probable tokens [batch, n] behind ``tokens`` [batch, 1], which were drawn by ``hidden``
        [batch, 1, width]; n is at most ``limit``."""
        guesses = []
        for number in range(1, min(limit, len(self.ahead or ())) + 1):
            hidden = self.further(number, hidden, tokens)
            tokens = self.head(hidden, self.input).argmax(dim=-1)
            guesses.append(tokens)
        return torch.cat(guesses, dim=1)

    def until_exit(self, number: int, values: Tensor, state: DecoderState) -> tuple[tuple[Tensor, ...], DecoderState]:
        """Run tokens that all go on behind exit ``number`` - 1, up to exit ``number``, in a stack with early exits.

        values: tokens [batch, time] for exit 0, else the hidden states of the exit before. state: of the layers between
        them alone. Returns (hidden [batch, time, dim] for the next exit, logits [batch, time, vocab] of this one, by
        which exit each token is to leave [batch, time]), and the state after.
        """
        chunk, before, seen = self._placed(Chunk(values), state.seen)
        if number == 0:
            chunk = chunk._replace(x=self._entered(self._embedded(values, chunk.positions, None), None))  # type: ignore[arg-type]
        stack: Any = self.stack
        read, source = self.exit_logits, source_means(state, values.shape[0])
        x, logits, leaves, layers = stack.until(number, chunk, state.layers, before, read, source)
        return (x, logits, leaves), DecoderState(layers, seen, state.source)

    def past_exit(self, number: int, hidden: Tensor, state: DecoderState) -> tuple[tuple[()], DecoderState]:
        """Advance the state alone for tokens that left before with ``hidden`` [batch, time, dim]."""
        chunk, before, seen = self._placed(Chunk(hidden), state.seen)
        stack: Any = self.stack
        return (), DecoderState(stack.past(number, chunk, state.layers, before), seen, state.source)

    def _placed(self, chunk: Chunk, seen: Tensor) -> tuple[Chunk, BeforeUse, Tensor]:
        """Return ``chunk`` with its positions, the function that adds to the input of each
        use of a layer, and ``seen`` after it."""
        positions = positions_of(chunk, seen)
        token_positions = positions if chunk.valid is None else positions.masked_fill(~chunk.valid, 0)

        def before(x: Tensor, use: int) -> Tensor:
            added = self.position.layer_input(token_positions, use)
            return x if added is None else select_valid(x + added.to(x.dtype), chunk.valid)

        return chunk._replace(positions=positions), before, advance(seen, chunk, positions)

    def _absorb(self, chunk: Chunk, state: DecoderState, taps: Sequence[int]) -> tuple[Hidden, Tensor | None]:
        """Absorb ``chunk``, which holds the values that the input takes."""
        chunk, before, seen = self._placed(chunk, state.seen)
        x = self._entered(self._embedded(chunk.x, chunk.positions, chunk.valid), chunk.valid)  # type: ignore[arg-type]
        chunk = chunk._replace(x=x)
        reading = self.exit_logits, source_means(state, x.shape[0])
        (x, layers, tapped), exits = self.stack.absorb_early_exits(chunk, state.layers, before, taps, *reading)
        # By name, since PyTorch 2.11 returns no NamedTuple from a graph whose class it met as that of another.
        return Hidden(self.norm(x), DecoderState(layers, seen, state.source), tapped), exits


PARTS = {
    "DecoderModel": Decoder.Config,
}
