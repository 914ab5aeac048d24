"""Mixers that each break one law, in the ways in which real ones do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kinformer.core.contract import Chunk, select_valid

from .toys import Attention, Model, PastState, Recurrence, ReservedPast, SegmentMemory, SumState


class LooksAhead(Recurrence):
    """Every token but the chunk's last sees the next one."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return y + torch.nn.functional.pad(chunk.x[:, 1:], (0, 0, 0, 1)), end


class LeaksThroughMaximum(Attention):
    """Selects by a maximum over the whole chunk: no gradient, but the future is visible in the choice."""

    def step(self, chunk, state):
        y, end = super().step(chunk, state)
        loud = chunk.x.detach().abs().amax(dim=(1, 2), keepdim=True) > 4
        return torch.where(loud, 1.5 * y, y), end


class LeaksThroughSort(Attention):
    """Gates each token by its rank within the chunk, as sorting and balanced routing do."""

    def step(self, chunk, state):
        y, end = super().step(chunk, state)
        rank = chunk.x.detach().sum(dim=-1).argsort(dim=1).argsort(dim=1)
        return y * (1 + 0.1 * (rank % 2))[..., None].to(y.dtype), end


class SwitchesByChunkLength(Recurrence):
    """Has a separate path for single tokens that is not the same."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return (y if chunk.x.shape[1] > 1 else 1.001 * y), end


class TruncatesBeforeItAttends(Attention):
    """Appends, truncates to the window and only then attends: right for single tokens, wrong for more."""

    def __init__(self):
        super().__init__(window=4)

    def attend(self, q, k, v, visible):
        w = self.window
        return super().attend(q, k[:, :, -w:], v[:, :, -w:], visible[..., -w:])


class SegmentsByChunk(SegmentMemory):
    """Transformer-XL as published: one call is one segment."""

    def begins(self, positions: Tensor) -> Tensor:
        return positions[:, :1].expand_as(positions)


class DetachesBetweenChunks(Recurrence):
    """Right values, but no gradient crosses a chunk."""

    def forward(self, chunk, state):
        return super().forward(chunk, state._replace(total=state.total.detach()))


class WritesIntoItsState(Recurrence):
    """Counts in place."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return y, end._replace(seen=state.seen.copy_(end.seen))


class RemembersInItself(Recurrence):
    """Keeps something in a buffer of the module, where no state shows it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, chunk, state):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return super().forward(chunk, state)


class MixesRows(Recurrence):
    """Centres over the batch."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return y - 0.1 * y.mean(dim=0), end


class BlindToPadding(Recurrence):
    def forward(self, chunk, state):
        return super().forward(Chunk(chunk.x, None, chunk.reset), state)


class MultipliesPaddingAway(Recurrence):
    """0 x NaN is NaN."""

    def forward(self, chunk, state):
        if chunk.valid is None:
            return super().forward(chunk, state)
        chunk = chunk._replace(x=chunk.x * chunk.valid[..., None])
        y, end = super().forward(chunk, state)
        return torch.where(chunk.valid[..., None], y, 0.0 * chunk.x), end


class CountsPadding(Attention):
    """Outputs are right, but the counter advances over padding."""

    def step(self, chunk, state):
        y, end = super().step(chunk, state)
        return y, end if chunk.valid is None else end._replace(seen=end.seen + (~chunk.valid).sum(dim=1))


class IgnoresResets(Attention):
    def step(self, chunk, state):
        return super().step(Chunk(chunk.x, chunk.valid), state)


class HeedsOnlyResetsAtTheStart(Recurrence):
    """A reset clears the state that came in, wherever it stands in the chunk."""

    def forward(self, chunk, state):
        if chunk.reset is None:
            return super().forward(chunk, state)
        reset = torch.zeros_like(chunk.reset)
        reset[:, 0] = chunk.reset.any(dim=1)
        return super().forward(chunk._replace(reset=reset), state)


