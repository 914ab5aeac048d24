"""Reversible layers (RevNet, Gomez et al. 2017; Reformer, Kitaev et al. 2020, section 3): inputs are computed from
outputs in the backward pass.

Two streams x1 and x2 begin as the input. A layer of attention f and feed-forward g, each after a norm, computes

    y1 = x1 + f(x2),    y2 = x2 + g(y1)         backwards    x2 = y2 - g(y1),    x1 = y1 - f(x2)

so that a training step stores the last streams only, and its activations do not grow with depth. The output is [y1, y2]
side by side, as in Trax and in Hugging Face's Reformer: the last norm and the head are twice as wide. With ``join =
"mean"`` the output is (y1 + y2) / 2, as in reformer-pytorch, and as wide as the model.

Sublayers add to the streams in turns (Trax swaps the streams after each), so a layer may have any number of sublayers.

The streams are float32 at least. Restored inputs differ from the original ones by rounding: after 32 layers by 3e-6 of
the largest value in float32 and by 1e-14 in float64 (``benchmarks/reversible.py``; with streams in bfloat16 by a
tenth). Gradients in float32 are off by 6e-7 of their norm; without recomputing they are off by 3e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from kinformer.core import state as states
from kinformer.core.contract import Chunk, state_dtype
from kinformer.core.encoder import SequenceContext
from kinformer.core.parts import Position
from kinformer.core.stack import BeforeUse, Branch, Stack, StackConfig
from kinformer.core.state import State, map_tensors, reserved_parts, tensors
from kinformer.runtime.autograd import Context, Gradients, check_reverse, first_order
from kinformer.runtime.compiling import uncompiled
from kinformer.runtime.errors import KinformerError

# The backward pass of reversible layers: it restores inputs and random numbers, and computes gradients on the way.

NAME = "the reversible stack"
UndoState = tuple[State, Sequence[Tensor], Sequence[Tensor | None]]
"""The state before a mixer as a form and its tensors, and the gradients of the tensors of the state after."""
REMEDY = "use `set` stack.recompute=false for that"


class Trail:
    """The progress of a backward pass: the ``streams`` a and b after the use that is next in the backward pass."""

    streams: tuple[Tensor, Tensor]


class LayerUse:
    """One use of a layer: its ``branches`` read and add to the streams a and b [batch, time, dim] in turns.

    A branch reads b and adds to a; then a and b change places. ``context`` is the context of the tokens, ``dtype`` the
    dtype of the branches' inputs. ``random``: whether branches may draw random numbers.
    """

    def __init__(self, branches: Sequence[Branch], context: object, dtype: torch.dtype, random: bool) -> None:
        self.branches, self.context, self.dtype, self.random = branches, context, dtype, random
        self.autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        self.drawn: list[Callable[[], AbstractContextManager[object]]] = []

    def forward(self, a: Tensor, b: Tensor, state: tuple[State, ...]) -> tuple[Tensor, Tensor, tuple[State, ...]]:
        """Return the streams and the mixers' states after the layer."""
        inputs, after = iter(state), []
        for branch in self.branches:
            added, new_state = self._run_branch(branch, b, next(inputs) if branch.mixes else ())
            a, b = b, a + added
            if branch.mixes:
                after.append(new_state)
        return a, b, tuple(after)

    def forward_to_undo(self, a: Tensor, b: Tensor, state: tuple[State, ...]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the streams and the states' tensors as :meth:`forward` does, detached, and note the settings that the
        backward pass restores.

        Branches are computed with a graph, as in the backward pass, because some branches compute differently without a
        graph. The tensors that the graph would save are dropped at once.
        """
        self.autocast, self.drawn = _autocast(a.device), []
        inputs, after = iter(state), []
        with self.autocast(), saved_tensors_hooks(lambda _: _NOTHING, _never):
            for branch in self.branches:
                self.drawn.append(_generators(b) if self.random else nullcontext)
                branch_state = states.detach(next(inputs)) if branch.mixes else ()
                with torch.enable_grad():
                    added, branch_state = self._run_branch(branch, b.detach(), branch_state)
                a, b = b, a + added.detach()
                if branch.mixes:
                    after += [tensor.detach().clone() for tensor in states.tensors(branch_state)]
        return a, b, after

    def backward(
        self,
        streams: tuple[Tensor, Tensor],
        gradients: tuple[Tensor | None, Tensor | None],
        before: Sequence[UndoState],
        weights: Sequence[Tensor],
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Return the streams before the layer from the streams after it, and the gradients of the streams, of the
        states' tensors, in order, and of ``weights``.

        ``before`` has an entry for each mixer, in order.
        """
        (a, b), (of_a, of_b) = streams, gradients
        of_weights: list[Tensor | None] = [None] * len(weights)
        of_states: list[Tensor | None] = []
        mixers = list(before)
        for branch, drawn in zip(reversed(self.branches), reversed(self.drawn), strict=True):
            undo_state = mixers.pop() if branch.mixes else ((), [], ())
            with self.autocast(), drawn():
                added, grads = self._undo(branch, a, undo_state, of_b, weights)
            # x = y - F(..), the streams before the branch.
            a, b = b - added, a
            of_a, of_b = of_b, _sum(of_a, grads[0])
            count = 1 + len(undo_state[1])
            of_states = [*grads[1:count], *of_states]
            of_weights = [_sum(*pair) for pair in zip(of_weights, grads[count:], strict=True)]
        return (a, b), (of_a, of_b), of_states, of_weights

    def _undo(
        self, branch: Branch, x: Tensor, undo_state: UndoState, of_added: Tensor | None, weights: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum that ``branch`` added for x, and the gradients of x, the state and ``weights``."""
        form, tensors, of_after = undo_state
        with torch.enable_grad():
            x, *tensors = inputs = [
                tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in (x, *tensors)
            ]
            # Views, since FlopCounterMode's hooks fail on leaves in a nested backward pass.
            views = [item.view_as(item) for item in inputs]
            added, after = self._run_branch(branch, views[0], fill(form, views[1:]))
        ends = zip([added, *states.tensors(after)], [of_added, *of_after], strict=True)
        pairs = [(y, g.to(y.dtype)) for y, g in ends if g is not None and y.requires_grad]
        leaves = [tensor for tensor in (x, *tensors, *weights) if tensor.requires_grad]
        grads: Iterable[Tensor | None] = [None] * len(leaves)
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        rest = iter(grads)
        return added.detach(), [next(rest) if tensor.requires_grad else None for tensor in (x, *tensors, *weights)]

    def _run_branch(self, branch: Branch, x: Tensor, state: State) -> tuple[Tensor, State]:
        return branch.run(x.to(self.dtype), self.context, state)


class UseLayer(torch.autograd.Function):
    """The autograd function of a use of a layer -> ``a, b, *state after``. It saves its inputs but the streams."""

    @staticmethod
    def forward(
        ctx: Context,
        use: LayerUse,
        trail: Trail,
        state: State,
        weights: Callable[[], Sequence[Tensor]],
        a: Tensor,
        b: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.use, ctx.trail, ctx.weights = use, trail, weights
        ctx.forms = [states.map_tensors(lambda _: _NOTHING, item) for item in state]
        a, b, after = use.forward_to_undo(a, b, state)
        return a, b, *after

    @staticmethod
    @first_order(NAME, REMEDY)
    def backward(ctx: Context, saved: tuple[Tensor, ...], *gradients: Tensor | None) -> Gradients:
        weights = ctx.weights()
        _check_same(weights, saved[len(saved) - len(weights) :])
        inputs, of_after, before = iter(saved), iter(gradients[2:]), []
        for form in ctx.forms:
            tensors = [next(inputs) for _ in states.tensors(form)]
            before.append((form, tensors, [next(of_after) for _ in tensors]))
        streams, of_streams, of_states, of_weights = ctx.use.backward(
            ctx.trail.streams, (gradients[0], gradients[1]), before, weights
        )
        ctx.trail.streams = streams
        return None, None, None, None, *of_streams, *of_states, *of_weights


class Join(torch.autograd.Function):
    """The autograd function that joins the streams; ``others`` pass through, so that its backward runs first."""

    @staticmethod
    def forward(
        ctx: Context, trail: Trail, mean: bool, dtype: torch.dtype, a: Tensor, b: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        y = join_streams(a, b, mean, dtype)
        ctx.save_for_backward(*((a, b) if mean or dtype != a.dtype else (y,)))
        ctx.trail, ctx.mean, ctx.dtype = trail, mean, a.dtype
        return y, *others

    @staticmethod
    @first_order(NAME, REMEDY)
    def backward(ctx: Context, saved: tuple[Tensor, ...], of_y: Tensor | None, *of_others: Tensor | None) -> Gradients:
        a, b = saved if len(saved) == 2 else saved[0].chunk(2, dim=-1)
        ctx.trail.streams = a, b
        of_streams: tuple[Tensor | None, ...] = (None, None)
        if of_y is not None:
            of_y = of_y.to(ctx.dtype)
            of_streams = (0.5 * of_y,) * 2 if ctx.mean else of_y.chunk(2, dim=-1)
        return None, None, None, *of_streams, *of_others


def join_streams(a: Tensor, b: Tensor, mean: bool, dtype: torch.dtype) -> Tensor:
    """Return the stack's output of the streams [batch, time, dim]: their mean, or both side by side."""
    return (0.5 * (a + b) if mean else torch.cat([a, b], dim=-1)).to(dtype)


def fill(form: State, tensors: Iterable[Tensor]) -> State:
    """Return a state with the form of ``form`` and other ``tensors``."""
    rest = iter(tensors)
    return states.map_tensors(lambda _: next(rest), form)


_NOTHING = torch.empty(0)


def _never(_: object) -> Tensor:
    raise AssertionError("a graph without saved tensors was differentiated")


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _check_same(now: Sequence[Tensor], then: Sequence[Tensor]) -> None:
    if any(a.untyped_storage()._cdata != b.untyped_storage()._cdata for a, b in zip(now, then, strict=False)):
        raise KinformerError(
            f"{NAME} has other weights in the backward pass than in the forward pass, but computes layers again with "
            f"the present ones; {REMEDY}."
        )


def _autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return the present autocast without its cache of weights, which would return weights without a graph."""
    if device.type == "meta":
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return partial(torch.autocast, device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _generators(x: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes contexts with the present states of the random generators."""
    generators, (devices, others), kind = torch.get_rng_state(), get_device_states(x), x.device.type

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices=devices, device_type=kind if devices else "cuda"):
            torch.set_rng_state(generators)
            if devices:
                set_device_states(devices, others, device_type=kind)
            yield

    return again


class Reversible(Stack):
    """The reversible stack: the input becomes two streams, which pass through all layers and are then joined. It has
    the states and the partition invariance of any stack.

    With ``recompute = False`` the same function saves all activations for the backward pass. With ``recompute = True``
    an autograd function computes layers again. Then second derivatives are not available, FSDP cannot shard the layers,
    and ``torch.compile`` skips the stack (with ``fullgraph=True`` it raises an error), because a compiler would save
    the activations that the stack exists to drop.
    """

    shardable = False

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
        self, x: Tensor, context: SequenceContext, before: BeforeUse, taps: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, _, tapped = self._run(x, context, ((),) * len(self.order), taps)
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
            return self._recompute(x, context, state, taps)
        a = b = x.to(state_dtype(x.dtype))
        tapped, after = [], []
        for number, index in enumerate(self.order):
            use = LayerUse(self._branches(index), context, x.dtype, self.training)
            a, b, new_state = use.forward(a, b, state[number])
            after.append(new_state)
            if number in taps:
                tapped.append(join_streams(a, b, self.mean, x.dtype))
        return join_streams(a, b, self.mean, x.dtype), tuple(after), tuple(tapped)

    @uncompiled("a reversible stack computes layers again in the backward pass; recompute = false")
    def _recompute(
        self, x: Tensor, context: object, state: tuple[State, ...], taps: Sequence[int]
    ) -> tuple[Tensor, tuple[State, ...], tuple[Tensor, ...]]:
        """Run the layers and store their outputs alone for the backward pass."""
        for part in reserved_parts(state):
            part.refuse_graph()
        trail = Trail()
        # y - F(..) restores x up to rounding errors, so the streams are float32 at least.
        a = b = x.to(state_dtype(x.dtype))
        tapped, after = [], []
        for number, index in enumerate(self.order):
            use = LayerUse(self._branches(index), context, x.dtype, self.training)
            leaves = (*tensors(state[number]), *self._weights(index))
            check_reverse(NAME, a, *leaves, remedy=REMEDY)
            a, b, *new_state = UseLayer.apply(use, trail, state[number], partial(self._weights, index), a, b, *leaves)
            after.append(fill(state[number], new_state))
            if number in taps:
                tapped.append(join_streams(a, b, self.mean, x.dtype))
        # All outputs go through one node, whose backward runs first and sets the streams that the layers begin with.
        others = tuple(tapped), tuple(after)
        moving = [tensor for tensor in tensors(others) if tensor.requires_grad]
        y, *moved = Join.apply(trail, self.mean, x.dtype, a, b, *moving)
        rest = iter(moved)
        tapped, after = map_tensors(lambda item: next(rest) if item.requires_grad else item, others)
        return y, after, tapped

    def _weights(self, index: int) -> tuple[nn.Parameter, ...]:
        """Return the trainable weights of a layer, shared parts included."""
        parameters = (*self.layers[index].parameters(), *self.shared.parameters())
        return tuple(parameter for parameter in parameters if parameter.requires_grad)


PARTS = {"ReversibleStack": Reversible.Config}
