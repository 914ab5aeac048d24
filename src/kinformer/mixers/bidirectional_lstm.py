"""Long short-term memory over a full sequence, in both directions (Graves and Schmidhuber 2005).

    y_t = [h_t ; h'_t],   (h_t, c_t) = LSTM(x_t, h_(t-1), c_(t-1)),   (h'_t, c'_t) = LSTM'(x_t, h'_(t+1), c'_(t+1))

The second begins at a sequence's last token, not at the end of its padding. Each direction is half as wide as the
stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinformer.core.contract import select_valid, state_dtype
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, refuse_global
from kinformer.kernels.impls import LstmImpl
from kinformer.kernels.lstm import IMPLS, Weights, lstm
from kinformer.runtime.autocast import no_autocast
from kinformer.runtime.errors import KinformerError, choose


class BidirectionalLSTM(EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim], computed in float32 at least; ``dim`` is even."""

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "lstm"
        impl: LstmImpl = "auto"

        def __post_init__(self) -> None:
            choose(self.impl, IMPLS, "impl of lstm")

        def build(self, dim: int) -> BidirectionalLSTM:
            return BidirectionalLSTM(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        if dim % 2:
            raise KinformerError(f"dim = {dim} is odd, but the mixer lstm has two directions of dim / 2; make it even.")
        self.impl = config.impl
        self.rnn = nn.LSTM(dim, dim // 2, bidirectional=True)

    def check(self, global_tokens: bool, global_input: bool) -> None:
        refuse_global("the mixer lstm has no global tokens, as it reads tokens in order", global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.global_positions is not None, text.num_global > 0)
        x, valid = select_valid(x, text.valid), text.valid
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
