"""Causal linear attention: sums over feature-mapped keys, which may decay.

Katharopoulos, Vyas, Pappas and Fleuret 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", eq. 9-15. With phi(q_t) = ``q``, phi(k_t) = ``k``:

    S_t = S_{t-1} + k_t v_t^T,    z_t = z_{t-1} + k_t,    out_t = q_t^T S_t / (q_t . z_t + eps)

With a decay a_t in (0, 1], of all features (Sun et al. 2023, RetNet; Peng et al. 2021, RFA's gate) or of each (Yang
et al. 2024, GLA), S_{t-1} and z_{t-1} are multiplied by a_t first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.crossing import Crossing
from kinformer.kernels import LinearImpl
from kinformer.kernels.linear.chunked import chunked
from kinformer.kernels.linear.sequence import LinearSequence, LinearState, accumulator_dtype, check_call, choose_impl
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.compiling import substitute
from kinformer.runtime.errors import KinformerError

# Linear attention as a recurrence, token by token: the truth that the fast kernels are held to.
#
# S <- diag(a) S + k v^T,   z <- a z + k,   out = q^T S / (q . z + eps)      a: a number a head, or one a feature (GLA)


def recurrence(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final S and z; arguments as for ``linear_attention``."""
    q, k, v, log_decay, eps, reset = sequence
    dtype = accumulator_dtype(q, k, v)
    s, z = s.to(dtype), z.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if reset is not None:
            fresh = reset[:, t, None, None]
            s, z = s.masked_fill(fresh[..., None], 0), z.masked_fill(fresh, 0)
        if log_decay is not None:
            decay = log_decay[:, :, t].to(dtype).exp().view(*z.shape[:2], -1)
            s, z = s * decay[..., None], z * decay
        query, key, value = (x[:, :, t].to(dtype) for x in (q, k, v))
        # S <- S + k v^T
        s = s + key[..., :, None] * value[..., None, :]
        z = z + key
        out = (query[..., :, None] * s).sum(-2)
        if eps is not None:
            out = out / ((query * z).sum(-1, keepdim=True) + eps)
        outputs.append(out)
    return torch.stack(outputs, 2).to(v.dtype), s, z


__all__ = [
    "LinearState",
    "LinearSummary",
    "check_decay",
    "check_shapes",
    "linear_across",
    "linear_attention",
    "summarise",
]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    log_decay: Tensor | None = None,
    eps: float | None = 1e-6,
    reset: Tensor | None = None,
    impl: LinearImpl = "auto",
) -> tuple[Tensor, LinearState]:
    """Absorb a chunk of any length; returns outputs [batch, heads, time, head_dim] in v's dtype and the new state.

    q, k: [batch, heads, time, features], already feature-mapped, k zero at invalid tokens.
    v: [batch, heads, time, head_dim].
    log_decay: log a_t, not above 0 and finite, [batch, heads, time] or, per feature, [batch, heads, time, features]; 0
        at invalid tokens. None: nothing decays.
    eps: added to the normaliser q . z; None leaves the normaliser out: out_t = q_t^T S_t (z is still carried).
    reset: [batch, time] bool; a marked token begins a new sequence: S and z are zero before it is absorbed.
    impl: "reference" (the recurrence), "chunked", "triton", or "auto" (see ``linear.impls``).

    Raises KinformerError for an unknown ``impl`` or one that cannot do this, and for shapes that do not fit.
    """
    check_shapes("linear_attention", q, k, v, log_decay, reset)
    batch, heads, _, features = q.shape
    if state.s.shape != (batch, heads, features, v.shape[3]) or state.z.shape != (batch, heads, features):
        raise KinformerError(
            f"linear_attention: state s {tuple(state.s.shape)}, z {tuple(state.z.shape)} does not fit the inputs; "
            f"expected {(batch, heads, features, v.shape[3])} and {(batch, heads, features)}: begin with zeros of "
            "these shapes."
        )
    if (operator := substitute("linear_attention")) is not None and reset is None:
        out, s, z = operator(q, k, v, state.s, state.z, log_decay, eps)
        return out, LinearState(s, z)
    chosen = choose_impl("linear_attention", impl, q, v)
    kernel = {"reference": recurrence, "chunked": chunked, "triton": _triton}[chosen]
    out, s, z = kernel(LinearSequence(q, k, v, log_decay, eps, reset), state.s, state.z)
    return out, LinearState(s, z)


