"""Context parallelism: processes share the time of every row, each with one stretch of it.

    mixers that say how their state crosses   compute all stretches at once          (``core.crossing``)
    other causal mixers                       hand their state on, layer by layer    (``training.handing``)
    encoders' mixers                          gather the keys and values of the row
    cross-attention                           sees the encoded source, which is gathered once

The loss of a stretch is a sum over its predictions, divided by their number in the whole row. States are those before
and after the row, the same in all processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from kinformer.core import state as states
from kinformer.core.config import Config, describe
from kinformer.core.contract import CausalMixer, Chunk, advance, positions_of
from kinformer.core.crossing import Crosses
from kinformer.core.encoder import EncoderMixer
from kinformer.core.learning import AuxLoss
from kinformer.core.model import modules_of
from kinformer.core.source import SourceMixer
from kinformer.core.stack import Stack
from kinformer.runtime.errors import KinformerError
from kinformer.training.crossing import Stretches, all_gather
from kinformer.training.handing import hand_on
from kinformer.training.objective import PREDICTED, ObjectiveModule, ObjectiveOutput


def check_time(model: nn.Module, ring: bool) -> None:
    """Refuse a ``model`` whose rows cannot be shared by time."""
    config, stack = getattr(model, "config", None), getattr(model, "stack", None)
    if getattr(config, "kind", None) not in ("decoder", "encoder", "encoder_decoder") or not isinstance(stack, Stack):
        raise _unshared(config, "only decoders and encoders of tokens and both in one model can")
    for reader in readers_of(model):
        _check_reader(reader, ring)
    if readers_of(model) == [model]:
        return
    _check_stack(stack)
    if stack.exits or stack.halting is not None:
        raise _unshared(stack.config, "how many layers it applies depends on the tokens")
    waiting = [mixer for mixer in mixers_of(stack) if not crosses(mixer)]
    if stack.config.recomputes and waiting:
        raise _unshared(
            stack.config,
            f"the mixer {type(waiting[0]).__name__} would receive states again in the backward pass; set "
            "stack.checkpoint = false",
        )
    initial_states = tuple(mixer.initial_state(1) for mixer in mixers_of(stack) if not isinstance(mixer, SourceMixer))
    if modules_of(model, AuxLoss) or states.pop_aux(initial_states)[0]:
        raise _unshared(config, "it has costs beside the loss, which are means over rows")
    for mixer in mixers_of(stack) if ring else ():
        if getattr(mixer, "growth", None) == "linear" and not getattr(mixer, "rings", False):
            raise KinformerError(
                f"`parallel` ring: the keys and values of the mixer {type(mixer).__name__} do not go round, since its "
                "scores are more than products of queries and keys; give cp instead of ring."
            )


def _check_reader(reader: Any, ring: bool) -> None:
    """Refuse an encoder that needs a whole row at once."""
    config, stack = reader.config, reader.stack
    if ring:
        raise KinformerError(
            "`parallel` ring: keys and values go round in the order of time, but an encoder sees both ways; give cp "
            "instead of ring."
        )
    if reader.input.config.kind != "tokens":
        raise _unshared(config, f"its input {reader.input.config.kind!r} has no tokens in order")
    if config.global_tokens or config.global_input is not None:
        raise _unshared(config, "its global tokens see the whole row from one process")
    _check_stack(stack)
    if stack.halting is not None:
        raise _unshared(stack.config, "how many layers it applies depends on the tokens")
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


def _unshared(config: Config | None, why: str) -> KinformerError:
    what = "this model" if config is None else describe(config)
    return KinformerError(f"{what} cannot share the time of rows: {why}; leave `parallel` cp out.")


def crosses(mixer: CausalMixer) -> bool:
    """Return whether a ``mixer`` computes its stretch without waiting for a state."""
    return isinstance(mixer, SourceMixer) or (isinstance(mixer, Crosses) and mixer.crosses)


def readers_of(model: Any) -> list[Any]:
    """Return the encoder of whole rows that a model is or has."""
    return {"encoder": [model], "encoder_decoder": [getattr(model, "encoder", None)]}.get(model.config.kind, [])


def mixers_of(stack: Stack) -> list[CausalMixer]:
    """Return the mixers of the layers, each of which absorbs a chunk after a state."""
    mixers: dict[CausalMixer, None] = {}
    inner = {
        part
        for mixer in stack.modules()
        if isinstance(mixer, CausalMixer)
        for part in mixer.modules()
        if part is not mixer
    }
    for module in stack.modules():
        if isinstance(module, CausalMixer) and module not in inner:
            mixers[module] = None
    return list(mixers)


def share_time(step: ObjectiveModule, processes: distributed.ProcessGroup, keeps: bool, ring: bool) -> None:
    """Let ``step`` compute one stretch of its rows, of which the ``processes`` have the others, in place; ``keeps``:
    whether the states after the rows are wanted."""
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
    """Hooks between the rows and a model that reads one stretch of them; before an encoder they change nothing."""

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
        """Weight the loss by this stretch's share of the predictions and sum the metrics over the row; give the state
        the number of tokens after the row."""
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
    members = [
        [replica * size + stretch * tensor + part for stretch in range(context)]
        for replica in range(replicas)
        for part in range(tensor)
    ]
    return distributed.new_subgroups_by_enumeration(members)[0]
