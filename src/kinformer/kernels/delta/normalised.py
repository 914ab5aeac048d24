"""The delta rule with attention normalisation: what is read is an average (Schlag, Irie and Schmidhuber 2021).

    W_t = W_{t-1} + k_t (beta_t (v_t - W_{t-1}^T k_t / c_t))^T,   c_t = z_{t-1} . k_t,   z_t = z_{t-1} + k_t
    out_t = W_t^T q_t / (z_t . q_t + eps)

As in the authors' code it is the delta rule with the keys k_t / (c_t + eps) and the strengths beta_t c_t, and c is 1 at
a sequence's first token.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from kinformer.kernels.delta import delta_rule
from kinformer.kernels.impls import LinearImpl
from kinformer.kernels.linear import LinearState, linear_attention


def normalised_delta_rule(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor],
    state: LinearState,
    first: Tensor,
    *,
    eps: float = 1e-6,
    reset: Tensor | None = None,
    impl: LinearImpl = "auto",
) -> tuple[Tensor, LinearState]:
    """Absorb a chunk of any length; returns outputs [batch, heads, time, head_dim] in v's dtype and the new state.

    tokens: q, k, v and beta as for :func:`delta_rule`; features are positive, k zero at invalid tokens.
    state: W and z. first: [batch, time] bool, the first token of a sequence, whether by ``reset`` or after a new state.
    """
    q, k, v, beta = tokens
    ones, sums = v.new_ones(*v.shape[:3], 1), LinearState(state.z.unsqueeze(-1), state.z)
    before = pad(k, (0, 0, 1, 0))[:, :, :-1]
    if reset is not None:
        before = before.masked_fill(reset[:, None, :, None], 0)
    # c_t = sum over s < t of k_s . k_t: the keys of one token before, in a sum that is read with k_t
    c, _ = linear_attention(k, before, ones, sums, eps=None, reset=reset, impl=impl)
    c = c[..., 0].masked_fill(first[:, None], 1.0)
    total, (_, z) = linear_attention(q, k, ones, sums, eps=None, reset=reset, impl=impl)
    out, w = delta_rule(q, k / (c + eps).unsqueeze(-1), v, beta * c, state.s, reset=reset, impl=impl)
    return out / (total + eps), LinearState(w, z)
