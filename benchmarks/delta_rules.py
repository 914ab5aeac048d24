"""What do decays by channel, erased keys and several steps cost the delta rule, beside what they compute?

    python benchmarks/delta_rules.py            # about two minutes on two cores

Forward and backward of the chunked kernels at 1 x 8 heads x 4,096 x 64 in float32, in rounds: the delta rule with a
decay by head (Gated DeltaNet) and by channel (KDA), with keys to erase under of their own (Gated DeltaNet-2), with two
steps a token (DeltaProduct; RWKV-7's update, an erasing and a writing one), and the linear rule with either decay
(Mamba-2, GLA); beside them the chunked forms of transformers in PyTorch. Every kernel must first give the values and
gradients of its recurrence, for a shorter text; transformers' must give those of ours. Operations are counted, those of
matrix products alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from common import Contestant, arguments, gate_equal, interleave, peer, prepare, save, show
from kinformer.kernels.delta import DeltaTokens, delta_rule, delta_steps
from kinformer.kernels.linear import LinearState, linear_attention

Attention = Callable[..., Tensor]
SHAPE, SHORT, TOLERANCE = (1, 8, 4096, 64), 300, 1e-3


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def empty(q: Tensor) -> Tensor:
    return q.new_zeros(*q.shape[:2], q.shape[3], q.shape[3])


def by_head(a: Tensor) -> Tensor:
    return functional.logsigmoid(a[..., 0]) / 16


def by_channel(a: Tensor) -> Tensor:
    return functional.logsigmoid(a) / 16


def delta(q: Tensor, k: Tensor, v: Tensor, a: Tensor, impl: str, decay: Callable[[Tensor], Tensor]) -> Tensor:
    return delta_rule(unit(q), unit(k), v, a[..., 1].sigmoid(), empty(q), log_decay=decay(a), impl=impl)[0]


def erasing(q: Tensor, k: Tensor, v: Tensor, a: Tensor, impl: str) -> Tensor:
    """Gated DeltaNet-2: a gate for every channel of what is erased."""
    key = unit(k).unsqueeze(3)
    tokens = DeltaTokens(unit(q), key, v.unsqueeze(3), torch.ones_like(key[..., 0]), key * a.sigmoid().unsqueeze(3))
    return delta_steps(tokens._replace(log_decay=by_channel(a)), empty(q), impl=impl)[0]


def two_steps(q: Tensor, k: Tensor, v: Tensor, a: Tensor, impl: str) -> Tensor:
    """DeltaProduct: two keys, values and betas a token."""
    keys, values = torch.stack([unit(k), unit(k.flip(-1))], 3), torch.stack([v, v.flip(-1)], 3)
    tokens = DeltaTokens(unit(q), keys, values, 2 * a[..., :2].sigmoid(), None, by_head(a))
    return delta_steps(tokens, empty(q), impl=impl)[0]


def rwkv7(q: Tensor, k: Tensor, v: Tensor, a: Tensor, impl: str) -> Tensor:
    """S <- diag(w) S - (a * kk) (kk^T S) + k v^T, kk reading the state before it decays."""
    kk, gate, decay = unit(k), a.sigmoid(), by_channel(a)
    keys, values = torch.stack([kk * gate, k / 8], 3), torch.stack([torch.zeros_like(v), v], 3)
    erase = torch.stack([kk * (-decay).exp(), torch.zeros_like(k)], 3)
    tokens = DeltaTokens(unit(q), keys, values, torch.ones_like(keys[..., 0]), erase, decay)
    return delta_steps(tokens, empty(q), impl=impl)[0]


def sums(q: Tensor, k: Tensor, v: Tensor, a: Tensor, impl: str, decay: Callable[[Tensor], Tensor]) -> Tensor:
    state = LinearState(empty(q), q.new_zeros(*q.shape[:2], q.shape[3]))
    return linear_attention(q, k / 8, v, state, log_decay=decay(a), eps=None, impl=impl)[0]


OURS: dict[str, Attention] = {
    "gated-deltanet": partial(delta, decay=by_head),
    "kda": partial(delta, decay=by_channel),
    "gated deltanet-2": erasing,
    "deltaproduct, 2 steps": two_steps,
    "rwkv-7": rwkv7,
    "mamba2": partial(sums, decay=by_head),
    "gla": partial(sums, decay=by_channel),
}


def peers(short: tuple[Tensor, ...]) -> dict[str, Attention]:
    """The chunked rules of transformers, where it is installed, held to ours on ``short``."""
    if peer("transformers") is None:
        return {}
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def attend(q: Tensor, k: Tensor, v: Tensor, a: Tensor, rule: Any, decay: Callable[[Tensor], Tensor]) -> Tensor:
        tokens = [x.transpose(1, 2) for x in (q, k, v, decay(a), a[..., 1].sigmoid())]
        y = rule(*tokens, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)[0]
        return y.transpose(1, 2) * q.shape[-1] ** 0.5  # queries are scaled there

    known = {
        "gated-deltanet": partial(attend, rule=torch_chunk_gated_delta_rule, decay=by_head),
        "kda": partial(attend, rule=chunk_kimi_delta_attention, decay=by_channel),
    }
    for name, theirs in known.items():
        pair = gradients(partial(OURS[name], impl="reference"), short), gradients(theirs, short)
        for values in zip(*pair, strict=True):
            gate_equal(f"transformers, {name}", *values, TOLERANCE)
    return {f"transformers, {name}": theirs for name, theirs in known.items()}


def gradients(attend: Attention, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output, and the gradients of all inputs."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    y = attend(*inputs)
    return y.detach(), *torch.autograd.grad(y.sum(), inputs)


def operations(attend: Attention, inputs: tuple[Tensor, ...]) -> int:
    with FlopCounterMode(display=False) as counter:
        gradients(attend, inputs)
    return int(counter.get_total_flops())


def main() -> None:
    options = prepare(arguments(__doc__))
    shape = (1, 2, 512, 64) if options.quick else SHAPE
    rounds = options.rounds or (2 if options.quick else 7)
    inputs = tuple(torch.randn(shape) for _ in range(4))
    short, gaps = tuple(x[:, :, :SHORT] for x in inputs), {}
    for name, attend in OURS.items():
        pair = (gradients(partial(attend, impl=impl), short) for impl in ("chunked", "reference"))
        gaps[name] = max(gate_equal(name, *values, TOLERANCE) for values in zip(*pair, strict=True))
    everyone = {name: partial(attend, impl="chunked") for name, attend in OURS.items()} | peers(short)
    contestants = [Contestant(name, partial(gradients, attend, inputs)) for name, attend in everyone.items()]
    interleave(contestants, rounds)
    base, times = next(each.median for each in contestants if each.name == "gated-deltanet"), {}
    for each in contestants:
        count = operations(everyone[each.name], inputs) if each.name in OURS else None
        times[each.name] = {
            "milliseconds": each.median * 1000,
            "times_gated_deltanet": each.median / base,
            "gflop": None if count is None else count / 1e9,
            "gflop_per_second": None if count is None else count / 1e9 / each.median,
            "gap": gaps.get(each.name),
        }
    header = ("contestant", "ms", "x gated-deltanet", "GFLOP", "GFLOP/s", "gap")
    show(f"forward and backward at {' x '.join(map(str, shape))}", header, [[n, *r.values()] for n, r in times.items()])
    save(options, "delta_rules", {"shape": shape, "dtype": "float32", "rounds": rounds, "times": times})


if __name__ == "__main__":
    main()
