"""Context parallelism: processes share the time of every row, each with one stretch of it.

    mixers that say how their state crosses   compute all stretches at once          (``core.crossing``)
    other causal mixers                       hand their state on, layer by layer
    encoders' mixers                          gather the keys and values of the row
    cross-attention                           sees the encoded source, which is gathered once

The loss of a stretch is a sum over its predictions, divided by the number of predictions in the whole row. The states
before and after a row are the same in all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from kinformer.core.config import Config, describe
from kinformer.core.contract import CausalMixer, Chunk, advance, positions_of
from kinformer.core.crossing import Crosses, Crossing, sent_by_neighbours
from kinformer.core.encoder import EncoderMixer, SourceMixer
from kinformer.core.learning import AuxLoss
from kinformer.core.model import modules_of
from kinformer.core.stack import Stack
from kinformer.core.state import State, map_tensors, pop_aux, tensors
from kinformer.lab.training.data_module import PREDICTED, ObjectiveModule, ObjectiveOutput
from kinformer.runtime.autograd import Context
from kinformer.runtime.errors import KinformerError

# The operations of :mod:`kinformer.core.crossing` on ``torch.distributed``, with gradients.
#
# composed   all-gather of summaries; the gradient is a reduce-scatter          (LASP-2, Sun et al. 2025, 2502.07563)
# past       all-gather, or from the neighbours with a window's slots; gradients go back the same way
# last       broadcast from the last process; the gradient is a sum there
# exchange   from one process to another, without gradients

# PyTorch 2.13 has other names for these.
all_gather: Callable[..., object] = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
reduce_scatter: Callable[..., object] = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


class Stretches(Crossing):
    """The stretches of the ``processes``, a group in order of time."""

    def __init__(self, processes: distributed.ProcessGroup, keeps: bool, ring: bool) -> None:
        self.processes, self.keeps, self.ring = processes, keeps, ring
        self.number, self.count = distributed.get_rank(processes), distributed.get_world_size(processes)
        self.peers = distributed.get_process_group_ranks(processes)

    def gathered(self, local: Tensor, tied: Tensor) -> tuple[Tensor, Tensor]:
        return _Gathered.apply(local, tied, self)

    def from_neighbours(self, slots: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        return _FromNeighbours.apply(slots, self, limit)

    def last(self, slots: Tensor, count: int | None = None) -> Tensor:
        return _Last.apply(slots, self, slots.shape[2] if count is None else count) if self.keeps else slots

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> bool:
        waiting = None
        if sent is not None and 0 <= to < self.count:
            waiting = distributed.isend(sent.contiguous(), self.peers[to], group=self.processes)
        arrives = received is not None and 0 <= source < self.count
        if arrives:
            assert received is not None
            distributed.recv(received, self.peers[source], group=self.processes)
        if waiting is not None:
            waiting.wait()
        return arrives


class _Gathered(torch.autograd.Function):
    """The ``local`` of all processes [processes, ...]. ``tied`` passes through unchanged. Every process therefore runs
    the backward, a collective, even where its outputs do not depend on the tensors that the others sent."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, tied: Tensor, stretches: Stretches) -> tuple[Tensor, Tensor]:
        ctx.stretches, ctx.form = stretches, local
        everyone = local.new_empty(stretches.count, *local.shape)
        all_gather(everyone.flatten(), local.contiguous().flatten(), group=stretches.processes)
        return everyone, tied.view_as(tied)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor, tied: Tensor) -> tuple[Tensor, Tensor, None]:
        local = torch.empty_like(ctx.form, memory_format=torch.contiguous_format)
        reduce_scatter(local.view(-1), gradient.contiguous().flatten(), group=ctx.stretches.processes)
        return local, tied, None


