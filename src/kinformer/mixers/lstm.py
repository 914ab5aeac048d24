"""Long short-term memory as a mixer (Hochreiter and Schmidhuber 1997): a recurrence, as wide as the stream.

    y_t = h_t,    (h_t, c_t) = LSTM(x_t, h_(t-1), c_(t-1))

Its state, ``h`` and ``c``, is constant in size. Torch's own implementation runs a chunk in one call, whatever its rows'
lengths and resets; ``torch.compile`` leaves it as it is, outside of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, real_resets, select_valid, state_dtype
from kinformer.kernels.impls import LstmImpl
from kinformer.kernels.lstm import IMPLS, Weights, lstm
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.errors import choose


class LSTMState(NamedTuple):
    """The state: ``h`` and ``c`` [batch, dim], float32 at least."""

    h: Tensor
    c: Tensor


class LSTM(CausalMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], the hidden states; computed in float32 at least."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MixerConfig):
        kind = "lstm"
        indivisible = "every unit reads all units of the token before"
        impl: LstmImpl = "auto"

        def __post_init__(self) -> None:
            choose(self.impl, IMPLS, "impl of lstm")

        def build(self, dim: int) -> LSTM:
            return LSTM(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.impl, self.dim = config.impl, dim
        self.rnn = nn.LSTM(dim, dim)

    def initial_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> LSTMState:
        like: Tensor = self.rnn.weight_hh_l0  # type: ignore[assignment]
        device, dtype = device or like.device, state_dtype(dtype or like.dtype)
        return LSTMState(*(torch.zeros(batch, self.dim, device=device, dtype=dtype) for _ in range(2)))

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return 2 * self.dim * state_dtype(dtype).itemsize

    def forward(self, chunk: Chunk, state: LSTMState) -> tuple[Tensor, LSTMState]:
        rnn, accumulator = self.rnn, state_dtype(chunk.x.dtype)
        parts = (rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0)
        # In float32: errors of a recurrence in half precision add up over the tokens.
        with no_autocast(chunk.x.device):
            weights = Weights(*(part.to(accumulator) for part in parts))  # type: ignore[arg-type]
            x, h, c = (item.to(accumulator) for item in (select_valid(chunk.x, chunk.valid), *state))
            y, *after = lstm(x, h, c, weights, valid=chunk.valid, reset=real_resets(chunk), impl=self.impl)
        return y.to(chunk.x.dtype), LSTMState(*(new.to(old.dtype) for new, old in zip(after, state, strict=True)))
