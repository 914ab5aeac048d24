"""Linear attention block by block in Triton, for a GPU; Triton's interpreter runs it on a CPU, for tests.

All products inside blocks have one form, :func:`mix`. With M the factors between a block's tokens (order, decay,
resets) and c those between a token and the state S at the block's edge,

    mix(a, b, x, S)_t = sum_s M_ts (a_t . b_s) x_s + c_t S^T a_t

so that out = mix(Q, K, V, S) and, Y being the gradient of out, dQ = mix(Y, V, K, S^T); against the direction of time
dV = mix(K, Q, Y, dS) and dK = mix(V, Y, Q, dS^T). One kernel gives the states before all blocks, S <- keep S + K^T V,
and from the last block to the first dS <- keep dS + Q^T Y. The normaliser z is one more column of S, whose values are 1
and whose gradients are g. The backward makes the states again; sums are float32, operands bfloat16 or float32.

A decay by channel stands in queries and keys (:func:`fold`), and S <- retained (S + K^T V) for every block.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from kinformer.kernels.linear.chunked import (
    RANGE,
    SequenceBlocks,
    accumulator_dtype,
    chunked,
    folded,
    number,
    operand_dtype,
    product_dtype,
)
from kinformer.kernels.linear.sequence import LinearSequence
from kinformer.runtime.autograd import Context, check_reverse, first_order
from kinformer.runtime.errors import KinformerError

LARGEST = 64
"""Tokens in a block."""
LEAST = 16
"""The least side of a product, tl.dot's; narrower operands are filled up with zeros."""
_Rest = tuple[Tensor | None, Tensor | None, Tensor | None, float | None]
_Sequence = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
_Saved = tuple[*_Sequence, bool, bool]
_SEQUENCE = "Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? log_decay, Tensor? reset, Tensor? retained"

INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def product(a, b, total):
    """Return total + a b, float32 operands in full precision (not in TensorFloat-32)."""
    if _INTERPRETED:  # the interpreter of Triton 3.7 multiplies the bits of bfloat16 as whole numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def factors(decay, reset, row, heads, time, at, SIZE: tl.constexpr):
    """Return for the block whose tokens are ``at``: the running sums of the decay's logarithms, the sequence numbers,
    and the factors of the state at each token, of each token after the block, and of the state after the block."""
    sums = tl.zeros([SIZE], tl.float32)
    sequence = tl.zeros([SIZE], tl.int32)
    if decay is not None:
        sums = tl.cumsum(tl.load(decay + row * time + at, at < time, 0.0), 0)
    if reset is not None:
        sequence = tl.cumsum(tl.load(reset + row // heads * time + at, at < time, 0).to(tl.int32), 0)
    last = tl.arange(0, SIZE) == SIZE - 1
    total, count = tl.sum(tl.where(last, sums, 0.0), 0), tl.sum(tl.where(last, sequence, 0), 0)
    enter = tl.where(sequence == 0, tl.exp(sums), 0.0)
    leave = tl.where(sequence == count, tl.exp(total - sums), 0.0)
    return sums, sequence, enter, leave, tl.where(count == 0, tl.exp(total), 0.0)


@triton.jit
def between(sums, sequence, REVERSE: tl.constexpr, STRICT: tl.constexpr, SIZE: tl.constexpr):
    """Return M [SIZE, SIZE]: the row sees the columns before it (REVERSE: after it) and itself (STRICT: not itself)."""
    t = tl.arange(0, SIZE)
    distance, decayed = t[:, None] - t[None, :], sums[:, None] - sums[None, :]
    if REVERSE:
        distance, decayed = -distance, -decayed
    seen = (distance >= STRICT) & (sequence[:, None] == sequence[None, :])
    return tl.where(seen, tl.exp(tl.minimum(decayed, 0.0)), 0.0)


@triton.jit
def mix(
    a, b, x, states, out, decay, reset, weights, sums_z, divisor, eps, heads, time, count, m, n, step_m, step_n,
    SIZE: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Compute one block, ``COLUMNS`` of its n columns. a, b [rows, time, m], x and out [rows, time, n].

    states: [rows, count, ...] with steps ``step_m`` and ``step_n``, or None. With a ``divisor`` [rows, time], out is
    divided by a . z + eps, which is written there (sums_z: [rows, count, m]). Else weights [rows, time], of the rows'
    tokens (REVERSE: of the columns'), and sums_z [rows, count, n] are the normaliser's part of a and of S.
    """
    here, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, at = here // count, here % count * SIZE + tl.arange(0, SIZE)
    sums, sequence, enter, leave, _ = factors(decay, reset, row, heads, time, at, SIZE)
    tokens, inside, wide = row * time + at, at < time, cols < n
    scores = tl.zeros([SIZE, SIZE], tl.float32)
    total = tl.zeros([SIZE, COLUMNS], tl.float32)
    below = tl.zeros([SIZE], tl.float32)
    for start in range(0, m, INNER):
        f = start + tl.arange(0, INNER)
        A = tl.load(a + tokens[:, None] * m + f[None, :], inside[:, None] & (f < m)[None, :], 0.0)
        B = tl.load(b + tokens[None, :] * m + f[:, None], inside[None, :] & (f < m)[:, None], 0.0)
        scores = product(A, B, scores)
        if states is not None:
            S = states + here * m * n + f[:, None] * step_m + cols[None, :] * step_n
            total = product(A, tl.load(S, (f < m)[:, None] & wide[None, :], 0.0), total)
        if divisor is not None:
            below += tl.sum(A.to(tl.float32) * tl.load(sums_z + here * m + f, f < m, 0.0)[None, :], 1)
    if divisor is None:
        if weights is not None:
            g = tl.load(weights + tokens, inside, 0.0)
            scores += g[None, :] if REVERSE else g[:, None]
        if sums_z is not None:
            z = tl.load(sums_z + here * n + cols, wide, 0.0)[None, :]
            total += z if REVERSE else g[:, None] * z
    edge = leave if REVERSE else enter
    scores *= between(sums, sequence, REVERSE, STRICT, SIZE)
    X = tl.load(x + tokens[:, None] * n + cols[None, :], inside[:, None] & wide[None, :], 0.0)
    total = product(scores.to(X.dtype), X, total * edge[:, None])
    if divisor is not None:
        below = below * edge + tl.sum(scores, 1) + eps
        total = total / below[:, None]
        tl.store(divisor + tokens, below, at < tl.where(tl.program_id(1) == 0, time, 0))
    tl.store(out + tokens[:, None] * n + cols[None, :], total, inside[:, None] & wide[None, :])


@triton.jit
def accumulate(
    k, v, weights, first, first_z, states, states_z, last, last_z, decay, reset, retained, heads, time, count, m, n,
    SIZE: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute ``INNER`` rows and ``COLUMNS`` columns of S and z of one sequence, before every block and after the last
    one.

    REVERSE: k and v are Q and Y, weights g or None, and states run from the last block to the first: the states after
    every block, and the state before the first. retained [rows, count, m]: the logarithms of the retained fraction of
    a state after a block, or None.
    """
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * INNER + tl.arange(0, INNER)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    # Masks compare tensors: a scalar's comparison is an int32 in Triton's interpreter, and 3.9 refuses such masks.
    inner, wide, once = f < m, d < n, f < tl.where(tl.program_id(2) == 0, m, 0)
    offset, within = f[:, None] * n + d[None, :], inner[:, None] & wide[None, :]
    S, z = tl.load(first + row * m * n + offset, within, 0.0), tl.load(first_z + row * m + f, inner, 0.0)
    for step in range(count):
        block = count - 1 - step if REVERSE else step
        at, here = block * SIZE + tl.arange(0, SIZE), row * count + block
        tokens, inside = row * time + at, at < time
        late = tl.full([INNER], 1.0, tl.float32)
        if retained is not None:
            late = tl.exp(tl.load(retained + here * m + f, inner, 0.0))
        if REVERSE:
            S, z = S * late[:, None], z * late
        tl.store(states + here * m * n + offset, S, within)
        tl.store(states_z + here * m + f, z, once)
        _, _, enter, leave, keep = factors(decay, reset, row, heads, time, at, SIZE)
        K = tl.load(k + tokens[None, :] * m + f[:, None], inner[:, None] & inside[None, :], 0.0)
        V = tl.load(v + tokens[:, None] * n + d[None, :], inside[:, None] & wide[None, :], 0.0)
        scaled = K.to(tl.float32) * (enter if REVERSE else leave)[None, :]
        S = product(scaled.to(K.dtype), V, S * keep)
        z *= keep
        if weights is not None:
            z += tl.sum(scaled * tl.load(weights + tokens, inside, 0.0)[None, :], 1)
        elif not REVERSE:
            z += tl.sum(scaled, 1)
        if not REVERSE:
            S, z = S * late[:, None], z * late
    tl.store(last + row * m * n + offset, S, within)
    tl.store(last_z + row * m + f, z, once)


def side(width: int) -> int:
    """Return the power of two that ``width`` is filled up to."""
    return max(LEAST, triton.next_power_of_2(width))


def tile(width: int, dtype: torch.dtype) -> int:
    """Return how much of a width one product takes: 64 numbers of bfloat16, 32 of float32. An operand of ``LARGEST``
    tokens then has 8 KiB, and the few that a step loads, two or three steps ahead, fit into 99 KiB of shared memory."""
    return min(side(width), 128 // dtype.itemsize)


def block_size(time: int, largest: int = LARGEST) -> int:
    """Return the number of tokens in a block for sequences of ``time`` tokens: no more than hold them all."""
    return min(largest, side(time))


class States(NamedTuple):
    """At every block's edge, in the operands' dtype: s [rows, count, m, n] and, float32, z [rows, count, m]; the last
    ones, ``last`` [rows, m, n] and ``last_z`` [rows, m], in float32."""

    s: Tensor
    z: Tensor
    last: Tensor
    last_z: Tensor


class Cut:
    """Sequences [batch, heads, time, ...] in blocks of ``size`` tokens, their decay and resets, and the kernels."""

    def __init__(
        self,
        like: Tensor,
        log_decay: Tensor | None,
        reset: Tensor | None,
        retained: Tensor | None = None,
        largest: int = LARGEST,
    ) -> None:
        if like.device.type == "cpu" and not INTERPRETED:
            raise KinformerError(
                "impl='triton' runs on a GPU, but the tensors are on the CPU; use impl='chunked' there, or set "
                "TRITON_INTERPRET=1 before Python starts to have the kernels interpreted."
            )
        self.batch, self.heads, self.time = like.shape[:3]
        self.rows, self.size = self.batch * self.heads, block_size(self.time, largest)
        self.count = triton.cdiv(self.time, self.size)
        self.decay = None if log_decay is None else log_decay.contiguous()
        self.reset = None if reset is None else reset.to(torch.int8).contiguous()
        self.retained = None if retained is None else retained.contiguous()

    @property
    def sequence(self) -> tuple[int, int, int]:
        return self.heads, self.time, self.count

    def mix(
        self, a: Tensor, b: Tensor, x: Tensor, states: Tensor | None = None, *, transposed: bool = False,
        reverse: bool = False, strict: bool = False, dtype: torch.dtype | None = None, **normaliser: Unpack[Normaliser],
    ) -> Tensor:  # fmt: skip
        """Run the kernel :func:`mix`, in ``dtype`` or in x's dtype; ``transposed`` states are [rows, count, n, m]."""
        out = torch.empty_like(x, dtype=dtype)
        m, n = a.shape[-1], x.shape[-1]
        extra = (normaliser.get(name) for name in ("weights", "sums_z", "divisor"))
        columns = tile(n, x.dtype)
        mix[self.rows * self.count, triton.cdiv(n, columns)](
            a, b, x, states, out, self.decay, self.reset, *extra, normaliser.get("eps", 0.0), *self.sequence, m, n,
            *((1, m) if transposed else (n, 1)),
            SIZE=self.size, INNER=tile(m, a.dtype), COLUMNS=columns, REVERSE=reverse, STRICT=int(strict),
        )  # fmt: skip
        return out

    def accumulate(
        self, k: Tensor, v: Tensor, s: Tensor, z: Tensor, weights: Tensor | None = None, reverse: bool = False
    ) -> States:
        """Run the kernel :func:`accumulate` from the states s [batch, heads, m, n] and z [batch, heads, m]."""
        m, n = k.shape[-1], v.shape[-1]
        states = k.new_empty(self.rows, self.count, m, n), z.new_empty(self.rows, self.count, m)
        new_states = States(*states, s.new_empty(self.rows, m, n), z.new_empty(self.rows, m))
        inner, columns = tile(m, k.dtype), tile(n, k.dtype)
        accumulate[self.rows, triton.cdiv(m, inner), triton.cdiv(n, columns)](
            k, v, weights, s.contiguous(), z.contiguous(), *new_states, self.decay, self.reset, self.retained,
            *self.sequence, m, n,
            SIZE=self.size, INNER=inner, COLUMNS=columns, REVERSE=reverse,
        )  # fmt: skip
        return new_states

    def ended(self, states: Tensor, last: Tensor, slopes: Tensor) -> Tensor:
        """Return S dS after every block, summed, [rows * count, 1] float32, from the states before the blocks."""
        after = torch.cat([states[:, 1:].to(last.dtype), last.unsqueeze(1)], 1)
        return (after * slopes.to(last.dtype)).flatten(2).sum(-1).view(-1, 1)

    def retained_gradient(self, states: Tensor, last: Tensor, slopes: Tensor) -> Tensor:
        """Return the gradient of ``retained``, given the states [rows, count, m, n] before the blocks, the last state,
        and the gradients of states after each block, before the factor ``retained``."""
        assert self.retained is not None
        after = torch.cat([states[:, 1:].to(last.dtype), last.unsqueeze(1)], 1)
        return (after * slopes.to(last.dtype)).sum(-1) / self.retained.exp()

    def decay_gradient(self, change: Tensor, ended: Tensor) -> Tensor:
        """Return the gradient of log_decay, [batch, heads, time] float32, from q dq - k dk over features and S dS."""
        numbers = None if self.reset is None else number(self.reset, self.count, self.size)
        blocks = SequenceBlocks(self.batch, self.heads, self.time, self.count, self.size, sequence=numbers)
        return blocks.decay_gradient(blocks.split(change.unsqueeze(-1)), ended).squeeze(-1).contiguous()


class Normaliser(TypedDict, total=False):
    """What :func:`mix` takes of a normaliser, as of the kernel."""

    weights: Tensor | None
    sums_z: Tensor | None
    divisor: Tensor
    eps: float


class Fold(NamedTuple):
    """A decay by channel, applied to queries and keys (``Fold``): factors ``read`` of queries and erasing keys,
    ``written`` of written keys [batch, heads, time, m], ``initial`` of the state [batch, heads, m], and the logarithms
    of the ``retained`` fraction of a state after each block [rows, count, m]."""

    read: Tensor
    written: Tensor
    initial: Tensor
    retained: Tensor


def fold(log_decay: Tensor, size: int) -> Fold | None:
    """Return the fold of a decay by channel [batch, heads, time, m] in blocks of ``size`` tokens; None where the decays
    of a block add up to more than RANGE. Looking at them waits for the GPU."""
    batch, heads, time, m = log_decay.shape
    count = triton.cdiv(time, size)
    padded = functional.pad(log_decay, (0, 0, 0, count * size - time))
    sums = padded.reshape(-1, size, m).cumsum(1)
    if not bool((sums[:, 0] - sums[:, -1]).amax() <= RANGE):
        return None
    away, initial, retained = folded(sums, batch * heads)
    read, written = (x.exp().view(batch, heads, -1, m)[:, :, :time] for x in (away, -away))
    return Fold(read, written, initial.exp().view(batch, heads, m), retained)


def attend(sequence: LinearSequence, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [batch, heads, time, head_dim] and the final S and z; arguments as for ``linear_attention``.

    A decay by channel beyond float32's range in a block is computed by the chunked kernel.
    """
    q, k, v, log_decay, eps, reset = sequence
    check_reverse("Triton's linear attention", q, k, v, s, z, log_decay)
    cast, operand_types = operand_dtype(q), v.dtype
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    dtype, accumulator = product_dtype(q, k, v), accumulator_dtype(q, k, v)
    log_decay = None if log_decay is None else log_decay.to(accumulator)
    s, z, retained = s.to(accumulator), z.to(accumulator), None
    if log_decay is not None and log_decay.dim() == 4:
        channels = fold(log_decay, block_size(q.shape[2]))
        if channels is None:
            return chunked(sequence, s, z)
        q, k, log_decay, retained = q * channels.read, k * channels.written, None, channels.retained
        s, z = s * channels.initial.unsqueeze(-1), z * channels.initial
    out, s, z, _ = _forward(q.to(dtype), k.to(dtype), v.to(dtype), s, z, log_decay, reset, retained, eps)
    return out.to(operand_types), s, z


@torch.library.custom_op(
    "kinformer::triton_linear",
    mutates_args=(),
    schema=f"({_SEQUENCE}, float? eps) -> (Tensor out, Tensor last_s, Tensor last_z, Tensor divisor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *rest: *_Rest) -> tuple[Tensor, ...]:
    log_decay, reset, retained, eps = rest
    cut, (q, k, v) = Cut(q, log_decay, reset, retained), (x.contiguous() for x in (q, k, v))
    with torch.cuda.device_of(q):
        states = cut.accumulate(k, v, s, z)
        if eps is None:
            out, divisor = cut.mix(q, k, v, states.s), z.new_empty(0)
        else:
            divisor = z.new_empty(q.shape[:3])
            out = cut.mix(q, k, v, states.s, sums_z=states.z, divisor=divisor, eps=eps)
    return out, states.last.view(s.shape), states.last_z.view(z.shape), divisor


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *rest: *_Rest) -> tuple[Tensor, ...]:
    divisor = z.new_empty(0 if rest[3] is None else q.shape[:3])
    return v.new_empty(v.shape), s.new_empty(s.shape), z.new_empty(z.shape), divisor


@torch.library.custom_op(
    "kinformer::triton_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_s, Tensor grad_z, Tensor out, Tensor divisor, {_SEQUENCE}, "
    "bool normalised, bool learns) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    Y: Tensor, grad_s: Tensor, grad_z: Tensor, out: Tensor, divisor: Tensor, *saved_inputs: *_Saved
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, s, z, if it ``learns`` of log_decay, and of ``retained``, else empty tensors."""
    *tensors, log_decay, reset, retained, normalised, learns = saved_inputs
    s, z = tensors[3:]
    q, k, v = (x.contiguous() for x in tensors[:3])
    cut, g = Cut(q, log_decay, reset, retained), None
    if normalised:
        g = -(Y.to(divisor.dtype) * out).sum(-1).div_(divisor)
        Y = (Y / divisor.unsqueeze(-1)).to(q.dtype)
    Y = Y.contiguous()
    with torch.cuda.device_of(q):
        states = cut.accumulate(k, v, s, z)
        slopes = cut.accumulate(q, Y, grad_s, grad_z, weights=g, reverse=True)
        dq = cut.mix(Y, v, k, states.s, transposed=True, weights=g, sums_z=states.z if normalised else None)
        dk = cut.mix(v, Y, q, slopes.s, transposed=True, reverse=True, weights=g, sums_z=slopes.z)
        dv = cut.mix(k, q, Y, slopes.s, reverse=True)
    dg = z.new_empty(0)
    if learns:
        change = (q * dq).sum(-1, dtype=z.dtype) - (k * dk).sum(-1, dtype=z.dtype)
        ended = cut.ended(states.s, states.last, slopes.s) + cut.ended(states.z, states.last_z, slopes.z)
        dg = cut.decay_gradient(change, ended)
    dretained = z.new_empty(0)
    if retained is not None:
        dretained = cut.retained_gradient(states.s, states.last, slopes.s)
        dretained += cut.retained_gradient(*(x.unsqueeze(-1) for x in (states.z, states.last_z, slopes.z)))
    return dq, dk, dv, slopes.last.view(s.shape), slopes.last_z.view(z.shape), dg, dretained


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, log_decay, retained, learns = arguments[5:10], arguments[10], arguments[12], arguments[-1]
    decays = (log_decay.shape if learns else 0), (0 if retained is None else retained.shape)
    return *(x.new_empty(x.shape) for x in tensors), *map(tensors[4].new_empty, decays)


def _save(ctx: Context, inputs: tuple[*_Sequence, float | None], output: tuple[Tensor, ...]) -> None:
    *tensors, eps = inputs
    ctx.normalised = eps is not None
    out = output[0] if ctx.normalised else output[3]
    ctx.save_for_backward(out, output[3], *tensors)


@first_order("Triton's linear attention")
def _differentiate(ctx: Context, saved: tuple[Tensor | None, ...], *gradients: Tensor) -> tuple[Tensor | None, ...]:
    learns = ctx.needs_input_grad[5]
    *grads, dg, dretained = _backward(*gradients[:3], *saved, ctx.normalised, learns)
    return *grads, dg if learns else None, None, dretained if ctx.needs_input_grad[7] else None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def block_flops(time: int, size: int, squares: int, states: int) -> int:
    """Return the floating-point operations of a sequence's products, by one block of ``size`` tokens: products of two
    tokens, in all ``squares`` wide, and of a token and a state of ``states`` numbers."""
    return triton.cdiv(time, size) * (2 * size * size * squares + 2 * size * states)


def _flops(q: Tensor, v: Tensor, mixes: int, passes: int) -> int:
    batch, heads, time, m = q.shape
    n = v.shape[-1]
    return batch * heads * block_flops(time, block_size(time), mixes * (m + n), (mixes + passes) * m * n)


@register_flop_formula(torch.ops.kinformer.triton_linear, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> int:
    return _flops(q, v, mixes=1, passes=1)


@register_flop_formula(torch.ops.kinformer.triton_linear_backward, get_raw=True)
def _backward_flops(*arguments: *tuple[Tensor, Tensor, Tensor, Tensor, Tensor, *_Saved], **_: object) -> int:
    return _flops(arguments[5], arguments[7], mixes=3, passes=2)