class _FromNeighbours(torch.autograd.Function):
    """The last ``limit`` slots [batch, heads, time, width] of earlier stretches; ``slots`` pass through."""

    @staticmethod
    def forward(ctx: Context, slots: Tensor, stretches: Stretches, limit: int) -> tuple[Tensor, Tensor]:
        ctx.stretches, ctx.form = stretches, slots
        time, received = slots.shape[2], list[Tensor]()
        ctx.widths = sent_by_neighbours(time, limit, stretches.count)
        for distance, width in enumerate(ctx.widths, start=1):
            tail = slots[:, :, time - width :].contiguous()
            room = torch.empty_like(tail)
            if stretches.exchange(tail, stretches.number + distance, room, stretches.number - distance):
                received.insert(0, room)
        return torch.cat([slots[:, :, :0], *received], dim=2), slots.view_as(slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor, passed: Tensor) -> tuple[Tensor, None, None]:
        stretches, time, end = ctx.stretches, ctx.form.shape[2], gradient.shape[2]
        total = passed.clone(memory_format=torch.contiguous_format)
        for distance, width in enumerate(ctx.widths, start=1):
            sent = gradient[:, :, max(0, end - width) : end].contiguous()
            room = total.new_empty(*total.shape[:2], width, total.shape[3])
            if stretches.exchange(sent, stretches.number - distance, room, stretches.number + distance):
                total[:, :, time - width :] += room
            end -= width
        return total, None, None


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, slots: Tensor, stretches: Stretches, count: int) -> Tensor:
        ctx.stretches, ctx.form = stretches, slots
        ours = stretches.number == stretches.count - 1
        last = slots.clone(memory_format=torch.contiguous_format) if ours else None
        if last is None:
            last = slots.new_empty(*slots.shape[:2], count, *slots.shape[3:])
        distributed.broadcast(last, stretches.peers[-1], group=stretches.processes)
        return last

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        stretches, total = ctx.stretches, gradient.clone(memory_format=torch.contiguous_format)
        distributed.reduce(total, stretches.peers[-1], group=stretches.processes)
        return total if stretches.number == stretches.count - 1 else torch.zeros_like(ctx.form), None, None


# States handed from one process to the next: how any causal mixer computes a stretch of a row.
#
# By partition invariance the outputs of the stretches equal the outputs of the whole row. In every layer a process
# waits for the state of the process before it. With many layers all processes are busy at once, each one layer behind
# the process before it (LASP, Sun et al. 2024, arXiv 2404.02882, does this with the states of linear attention).
# Gradients of states go back the same way.

Inputs = tuple[Chunk, State, *tuple[object, ...]]
"""The arguments of a causal mixer."""
Outputs = tuple[Tensor, State, *tuple[object, ...]]

_AXES = 8
"""Axes that a leaf has at most."""


def hand_on(mixer: nn.Module, stretches: Stretches) -> None:
    """Let ``mixer`` take its state from the process before and hand it on to the next."""

    def enter(_: nn.Module, inputs: Inputs) -> Inputs:
        chunk, state, *rest = inputs
        if stretches.number == 0:
            return inputs
        x, *leaves = _Received.apply(chunk.x, _marker(), stretches, *(leaf.dtype for leaf in tensors(state)))
        order = iter(leaves)
        return chunk._replace(x=x), map_tensors(lambda _: next(order), state), *rest

    def leave(_: nn.Module, __: Inputs, outputs: Outputs) -> Outputs:
        y, state, *rest = outputs
        leaves = list(tensors(state))
        if stretches.number < stretches.count - 1:
            y = _Sent.apply(y, _marker(), stretches, *leaves)
        return y, _last(state, stretches), *rest

    mixer.register_forward_pre_hook(enter)
    mixer.register_forward_hook(leave)


def _marker() -> Tensor:
    """Return a scalar that requires a gradient, so that all processes run the backward of their exchanges."""
    return torch.ones((), requires_grad=torch.is_grad_enabled())


def _last(state: State, stretches: Stretches) -> State:
    """Return the state after the last stretch in all processes, without gradients, if it is kept."""
    if not stretches.keeps:
        return state
    leaves = list(tensors(state))
    forms = _forms(leaves)
    distributed.broadcast(forms, stretches.peers[-1], group=stretches.processes)
    after = []
    for leaf, form in zip(leaves, forms, strict=True):
        same = _shape(form) == leaf.shape
        after.append(
            leaf.detach().clone(memory_format=torch.contiguous_format) if same else leaf.new_empty(_shape(form))
        )
        if after[-1].numel():
            distributed.broadcast(after[-1], stretches.peers[-1], group=stretches.processes)
    order = iter(after)
    return map_tensors(lambda _: next(order), state)


def _forms(leaves: list[Tensor]) -> Tensor:
    """Return the shapes of ``leaves``, [leaves, axes] int64, padded with -1."""
    rows = [[*leaf.shape, *[-1] * (_AXES - leaf.dim())] for leaf in leaves]
    return torch.tensor(rows, device=leaves[0].device, dtype=torch.int64)


def _shape(form: Tensor) -> torch.Size:
    return torch.Size(size for size in form.tolist() if size >= 0)


