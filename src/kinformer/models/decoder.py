"""The trunk of all models, and the decoder: a chunk of tokens in, next-token logits and a state of all tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.blocks.layer import LayerConfig
from kinformer.blocks.residual import Initialisation, LayerNorm, NormConfig
from kinformer.core import state as states
from kinformer.core.contract import (
    Alignment,
    CausalMixer,
    Chunk,
    ReadsSource,
    advance,
    left_align,
    positions_of,
    select_valid,
)
from kinformer.core.encoder import EncoderMixer
from kinformer.core.model import CausalModel, Hidden
from kinformer.core.parts import Input
from kinformer.core.stack import BeforeUse, ModelConfig, StackConfig
from kinformer.core.state import form, require_rows
from kinformer.runtime.compiling import arguments_trusted
from kinformer.runtime.draws import Dropout
from kinformer.runtime.errors import KinformerError, plural
from kinformer.stacks.sequential import Sequential

# The base of all models: an input, positions, a stack of layers, a norm and a head.


class CommonConfig(ModelConfig):
    """The fields of all models. ``norm`` follows the last layer, ``dropout`` falls on the first layer's input."""

    LEAST = {"dim": 1}

    stack: StackConfig = Sequential.Config()
    norm: NormConfig | None = None
    dropout: float = 0.0
    initialisation: Initialisation = Initialisation()

    def __post_init__(self) -> None:
        if not self.layers:
            raise KinformerError("layers must hold at least one layer, but is empty.")


