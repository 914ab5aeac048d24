"""The delta rule block by block in Triton, for a GPU; Triton's interpreter runs it on a CPU, for tests.

In the WY form of ``chunked`` (A, R, P, U, G as there), with the kernel :func:`mix` of ``linear.triton``: :func:`solve`
gives -R diag(beta) K and R diag(beta) V of all blocks, or R^T K and R^T P^T Y; :func:`run` goes through the blocks,

    U = R diag(beta) V - R diag(beta) K W,   W <- W + K^T U        G = R^T P^T Y + R^T K dW,   dW <- dW + Q^T Y - K^T dV

The rest is mixes inside blocks: out = mix(Q, K, U, W), P^T Y = mix(K, Q, Y) and dQ = mix(Y, U, K, W^T). The gradient of
a key is mix(U, Y, Q, dW^T) - mix(U, dV, E) for writing plus mix(dV, U, K, W^T) for erasing, with E the erasing keys (K
unless they are given). With V - mix(E, K, U, W), the error of the memory at a token's key, dV = diag(beta) G
and dbeta = rowsum of G times the error. A decay by channel stands in Q, E and K (``linear.triton.fold``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kinformer.kernels.delta.chunked import chunked
from kinformer.kernels.linear.chunked import operand_dtype, product_dtype
from kinformer.kernels.linear.sequence import DeltaTokens, accumulator_dtype
from kinformer.kernels.linear.triton import Cut, between, block_flops, block_size, factors, fold, product, side, tile
from kinformer.runtime.autograd import Context, check_reverse, first_order

_Sequence = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_SEQUENCE = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor w, Tensor? log_decay, Tensor? reset, Tensor? erase, "
    "Tensor? retained"
)


@triton.jit
def inverse(lower, LEVELS: tl.constexpr, SIZE: tl.constexpr):
    """Return (I + lower)^-1 for ``lower`` strictly so, by doubling: [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']].

    Unlike a product of powers it does not cancel where many keys are alike.
    """
    i, half = tl.arange(0, SIZE), 1
    inverse_ = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for _ in range(LEVELS):
        corner = (i[:, None] // half == i[None, :] // half + 1) & (i[:, None] // half % 2 == 1)
        zero = tl.zeros([SIZE, SIZE], tl.float32)
        inverse_ -= product(product(inverse_, tl.where(corner, lower, 0.0), zero), inverse_, zero)
        half *= 2
    return inverse_


@triton.jit
def solve(
    k, e, beta, v, x, u, decay, reset, heads, time, count, m, n,
    SIZE: tl.constexpr, LEVELS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute for one block x = -R diag(beta) E and u = R diag(beta) V, E as far as it reads the state before the
    block.

    REVERSE: x = R^T K and u = R^T V, K as far as it writes into the state after it.
    """
    here = tl.program_id(0).to(tl.int64)
    row, at = here // count, here % count * SIZE + tl.arange(0, SIZE)
    sums, sequence, enter, leave, _ = factors(decay, reset, row, heads, time, at, SIZE)
    tokens, inside = row * time + at, at < time
    strength = tl.load(beta + tokens, inside, 0.0)
    A = tl.zeros([SIZE, SIZE], tl.float32)
    for start in range(0, m, INNER):
        f = start + tl.arange(0, INNER)
        K = tl.load(k + tokens[:, None] * m + f[None, :], inside[:, None] & (f < m)[None, :], 0.0)
        E = tl.load(e + tokens[:, None] * m + f[None, :], inside[:, None] & (f < m)[None, :], 0.0)
        A = product(E, tl.trans(K), A)
    R = inverse(A * between(sums, sequence, False, 1, SIZE) * strength[:, None], LEVELS, SIZE)
    if REVERSE:
        R, reads, writes = tl.trans(R), leave, 1.0
        keys = k
    else:
        reads, writes = -strength * enter, strength[:, None]
        keys = e
    R = R.to(k.dtype.element_ty)
    for start in range(0, m, INNER):
        f = start + tl.arange(0, INNER)
        offset, seen = tokens[:, None] * m + f[None, :], inside[:, None] & (f < m)[None, :]
        K = (tl.load(keys + offset, seen, 0.0).to(tl.float32) * reads[:, None]).to(R.dtype)
        tl.store(x + offset, product(R, K, tl.zeros([SIZE, INNER], tl.float32)), seen)
    for start in range(0, n, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        offset, seen = tokens[:, None] * n + d[None, :], inside[:, None] & (d < n)[None, :]
        V = (tl.load(v + offset, seen, 0.0).to(tl.float32) * writes).to(R.dtype)
        tl.store(u + offset, product(R, V, tl.zeros([SIZE, COLUMNS], tl.float32)), seen)


@triton.jit
def run(
    x, u, k, beta, q, y, first, states, last, decay, reset, retained, heads, time, count, m, n,
    SIZE: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Run ``COLUMNS`` columns of W of one sequence through all blocks, storing W before every block and after the last,
    and u in place: u <- u + x W, W <- keep W + K^T u.

    REVERSE: dW and G, from the last block to the first, k being E: after every block, and before the first. retained
    [rows, count, m]: the logarithms of the retained fraction of W after each block, or None.
    """
    row, f = tl.program_id(0).to(tl.int64), tl.arange(0, FEATURES)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner, wide = f < m, d < n
    offset, within = f[:, None] * n + d[None, :], inner[:, None] & wide[None, :]
    W = tl.load(first + row * m * n + offset, within, 0.0)
    for step in range(count):
        block = count - 1 - step if REVERSE else step
        at = block * SIZE + tl.arange(0, SIZE)
        tokens, inside = row * time + at, at < time
        late = tl.full([FEATURES], 1.0, tl.float32)
        if retained is not None:
            late = tl.exp(tl.load(retained + (row * count + block) * m + f, inner, 0.0))
        if REVERSE:
            W = W * late[:, None]
        tl.store(states + (row * count + block) * m * n + offset, W, within)
        _, _, enter, leave, keep = factors(decay, reset, row, heads, time, at, SIZE)
        X = tl.load(x + tokens[:, None] * m + f[None, :], inside[:, None] & inner[None, :], 0.0)
        written, seen = u + tokens[:, None] * n + d[None, :], inside[:, None] & wide[None, :]
        U = product(X, W.to(X.dtype), tl.load(written, seen, 0.0).to(tl.float32)).to(X.dtype)
        tl.store(written, U, seen)
        turned, shown = tokens[None, :] * m + f[:, None], inside[None, :] & inner[:, None]
        scale = leave
        if REVERSE:
            scale = -enter * tl.load(beta + tokens, inside, 0.0)
        K = (tl.load(k + turned, shown, 0.0).to(tl.float32) * scale[None, :]).to(X.dtype)
        W = product(K, U, W * keep)
        if REVERSE:
            Q = (tl.load(q + turned, shown, 0.0).to(tl.float32) * enter[None, :]).to(X.dtype)
            W = product(Q, tl.load(y + tokens[:, None] * n + d[None, :], seen, 0.0), W)
        else:
            W = W * late[:, None]
    tl.store(last + row * m * n + offset, W, within)


class States(NamedTuple):
    """The states at every block's edge: u [batch, heads, time, n], w [rows, count, m, n]; the ``last`` W is float32."""

    u: Tensor
    w: Tensor
    last: Tensor


def _largest(k: Tensor) -> int:
    """Return the tokens in a block: 32, since the inverse, by 2 log2(size) products in float32, would be most
    of the work of 64; fewer where the keys would have more than 16 KiB, 16 of 256 features in float32, for
    :func:`run` holds all features of X, K and Q."""
    return min(32, 2**14 // (side(k.shape[-1]) * k.dtype.itemsize))


class DeltaCut(Cut):
    """A :class:`Cut` with the keys and strengths of the delta rule."""

    def __init__(
        self,
        keys: tuple[Tensor, Tensor | None],
        beta: Tensor,
        log_decay: Tensor | None,
        reset: Tensor | None,
        retained: Tensor | None,
    ) -> None:
        k, erase = keys
        super().__init__(k, log_decay, reset, retained, _largest(k))
        self.k, self.erase, self.beta = k, k if erase is None else erase.contiguous(), beta.contiguous()

    def run(self, v: Tensor, w: Tensor, *, q: Tensor | None = None, y: Tensor | None = None) -> States:
        """Run :func:`solve` and :func:`run` from the state w; with q and y, run the backward, v being P^T Y."""
        k, m, n, reverse = self.k, self.k.shape[-1], v.shape[-1], q is not None
        x, u = torch.empty_like(k), torch.empty_like(v)
        solve[(self.rows * self.count,)](
            k, self.erase, self.beta, v, x, u, self.decay, self.reset, *self.sequence, m, n,
            SIZE=self.size, LEVELS=self.size.bit_length() - 1, INNER=tile(m, k.dtype), COLUMNS=tile(n, k.dtype),
            REVERSE=reverse,
        )  # fmt: skip
        new_states = States(u, k.new_empty(self.rows, self.count, m, n), w.new_empty(self.rows, m, n))
        # All features of W's columns stay in registers: 32 columns of up to 128, 16 of more.
        columns = min(side(n), 32 if side(m) <= 128 else 16)
        run[self.rows, triton.cdiv(n, columns)](
            x, u, self.erase if reverse else k, self.beta, q, y, w.contiguous(), *new_states[1:], self.decay,
            self.reset, self.retained, *self.sequence, m, n,
            SIZE=self.size, FEATURES=side(m), COLUMNS=columns, REVERSE=reverse, num_stages=2,
        )  # fmt: skip
        return new_states


def attend(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final W; arguments as for ``delta_rule``.

    A decay by channel beyond float32's range in a block is computed by the chunked kernel.
    """
    q, k, v, beta, erase, log_decay, reset, _ = tokens
    check_reverse("Triton's delta rule", q, k, v, beta, state, erase, log_decay)
    cast, operand_types = operand_dtype(q), v.dtype
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    dtype, wide = product_dtype(q, k, v), accumulator_dtype(q, k, v)
    log_decay = None if log_decay is None else log_decay.to(wide)
    state, retained = state.to(wide), None
    if log_decay is not None and log_decay.dim() == 4:
        channels = fold(log_decay, block_size(q.shape[2], _largest(k.to(dtype))))
        if channels is None:
            return chunked(tokens, state)
        erase = (k if erase is None else erase) * channels.read
        q, k, state = q * channels.read, k * channels.written, state * channels.initial.unsqueeze(-1)
        log_decay, retained = None, channels.retained
    operands = q.to(dtype), k.to(dtype), v.to(dtype), beta.to(wide), state
    out, state = _forward(*operands, log_decay, reset, None if erase is None else erase.to(dtype), retained)
    return out.to(operand_types), state


@torch.library.custom_op(
    "kinformer::triton_delta", mutates_args=(), schema=f"({_SEQUENCE}) -> (Tensor out, Tensor last)"
)
def _forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    log_decay, reset, erase, retained = rest
    q, k, v = (x.contiguous() for x in (q, k, v))
    with torch.cuda.device_of(q):
        cut = DeltaCut((k, erase), beta, log_decay, reset, retained)
        states = cut.run(v, w)
        return cut.mix(q, k, states.u, states.w), states.last.view(w.shape)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, w: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), w.new_empty(w.shape)


@torch.library.custom_op(
    "kinformer::triton_delta_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_w, {_SEQUENCE}, bool learns) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(Y: Tensor, grad_w: Tensor, *saved_inputs: *tuple[*_Sequence, bool]) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, beta, w, and of log_decay, erase and ``retained`` where they are learnt."""
    q, k, v, beta, w, log_decay, reset, erase, retained, learns = saved_inputs
    q, k, v, Y = (x.contiguous() for x in (q, k, v, Y))
    wide, strength = w.dtype, beta.unsqueeze(-1)
    with torch.cuda.device_of(q):
        cut = DeltaCut((k, erase), beta, log_decay, reset, retained)
        u, w_before, last = cut.run(v, w)
        G, dw, dw_first = cut.run(cut.mix(k, q, Y, reverse=True), grad_w, q=q, y=Y)
        dv = (G * strength).to(G.dtype)
        dq = cut.mix(Y, u, k, w_before, transposed=True)
        read = cut.mix(dv, u, k, w_before, transposed=True, strict=True, dtype=wide)
        written = cut.mix(u, Y, q, dw, transposed=True, reverse=True, dtype=wide)
        written -= cut.mix(u, dv, cut.erase, reverse=True, strict=True, dtype=wide)
        error = v - cut.mix(cut.erase, k, u, w_before, strict=True, dtype=wide)
    dbeta = (G * error).sum(-1)
    dk = (written - read if erase is None else written).to(k.dtype)
    de = k.new_empty(0) if erase is None else read.neg().to(k.dtype)
    dg = w.new_empty(0)
    if learns:
        change = (q * dq).sum(-1, dtype=wide) - (k * written + cut.erase * read).sum(-1)
        dg = cut.decay_gradient(change, cut.ended(w_before, last, dw))
    dretained = w.new_empty(0) if retained is None else cut.retained_gradient(w_before, last, dw)
    return dq, dk, dv, dbeta, dw_first.view(w.shape), dg, de, dretained


@_backward.register_fake
def _(*arguments: *tuple[Tensor, Tensor, *_Sequence, bool]) -> tuple[Tensor, ...]:
    tensors, (log_decay, _, erase, retained, learns) = arguments[2:7], arguments[7:]
    de = tensors[1].new_empty(0 if erase is None else erase.shape)
    dg, dretained = (
        tensors[4].new_empty(0 if x is None else x.shape) for x in (log_decay if learns else None, retained)
    )
    return *(x.new_empty(x.shape) for x in tensors), dg, de, dretained


def _save(ctx: Context, inputs: _Sequence, output: object) -> None:
    ctx.save_for_backward(*inputs)


@first_order("Triton's delta rule")
def _differentiate(ctx: Context, saved: tuple[Tensor | None, ...], *gradients: Tensor) -> tuple[Tensor | None, ...]:
    learns = ctx.needs_input_grad[5]
    *grads, dg, de, dretained = _backward(*gradients, *saved, learns)
    needs = ctx.needs_input_grad
    return *grads, dg if learns else None, None, de if needs[7] else None, dretained if needs[8] else None


_forward.register_autograd(_differentiate, setup_context=_save)


def _flops(k: Tensor, v: Tensor, squares: int, states: int) -> int:
    """Return the floating-point operations; ``squares``: the widths of products of two tokens outside ``solve``."""
    batch, heads, time, m = k.shape
    size = block_size(time, _largest(k))
    inverted = 2 * (size.bit_length() - 1) * size
    solved = 2 * m + v.shape[-1] + inverted
    return batch * heads * block_flops(time, size, solved + squares, states * m * v.shape[-1])


@register_flop_formula(torch.ops.kinformer.triton_delta, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> int:
    return _flops(k, v, k.shape[-1] + v.shape[-1], states=3)


@register_flop_formula(torch.ops.kinformer.triton_delta_backward, get_raw=True)
def _backward_flops(*arguments: *tuple[Tensor, Tensor, *_Sequence, bool], **_: object) -> int:
    """Return the operations of a backward: ``run`` of both passes, and six mixes, four of them with states."""
    k, v = arguments[3:5]
    width = k.shape[-1] + v.shape[-1]
    return _flops(k, v, 6 * width, states=5 + 4) + _flops(k, v, 0, states=0)
