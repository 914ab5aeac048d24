"""Kernel attention: forward and backward at 1 x 8 heads x 4096 x 64 in float32, and a million tokens through one state.

    python benchmarks/kernel_attention.py            # about five minutes on two cores

The first part times, in rounds, causal attention by the members' rules with 64 features a head, feature maps included;
beside them PyTorch's causal softmax attention and, where they are installed, performer-pytorch's FAVOR+ and the gated
delta rule of transformers' Qwen3-Next in PyTorch. Every kernel must first give the values and gradients of its
recurrence, for a shorter text; transformers' must give those of ours.
The second part absorbs a million tokens in chunks with the mixers of the tiny recipes in float32 and float64, and
compares the outputs of the last 4096.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common import Contestant, arguments, gate_equal, interleave, peer, prepare, save, show
from kinformer.core.contract import Chunk
from kinformer.family.build import configure
from kinformer.kernels.delta import delta_rule
from kinformer.kernels.linear import LinearState, linear_attention, running_maximum
from kinformer.parts.feature_maps import Elu, Favor, RandomFourier, Unit

Attention = Callable[..., Tensor]
SHAPE, SHORT, TOLERANCE, ERROR = (1, 8, 4096, 64), 300, 1e-3, 1e-3
MEMBERS = ("linear-transformer", "performer", "retnet", "gated-deltanet", "gla", "rfa")
CHUNK, LAST = 16384, 4096


def sums(
    q: Tensor, k: Tensor, v: Tensor, impl: str, log_decay: Tensor | None = None, eps: float | None = None
) -> Tensor:
    empty = LinearState(q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), q.new_zeros(*q.shape[:2], q.shape[3]))
    return linear_attention(q, k, v, empty, log_decay=log_decay, eps=eps, impl=impl)[0]


def linear(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, impl: str) -> Tensor:
    phi = Elu.Config().build(q.shape[3])
    return sums(phi(q), phi(k), v, impl, eps=1e-6)


def performer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, impl: str, phi: Favor) -> Tensor:
    features, lacking = phi.keys(k)
    assert lacking is not None
    before = torch.zeros(k.shape[:2], dtype=torch.int64)
    running = running_maximum(lacking, before, before[:, 0] > 0, None, None)
    k = features * running.factor.unsqueeze(-1)
    return sums(phi.queries(q), k, v, impl, log_decay=running.log_decay, eps=1e-30)


def retnet(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, impl: str) -> Tensor:
    decay = torch.log1p(-torch.exp2(-5.0 - torch.arange(q.shape[1])))[None, :, None].expand(q.shape[:3])
    return sums(q, k, v, impl, log_decay=decay)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, impl: str) -> Tensor:
    return sums(q, k, v, impl, log_decay=functional.logsigmoid(a) / 16)


def rfa(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, impl: str, phi: RandomFourier) -> Tensor:
    decay = functional.logsigmoid(g)
    return sums(phi(q), phi(k) * -torch.expm1(decay).unsqueeze(-1), v, impl, log_decay=decay, eps=1.0)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, impl: str) -> Tensor:
    phi, empty = Unit.Config().build(q.shape[3]), q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    return delta_rule(phi(q), phi(k), v, g.sigmoid(), empty, log_decay=functional.logsigmoid(g), impl=impl)[0]


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, impl: str) -> Tensor:
    phi, empty = Unit.Config().build(q.shape[3]), q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    return delta_rule(phi(q), phi(k), v, g.sigmoid(), empty, impl=impl)[0]


def softmax(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def peer_performer(head_dim: int) -> Attention | None:
    """performer-pytorch's causal attention with as many features, or None where it is not installed."""
    if peer("performer_pytorch") is None:
        return None
    from performer_pytorch import FastAttention

    attention = FastAttention(dim_heads=head_dim, nb_features=head_dim, causal=True)
    return lambda q, k, v, *_: attention(q, k, v)


def peer_gated_delta(short: tuple[Tensor, ...]) -> Attention | None:
    """The chunked gated delta rule of transformers, or None where it is not installed; held to ours on ``short``."""
    if peer("transformers") is None:
        return None
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor) -> Tensor:
        q, k, v, beta, decay = (x.transpose(1, 2) for x in (q, k, v, g.sigmoid(), functional.logsigmoid(g)))
        y = torch_chunk_gated_delta_rule(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True)[0]
        return y.transpose(1, 2) * q.shape[-1] ** 0.5  # queries are scaled there

    pair = gradients(partial(gated_delta, impl="reference"), short), gradients(attend, short)
    for values in zip(*pair, strict=True):
        gate_equal("transformers, gated delta", *values, TOLERANCE)
    return attend