class HeedsResetsOnPadding(Recurrence):
    """A flag on a token that is not there clears the state."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        if chunk.reset is None or chunk.valid is None:
            return y, end
        cleared = (chunk.reset & ~chunk.valid).any(dim=1)
        return y, SumState(end.total.masked_fill(cleared[:, None], 0), end.seen.masked_fill(cleared, 0))


class UnguardedPast(ReservedPast):
    """Forgets that its buffers have one owner."""

    def check(self) -> None:
        pass


class UnguardedPastState(PastState):
    def reserve(self, length: int) -> UnguardedPast:
        held = super().reserve(length)
        return UnguardedPast(held.k, held.v, held.seen, held.length, [0])


class SharesItsBuffers(Attention):
    """A reserved state can be used twice: the second use overwrites what the first wrote."""

    def initial_state(self, batch, **where):
        return UnguardedPastState(*super().initial_state(batch, **where))

    def step(self, chunk, state):
        y, end = super().step(chunk, state)
        return y, UnguardedPastState(*end)


class DeclaresTooFewBytes(Attention):
    """Forgets its counter."""

    def state_bytes(self, length, *, dtype=torch.float32):
        return super().state_bytes(length, dtype=dtype) - 8


class DeclaresAnotherGrowth(Attention):
    def __init__(self):
        super().__init__()
        self.growth = "constant"


class CountsInInt32(Recurrence):
    def initial_state(self, batch, **where):
        state = super().initial_state(batch, **where)
        return state._replace(seen=state.seen.int())

    def state_bytes(self, length, *, dtype=torch.float32):
        return super().state_bytes(length, dtype=dtype) - 4

    def forward(self, chunk, state):
        y, end = super().forward(chunk, type(state)(state.total, state.seen.long()))
        return y, type(end)(end.total, end.seen.int())


class BeginsWithOnes(Recurrence):
    """A leaf that is neither empty nor zero before the first token."""

    class State(NamedTuple):
        total: Tensor
        seen: Tensor
        ready: Tensor

    def state_bytes(self, length, *, dtype=torch.float32):
        return super().state_bytes(length, dtype=dtype) + 1

    def initial_state(self, batch, **where):
        state = super().initial_state(batch, **where)
        return self.State(*state, torch.ones(batch, dtype=torch.bool))

    def forward(self, chunk, state):
        y, end = super().forward(chunk, SumState(state.total, state.seen))
        return y, self.State(*end, state.ready)


class ComputesInFloat64(Recurrence):
    """Fine in float64; any other dtype is silently widened."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return y.double(), end


class AccumulatesInHalf(Recurrence):
    """Lets autocast choose the dtype of its accumulator."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        half = torch.is_autocast_enabled("cpu")
        return y, end._replace(total=end.total.bfloat16()) if half else end


class SquaresInHalf(Recurrence):
    """Normalises by squares that leave the range of float16."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        y = 100 * y
        return y * (y.square().mean(-1, keepdim=True) + 1e-3).rsqrt(), end


class DoublesGradients(Recurrence):
    """A custom backward that is consistently wrong."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return 2 * y - y.detach(), end


class Square(torch.autograd.Function):
    """x^2, whose gradient says nothing of x to whoever differentiates it again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach())
        return x.detach().square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * gradient


class DropsSecondDerivatives(Recurrence):
    """A custom backward whose result is cut from what it is made of."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return select_valid(y + Square.apply(select_valid(chunk.x, chunk.valid)), chunk.valid), end


class DropsTangents(Recurrence):
    """Knows no forward mode, and says nothing."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        if not torch.compiler.is_compiling():
            y = forward_ad.unpack_dual(y).primal
        return y, end


class BranchesOnValues(Recurrence):
    """Looks at a number on the host."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return (y if float(y.detach().sum()) < 1e9 else y.clone()), end


class NearlyTheSame(Recurrence):
    """Another implementation that computes something else in the sixth digit."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return y * (1 + 1e-6), end


class LosesFinalGradient(Recurrence):
    """Another implementation whose backward ignores the gradient of the final state."""

    def forward(self, chunk, state):
        y, end = super().forward(chunk, state)
        return y, end._replace(total=end.total.detach())


class ModelThatLooksAhead(Model):
    def forward(self, tokens, state=None, *, valid=None, reset=None):
        logits, end = super().forward(tokens, state, valid=valid, reset=reset)
        return logits + 0.1 * logits.detach().amax(dim=1, keepdim=True), end


class ModelThatAlignsNothing(Model):
    """Takes any mask for right padding."""

    def forward(self, tokens, state=None, *, valid=None, reset=None):
        if valid is not None:
            valid = torch.arange(tokens.shape[1]) < valid.sum(dim=1, keepdim=True)
        return super().forward(tokens, state, valid=valid, reset=reset)


class ModelThatDropsResets(Model):
    def forward(self, tokens, state=None, *, valid=None, reset=None):
        return super().forward(tokens, state, valid=valid)


class ModelThatForgetsToAlignResets(Model):
    """Aligns the tokens, and leaves the flags where they stood."""

    def forward(self, tokens, state=None, *, valid=None, reset=None):
        if valid is not None and reset is not None:
            back = torch.argsort((~valid).to(torch.int8), dim=1, stable=True).argsort(dim=1)
            reset = reset.gather(1, back)
        return super().forward(tokens, state, valid=valid, reset=reset)


class ModelThatMixesRows(Model):
    def forward(self, tokens, state=None, *, valid=None, reset=None):
        logits, end = super().forward(tokens, state, valid=valid, reset=reset)
        return logits - 0.1 * logits.mean(dim=0), end


class ModelThatForgetsItsPast(Model):
    """Starts one of its mixers anew in every chunk."""

    def forward(self, tokens, state=None, *, valid=None, reset=None):
        if state is not None:
            state = (self.mixers[0].initial_state(len(tokens), dtype=state[0].total.dtype), *state[1:])
        return super().forward(tokens, state, valid=valid, reset=reset)


class ModelThatWritesIntoItsState(Model):
    def forward(self, tokens, state=None, *, valid=None, reset=None):
        logits, end = super().forward(tokens, state, valid=valid, reset=reset)
        if state is None:
            return logits, end
        return logits, (end[0]._replace(seen=state[0].seen.copy_(end[0].seen)), *end[1:])