def _triton(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_call("linear_attention", sequence.q, sequence.v)
    from kinformer.kernels.linear.triton import attend  # imports Triton

    return attend(sequence, s, z)


def check_decay(name: str, q: Tensor, log_decay: Tensor | None) -> None:
    """Refuse a decay whose shape does not fit the queries of the function called ``name``."""
    if log_decay is not None and log_decay.shape not in (q.shape[:3], q.shape):
        raise KinformerError(
            f"{name}: log_decay {tuple(log_decay.shape)} does not fit; pass [batch, heads, time] = "
            f"{tuple(q.shape[:3])}, or {tuple(q.shape)} with one decay per feature."
        )


def check_shapes(
    name: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, reset: Tensor | None = None
) -> None:
    """Refuse a chunk whose shapes do not fit each other, on behalf of the function called ``name``."""
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or q.shape[:3] != v.shape[:3] or q.shape[2] == 0:
        raise KinformerError(
            f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; pass q and k as "
            "[batch, heads, time, features] and v as [batch, heads, time, head_dim] with at least one token."
        )
    check_decay(name, q, log_decay)
    if reset is not None and reset.shape != (expected := (q.shape[0], q.shape[2])):
        raise KinformerError(
            f"{name}: reset {tuple(reset.shape)} does not fit; pass [batch, time] = {expected} booleans."
        )


class LinearSummary(NamedTuple):
    """The effect of a chunk, independent of the state before: S <- a S + s, z <- a z + z_chunk.
    ``a`` [batch, heads, features or 1] is left of the state; ``s`` and ``z``, shaped like LinearState's, are added.

    Summaries compose, and composing is associative, so that chunks of one sequence may be summarised apart (on other
    ranks, in a tree) and joined afterwards.
    """

    a: Tensor
    s: Tensor
    z: Tensor

    def then(self, later: LinearSummary) -> LinearSummary:
        """Return the summary of this chunk and a ``later`` one, next to it."""
        return LinearSummary(self.a * later.a, *later.after(LinearState(self.s, self.z)))

    def after(self, state: LinearState) -> LinearState:
        """Return the state after the chunk, from that before it."""
        return LinearState(self.a.unsqueeze(-1) * state.s + self.s, self.a * state.z + self.z)


def summarise(k: Tensor, v: Tensor, *, log_decay: Tensor | None = None, reset: Tensor | None = None) -> LinearSummary:
    """Return the summary of a chunk, by 2 time features head_dim FLOPs; arguments as for ``linear_attention``."""
    dtype = accumulator_dtype(k, v)
    k, v = k.to(dtype), v.to(dtype)
    left = k.new_ones(*k.shape[:2], 1)
    if log_decay is not None:
        sums = (log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)).to(dtype).flip(2).cumsum(2).flip(2)
        left = sums[:, :, 0].exp()
        k = k * functional.pad(sums[:, :, 1:], (0, 0, 0, 1)).exp()  # of the decays behind each token
    if reset is not None:
        sequence = reset.long().cumsum(1)
        k = torch.where((sequence == sequence[:, -1:])[:, None, :, None], k, k.new_zeros(()))
        left = left.masked_fill(sequence[:, None, -1:] > 0, 0)
    with no_autocast(k.device):
        return LinearSummary(left, k.mT @ v, k.sum(2))


# Linear attention over stretches of time on several processes (``core.crossing``; LASP-2, Sun et al. 2025).
#
# S_before = S after the summaries of earlier stretches,    out = linear attention after S_before


class _Columns(NamedTuple):
    """A :class:`LinearSummary` whose normaliser, if any, is one more column of ``s``: S <- a S + s."""

    a: Tensor
    s: Tensor

    def after(self, state: Tensor) -> Tensor:
        return self.a.unsqueeze(-1) * state + self.s