def gradients(attend: Attention, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    y = attend(*inputs)
    y.backward(torch.ones_like(y))
    return y.detach(), *(x.grad for x in inputs[:3] if x.grad is not None)


def race(shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Medians of all contestants in milliseconds, after each kernel was held to its recurrence on a shorter text."""
    width = shape[3]
    ours: dict[str, Attention] = {
        "linear-transformer": linear,
        "performer": partial(performer, phi=Favor.Config(features=width).build(width)),
        "retnet": retnet,
        "rfa": partial(rfa, phi=RandomFourier.Config(features=width // 2).build_heads(shape[1], width)),
        "gla": gla,
        "gated-deltanet": gated_delta,
        "delta rule, no decay": delta,
    }
    inputs = tuple(torch.randn(size) for size in (shape, shape, shape, shape[:3], shape))
    short = tuple(x[:, :, :SHORT] for x in inputs)
    gaps = {}
    for name, attend in ours.items():
        pair = (gradients(partial(attend, impl=impl), short) for impl in ("chunked", "reference"))
        gaps[name] = max(gate_equal(name, *values, TOLERANCE) for values in zip(*pair, strict=True))
    others = {
        "SDPA causal": softmax,
        "performer-pytorch": peer_performer(width),
        "transformers, gated delta": peer_gated_delta(short),
    }
    everyone = {name: partial(attend, impl="auto") for name, attend in ours.items()} | {
        name: attend for name, attend in others.items() if attend
    }
    contestants = [Contestant(name, partial(gradients, attend, inputs)) for name, attend in everyone.items()]
    interleave(contestants, rounds)
    sdpa = next(each.median for each in contestants if each.name == "SDPA causal")
    return {
        each.name: {"milliseconds": each.median * 1000, "times_sdpa": each.median / sdpa, "gap": gaps.get(each.name)}
        for each in contestants
    }


def stream(member: str, tokens: int) -> dict[str, Any]:
    """Absorb ``tokens`` random tokens in chunks, in both dtypes side by side."""
    config = configure(member, "tiny")
    torch.manual_seed(0)
    mixer = config.layers[0].mixer.build(config.dim).eval()  # type: ignore[attr-defined]
    torch.manual_seed(0)
    exact = config.layers[0].mixer.build(config.dim).eval()  # type: ignore[attr-defined]
    exact.load_state_dict(mixer.state_dict())
    exact.double()
    state, truth = mixer.initial_state(1), exact.initial_state(1)
    generator, finite, left = torch.Generator().manual_seed(1), True, tokens
    with torch.inference_mode():
        while left:
            x = torch.randn(1, min(CHUNK, left), config.dim, generator=generator)
            y, state = mixer(Chunk(x), state)
            want, truth = exact(Chunk(x.double()), truth)
            finite, left = finite and bool(y.isfinite().all()), left - x.shape[1]
    y, want = y[:, -LAST:], want[:, -LAST:]
    error = float((y - want).norm() / want.norm())
    return {"member": member, "finite": finite, "relative_error": error, "right": finite and error < ERROR}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the second part; 0 leaves it out")
    options = prepare(parser)
    shape = (1, 2, 512, 64) if options.quick else SHAPE
    rounds, tokens = options.rounds or (2 if options.quick else 7), 20_000 if options.quick else options.tokens
    times = race(shape, rounds)
    rows = [[name, row["milliseconds"], row["times_sdpa"], row["gap"]] for name, row in times.items()]
    show(f"forward and backward at {' x '.join(map(str, shape))}", ("contestant", "ms", "x SDPA", "gap"), rows)
    streamed = [stream(member, tokens) for member in MEMBERS] if tokens else []
    rows = [[each["member"], each["relative_error"], each["right"]] for each in streamed]
    show(f"{tokens:,} tokens, float32 against float64", ("member", "error", "right"), rows)
    result = {"shape": shape, "features": shape[3], "dtype": "float32", "rounds": rounds, "times": times}
    save(options, "kernel_attention", result | {"tokens": tokens, "chunk": CHUNK, "stream": streamed})


if __name__ == "__main__":
    main()
