"""The decoder: tokens in, next-token logits out, with a state that carries everything that was absorbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kinformer.blocks.embedding import Lookup
from kinformer.blocks.initialise import Initialisation
from kinformer.blocks.norms import LayerNorm, NormConfig
from kinformer.blocks.residual import LayerConfig
from kinformer.blocks.sharing import share
from kinformer.core import state as states
from kinformer.core.contract import Chunk, advance, left_align, positions_of, select_valid
from kinformer.core.errors import KinformerError
from kinformer.core.model import CausalModel
from kinformer.core.parts import EmbeddingConfig, HeadConfig, ModelConfig, PositionConfig


class DecoderState(NamedTuple):
    """``layers``: one tuple of sublayer states per layer; ``seen`` [batch] int64 tokens of each row's sequence."""

    layers: tuple[Any, ...]
    seen: Tensor

    def reserve(self, length: int) -> DecoderState:
        """A single-owner state with room for ``length`` more tokens (see ``core.state.reserve``)."""
        return DecoderState(states.reserve(self.layers, length), self.seen)

    def fork(self) -> DecoderState:
        """An independent copy."""
        return states.fork(self)


class Decoder(nn.Module):
    """embedding -> layers -> norm -> head.

    ``logits, state = model(tokens, state)`` with tokens [batch, time] int64 and logits [batch, time, vocab];
    ``state=None`` begins new sequences. Chunks may have any length: a prompt, a segment, or one token.

    ``scale_embedding`` multiplies token embeddings by sqrt(dim) (Vaswani et al. 2017, section 3.4). With ``checkpoint``
    a training step keeps each layer's input and computes the rest a second time in the backward, with the same random
    masks: less memory, about a third more work, equal gradients.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        kind = "decoder"
        protocol = CausalModel
        vocab_size: int
        dim: int
        layers: tuple[LayerConfig, ...]
        position: PositionConfig
        head: HeadConfig
        norm: NormConfig | None = LayerNorm()
        dropout: float = 0.0
        initialisation: Initialisation = Initialisation()
        embedding: EmbeddingConfig = Lookup.Config()
        scale_embedding: bool = False
        checkpoint: bool = False

        def __post_init__(self) -> None:
            for name in ("vocab_size", "dim"):
                if getattr(self, name) < 1:
                    raise KinformerError(f"{name} must be 1 or more, but is {getattr(self, name)}.")
            if not self.layers:
                raise KinformerError("layers must hold at least one layer, but is empty.")

        def build(self) -> Decoder:
            return Decoder(self)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = config.embedding.build(config.vocab_size, config.dim)
        self.position = config.position.build_model(config.dim, len(config.layers))
        self.layers = nn.ModuleList(layer.build(config.dim) for layer in config.layers)
        self.shared = share(self.layers)
        self.norm = config.norm.build(config.dim) if config.norm else nn.Identity()
        self.head = config.head.build(config.dim, config.vocab_size)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        config.initialisation.apply(self)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """How long a sequence can get (a learned position's limit), or None."""
        return self.position.max_length

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> DecoderState:
        """The state of ``batch`` new sequences."""
        device = device or self.embedding.weight.device
        layers = tuple(
            layer.initial_state(batch, device=device, dtype=dtype)  # type: ignore[operator]
            for layer in self.layers
        )
        return DecoderState(layers, torch.zeros(batch, dtype=torch.int64, device=device))

    def forward(
        self,
        tokens: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """Logits [batch, time, vocab] (zero where not ``valid``) and the state after the chunk."""
        hidden, state, _ = self.hidden(tokens, state, valid=valid, reset=reset)
        return select_valid(self.logits(hidden), valid), state

    def head_inputs(
        self,
        tokens: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """What :meth:`logits` needs, the hidden states [batch, time, dim], and the state after the chunk."""
        hidden, state, _ = self.hidden(tokens, state, valid=valid, reset=reset)
        return hidden, state

    def logits(self, hidden: Tensor) -> Tensor:
        """[batch, time, dim] -> [batch, time, vocab]."""
        return self.head(hidden, self.embedding.weight)

    def hidden(
        self,
        tokens: Tensor,
        state: DecoderState | None = None,
        *,
        valid: Tensor | None = None,
        reset: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, DecoderState, tuple[Tensor, ...]]:
        """The normed last hidden states [batch, time, dim], the state, and the outputs of the layers in ``taps``."""
        self._check(tokens)
        if state is None:
            state = self.initial_state(tokens.shape[0], device=tokens.device)
        if valid is None:
            return self._absorb(tokens, state, None, reset, taps)
        order = left_align(valid)
        tokens = tokens.masked_fill(~valid, 0).gather(1, order.order)
        reset = None if reset is None else reset.gather(1, order.order)
        x, state, aligned = self._absorb(tokens, state, order.valid, reset, taps)
        back = order.inverse[..., None]
        x, *tapped = (y.gather(1, back.expand(-1, -1, y.shape[-1])) for y in (x, *aligned))
        return select_valid(x, valid), state, tuple(tapped)

    def _absorb(
        self, tokens: Tensor, state: DecoderState, valid: Tensor | None, reset: Tensor | None, taps: Sequence[int]
    ) -> tuple[Tensor, DecoderState, tuple[Tensor, ...]]:
        chunk = Chunk(tokens, valid, reset)
        positions = positions_of(chunk, state.seen)
        x = self.embedding(tokens, positions)
        x = x * self.config.dim**0.5 if self.config.scale_embedding else x
        encoded = self.position.embed(positions)
        x = x if encoded is None else x + encoded.to(x.dtype)
        x = select_valid(x if self.dropout is None else self.dropout(x), valid)
        after, tapped = [], []
        for index, layer in enumerate(self.layers):
            added = self.position.layer_input(positions, index)
            x = x if added is None else select_valid(x + added.to(x.dtype), valid)
            x, layer_state = self._layer(layer, Chunk(x, valid, reset), state.layers[index])
            after.append(layer_state)
            if index in taps:
                tapped.append(x)
        return self.norm(x), DecoderState(tuple(after), advance(state.seen, chunk, positions)), tuple(tapped)

    def _layer(self, layer: nn.Module, chunk: Chunk, state: Any) -> tuple[Tensor, Any]:
        if self.config.checkpoint and self.training and torch.is_grad_enabled():
            return checkpoint(_owned, layer, *chunk, state, use_reentrant=False)
        return layer(chunk, state)

    def _check(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise KinformerError(
                f"tokens must be [batch, time] with time >= 1, but have the shape {tuple(tokens.shape)}."
            )


def _owned(layer: nn.Module, x: Tensor, valid: Tensor | None, reset: Tensor | None, state: Any) -> tuple[Tensor, Any]:
    """What a layer gives, with a state of its own memory: a view would keep the tensors that it is a part of."""
    x, state = layer(Chunk(x, valid, reset), state)
    return x, states.map_tensors(torch.Tensor.clone, state)
