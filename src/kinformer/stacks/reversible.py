"""Reversible layers (RevNet, Gomez et al. 2017; Reformer, Kitaev et al. 2020, section 3): inputs made of outputs.

Two streams x1 and x2 begin as the input. A layer of attention f and feed-forward g, each behind its own norm, gives

    y1 = x1 + f(x2),    y2 = x2 + g(y1)         backwards    x2 = y2 - g(y1),    x1 = y1 - f(x2)

so that a training step stores the last streams only, and its activations do not grow with depth. The output is [y1, y2]
side by side, as in Trax and in Hugging Face's Reformer: the last norm and the head are twice as wide. With ``join =
"mean"`` it is (y1 + y2) / 2, as in reformer-pytorch, and as wide as the model.

Sublayers add to the streams in turns (Trax swaps the streams after each), so a layer may have any number of them.

The streams are float32 at least. What comes back differs from what was there by rounding: after 32 layers by 3e-6 of
the largest value in float32 and by 1e-14 in float64 (``benchmarks/reversible.py``; streams in bfloat16 would be
off by a tenth). Gradients in float32 are off by 6e-7 of their norm, 3e-7 of which are there without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kinformer.core import state as states
from kinformer.core.contract import Chunk, state_dtype
from kinformer.core.encoder import SequenceContext
from kinformer.core.parts import Position
from kinformer.core.stack import BeforeUse, Branch, Stack, StackConfig
from kinformer.core.state import State
from kinformer.runtime.compiling import uncompiled
from kinformer.runtime.derivatives import check_reverse
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.reversal import NAME, REMEDY, Join, LayerUse, Trail, UseLayer, filled, joined


class Reversible(Stack):
    """The reversible stack: x -> both streams, through all layers, -> joined. States and partitions are those of any
    other stack.

    ``recompute = False`` is the same function with everything saved for the backward pass. With it, layers are computed
    again by an autograd function of their own: there are no second derivatives, FSDP cannot shard the layers, and
    ``torch.compile`` leaves the stack as it is (with ``fullgraph=True`` it says so), because a compiler would keep what
    the stack exists not to keep.
    """

    shardable = False

    @dataclass(frozen=True, kw_only=True)
    class Config(StackConfig):
        kind = "reversible"
        join: Literal["concatenate", "mean"] = "concatenate"
        recompute: bool = True

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.checkpoint:
                raise KinformerError(
                    "the stack 'reversible' keeps no layer's input, so there is nothing that checkpoint = true could "
                    "save; leave it out, or use the stack 'sequential'."
                )

        def width(self, dim: int) -> int:
            return dim if self.join == "mean" else 2 * dim

        @property
        def recomputes(self) -> bool:
            return self.recompute

        def select(self, layers: Sequence[int]) -> StackConfig:
            return self

        def check(self, position: nn.Module) -> None:
            if isinstance(position, Position) and type(position).layer_input is not Position.layer_input:
                raise KinformerError(
                    "the stack 'reversible' has two streams, but this position enters every layer of one; use another "
                    "position, such as `set` position=sinusoidal, or the stack 'sequential'."
                )

        def build(self, layers: Sequence[nn.Module]) -> Reversible:
            return Reversible(self, layers)

    def __init__(self, config: Config, layers: Sequence[nn.Module]) -> None:
        super().__init__(config, layers)
        self.mean = config.join == "mean"
        for number in range(len(self.layers)):
            self._branches(number)

    def absorb(
        self, chunk: Chunk, state: tuple[State, ...], before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]]:
        return self._run(chunk.x, chunk._replace(x=cast(Any, None)), state, taps)

    def read(
        self, x: Tensor, text: SequenceContext, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, _, tapped = self._run(x, text, ((),) * len(self.order), taps)
        return y, tapped

    def _branches(self, index: int) -> tuple[Branch, ...]:
        layer: Any = self.layers[index]
        if not hasattr(layer, "branches"):
            raise KinformerError(
                f"the stack 'reversible' needs layers whose sublayers add to a stream, which {type(layer).__name__} "
                "does not have; use the layer 'decoder', or the stack 'sequential'."
            )
        return layer.branches()

    def _run(
        self, x: Tensor, context: object, state: tuple[State, ...], taps: Sequence[int]
    ) -> tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]]:
        if self.config.recomputes and torch.is_grad_enabled():
            return self._recomputed(x, context, state, taps)
        a = b = x.to(state_dtype(x.dtype))
        tapped, after = [], []
        for number, index in enumerate(self.order):
            use = LayerUse(self._branches(index), context, x.dtype, self.training)
            a, b, new_state = use.forward(a, b, state[number])
            after.append(new_state)
            if number in taps:
                tapped.append(joined(a, b, self.mean, x.dtype))
        return joined(a, b, self.mean, x.dtype), tuple(after), tuple(tapped)

    @uncompiled("a reversible stack computes layers again in the backward pass; recompute = false")
    def _recomputed(
        self, x: Tensor, context: object, state: tuple[State, ...], taps: Sequence[int]
    ) -> tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]]:
        """Run the layers without keeping anything for the backward pass but the outputs."""
        for part in states.reserved_parts(state):
            part.refuse_graph()
        trail = Trail()
        # y - F(..) restores x up to the rounding of the streams, which are therefore float32 at least.
        a = b = x.to(state_dtype(x.dtype))
        tapped, after = [], []
        for number, index in enumerate(self.order):
            use = LayerUse(self._branches(index), context, x.dtype, self.training)
            leaves = (*states.tensors(state[number]), *self._weights(index))
            check_reverse(NAME, a, *leaves, remedy=REMEDY)
            a, b, *new_state = UseLayer.apply(use, trail, state[number], partial(self._weights, index), a, b, *leaves)
            after.append(filled(state[number], new_state))
            if number in taps:
                tapped.append(joined(a, b, self.mean, x.dtype))
        # All goes through one node, whose backward is the first and brings the streams that the others begin with.
        others = tuple(tapped), tuple(after)
        moving = [tensor for tensor in states.tensors(others) if tensor.requires_grad]
        y, *moved = Join.apply(trail, self.mean, x.dtype, a, b, *moving)
        rest = iter(moved)
        tapped, after = states.map_tensors(lambda item: next(rest) if item.requires_grad else item, others)
        return y, after, tapped

    def _weights(self, index: int) -> tuple[nn.Parameter, ...]:
        """Return the weights that a layer can learn, shared parts included."""
        parameters = (*self.layers[index].parameters(), *self.shared.parameters())
        return tuple(parameter for parameter in parameters if parameter.requires_grad)
