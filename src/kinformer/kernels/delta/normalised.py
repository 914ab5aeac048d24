"""The delta rule with attention normalisation: what is read is an average (Schlag, Irie and Schmidhuber 2021).

    W_t = W_{t-1} + k_t (beta_t (v_t - W_{t-1}^T k_t / c_t))^T,   c_t = z_{t-1} . k_t,   z_t = z_{t-1} + k_t
    out_t = W_t^T q_t / (z_t . q_t + eps)

As in the authors' code it is the delta rule with the keys k_t / (c_t + eps) and the strengths beta_t c_t, and c is 1 at
a sequence's first token.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from kinformer.core.crossing import Crossing
from kinformer.kernels.delta import DeltaTokens
from kinformer.kernels.delta.crossing import delta_across
from kinformer.kernels.impls import LinearImpl
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.kernels.linear.crossing import sums_across


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
    crossing: where the chunk is one stretch of a row, that of the processes that have the others.
    """
    q, k, v, beta = tokens
    before, after = (state.z, None) if crossing is None else sums_across(k, state.z, reset, crossing)
    ones, sums = v.new_ones(*v.shape[:3], 1), LinearState(before.unsqueeze(-1), before)
    earlier = pad(k, (0, 0, 1, 0))[:, :, :-1]
    if reset is not None:
        earlier = earlier.masked_fill(reset[:, None, :, None], 0)
    # c_t = sum over s < t of k_s . k_t: the keys of one token before, in a sum that is read with k_t
    c, _ = linear_attention(k, earlier, ones, sums, eps=None, reset=reset, impl=impl)
    c = c[..., 0].masked_fill(first[:, None], 1.0)
    total, (_, z) = linear_attention(q, k, ones, sums, eps=None, reset=reset, impl=impl)
    corrected = DeltaTokens(q, k / (c + eps).unsqueeze(-1), v, beta * c, None, None, reset)
    out, w = delta_across(corrected, state.s, impl, crossing)
    return out / (total + eps), LinearState(w, z if after is None else after)
