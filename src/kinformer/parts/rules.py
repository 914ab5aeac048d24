"""The rules of kernel attention: how the tokens of a chunk change the state, and what their queries read of it.

A rule holds the parameters that no other rule has. A new rule is a class here with a name in ``RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from kinformer.core.crossing import Crossing
from kinformer.kernels import LinearImpl
from kinformer.kernels.delta import delta_across, normalised_delta_rule
from kinformer.kernels.linear import linear_across, linear_attention
from kinformer.kernels.linear.levels import LeveledTokens, leveled_attention
from kinformer.kernels.linear.sequence import DeltaTokens, LinearSequence, LinearState
from kinformer.runtime.autograd import Context, first_order, no_autocast, transformed
from kinformer.runtime.errors import KinformerError


class KernelTokens(NamedTuple):
    """A chunk as it meets the state: q, k [batch, heads, time, features] and v [batch, heads, time, width]; k and v
    have ``steps`` entries a token for a rule of several steps.

    ``strengths``: beta [batch, heads, time * steps] of the delta rule, the scales [batch, heads, time, levels + 1] of
    levels, or None. ``log_decay`` [batch, heads, time] or [batch, heads, time, features], or None. ``reset``, ``valid``
    [batch, time] bool or None; ``positions`` [batch, time] int64 where the state counts them; ``x`` [batch, time, dim],
    the mixer's input. ``seen`` [batch]: the counter before the chunk; ``crossing``: the processes of the row, where the
    chunk is one stretch of it. k, beta and log_decay are 0 where a token is not valid.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    strengths: Tensor | None
    log_decay: Tensor | None
    reset: Tensor | None
    valid: Tensor | None
    positions: Tensor | None
    x: Tensor
    seen: Tensor
    crossing: Crossing | None


