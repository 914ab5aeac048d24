"""The delta rule: a fast weight memory that corrects the value stored under a key.

Schlag, Irie and Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers", eq. 23-25; block
by block as in Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length". With phi(q_t) = ``q``, phi(k_t) = ``k`` and W_t [features, head_dim]:

    W_t = W_{t-1} + k_t (beta_t (v_t - W_{t-1}^T k_t))^T,    out_t = W_t^T q_t

With a decay a_t in (0, 1] (Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks", equation 10; per feature: the
Kimi team 2025, "Kimi Linear"), W_{t-1} is multiplied by a_t first. :func:`delta_steps` takes several steps a token.
``DeltaTokens`` may have erasing keys e_t that differ from k_t, and may read W_{t-1} before it decays (``early``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kinformer.core.crossing import Crossing
from kinformer.kernels import LinearImpl
from kinformer.kernels.delta.chunked import chunked
from kinformer.kernels.linear import check_decay, check_shapes, linear_attention, sums_across
from kinformer.kernels.linear.chunked import operand_dtype
from kinformer.kernels.linear.sequence import DeltaTokens, LinearState, accumulator_dtype, check_call, choose_impl
from kinformer.runtime.compiling import substitute
from kinformer.runtime.errors import KinformerError

# The delta rule as a recurrence, token by token: the truth that the fast kernels are held to.
#
# W <- a W,   W <- W + k (beta (v - W^T e))^T,   out = W^T q;   W^T e is ``stored``, beta (v - W^T e) ``correction``;
# e = k, unless it is given as ``erase``; an ``early`` W^T e is read before W decays


def recurrence(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final W; shapes as for ``delta_rule``."""
    q, k, v, beta, erase, log_decay, reset, early = tokens
    dtype = accumulator_dtype(q, k, v)
    w = state.to(dtype)
    outputs = []
    for t in range(q.shape[2]):
        if reset is not None:
            w = w.masked_fill(reset[:, t, None, None, None], 0)
        before = w
        if log_decay is not None:
            w = w * log_decay[:, :, t].to(dtype).exp().view(*w.shape[:2], -1, 1)
        query, key, value, erased = (x[:, :, t].to(dtype) for x in (q, k, v, k if erase is None else erase))
        # W^T e
        stored = ((before if early else w) * erased[..., :, None]).sum(-2)
        correction = beta[:, :, t, None].to(dtype) * (value - stored)
        # W <- W + k (beta (v - W^T e))^T
        w = w + key[..., :, None] * correction[..., None, :]
        outputs.append((w * query[..., :, None]).sum(-2))
    return torch.stack(outputs, 2).to(v.dtype), w


__all__ = ["DeltaSummary", "DeltaTokens", "absorb", "delta_rule", "delta_steps", "normalised_delta_rule", "one_by_one"]


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
    return absorb(DeltaTokens(q, k, v, beta, None, log_decay, reset), state, impl)


def delta_steps(tokens: DeltaTokens, state: Tensor, *, impl: LinearImpl = "auto") -> tuple[Tensor, Tensor]:
    """Absorb a chunk in which every token takes n steps of the delta rule; returns the same as :func:`delta_rule`.

    W <- a_t W,   then for i = 1 .. n   W <- W + k_ti (beta_ti (v_ti - W^T e_ti))^T,   and out_t = W^T q_t

    (Siems, Carstensen, Zela, Hutter, Pontil and Grazzi 2025, "DeltaProduct", equation 6.) One step with e = b * k is
    Gated DeltaNet-2; two, an erasing and a writing one, are W <- a W - p (e^T W) + k v^T, as in RWKV-7. It is the delta
    rule of n time tokens, whatever the ``impl``.

    tokens: q and log_decay as for :func:`delta_rule`; k and ``erase`` (None: e is k) [batch, heads, time, n, features],
    v [batch, heads, time, n, head_dim], beta [batch, heads, time, n], 0 at invalid tokens.
    """
    q, k, v, beta, erase, log_decay, *_ = tokens
    steps = k.shape[3] if k.dim() == 5 else 0
    if (
        not steps
        or v.shape[3:4] != (steps,)
        or beta.shape != k.shape[:4]
        or (erase is not None and erase.shape != k.shape)
    ):
        raise KinformerError(
            f"delta_steps: k {tuple(k.shape)}, v {tuple(v.shape)}, beta {tuple(beta.shape)} do not fit; pass k as "
            "[batch, heads, time, steps, features], erase like it, v as [batch, heads, time, steps, head_dim] and beta "
            "as [batch, heads, time, steps]."
        )
    check_decay("delta_steps", q, log_decay)
    if q.shape[2] == 1:
        k, v, beta, erase = (None if x is None else x.flatten(2, 3) for x in (k, v, beta, erase))  # type: ignore[assignment]
        return _one_token(tokens._replace(k=k, v=v, beta=beta, erase=erase), state, impl)
    out, state = absorb(one_by_one(tokens), state, impl, "delta_steps")
    return out[:, :, steps - 1 :: steps], state


