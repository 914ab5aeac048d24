"""Star-Transformer: a ring of tokens and a relay that sees them all, updated in turns (Guo et al. 2019, algorithm 1).

    Z = norm(H)
    h_i <- leaky_relu(attention of z_i over [z_(i-1), z_i, z_(i+1), e_i, s])        every token
    s   <- leaky_relu(attention of s over [s, h_1, ..., h_n])                       the relay

``iterations`` times, from H = E, the inputs, and s = their mean. A token sees five vectors and the relay all, so that
the cost is linear in the length, and any two tokens are two steps apart. Relay and inputs are needed by every update
and by nothing else, so all updates are one mixer. There is no residual: the published model is one layer, ``bare``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, pad

from kinformer.core.config import check_unused
from kinformer.core.contract import select_valid, state_dtype
from kinformer.core.encoder import EncoderMixer, EncoderMixerConfig, SequenceContext, refuse_global
from kinformer.core.parts import head_width, merge_heads
from kinformer.kernels.attention import Needs, Scoring, Visibility, attention, check_impl
from kinformer.kernels.impls import AttentionImpl
from kinformer.runtime.errors import KinformerError

Shift = Callable[[Tensor], Tensor]
"""[batch, time, ...] -> what stands beside every token, of the same shape."""


class StarAttention(EncoderMixer):
    """The mixer x [batch, time, dim] -> y [batch, time, dim]. ``head_dim`` defaults to dim / num_heads.

    ``ends``: the first and the last token are neighbours (``ring``), or, as in the authors' code, have a key and a
    value of zeros beyond them. ``tied``: one set of weights for all updates. ``add_relay``: y is (h_i + s) / 2, whose
    maximum over tokens is the input of the authors' classifier; else y is h_i, and the last relay is not made.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(EncoderMixerConfig):
        kind = "star"
        num_heads: int = 4
        head_dim: int | None = None
        iterations: int = 2
        tied: bool = False
        ends: Literal["ring", "zeros"] = "ring"
        add_relay: bool = True
        bias: bool = True
        impl: AttentionImpl = "auto"  # of the relay's attention

        def __post_init__(self) -> None:
            if self.iterations < 1:
                raise KinformerError(f"iterations must be 1 or more, but is {self.iterations}.")
            if self.iterations == 1:
                check_unused(self, "with iterations = 1", "tied")

        def build(self, dim: int) -> StarAttention:
            return StarAttention(self, dim)

    def __init__(self, config: Config, dim: int) -> None:
        super().__init__()
        self.dim = dim
        check_impl(config.impl, Needs(sets=True), "star")
        self.config = config
        last = config.iterations - 1
        self.updates = nn.ModuleList(
            Update(config, dim, relay=config.add_relay or number < last)
            for number in range(1 if config.tied else config.iterations)
        )

    def check(self, global_tokens: bool, global_input: bool) -> None:
        why = "this mixer (star) has a relay that sees all and is seen by all, and knows no other global tokens"
        refuse_global(why, global_tokens, global_input)

    def forward(self, x: Tensor, text: SequenceContext = SequenceContext()) -> Tensor:  # noqa: B008 (an immutable value)
        self.check(text.global_positions is not None, text.num_global > 0)
        nodes, relay = self.star(x, text.valid)
        return select_valid((nodes + relay) / 2, text.valid) if self.config.add_relay else nodes

    def star(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return tokens [batch, time, dim], zero where not ``valid``, and the
        relay [batch, 1, dim], after all updates."""
        e = h = select_valid(x, valid)
        count: int | Tensor = x.shape[1]
        if valid is not None:
            count = valid.sum(1).clamp_min(1)[:, None, None].to(x.dtype)
        s = e.sum(1, keepdim=True) / count
        shifts = _beside(self.config.ends, valid)
        for number in range(self.config.iterations):
            update = self.updates[0 if self.config.tied else number]
            assert isinstance(update, Update)
            h = select_valid(update.nodes(h, e, s, shifts), valid)
            if self.config.add_relay or number < self.config.iterations - 1:
                s = update.moved(s, h, valid)
        return h, s


class Update(nn.Module):
    """One update of all tokens and, where ``relay``, of the relay."""

    def __init__(self, config: StarAttention.Config, dim: int, relay: bool) -> None:
        super().__init__()
        head_dim = config.head_dim or head_width(dim, config.num_heads)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.ring = Products(dim, config.num_heads, head_dim, config.bias)
        self.relay = Products(dim, config.num_heads, head_dim, config.bias) if relay else None
        self.ends, self.impl, self.scale = config.ends, config.impl, head_dim**-0.5

    def nodes(self, h: Tensor, e: Tensor, s: Tensor, shifts: tuple[Shift, Shift, Shift]) -> Tensor:
        """Return h [batch, time, dim] after the tokens attended to their neighbours, their inputs and the relay.

        With five keys a query, products one by one are faster than tiles, of which a twentieth would be used.
        """
        shift, before, after = shifts
        z = self.norm(h)
        (k, v), (k_e, v_e), (k_s, v_s) = (self.ring.keys_values(tensor) for tensor in (z, e, s))
        k, v, q = shift(k), shift(v), self.ring.heads(self.ring.query(z)) * self.scale
        scores = torch.stack([(q * item).sum(-1) for item in (before(k), k, after(k), k_e, k_s)], -1)
        weights = scores.softmax(-1, dtype=state_dtype(scores.dtype)).to(v.dtype).unsqueeze(-1).unbind(-2)
        seen = (before(v), v, after(v), v_e, v_s)
        y = sum(weight * item for weight, item in zip(weights[1:], seen[1:], strict=True)) + weights[0] * seen[0]
        return leaky_relu(self.ring.out(y.flatten(2)))

    def moved(self, s: Tensor, h: Tensor, valid: Tensor | None) -> Tensor:
        """Return the relay s [batch, 1, dim] after it attended to itself and to all tokens."""
        assert self.relay is not None
        k, v = (keys_value.transpose(1, 2) for keys_value in self.relay.keys_values(torch.cat([s, h], 1)))
        hidden = None if valid is None else pad(~valid, (1, 0), value=False)
        q = self.relay.heads(self.relay.query(s)).transpose(1, 2)
        y = attention(q, k, v, Visibility(key_padding_mask=hidden), Scoring(self.scale), impl=self.impl).out
        return leaky_relu(self.relay.out(merge_heads(y)))


class Products(nn.Module):
    """The four products of multi-head attention; heads are [batch, time, heads, head_dim] here."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(dim, num_heads * head_dim, bias=bias) for _ in range(3))
        self.out = nn.Linear(num_heads * head_dim, dim, bias=bias)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.key(x)), self.heads(self.value(x))


def _beside(ends: str, valid: Tensor | None) -> tuple[Shift, Shift, Shift]:
    """Return three functions of projected tokens [batch, time, heads, head_dim]: the tokens as they are seen, their
    left and their right neighbours.

    Where ``ends`` are zeros, so is padding, which stands after the last token.
    """
    if ends == "zeros":
        return (
            lambda x: x if valid is None else select_valid(x.flatten(2), valid).view(x.shape),
            lambda x: pad(x[:, :-1], (0, 0, 0, 0, 1, 0)),
            lambda x: pad(x[:, 1:], (0, 0, 0, 0, 0, 1)),
        )
    if valid is None:
        return lambda x: x, lambda x: x.roll(1, 1), lambda x: x.roll(-1, 1)
    count = valid.sum(1, keepdim=True).clamp_min(1)
    index = torch.arange(valid.shape[1], device=valid.device)

    def at(places: Tensor) -> Shift:
        return lambda x: x.gather(1, places[:, :, None, None].expand_as(x))

    return lambda x: x, at((index - 1) % count), at((index + 1) % count)
