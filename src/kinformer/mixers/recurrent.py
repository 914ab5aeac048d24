"""Recurrences: LSTMs, fast weights written by outer products, and RWKV-7."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.config import check_unused
from kinformer.core.contract import (
    CausalMixer,
    Chunk,
    FirstValues,
    MixerConfig,
    SharesValues,
    in_blocks,
    in_range,
    real_resets,
    select_valid,
    state_dtype,
    unit_vectors,
)
from kinformer.core.crossing import Crosses
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext
from kinformer.core.parts import ResidualOutput, head_width, merge_heads
from kinformer.core.probe import KERNEL, no_weights, probe
from kinformer.kernels import LinearImpl, LstmImpl
from kinformer.kernels.delta import delta_across
from kinformer.kernels.linear.sequence import DeltaTokens, check_triton
from kinformer.kernels.lstm import Weights, lstm
from kinformer.parts.output_parts import convolve
from kinformer.runtime.autograd import no_autocast
from kinformer.runtime.errors import KinformerError


class LSTMState(NamedTuple):
    """The state: ``h`` and ``c`` [batch, dim], float32 at least."""

    h: Tensor
    c: Tensor


_NO_WEIGHTS = "An LSTM does not have attention: its memory of a token is not a weighted sum."


class LSTM(CausalMixer):
    """Long short-term memory as a mixer (Hochreiter and Schmidhuber 1997): a recurrence, as wide as the stream.

        y_t = h_t,    (h_t, c_t) = LSTM(x_t, h_(t-1), c_(t-1))

    Its state, ``h`` and ``c``, is constant in size. PyTorch's own implementation runs a chunk in one call, in float32
    at least, whatever its rows' lengths and resets; ``torch.compile`` leaves it outside of the graph.
    """

    class Config(MixerConfig):
        kind = "lstm"
        indivisible = "every unit reads all units of the token before"
        impl: LstmImpl = "auto"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.impl, self.dim = config.impl, dim
        self.rnn = nn.LSTM(dim, dim)

    def like(self) -> Tensor:
        return self.rnn.weight_hh_l0  # type: ignore[return-value]

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> LSTMState:
        zeros = torch.zeros(batch, self.dim, device=device, dtype=state_dtype(dtype))
        return LSTMState(zeros, zeros.clone())

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return 2 * self.dim * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: LSTMState) -> tuple[Tensor, LSTMState]:
        no_weights(_NO_WEIGHTS)
        rnn, accumulator = self.rnn, state_dtype(chunk.x.dtype)
        parts = (rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0)
        # In float32: errors of a recurrence in half precision add up over the tokens.
        with no_autocast(chunk.x.device):
            weights = Weights(*(part.to(accumulator) for part in parts))  # type: ignore[arg-type]
            x, h, c = (item.to(accumulator) for item in (select_valid(chunk.x, chunk.valid), *state))
            y, *after = lstm(x, h, c, weights, valid=chunk.valid, reset=real_resets(chunk), impl=self.impl)
        return y.to(chunk.x.dtype), LSTMState(*(new.to(old.dtype) for new, old in zip(after, state, strict=True)))


class BidirectionalLSTM(EncoderMixer):
    """Long short-term memory over a full sequence, in both directions (Graves and Schmidhuber 2005).

        y_t = [h_t ; h'_t],   (h_t, c_t) = LSTM(x_t, h_(t-1), c_(t-1)),   (h'_t, c'_t) = LSTM'(x_t, h'_(t+1), c'_(t+1))

    The second begins at a sequence's last token, not at the end of its padding. Each direction is half as wide as
    the stream, whose width is even. Both are computed in float32 at least.
    """

    lacks_global = "the mixer lstm does not support global tokens, as it reads tokens in order"

    class Config(EncoderMixerConfig):
        kind = "lstm"
        impl: LstmImpl = "auto"

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        if dim % 2:
            raise KinformerError(f"dim = {dim} is odd, but the mixer lstm has two directions of dim / 2; make it even.")
        self.impl = config.impl
        self.rnn = nn.LSTM(dim, dim // 2, bidirectional=True)

    def forward(self, x: Tensor, context: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(context.global_positions is not None, context.num_global > 0)
        no_weights(_NO_WEIGHTS)
        x, valid = select_valid(x, context.valid), context.valid
        # In float32: errors of a recurrence in half precision add up over the tokens.
        with no_autocast(x.device):
            ahead = self._run(x, valid, "")
            behind = _reversed(self._run(_reversed(x, valid), valid, "_reverse"), valid)
        return select_valid(torch.cat([ahead, behind], -1).to(x.dtype), valid)

    def _run(self, x: Tensor, valid: Tensor | None, direction: str) -> Tensor:
        """Return the hidden states [batch, time, dim / 2] of one direction."""
        dtype, width = state_dtype(x.dtype), self.rnn.hidden_size
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = Weights(*(getattr(self.rnn, name + direction).to(dtype) for name in names))
        h, c = (x.new_zeros(x.shape[0], width, dtype=dtype) for _ in range(2))
        return lstm(x.to(dtype), h, c, weights, valid=valid, impl=self.impl)[0]


def _reversed(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return x [batch, time, dim] with the valid tokens, a prefix of each row, in reversed order."""
    if valid is None:
        return x.flip(1)
    time = torch.arange(x.shape[1], device=x.device)
    mirrored = torch.where(valid, valid.sum(1, keepdim=True) - 1 - time, time)
    return x.gather(1, mirrored.unsqueeze(-1).expand_as(x))


Outer = Literal["tanh", "sigmoid", "relu", "identity"]
BLOCK = 32
"""Tokens whose outer products are made at once."""


class FastWeights(NamedTuple):
    """The state: S [batch, heads, head_dim, head_dim], in float32 or better."""

    weights: Tensor


class OuterProduct(CausalMixer):
    """Fast weights written by outer products of activations (Schmidhuber 1991; Schlag et al. 2021, equations 1-3).

        a_t, b_t, q_t = W_a x_t, W_b x_t, W_q x_t                      head by head
        S_t = sigma(S_(t-1) + a_t b_t^T)                               y_t = S_t^T q_t / sqrt(head_dim)

    With sigma the identity this is kernel attention (the mixer ``linear`` with the features ``identity``, without a
    normaliser), whose chunks are computed at once. Any other sigma makes S_t depend on S_(t-1) alone, token by
    token, as an LSTM's state does: the products of a block are made at once, and the activation is taken ``time``
    times. Training keeps S_t of every token, heads * head_dim^2 numbers. The state is constant. ``head_dim`` defaults
    to dim / num_heads.
    """

    growth = "constant"

    class Config(MixerConfig):
        kind = "outer_product"
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        activation: Outer = "tanh"
        bias: bool = False

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.config, self.dim = config, dim
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        width = config.num_heads * self.head_dim
        self.qkv = in_blocks(nn.Linear(dim, 3 * width, bias=config.bias), width, width, width)
        self.out = ResidualOutput(width, dim, bias=config.bias)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> FastWeights:
        shape = batch, self.config.num_heads, self.head_dim, self.head_dim
        return FastWeights(torch.zeros(shape, device=device, dtype=state_dtype(dtype)))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return self.config.num_heads * self.head_dim**2 * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: FastWeights) -> tuple[Tensor, FastWeights]:
        x = select_valid(chunk.x, chunk.valid)
        no_weights("Fast weights behind an activation hold no sum of values that tokens add.")
        q, a, b = self.qkv(x).unflatten(-1, (3, self.config.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        weights, reset, outputs = state.weights, real_resets(chunk), []
        for first in range(0, x.shape[1], BLOCK):
            block = slice(first, first + BLOCK)
            products = a[:, :, block, :, None].to(weights.dtype) * b[:, :, block, None, :].to(weights.dtype)
            written = []
            for index, product in enumerate(products.unbind(2), first):
                weights = self._written(weights, product, index, reset, chunk.valid)
                written.append(weights)
            read = q[:, :, block, None, :].to(weights.dtype) @ torch.stack(written, 2)
            outputs.append(read.squeeze(3))
        y = merge_heads(torch.cat(outputs, 2) * self.head_dim**-0.5).to(x.dtype)
        return select_valid(self.out(y), chunk.valid), FastWeights(weights)

    def _written(
        self, weights: Tensor, product: Tensor, index: int, reset: Tensor | None, valid: Tensor | None
    ) -> Tensor:
        """Return S after the token ``index``, whose outer product is ``product`` [batch, heads, head_dim, head_dim]."""
        before = weights
        if reset is not None:
            before = torch.where(reset[:, index, None, None, None], weights.new_zeros(()), weights)
        after = before + product
        if self.config.activation != "identity":
            after = getattr(torch, self.config.activation)(after)
        if valid is not None:  # padding writes nothing
            after = torch.where(valid[:, index, None, None, None], after, weights)
        return after


_RATE = -math.exp(-0.5)
_SHIFTS = {"r": 0.1, "w": 0.45, "k": 0.35, "v": 0.35, "a": 0.45, "g": 0.1}
"""What is mixed with the token before, and how its mu begins: 1 - (channel / dim)^p, as in a middle layer of the
authors' models."""


class TimeMixState(NamedTuple):
    """kv: S [batch, heads, head_dim, head_dim]; recent: the last token [batch, 1, 1, dim]."""

    kv: Tensor
    recent: Tensor


class FirstLayerValues(SharesValues, nn.Module):
    """The mixing of v [batch, heads, time, head_dim] with the first layer's, by gates of x' through ``rank``
    features."""

    def __init__(self, dim: int, rank: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.value_shape = num_heads, head_dim
        width = num_heads * head_dim
        self.down, self.up = _low_rank(dim, rank, width)
        self.bias = nn.Parameter(0.73 - 0.4 * torch.arange(width) / max(1, width - 1))

    def forward(self, v: Tensor, x: Tensor, channel: FirstValues | None) -> Tensor:
        first = v if channel is None else channel.of(v)
        gate = torch.sigmoid(self.up(self.down(x)) + self.bias).to(v.dtype)
        return torch.lerp(v, first.to(v.dtype), gate.unflatten(-1, self.value_shape).transpose(1, 2))


class RWKV7(Crosses, CausalMixer):
    """RWKV-7's time mixing: a state that forgets by channel, erases under one key and writes under another.

    (Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution".) With x' = x_t + mu * (x_(t-1) - x_t),
    a mu for each of r, w, k, v, a and g:

        r = W_r x',   k = W_k x',   v = W_v x',   g = W_g2 sigmoid(W_g1 x'),   a = sigmoid(W_a2 W_a1 x' + b_a)
        w = exp(-exp(-1/2) sigmoid(W_w2 tanh(W_w1 x') + b_w)),   kappa = norm(k * xi),   k~ = k * (1 + (a - 1) * alpha)
        S_t = diag(w) S_(t-1) - (a * kappa) (kappa^T S_(t-1)) + k~ v^T
        y_t = W_o (g * (norm(S_t^T r) + (r . (rho * k~)) v))

    which are two steps of the delta rule: erase under kappa, write under k~. With ``value_residual`` values are mixed
    with the values of the first layer, v <- v + (v_1 - v) * sigmoid(W_v2 W_v1 x' + b_v), where v_1 = v in that layer.
    The state is constant. The ranks belong to W_w1, W_a1, W_g1 and W_v1.
    """

    class Config(MixerConfig):
        kind = "rwkv7"
        LEAST = {"decay_rank": 1, "rate_rank": 1, "gate_rank": 1, "value_rank": 1}  # about dim / 8
        by_heads = True
        num_heads: int = 4
        head_dim: int | None = None
        decay_rank: int = 64
        rate_rank: int = 64
        gate_rank: int = 128
        value_residual: bool = False
        value_rank: int = 32
        impl: LinearImpl = "auto"

        def __post_init__(self) -> None:
            if not self.value_residual:
                check_unused(self, "without value_residual", "value_rank")

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim, self.config = dim, config
        self.head_dim = config.head_dim or head_width(dim, config.num_heads)
        if config.impl == "triton":
            check_triton("rwkv7", self.head_dim, self.head_dim)
        width = config.num_heads * self.head_dim
        place = torch.arange(dim) / dim
        self.shift = nn.Parameter(torch.stack([1 - place**power for power in _SHIFTS.values()]))
        self.r, self.k, self.v = (nn.Linear(dim, width, bias=False) for _ in range(3))
        self.decay_down, self.decay_up = _low_rank(dim, config.decay_rank, width)
        self.rate_down, self.rate_up = _low_rank(dim, config.rate_rank, width)
        self.gate_down, self.gate_up = _low_rank(dim, config.gate_rank, width)
        mixes = (dim, config.value_rank, config.num_heads, self.head_dim)
        self.first_values = FirstLayerValues(*mixes) if config.value_residual else None
        place = torch.arange(width) / max(1, width - 1)
        self.decay_bias = nn.Parameter(6 * place**1.8 - 5.5)
        self.rate_bias = nn.Parameter(0.4 * place - 0.39)
        self.erased = nn.Parameter(0.76 - 0.1 * place)
        self.replaced = nn.Parameter(torch.full((width,), 1.02))
        self.bonus = nn.Parameter(torch.full((width,), -0.04))
        self.norm_weight, self.norm_bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.out = ResidualOutput(width, dim, bias=False)

    def empty_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> TimeMixState:
        width, dtype = self.head_dim, state_dtype(dtype)
        kv = torch.zeros(batch, self.config.num_heads, width, width, device=device, dtype=dtype)
        return TimeMixState(kv, torch.zeros(batch, 1, 1, self.dim, device=device, dtype=dtype))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return (self.config.num_heads * self.head_dim**2 + self.dim) * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: TimeMixState) -> tuple[Tensor, TimeMixState]:
        x, reset = select_valid(chunk.x, chunk.valid).unsqueeze(1), real_resets(chunk)
        weight = torch.stack([1 - self.shift, self.shift])
        shifted, recent = self.convolved(partial(convolve, weight), x, state.recent, chunk, reset)
        xr, xw, xk, xv, xa, xg = shifted.unbind(1)
        rate = torch.sigmoid(self.rate_up(self.rate_down(xa)) + self.rate_bias)
        k, decay_logits = self.k(xk), self.decay_up(torch.tanh(self.decay_down(xw))) + self.decay_bias
        heads = [self._heads(part) for part in (self.r(xr), k * self.erased, self.v(xv), rate, decay_logits)]
        r, erased, v, rate_by_head, decay_logits = heads
        v = v if self.first_values is None else self.first_values(v, xv, chunk.values)
        key = self._heads(k * (1 + (rate - 1) * self.replaced))
        # In float32 at least, where a small decay and its inverse are exact.
        log_decay = _RATE * torch.sigmoid(decay_logits.to(state_dtype(decay_logits.dtype)))
        if chunk.valid is not None:
            log_decay = torch.where(chunk.valid[:, None, :, None], log_decay, log_decay.new_zeros(()))
        r, key, v = in_range(r), in_range(key), in_range(v)
        erasing = unit_vectors(in_range(erased)), in_range(rate_by_head)
        values = probe("values", v, implied=KERNEL)
        y, kv = self._update((r, key, values), erasing, state.kv, log_decay, chunk.valid, reset)
        gate = self.gate_up(torch.sigmoid(self.gate_down(xg)))
        bonus = (r * key * self._heads(self.bonus)).sum(-1, keepdim=True) * v
        return self._output(probe("outputs", y), bonus, gate, chunk.valid), TimeMixState(kv, recent)

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, time, width] as [batch, heads, time, head_dim], [width] as [heads, 1, head_dim]."""
        x = x.unflatten(-1, (self.config.num_heads, self.head_dim))
        return x.unsqueeze(1) if x.dim() == 2 else x.transpose(1, 2)

    def _update(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        erasing: tuple[Tensor, Tensor],
        kv: Tensor,
        log_decay: Tensor,
        valid: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return S_t^T r [batch, heads, time, head_dim] and the last S; ``erasing``: kappa and a."""
        (r, key, v), (kappa, rate) = tokens, erasing
        # kappa reads S before it decays: as the kernel reads it after, divided by w >= exp(-exp(-1/2)) = 0.545.
        read = kappa * (-log_decay).exp().to(kappa.dtype)
        keys, values = torch.stack([kappa * rate, key], 3), torch.stack([torch.zeros_like(v), v], 3)
        strength = torch.ones_like(keys[..., 0])
        if valid is not None:
            strength = strength * valid[:, None, :, None]
        erase = torch.stack([read, torch.zeros_like(read)], 3)
        two_steps = DeltaTokens(r, keys, values, strength, erase, log_decay, reset)
        return delta_across(two_steps, kv, self.config.impl, self.crossing)

    def _output(self, y: Tensor, bonus: Tensor, gate: Tensor, valid: Tensor | None) -> Tensor:
        normed = merge_heads(functional.layer_norm(y, (self.head_dim,), eps=1e-5 * self.head_dim))
        normed = torch.addcmul(self.norm_bias.to(y.dtype), normed, self.norm_weight.to(y.dtype))
        return select_valid(self.out(((normed + merge_heads(bonus)) * gate).to(gate.dtype)), valid)


def _low_rank(dim: int, rank: int, width: int) -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(dim, rank, bias=False), nn.Linear(rank, width, bias=False)


PARTS = {
    "BidirectionalLSTM": BidirectionalLSTM.Config,
    "RWKV7TimeMix": RWKV7.Config,
    "LSTM": LSTM.Config,
    "OuterProduct": OuterProduct.Config,
}