def one_by_one(tokens: DeltaTokens) -> DeltaTokens:
    """Return the steps of ``tokens`` (:func:`delta_steps`) as tokens of :func:`delta_rule`, one after the other."""
    q, k, v, beta, erase, log_decay, reset, early = tokens
    steps = k.shape[3]
    k, v, beta, erase = (None if x is None else x.flatten(2, 3) for x in (k, v, beta, erase))  # type: ignore[assignment]
    if steps > 1:
        # Only the first step of a token decays or begins a sequence, only the last one is read.
        q = _among(q, steps, steps - 1)
        log_decay = None if log_decay is None else _among(log_decay, steps, 0)
        reset = None if reset is None else _among(reset.unsqueeze(1), steps, 0).squeeze(1)
    return DeltaTokens(q, k, v, beta, erase, log_decay, reset, early)


def _among(x: Tensor, steps: int, which: int) -> Tensor:
    """Return x [batch, heads, time, ...] as [batch, heads, time * steps, ...], zero at all steps but ``which``."""
    ends = [0, 0] * (x.dim() - 3) + [which, steps - 1 - which]
    return functional.pad(x.unsqueeze(3), ends).flatten(2, 3)


def _one_token(tokens: DeltaTokens, state: Tensor, impl: LinearImpl) -> tuple[Tensor, Tensor]:
    """Absorb one token step by step, which builds no block."""
    out = tokens.v
    for step in range(tokens.k.shape[2]):
        at = slice(step, step + 1)
        k, v, beta, erase = (None if x is None else x[:, :, at] for x in tokens[1:5])
        rest = (tokens.log_decay, tokens.reset, tokens.early) if step == 0 else (None, None, False)
        out, state = absorb(DeltaTokens(tokens.q, k, v, beta, erase, *rest), state, impl, "delta_steps")  # type: ignore[arg-type]
    return out, state


def absorb(
    tokens: DeltaTokens, state: Tensor, impl: LinearImpl = "auto", name: str = "delta_rule"
) -> tuple[Tensor, Tensor]:
    """Absorb ``tokens`` of one step each as :func:`delta_rule` does; ``name`` is the function that messages name."""
    _validate(tokens, state, name, impl)
    plain = tokens.reset is None and tokens.erase is None and not tokens.early
    if plain and (operator := substitute("delta_rule")) is not None:
        return operator(tokens.q, tokens.k, tokens.v, tokens.beta, state, tokens.log_decay)
    chosen = choose_impl(name, impl, tokens.q, tokens.v)
    if impl == "auto" and chosen == "triton" and not _triton_pays(tokens):
        chosen = "chunked"
    kernel = {"reference": recurrence, "chunked": chunked, "triton": _triton}[chosen]
    return kernel(tokens, state)


def _triton_pays(tokens: DeltaTokens) -> bool:
    """Return whether "auto" takes Triton's kernel, which never reads early. In float32, which does not use tensor
    cores, it takes 1.2 times the time of the chunked kernel at 128 features, 0.3 at 64, and 0.9 and 0.2 with a decay by
    channel (H200, results/gpu.json)."""
    narrow = torch.bfloat16 in (tokens.q.dtype, operand_dtype(tokens.q))
    by_channel = tokens.log_decay is not None and tokens.log_decay.dim() == 4
    return not tokens.early and (narrow or by_channel or max(tokens.q.shape[-1], tokens.v.shape[-1]) <= 64)