def linear_across(
    sequence: LinearSequence, state: LinearState, impl: LinearImpl, crossing: Crossing | None
) -> tuple[Tensor, LinearState]:
    """Absorb a chunk as ``linear_attention`` does; it is one stretch of the row where there is a ``crossing``."""
    q, k, v, log_decay, eps, reset = sequence
    after = state
    if crossing is not None:
        total = summarise(k, v, log_decay=log_decay, reset=reset)
        if eps is None:  # nobody reads z
            before, last = crossing.composed(_Columns(total.a, total.s), state.s)
            state, after = LinearState(before, state.z), LinearState(last, state.z)
        else:
            columns = _Columns(total.a, torch.cat([total.s, total.z.unsqueeze(-1)], dim=-1))
            both = crossing.composed(columns, torch.cat([state.s, state.z.unsqueeze(-1)], dim=-1))
            state, after = (LinearState(sums[..., :-1], sums[..., -1]) for sums in both)
    y, alone = linear_attention(q, k, v, state, log_decay=log_decay, eps=eps, reset=reset, impl=impl)
    return y, alone if crossing is None else after


def sums_across(k: Tensor, z: Tensor, reset: Tensor | None, crossing: Crossing) -> tuple[Tensor, Tensor]:
    """Return the sums of keys [batch, heads, features] before this stretch and after the row, from ``z``, those before
    the row, and this stretch's k [batch, heads, time, features]."""
    total = summarise(k, k[..., :0], reset=reset)
    before, after = crossing.composed(_Columns(total.a, total.z.unsqueeze(-1)), z.unsqueeze(-1))
    return before[..., 0], after[..., 0]


# A running maximum for features that lack a factor exp(b) too large or too small for a number.
#
# With b_t the logarithm of the missing factor of key t and c_t = max over s <= t of ceil(b_s), the state times
# exp(-c_t) is finite: key t enters it with exp(b_t - c_t) <= 1, and the state decays by exp(c_(t-1) - c_t) <= 1. c
# cancels in a quotient of two such sums. No later key enters, so the future does not leak. The numbers c are integers:
# their gradient is 0 and their differences are exact.

_FAR, _LARGEST, _NOTHING = 2**44, 2**41, -(2**42)
_GONE = -1e4
"""Its exponential is zero in every dtype, while sums of such numbers stay exact."""


class Running(NamedTuple):
    """The result: ``factor`` exp(b - c) and ``log_decay`` [batch, heads, time]; ``last`` [batch, heads], the last c."""

    factor: Tensor
    log_decay: Tensor
    last: Tensor


def running_maximum(
    log_scale: Tensor, before: Tensor, continues: Tensor, valid: Tensor | None, reset: Tensor | None
) -> Running:
    """Return the factors and decays for ``log_scale`` [batch, heads, time], the exponents b of a chunk's keys.

    before: [batch, heads] int64, c before the chunk in the rows that continue, ``continues`` [batch] bool.
    valid, reset: [batch, time] bool or None; invalid keys do not count.
    """
    log_scale = log_scale.clamp(-_LARGEST, _LARGEST)
    # In int64 differences are exact up to 2^44; float32 would round exponents above 2^24.
    whole = log_scale.detach().double().ceil().long()
    if valid is not None:
        whole = torch.where(valid[:, None], whole, _NOTHING)
    first = torch.where(continues[:, None], before, _NOTHING).unsqueeze(-1)
    number = functional.pad(torch.zeros_like(whole[:, 0]) if reset is None else reset.long().cumsum(1), (1, 0))
    lift = number[:, None] * _FAR  # sequences one above the other
    c = (torch.cat([first, whole], dim=-1) + lift).cummax(dim=-1).values - lift
    fresh = (c[..., :-1] == _NOTHING) | (number[:, None, 1:] != number[:, None, :-1])
    # c_(t-1) - c_t, at most 0; the first token of a sequence does not decay a state.
    log_decay = (c[..., :-1] - c[..., 1:]).masked_fill(fresh, 0).to(log_scale.dtype).clamp_min(_GONE)
    exponent = log_scale - c[..., 1:].to(log_scale.dtype)
    if valid is not None:
        exponent = torch.where(valid[:, None], exponent, exponent.new_zeros(()))
    last = c[..., -1]
    return Running(exponent.exp(), log_decay, last.masked_fill(last == _NOTHING, 0))