def _learns(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() > 0


class _Sent(torch.autograd.Function):
    """The leaves of a state, sent to the next process. y passes through, so that its backward receives gradients."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, marker: Tensor, stretches: Stretches, *leaves: Tensor) -> Tensor:
        ctx.stretches, ctx.forms = stretches, leaves
        for sent in (_forms(list(leaves)), *(leaf for leaf in leaves if leaf.numel())):
            stretches.exchange(sent, stretches.number + 1, None, -1)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        received: list[Tensor | None] = []
        for leaf in ctx.forms:
            room = torch.empty_like(leaf, memory_format=torch.contiguous_format) if _learns(leaf) else None
            ctx.stretches.exchange(None, -1, room, ctx.stretches.number + 1)
            received.append(room)
        return gradient, None, None, *received


class _Received(torch.autograd.Function):
    """The leaves of a state from the process before, behind x, which passes through."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, marker: Tensor, stretches: Stretches, *dtypes: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.stretches = stretches
        forms = torch.empty(len(dtypes), _AXES, dtype=torch.int64, device=x.device)
        stretches.exchange(None, -1, forms, stretches.number - 1)
        forms_of = zip(forms, dtypes, strict=True)
        leaves = [torch.empty(_shape(form), dtype=dtype, device=x.device) for form, dtype in forms_of]
        for leaf in leaves:
            if leaf.numel():
                stretches.exchange(None, -1, leaf, stretches.number - 1)
        ctx.mark_non_differentiable(*(leaf for leaf in leaves if not leaf.is_floating_point()))
        ctx.learns = [_learns(leaf) for leaf in leaves]
        return x.view_as(x), *leaves

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, x: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for gradient, learns in zip(gradients, ctx.learns, strict=True):
            if learns:
                ctx.stretches.exchange(gradient, ctx.stretches.number - 1, None, -1)
        return x, *[None] * (2 + len(gradients))


def check_time(model: nn.Module, ring: bool) -> None:
    """Raise for a ``model`` whose rows cannot be shared by time."""
    config, stack = getattr(model, "config", None), getattr(model, "stack", None)
    if getattr(config, "kind", None) not in ("decoder", "encoder", "encoder_decoder") or not isinstance(stack, Stack):
        raise _unshared(config, "only decoders and encoders of tokens and both in one model can")
    for reader in readers_of(model):
        _check_reader(reader, ring)
    if readers_of(model) == [model]:
        return
    _check_stack(stack)
    waiting = [mixer for mixer in mixers_of(stack) if not crosses(mixer)]
    if stack.config.recomputes and waiting:
        kind = type(waiting[0]).__name__
        why = f"the mixer {kind} would receive states again in the backward pass; set stack.checkpoint = false"
        raise _unshared(stack.config, why)
    initial_states = tuple(mixer.initial_state(1) for mixer in mixers_of(stack) if not isinstance(mixer, SourceMixer))
    if modules_of(model, AuxLoss) or pop_aux(initial_states)[0]:
        raise _unshared(config, "it has costs beside the loss, which are means over rows")
    for mixer in mixers_of(stack) if ring else ():
        if getattr(mixer, "growth", None) == "linear" and not getattr(mixer, "rings", False):
            kind = type(mixer).__name__
            raise KinformerError(
                f"`parallel` ring: the keys and values of the mixer {kind} do not go round, since its scores are more "
                "than products of queries and keys; give cp instead."
            )


def _check_reader(reader: Any, ring: bool) -> None:
    """Raise for an encoder that needs a whole row at once."""
    config, stack = reader.config, reader.stack
    if ring:
        raise KinformerError("`parallel` ring: keys go round in order of time, but an encoder sees both ways; give cp.")
    if reader.input.config.kind != "tokens":
        raise _unshared(config, f"its input {reader.input.config.kind!r} does not have tokens in order")
    if config.global_tokens or config.global_input is not None:
        raise _unshared(config, "its global tokens see the whole row from one process")
    _check_stack(stack)
    for mixer in stack.modules():
        if isinstance(mixer, EncoderMixer) and not mixer.crosses:
            raise _unshared(config, f"the mixer {type(mixer).__name__} needs a whole row at once")
    if modules_of(reader, AuxLoss):
        raise _unshared(config, "it has costs beside the loss, which are means over rows")


def _check_stack(stack: Stack) -> None:
    if not stack.shardable:
        raise _unshared(stack.config, "it computes layers again in the backward pass")
    if stack.config.stochastic_depth:
        raise _unshared(stack.config, "it drops sublayers for whole rows, but processes draw for themselves")
    if stack.adaptive:
        raise _unshared(stack.config, "how many layers it applies depends on the tokens")


def _unshared(config: Config | None, why: str) -> KinformerError:
    what = "this model" if config is None else describe(config)
    return KinformerError(f"{what} cannot share the time of rows: {why}; leave `parallel` cp out.")


def crosses(mixer: CausalMixer) -> bool:
    """Return whether a ``mixer`` computes its stretch without waiting for a state."""
    return isinstance(mixer, SourceMixer) or (isinstance(mixer, Crosses) and mixer.crosses)


def readers_of(model: Any) -> list[Any]:
    """Return the encoder of whole rows: the model itself, or its encoder."""
    return {"encoder": [model], "encoder_decoder": [getattr(model, "encoder", None)]}.get(model.config.kind, [])


def mixers_of(stack: Stack) -> list[CausalMixer]:
    """Return the causal mixers of ``stack``, without mixers inside other mixers."""
    mixers = [module for module in stack.modules() if isinstance(module, CausalMixer)]
    inner = {part for mixer in mixers for part in mixer.modules() if part is not mixer}
    return [mixer for mixer in mixers if mixer not in inner]


def share_time(step: ObjectiveModule, processes: distributed.ProcessGroup, keeps: bool, ring: bool) -> None:
    """Change ``step`` in place so that it computes one stretch of its rows; the other ``processes`` compute the others.
    ``keeps``: whether the states after the rows are needed."""
    model: Any = step.model
    check_time(model, ring)
    stretches = Stretches(processes, keeps, ring)
    for mixer in mixers_of(model.stack):
        if crosses(mixer):
            mixer.crossing = stretches  # type: ignore[assignment]
        else:
            hand_on(mixer, stretches)
    for reader in readers_of(model):
        reader.crossing = stretches
    edge = _Edge(model, stretches)
    step.register_forward_pre_hook(edge.enter)
    step.register_forward_hook(edge.leave)


class _Edge:
    """Hooks between the rows and a model that reads one stretch of each row; before an encoder they change nothing."""

    def __init__(self, model: Any, stretches: Stretches) -> None:
        self.model, self.stretches = model, stretches

    def enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[object, ...]:
        """Give the model the number of tokens that each row's sequence has before this stretch."""
        batch, state, *rest = inputs
        stretches, kind = self.stretches, self.model.config.kind
        if kind == "encoder_decoder":  # its states begin within the step
            seen = torch.zeros(len(batch.target), dtype=torch.int64, device=batch.target.device)
            stretches.before, stretches.seen = self._counted(Chunk(batch.target, batch.target_valid), seen)
        if kind != "decoder":
            return inputs
        tokens = batch.tokens[:, :-1]
        state = self.model.initial_state(len(tokens)) if state is None else state
        stretches.before, stretches.seen = self._counted(Chunk(tokens, batch.valid, batch.reset), state.seen)
        return batch, state._replace(seen=stretches.before), *rest

    def leave(self, _: nn.Module, __: object, outputs: ObjectiveOutput) -> ObjectiveOutput:
        """Weight the loss by this stretch's share of the predictions; sum the metrics and count tokens over the row."""
        loss, metrics, state = outputs
        predicted = metrics[PREDICTED].to(loss.dtype)
        sums = torch.stack([metric.detach().to(torch.float64) for metric in metrics.values()])
        distributed.all_reduce(sums, group=self.stretches.processes)
        metrics = {name: total.to(metrics[name].dtype) for name, total in zip(metrics, sums, strict=True)}
        loss = loss * (predicted * self.stretches.count / metrics[PREDICTED].to(loss.dtype).clamp_min(1))
        return loss, metrics, state if state is None else state._replace(seen=self.stretches.seen)

    def _counted(self, chunk: Chunk, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of each row's sequence before this stretch, and after the row, from ``seen`` before it."""
        nothing = torch.zeros_like(seen)
        count = advance(nothing, chunk, positions_of(chunk, nothing))
        resets = nothing.bool() if chunk.reset is None else chunk.reset.any(1)
        local = torch.stack([count, resets.to(count.dtype)])
        gathered = local.new_empty(self.stretches.count, *local.shape)
        all_gather(gathered.flatten(), local.flatten(), group=self.stretches.processes)
        before = after = seen
        for number, (count, resets) in enumerate(gathered.unbind(0)):
            if number == self.stretches.number:
                before = after
            after = count + torch.where(resets > 0, 0, after)
        return before, after


def groups_of(replicas: int, context: int, tensor: int) -> distributed.ProcessGroup:
    """Return the group of processes that share rows with this one; all processes of the job must call together."""
    size = context * tensor
    places = [(replica, part) for replica in range(replicas) for part in range(tensor)]
    members = [[replica * size + stretch * tensor + part for stretch in range(context)] for replica, part in places]
    return distributed.new_subgroups_by_enumeration(members)[0]
