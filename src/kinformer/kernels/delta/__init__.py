"""The delta rule: a fast weight memory that corrects what it has stored under a key.

Schlag, Irie and Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers", eq. 23-25; block
by block as in Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length". With phi(q_t) = ``q``, phi(k_t) = ``k`` and W_t [features, head_dim]:

    W_t = W_{t-1} + k_t (beta_t (v_t - W_{t-1}^T k_t))^T,    out_t = W_t^T q_t

With a decay a_t in (0, 1] (Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks", equation 10; per feature: the Kimi
team 2025, "Kimi Linear"), W_{t-1} is multiplied by a_t first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.kernels.delta.chunked import chunked
from kinformer.kernels.delta.reference import recurrence
from kinformer.kernels.impls import LinearImpl
from kinformer.kernels.linear import check_call, check_decay, choose_impl
from kinformer.kernels.linear.blocks import accumulator_dtype
from kinformer.runtime.errors import KinformerError

__all__ = ["DeltaSummary", "delta_rule", "summarise"]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    reset: Tensor | None = None,
    impl: LinearImpl = "auto",
) -> tuple[Tensor, Tensor]:
    """Absorb a chunk of any length; returns outputs [batch, heads, time, head_dim] in v's dtype and the new state.

    q, k: [batch, heads, time, features], already feature-mapped. The rule is stable for beta in (0, 1) when every
    key sums to 1 (non-negative features) or has length 1; neither is enforced, and nothing is scaled.
    v: [batch, heads, time, head_dim].
    beta: [batch, heads, time], the write strength, 0 at invalid tokens.
    state: W [batch, heads, features, head_dim], in float32 or wider (the accumulators of the inputs' dtype).
    log_decay: log a_t, not above 0 and finite, [batch, heads, time] or, per feature, [batch, heads, time, features]; 0
        at invalid tokens. None: nothing decays.
    reset: [batch, time] bool; a marked token begins a new sequence: W is zero before it is absorbed.
    impl: "reference" (the recurrence), "chunked", "triton", or "auto" (see ``linear.impls``).

    Raises KinformerError for an unknown ``impl`` or one that cannot do this, and for shapes that do not fit.
    """
    _validate(q, k, v, beta, state, reset)
    check_decay("delta_rule", q, log_decay)
    kernel = {"reference": recurrence, "chunked": chunked, "triton": _triton}[choose_impl("delta_rule", impl)]
    return kernel(q, k, v, beta, state, log_decay, reset)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, log_decay: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    check_call("delta_rule", q, v, log_decay)
    from kinformer.kernels.delta.triton import attend  # imports Triton

    return attend(q, k, v, beta, state, log_decay, reset)


def _validate(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, reset: Tensor | None) -> None:
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or q.shape[:3] != v.shape[:3] or q.shape[2] == 0:
        raise KinformerError(
            f"delta_rule: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; pass q and k as "
            "[batch, heads, time, features] and v as [batch, heads, time, head_dim] with at least one token."
        )
    batch, heads, time, features = q.shape
    if beta.shape != (batch, heads, time):
        raise KinformerError(
            f"delta_rule: beta {tuple(beta.shape)} does not fit; pass [batch, heads, time] = {(batch, heads, time)}."
        )
    if state.shape != (batch, heads, features, v.shape[3]):
        raise KinformerError(
            f"delta_rule: state {tuple(state.shape)} does not fit the inputs; expected "
            f"{(batch, heads, features, v.shape[3])}: begin with zeros of this shape."
        )
    if reset is not None and reset.shape != (batch, time):
        raise KinformerError(
            f"delta_rule: reset {tuple(reset.shape)} does not fit; pass [batch, time] = {(batch, time)} booleans."
        )


class DeltaSummary(NamedTuple):
    """The effect of a chunk, which needs no memory to apply it to: W <- a W + b. ``a`` [batch, heads, features,
    features] is a matrix that is left of the memory; ``b`` [.., features, head_dim] is added.

    Summaries compose, and composing is associative, so that chunks of one sequence may be summarised apart (on other
    ranks, in a tree) and joined afterwards.
    """

    a: Tensor
    b: Tensor

    def then(self, later: DeltaSummary) -> DeltaSummary:
        """The summary of this chunk and a ``later`` one, next to it."""
        return DeltaSummary(later.a @ self.a, later.after(self.b))

    def after(self, state: Tensor) -> Tensor:
        """Return W after the chunk, from W before it."""
        return self.a @ state + self.b


def summarise(
    k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor | None = None, reset: Tensor | None = None
) -> DeltaSummary:
    """The summary of a chunk; arguments as for ``delta_rule``.

    The rule is linear in W and v, so a is what becomes of the identity when nothing is written. Both are made in one
    run of the chunked rule, with features + head_dim columns.
    """
    dtype, features = accumulator_dtype(k, v), k.shape[-1]
    # Columns [0, V] with initial state [I, 0]: the first half ends as a, the second as b.
    nothing = functional.pad(v, (features, 0))
    start = torch.eye(features, dtype=dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    _, state = chunked(k, k, nothing, beta, functional.pad(start, (0, v.shape[-1])), log_decay, reset)
    return DeltaSummary(*state.split([features, v.shape[-1]], dim=-1))