class Trunk(nn.Module):
    """A model without its head: input, positions, a stack of layers and a norm; models define ``hidden`` themselves.

    ``config`` is a model's config, or the config of an encoder inside a model: it has ``position``, ``layers``,
    ``uses``, ``stack``, ``norm`` and ``dropout``. ``owns``: whether ``input`` is saved and trained with this module.
    """

    def __init__(self, config: Any, dim: int, input: Input, owns: bool = True) -> None:
        super().__init__()
        self.config = config
        if owns:
            self.input = input
        else:
            object.__setattr__(self, "input", input)
        self.position = config.position.build_model(dim, len(config.uses))
        self._build_entrance(dim)
        config.stack.check(self.position)
        widths = config.stack.widths(dim, len(config.layers))
        layers = [layer.build(width) for layer, width in zip(config.layers, widths, strict=True)]
        self.stack = config.stack.build_model(layers, dim)
        self.norm = config.norm.build(config.stack.width(dim)) if config.norm else nn.Identity()
        mixers = (
            module.max_length for module in self.stack.modules() if isinstance(module, CausalMixer | EncoderMixer)
        )
        self._max_length = min((n for n in (self.position.max_length, *mixers) if n is not None), default=None)
        self.dropout = Dropout(config.dropout) if config.dropout else None

    def _build_entrance(self, dim: int) -> None:
        """Build the parts between the input and the stack."""

    @property
    def max_length(self) -> int | None:
        """Return the greatest length of a sequence for its position and every mixer, or None."""
        return self._max_length

    def _embedded(self, values: Tensor, positions: Tensor, valid: Tensor | None, **others: Tensor) -> Tensor:
        """Return ``values`` [batch, time, ...] as vectors [batch, time, dim] plus the encodings of ``positions``."""
        if valid is not None:  # padding is not read, and does not have a position
            values, positions = self.input.without_padding(values, valid), positions.masked_fill(~valid, 0)
        x = self.input(values, positions, **others)
        encoded = self.position.embed(positions)
        return x if encoded is None else x + encoded.to(x.dtype)

    def _check(self, values: Tensor, masks: Mapping[str, Tensor | None], integers: Mapping[str, Tensor | None]) -> None:
        """Refuse ``values`` that this model cannot read, and masks and integers of another shape or type."""
        for name, value in {"values": values, **masks, **integers}.items():
            if not isinstance(value, Tensor) and (value is not None or name == "values"):
                raise KinformerError(f"{name} must be a tensor, but is of the type {type(value).__name__}.")
        self.input.check(values)
        shape = (len(values), self.input.length(values))
        if shape[0] < 1:
            raise KinformerError("there must be one row or more, but the batch has 0; leave the call out.")
        for checks, dtype in ((masks, torch.bool), (integers, torch.int64)):
            for name, value in checks.items():
                if value is not None and (tuple(value.shape) != shape or value.dtype != dtype):
                    raise KinformerError(
                        f"{name} is {value.dtype} {list(value.shape)}, but must be {dtype} [batch, time] = "
                        f"{list(shape)}; give one for every position."
                    )

    def _entered(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return the first layer's input."""
        return select_valid(x if self.dropout is None else self.dropout(x), valid)


class CommonModel(Trunk):
    """A trunk with a head; models define ``forward`` and ``hidden`` themselves."""

    config: CommonConfig

    def __init__(self, config: CommonConfig) -> None:
        super().__init__(config, config.dim, config.input.build(config.dim))
        config.head.check(config.width, self.input)
        self._build_head()
        config.initialisation.apply(self)
        self.initialised = True

    def _build_head(self) -> None:
        self.head = self.config.head.build(self.config.width, self.input)

    @property
    def layers(self) -> nn.ModuleList:
        """Return the layers of the stack, as the paths of ``set`` name them."""
        return self.stack.layers

    @property
    def vocab_size(self) -> int:
        """Return how many ids the input takes."""
        if self.input.vocab_size is None:
            raise KinformerError(f"the input {self.config.input.kind!r} of this model does not read token ids.")
        return self.input.vocab_size


# Predictions of the tokens beyond the next (Gloeckle et al. 2024, "Multi-token prediction"; DeepSeek-V3, section 2.2).
#
# The objective multi-token trains them (``lab.tasks.next_token``), and generation takes their most probable tokens as a
# draft (``generation.drafts``).


class Ahead(nn.ModuleList):
    """The predictions of ``count`` tokens beyond the next, one :class:`FurtherToken` each; a decoder owns them."""

    def __init__(self, count: int, width: int, dim: int) -> None:
        super().__init__(FurtherToken(width, dim) for _ in range(count))

    def further(self, number: int, hidden: Tensor, tokens: Tensor, input: Input) -> Tensor:
        """Return the hidden states [batch, time, width] that predict the tokens after ``tokens`` [batch, time].

        ``hidden`` [batch, time, width] predicts ``tokens``: the model's hidden states for ``number`` 1, otherwise the
        result for ``number`` - 1. ``input`` is the model's.
        """
        return self[number - 1](hidden, input(tokens, torch.zeros_like(tokens)))

    def guesses(self, hidden: Tensor, tokens: Tensor, limit: int, input: Input, head: nn.Module) -> Tensor:
        """Return the most probable tokens [batch, n] after ``tokens`` [batch, 1], with n at most ``limit``.

        ``tokens`` were drawn by the hidden states ``hidden`` [batch, 1, width]; ``input`` and ``head`` are the model's.
        """
        guesses = []
        for number in range(1, min(limit, len(self)) + 1):
            hidden = self.further(number, hidden, tokens, input)
            tokens = head(hidden, input).argmax(dim=-1)
            guesses.append(tokens)
        return torch.cat(guesses, dim=1)


class FurtherToken(nn.Module):
    """The map from hidden states that predict a token, and the token's vector, to hidden states that predict the token
    after it:

        z' = z + V silu(U [rms(z); rms(e)])

    z [batch, time, width] are the model's hidden states or results of this map, e [batch, time, dim] the vectors of the
    tokens. The model's head reads z and z'. DeepSeek-V3's equation 21 continues with a layer of attention, which would
    need a state; it is left out here.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width + dim, 2 * width, bias=False)
        self.outer = nn.Linear(2 * width, width, bias=False)

    def forward(self, z: Tensor, e: Tensor) -> Tensor:
        joined = torch.cat([_normed(z), _normed(e).to(z.dtype)], dim=-1)
        return z + self.outer(functional.silu(self.inner(joined)))


def _normed(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:])


class DecoderState(NamedTuple):
    """The state of a decoder: ``layers``, one state per use of a layer, and ``seen`` [batch] int64, the number of
    tokens of each row's sequence.

    ``source`` is the part of a source that the stack itself reads (``adaptive.stack``); ``()`` for most models.
    """

    layers: tuple[states.State, ...]
    seen: Tensor
    source: states.State = ()

    def reserve(self, length: int) -> DecoderState:
        """Return a single-owner state with room for ``length`` more tokens (see ``core.state.reserve``)."""
        return self._replace(layers=states.reserve(self.layers, length))

    def fork(self) -> DecoderState:
        """Return an independent copy of the state."""
        return states.fork(self)


class Decoder(CommonModel):
    """The decoder: input -> stack -> norm -> head.

    ``logits, state = model(tokens, state)`` with tokens [batch, time] int64 (or other values that the input reads)
    and logits [batch, time, vocab]; ``state=None`` begins new sequences. Chunks may have any length: a prompt, a
    segment, or one token. With ``ahead`` the model also has heads for this many tokens beyond the next
    (:class:`Ahead`); the objective multi-token trains them, and generation may use them as drafts. Early exits add
    to this class in ``adaptive.stack``.
    """

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
                    f"ahead is {self.ahead} but must be 0, or the number of tokens beyond the next that a model of "
                    "tokens predicts."
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
            return self.stack.model_class(Decoder)(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.ahead = Ahead(config.ahead, config.width, config.dim) if config.ahead else None
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

        Cross-attention attends to ``source`` [batch, length, width], whose real vectors are ``source_valid`` [batch,
        length] (None: all); the layers project it here, once.
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

    def logits(self, inputs: Any) -> Tensor:
        """Return logits [batch, time, vocab] of head inputs (see :meth:`head_inputs`) or hidden states."""
        return self.head(inputs, self.input)

    def head_inputs(
        self,
        values: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Any, DecoderState]:
        """Return the inputs of :meth:`logits`, here the last hidden states [batch, time, dim], and the state after."""
        hidden_states, state, _ = self.hidden(values, state, valid=valid, reset=reset)
        return hidden_states, state

    def hidden(
        self,
        values: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Return the normed last hidden states [batch, time, dim], the state, and the outputs in ``taps``."""
        chunk, state, order = self._begin(values, state, valid, reset)
        result = self._absorb(chunk, state, taps)
        if order is None:
            return result
        x, state, tapped = result
        return Hidden(order.restore(x), state, tuple(map(order.restore, tapped)))

    def _begin(
        self, values: Tensor, state: DecoderState | None, valid: Tensor | None, reset: Tensor | None
    ) -> tuple[Chunk, DecoderState, Alignment | None]:
        """Check a call; return its chunk of values, the state before, and the order of valid values (None: all are)."""
        if state is None or not arguments_trusted():
            self._check(values, {"valid": valid, "reset": reset}, {})
            state = self._checked_state(state, values)
        if valid is None:
            return Chunk(values, None, reset), state, None
        order = left_align(valid)
        return Chunk(order.align(values), order.valid, None if reset is None else order.align(reset)), state, order

    @cached_property
    def _form(self) -> object:
        """Return the form of this model's states; None with a source, since the form then depends on its length."""
        if any(isinstance(module, ReadsSource) for module in self.modules()):
            return None
        return form(self.stack.initial_state(1, device=torch.device("meta")))

    def _checked_state(self, state: DecoderState | None, values: Tensor) -> DecoderState:
        """Return ``state``, a copy where its tensors may not be shared, or the state of new sequences; refuse the state
        of another model, or of another number of rows than ``values``."""
        batch = values.shape[0]
        if state is None:
            return self.initial_state(batch, device=values.device)
        if not isinstance(state, DecoderState) or len(state.layers) != len(self.stack.order):
            what = f"the type {type(state).__name__}"
            what = plural(len(state.layers), "layer") if isinstance(state, DecoderState) else what
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
            # Autograd refuses to save tensors of inference mode, and nothing may be written into them.
            return state.fork()
        return state

    def _place(self, chunk: Chunk, seen: Tensor) -> tuple[Chunk, BeforeUse, Tensor]:
        """Return ``chunk`` with vectors and positions, the function that adds positions to the input of a layer, and
        ``seen`` after the chunk."""
        positions = positions_of(chunk, seen)
        token_positions = positions if chunk.valid is None else positions.masked_fill(~chunk.valid, 0)

        def add_position(x: Tensor, use: int) -> Tensor:
            added = self.position.layer_input(token_positions, use)
            return x if added is None else select_valid(x + added.to(x.dtype), chunk.valid)

        after = advance(seen, chunk, positions)
        x = self._entered(self._embedded(chunk.x, positions, chunk.valid), chunk.valid)
        return chunk._replace(x=x, positions=positions), add_position, after

    def _absorb(self, chunk: Chunk, state: DecoderState, taps: Sequence[int]) -> Hidden:
        """Absorb ``chunk``, which holds the values of the input."""
        chunk, before, seen = self._place(chunk, state.seen)
        x, layers, tapped = self.stack.absorb(chunk, state.layers, before, taps)
        # Not ``state._replace``: PyTorch 2.11 cannot return a NamedTuple from a graph that met its class as an input's.
        return Hidden(self.norm(x), DecoderState(layers, seen, state.source), tapped)


PARTS = {"DecoderModel": Decoder.Config}