class LinearRule(nn.Module):
    """Keys and values add up: S_t = a_t S_(t-1) + k_t v_t^T. With an ``eps`` outputs are divided by q_t . z_t + eps,
    where z_t = a_t z_(t-1) + k_t is part of the state.

    ``sums``: whether the state has z; ``columns``: how many columns S has beyond the values. ``normalisers``: the
    normalisers that a rule takes. ``corrects``: whether keys erase, so that they must not be longer than 1.
    ``strengths``: whether tokens have beta in the mixer's projection. ``special``: whether there is no Triton kernel
    and no decay by channel. ``crosses``: whether stretches of a row may be computed at once. ``convolves``: how many of
    q, k and v pass the short convolution.
    """

    normalisers: tuple[str, ...] = ("none", "sum")
    corrects = strengths = special = False
    crosses, convolves, columns = True, 3, 0

    def __init__(self, eps: float | None, impl: LinearImpl) -> None:
        super().__init__()
        self.eps, self.impl, self.sums = eps, impl, eps is not None

    def queries(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the queries for q and k [batch, key_heads, time, width], before the feature map."""
        return q

    def values(self, v: Tensor, x: Tensor) -> Tensor:
        """Return the values to write for v [batch, heads, time, width] and the input x [batch, time, dim]."""
        return v

    def forward(self, tokens: KernelTokens, state: LinearState) -> tuple[Tensor, LinearState]:
        """Return the outputs [batch, heads, time, width] and the state after the chunk."""
        q, k, v, _, log_decay, reset, *_ = tokens
        if self.eps is not None:
            return linear_across(LinearSequence(q, k, v, log_decay, self.eps, reset), state, self.impl, tokens.crossing)
        nothing = LinearState(state.s, state.s.new_zeros(state.s.shape[:3]))
        sequence = LinearSequence(q, k, v, log_decay, None, reset)
        y, (s, _) = linear_across(sequence, nothing, self.impl, tokens.crossing)
        return y, LinearState(s, state.z)


class FlooredRule(LinearRule):
    """The linear rule with outputs divided by max(q_t . z_t, floor); z is one more column of S."""

    columns = 1

    def __init__(self, floor: float, impl: LinearImpl) -> None:
        super().__init__(None, impl)
        self.floor = floor

    def forward(self, tokens: KernelTokens, state: LinearState) -> tuple[Tensor, LinearState]:
        # A column of ones sums the keys.
        ones = tokens._replace(v=pad(tokens.v, (0, 1), value=1.0))
        y, after = super().forward(ones, state)
        return y[..., :-1] / y[..., -1:].clamp_min(self.floor), after


class LeveledRule(LinearRule):
    """The linear rule with one S for each level of the past (``kernels.linear.levels``)."""

    crosses, special = False, True

    def __init__(self, impl: LinearImpl) -> None:
        super().__init__(None, impl)

    def forward(self, tokens: KernelTokens, state: LinearState) -> tuple[Tensor, LinearState]:
        q, k, v, scales, log_decay, reset, valid, positions, *_ = tokens
        assert scales is not None and positions is not None
        leveled = LeveledTokens(q, k, v, scales, log_decay, positions, reset, valid)
        y, s = leveled_attention(leveled, state.s, tokens.seen, self.impl)
        return y, LinearState(s, state.z)


class DeltaRule(LinearRule):
    """Values replace what their keys read: the delta rule, of ``steps`` a token.

    ``early``: keys read S before it decays.
    """

    early = False
    normalisers: tuple[str, ...] = ("none", "attention")
    corrects = strengths = True

    def __init__(self, steps: int, impl: LinearImpl) -> None:
        super().__init__(None, impl)
        self.steps = steps

    def erase(self, tokens: KernelTokens) -> Tensor | None:
        """Return the keys under which S is read and erased, shaped like the keys of ``tokens``; None for these keys."""
        return None

    def forward(self, tokens: KernelTokens, state: LinearState) -> tuple[Tensor, LinearState]:
        q, k, v, beta, log_decay, reset, *_ = tokens
        beta = k.new_ones(k.shape[:3]) if beta is None else beta
        if self.steps > 1:
            k, v, beta = (x.unflatten(2, (-1, self.steps)) for x in (k, v, beta))
        delta = DeltaTokens(q, k, v, beta, self.erase(tokens), log_decay, reset, self.early)
        y, s = delta_across(delta, state.s, self.impl, tokens.crossing)
        return y, LinearState(s, state.z)


class AveragedDeltaRule(LinearRule):
    """The delta rule that corrects and reads averages (``kernels.delta.normalised_delta_rule``)."""

    def forward(self, tokens: KernelTokens, state: LinearState) -> tuple[Tensor, LinearState]:
        q, k, v, beta, _, reset, _, positions, *_ = tokens
        assert beta is not None and self.eps is not None and positions is not None
        begins, crossing = positions == 0, tokens.crossing
        return normalised_delta_rule(
            (q, k, v, beta), state, begins, eps=self.eps, reset=reset, impl=self.impl, crossing=crossing
        )


class Comba(DeltaRule):
    """The delta rule with the feedbacks of a closed loop (Hu et al. 2025, "Improving Bilinear RNNs with Closed-loop
    Control", arXiv 2506.02475, section 3).

        S_t = a_t S_(t-1) + k_t (beta_t (v_t - b S_(t-1)^T k_t))^T,    k_t = phi(k'_t)
        y_t = S_t^T phi(q'_t - d b k'_t)

    A key reads the state before it decays, so that the decay and the correction add up: a_t I - beta_t b k_t k_t^T is a
    scalar plus a matrix of rank 1. The state is corrected by the share b = sigmoid(``feedback``), and a query does not
    ask for the share d b of its token's own key. b and d (``correction``) are numbers of each key head; they begin at
    sigmoid(1) and 0.02.
    """

    normalisers = ("none",)
    early = special = True

    def __init__(self, key_heads: int, shared_by: int, impl: LinearImpl) -> None:
        super().__init__(1, impl)
        self.shared_by = shared_by
        self.feedback = nn.Parameter(torch.ones(key_heads))
        self.correction = nn.Parameter(torch.full((key_heads,), 0.02))

    def queries(self, q: Tensor, k: Tensor) -> Tensor:
        return q - (self.correction * self.feedback.sigmoid()).to(q.dtype).view(-1, 1, 1) * k

    def erase(self, tokens: KernelTokens) -> Tensor:
        share = self.feedback.sigmoid().repeat_interleave(self.shared_by)
        return share.to(tokens.k.dtype).view(-1, 1, 1) * tokens.k


class GatedDelta2(DeltaRule):
    """The delta rule with an erasing gate and a writing gate for every channel (Hatamizadeh, Choi and Kautz 2026,
    "Gated DeltaNet-2", arXiv 2605.22791).

        S_t = (I - k_t (b_t * k_t)^T) diag(a_t) S_(t-1) + k_t (w_t * v_t)^T,    b_t = sigmoid(W_b x_t),
                                                                                w_t = sigmoid(W_w x_t)

    ``largest``: what b_t stays below, 1 or 2. W_b is ``erasing``, W_w ``writing``.
    """

    normalisers = ("none",)
    strengths = False

    def __init__(
        self, dim: int, erased: tuple[int, int], written: tuple[int, int], largest: float, impl: LinearImpl
    ) -> None:
        """Make the rule of ``erased`` (key heads, features) and ``written`` (heads, value_dim)."""
        super().__init__(1, impl)
        self.largest, self.erased, self.written = largest, erased, written
        self.erasing = nn.Linear(dim, erased[0] * erased[1], bias=False)
        self.writing = nn.Linear(dim, written[0] * written[1], bias=False)

    def values(self, v: Tensor, x: Tensor) -> Tensor:
        return v * self.writing(x).sigmoid().unflatten(-1, self.written).transpose(1, 2).to(v.dtype)

    def erase(self, tokens: KernelTokens) -> Tensor:
        gate = self.largest * self.erasing(tokens.x).sigmoid().unflatten(-1, self.erased).transpose(1, 2)
        return tokens.k * gate.repeat_interleave(self.written[0] // self.erased[0], 1).to(tokens.k.dtype)


class Ridge(NamedTuple):
    """The matrices A_t = H_t + diag(ridge) of a chunk, H_t = a_t H_(t-1) + written_t k_t^T, one for every token.

    written, k: [batch, heads, time, features]; before: H before the chunk [batch, heads, features, features]; ridge:
    [heads, 1, features]; log_decay, reset as of ``linear_attention``.
    """

    written: Tensor
    k: Tensor
    before: Tensor
    ridge: Tensor
    log_decay: Tensor | None
    reset: Tensor | None

    def read(self, p: Tensor, values: Tensor, before: Tensor, impl: LinearImpl) -> tuple[Tensor, Tensor]:
        """Return p_t^T S_t and the last S, where S has these ``values`` in place of k."""
        state = LinearState(before, before.new_zeros(before.shape[:3]))
        y, (s, _) = linear_attention(
            p, self.written, values, state, log_decay=self.log_decay, eps=None, reset=self.reset, impl=impl
        )
        return y, s

    def solve(self, b: Tensor, iterations: int, impl: LinearImpl) -> Tensor:
        """Return A_t^-1 b_t by conjugate gradients from 0: exactly, where ``iterations`` are as many as features."""
        # A chunk of one token has one H, which every iteration reads as it stands.
        last = self.read(b, self.k, self.before, impl)[1] if b.shape[2] == 1 else None
        x, r = torch.zeros_like(b), b
        p, squared = r, r.square().sum(-1, keepdim=True)
        least = torch.finfo(b.dtype).tiny
        for _ in range(iterations):
            product = self.read(p, self.k, self.before, impl)[0] if last is None else p @ last
            product = product + self.ridge * p
            # where the residual is 0 the solution stays
            step = squared / (p * product).sum(-1, keepdim=True).clamp_min(least)
            x, r = x + step * p, r - step * product
            before, squared = squared, r.square().sum(-1, keepdim=True)
            p = r + squared / before.clamp_min(least) * p
        return x


class _Solution(torch.autograd.Function):
    """x, the solution of A x = b, as a function of its residual b - A x = 0, whose derivative is A^-1."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, residual: Tensor, iterations: int, impl: LinearImpl, *ridge: Any) -> Tensor:
        ctx.iterations, ctx.impl = iterations, impl
        ctx.save_for_backward(*ridge)
        return x.clone()

    @staticmethod
    @first_order("the mesa rule")
    def backward(ctx: Context, saved: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, Ridge(*saved).solve(gradient, ctx.iterations, ctx.impl), *[None] * 8


class Mesa(LinearRule):
    """Regression at every token (von Oswald et al. 2025, "MesaNet", arXiv 2506.05233): what linear attention sums up is
    read through the inverse of its keys' covariance.

        H_t = a_t H_(t-1) + beta_t k_t k_t^T,    S_t = a_t S_(t-1) + beta_t k_t v_t^T
        y_t = S_t^T (H_t + diag(ridge))^-1 q_t,    beta_t = sigmoid(w . x_t + c)

    so that S_t^T (..)^-1 is the linear map of keys to values with the least squared error, which fades and has a
    penalty of ``ridge`` > 1/4. ``iterations`` of conjugate gradients solve for all tokens of a chunk at once: each is
    linear attention of k to k. The gradient is the gradient of the exact solution. H stands behind S in the state.
    """

    normalisers = ("none",)
    crosses, special, convolves = False, True, 2

    def __init__(self, dim: int, heads: int, features: int, iterations: int, impl: LinearImpl) -> None:
        super().__init__(None, impl)
        self.iterations, self.columns = iterations, features
        self.strength = nn.Linear(dim, heads)
        # softplus(b) + 1/4 begins at 1
        self.penalty = nn.Parameter(torch.full((heads * features,), math.log(math.expm1(0.75))))

    def forward(self, tokens: KernelTokens, state: LinearState) -> tuple[Tensor, LinearState]:
        wide, strength = state.s.dtype, self.strength(tokens.x)
        with no_autocast(tokens.x.device):
            q, k, v = (x.to(wide) for x in tokens[:3])
            beta = strength.to(wide).sigmoid().mT.unsqueeze(-1)
            ridge = (functional.softplus(self.penalty) + 0.25).to(wide).view(k.shape[1], 1, -1)
            values, keys = state.s[..., : v.shape[-1]], state.s[..., v.shape[-1] :]
            system = Ridge(beta * k, k, keys, ridge, tokens.log_decay, tokens.reset)
            with torch.no_grad():
                solution = system.solve(q, self.iterations, self.impl)
            product, keys = system.read(solution, k, keys, self.impl)
            residual = q - product - ridge * solution
            if not transformed():
                solution = _Solution.apply(solution, residual, self.iterations, self.impl, *system)
            elif torch.is_grad_enabled():
                raise KinformerError("the mesa rule does not have a gradient under torch.func; call backward instead.")
            y, values = system.read(solution, v, values, self.impl)
        return y.to(tokens.v.dtype), LinearState(torch.cat([values, keys], -1), state.z)


Rule = Literal["linear", "delta", "comba", "gdn2", "mesa"]
RULES: Mapping[str, type[LinearRule]] = {
    "linear": LinearRule,
    "delta": DeltaRule,
    "comba": Comba,
    "gdn2": GatedDelta2,
    "mesa": Mesa,
}