def _triton(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    check_call("delta_rule", tokens.q, tokens.v)
    from kinformer.kernels.delta.triton import attend  # imports Triton

    return attend(tokens, state)


def _validate(tokens: DeltaTokens, state: Tensor, name: str, impl: LinearImpl) -> None:
    q, k, v, beta, _, log_decay, reset, early = tokens
    check_shapes(name, q, k, v, log_decay, reset)
    batch, heads, time, features = q.shape
    if beta.shape != (batch, heads, time):
        raise KinformerError(
            f"{name}: beta {tuple(beta.shape)} does not fit; pass [batch, heads, time] = {(batch, heads, time)}."
        )
    if state.shape != (batch, heads, features, v.shape[3]):
        raise KinformerError(
            f"{name}: state {tuple(state.shape)} does not fit the inputs; expected "
            f"{(batch, heads, features, v.shape[3])}: begin with zeros of this shape."
        )
    if early and (impl == "triton" or (log_decay is not None and log_decay.dim() == 4)):
        raise KinformerError(
            f"{name}: early reads have no Triton kernel and no decay by channel; use "
            "impl='chunked' and log_decay [batch, heads, time]."
        )


class DeltaSummary(NamedTuple):
    """The effect of a chunk, independent of the memory before: W <- a W + b, with ``a`` [batch, heads, features,
    features] and ``b`` [.., features, head_dim].

    Summaries compose, and composing is associative, so that chunks of one sequence may be summarised apart (on other
    ranks, in a tree) and joined afterwards.
    """

    a: Tensor
    b: Tensor

    def then(self, later: DeltaSummary) -> DeltaSummary:
        """Return the summary of this chunk and a ``later`` one, next to it."""
        return DeltaSummary(later.a @ self.a, later.after(self.b))

    def after(self, state: Tensor) -> Tensor:
        """Return W after the chunk, from W before it."""
        return self.a @ state + self.b


def summarise_delta(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    erase: Tensor | None = None,
    log_decay: Tensor | None = None,
    reset: Tensor | None = None,
    early: bool = False,
) -> DeltaSummary:
    """Return the summary of a chunk; arguments as for ``delta_rule``, ``erase`` and ``early`` as of ``DeltaTokens``.

    The rule is linear in W and v, so a is what becomes of the identity when nothing is written. Both are made in one
    run of the chunked rule, with features + head_dim columns.
    """
    dtype, features = accumulator_dtype(k, v), k.shape[-1]
    # Columns [0, V] with initial state [I, 0]: the first half ends as a, the second as b.
    nothing = functional.pad(v, (features, 0))
    start = torch.eye(features, dtype=dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    tokens = DeltaTokens(k, k, nothing, beta, erase, log_decay, reset, early)
    _, state = chunked(tokens, functional.pad(start, (0, v.shape[-1])))
    return DeltaSummary(*state.split([features, v.shape[-1]], dim=-1))


# The delta rule over stretches of time on several processes (``core.crossing``).
#
# W_before = W after the summaries W <- A W + B of earlier stretches,    out = the delta rule after W_before


def delta_across(
    tokens: DeltaTokens, state: Tensor, impl: LinearImpl, crossing: Crossing | None
) -> tuple[Tensor, Tensor]:
    """Absorb a chunk as ``delta_rule`` or, with steps in k, ``delta_steps``; ``crossing``: a stretch of the row."""
    after = None
    if crossing is not None:
        _, k, v, beta, erase, log_decay, reset, early = one_by_one(tokens) if tokens.k.dim() == 5 else tokens
        summary = summarise_delta(k, v, beta, erase=erase, log_decay=log_decay, reset=reset, early=early)
        state, after = crossing.composed(summary, state)
    y, alone = (delta_steps if tokens.k.dim() == 5 else absorb)(tokens, state, impl=impl)
    return y, alone if after is None else after


# The delta rule with attention normalisation: a query reads an average (Schlag, Irie and Schmidhuber 2021).
#
#     W_t = W_{t-1} + k_t (beta_t (v_t - W_{t-1}^T k_t / c_t))^T,   c_t = z_{t-1} . k_t,   z_t = z_{t-1} + k_t
#     out_t = W_t^T q_t / (z_t . q_t + eps)
#
# As in the authors' code it is the delta rule with the keys k_t / (c_t + eps) and the strengths beta_t c_t, and c is 1
# at a sequence's first token.


def normalised_delta_rule(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor],
    state: LinearState,
    first: Tensor,
    *,
    eps: float = 1e-6,
    reset: Tensor | None = None,
    impl: LinearImpl = "auto",
    crossing: Crossing | None = None,
) -> tuple[Tensor, LinearState]:
    """Absorb a chunk of any length; returns outputs [batch, heads, time, head_dim] in v's dtype and the new state.

    tokens: q, k, v and beta as for :func:`delta_rule`; features are positive, k zero at invalid tokens.
    state: W and z. first: [batch, time] bool, the first token of a sequence, whether by ``reset`` or after a new state.
    crossing: set if the chunk is one stretch of a row whose other stretches are on other processes.
    """
    q, k, v, beta = tokens
    before, after = (state.z, None) if crossing is None else sums_across(k, state.z, reset, crossing)
    ones, sums = v.new_ones(*v.shape[:3], 1), LinearState(before.unsqueeze(-1), before)
    earlier = functional.pad(k, (0, 0, 1, 0))[:, :, :-1]
    if reset is not None:
        earlier = earlier.masked_fill(reset[:, None, :, None], 0)
    # c_t = sum over s < t of k_s . k_t: the sum of keys up to the token before, read with k_t
    c, _ = linear_attention(k, earlier, ones, sums, eps=None, reset=reset, impl=impl)
    c = c[..., 0].masked_fill(first[:, None], 1.0)
    total, (_, z) = linear_attention(q, k, ones, sums, eps=None, reset=reset, impl=impl)
    corrected = DeltaTokens(q, k / (c + eps).unsqueeze(-1), v, beta * c, None, None, reset)
    out, w = delta_across(corrected, state.s, impl, crossing)
    return out / (total + eps), LinearState(w, z if after is None else after)
