"""The kernels alone, forward and backward at 1 x 8 heads x 4096 x 64 in float32, beside what one would use instead.

    linear     causal linear attention: ours without and with its feature map elu + 1, the C++ kernel of
               pytorch-fast-transformers (which includes that map), and PyTorch's causal softmax attention
    delta      the delta rule: ours, and the textbook's chunkwise form written in plain PyTorch below
    softmax    causal attention: ours and PyTorch's fused attention (SDPA)
    window     each token sees itself and 255 before: ours, SDPA with a mask, and SDPA over everything

"fast": fp32 products take oneDNN's path, as `kinformer train` has it; the others are PyTorch's default.
Every contestant must first give the values and gradients of the definition, or of the peer that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from common import Contestant, arguments, gate_equal, interleave, peer, prepare, save, show
from kinformer.core.pattern import Band
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.delta import delta_rule
from kinformer.kernels.linear import LinearState, linear_attention

Attention = Callable[..., Tensor]
Field = dict[str, tuple[Attention, str]]
WINDOW, TOLERANCE = 256, 1e-4
ELSEWHERE = {"linear": 35.0, "delta": 120.0}
"""Milliseconds to reach, from another machine of this kind; there the C++ kernel took 54 and SDPA 358."""


class Input(NamedTuple):
    """What an attention is computed on, and the function whose values and gradients are right."""

    tensors: tuple[Tensor, ...]
    truth: Attention


Inputs = dict[str, Input]


def linear_quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, with all pairs: what the linear contestants are held to."""
    scores = (q @ k.mT).tril()
    return scores @ v / (scores.sum(dim=-1, keepdim=True) + 1e-6)


def linear_quadratic_mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_quadratic(functional.elu(q) + 1, functional.elu(k) + 1, v)


def linear_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    empty = LinearState(q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), q.new_zeros(*q.shape[:2], q.shape[3]))
    return linear_attention(q, k, v, empty)[0]


def linear_mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_ours(functional.elu(q) + 1, functional.elu(k) + 1, v)


def linear_idiap() -> Attention | None:
    """The peer's attention layer, which takes [batch, time, heads, head_dim]; None where it is not installed."""
    if peer("fast_transformers") is None:
        return None
    from fast_transformers.attention import CausalLinearAttention
    from fast_transformers.masking import LengthMask, TriangularCausalMask

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        lengths = LengthMask(torch.full((q.shape[0],), q.shape[1]))
        return layer(q, k, v, mask, lengths, lengths).transpose(1, 2)

    layer, mask = CausalLinearAttention(64), TriangularCausalMask(1)
    return attend


def delta_ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return delta_rule(q, k, v, beta, q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]))[0]


def delta_textbook(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The chunkwise delta rule of Yang et al. 2024, section 3.2, line by line, differentiated by autograd.

    A stand-in for the reference code that ships with flash-linear-attention, whose layers need a GPU.
    """
    batch, heads, time, dim = q.shape
    q, k, v, beta = (x.reshape(batch, heads, time // chunk, chunk, -1) for x in (q, k, v, beta))
    written = -(beta * k @ k.mT).tril(-1)
    rows = [written[..., 0, :]]
    for i in range(1, chunk):
        before = torch.stack(rows, dim=-2)
        rows.append(written[..., i, :] + (written[..., i, :i, None] * before).sum(-2))
    inverse = torch.stack(rows, dim=-2) + torch.eye(chunk)
    w, u = inverse @ (beta * k), inverse @ (beta * v)
    state, outputs = q.new_zeros(batch, heads, dim, v.shape[-1]), []
    for n in range(time // chunk):
        new = u[:, :, n] - w[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + (q[:, :, n] @ k[:, :, n].mT).tril() @ new)
        state = state + k[:, :, n].mT @ new
    return torch.cat(outputs, dim=2)


def softmax_ours(q: Tensor, k: Tensor, v: Tensor, behind: int | None = None) -> Tensor:
    return attention(q, k, v, Visibility(Band(behind=behind)), Scoring(q.shape[3] ** -0.5)).out


def softmax_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def softmax_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def gradients(attend: Attention, inputs: Iterable[Tensor], weight: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of every input for the output's gradient ``weight``."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = attend(*inputs)
    y.backward(weight)
    return y.detach(), *(x.grad for x in inputs)


def race(task: str, field: Field, inputs: Inputs, rounds: int) -> dict[str, Any]:
    """Time every attention of ``field``: name -> (function, which of ``inputs``), after holding it to the truth.

    A name that ends in "(other)" computes something else and is only timed.
    """
    weight = torch.randn_like(next(iter(inputs.values())).tensors[0])
    truths = {kind: gradients(each.truth, each.tensors, weight) for kind, each in inputs.items()}
    contestants, gaps = [], {}
    for name, (attend, kind) in field.items():
        step = partial(gradients, attend, inputs[kind].tensors, weight)
        if not name.endswith("(other)"):
            pairs = zip(step(), truths[kind], strict=True)
            gaps[name] = max(gate_equal(f"{task}: {name}", value, truth, TOLERANCE) for value, truth in pairs)
        contestants += [Contestant(name, step), Contestant(f"{name} fast", step, fast=True)]
    del truths
    interleave(contestants, rounds)
    return {
        contestant.name: {
            "milliseconds": contestant.median * 1000,
            "fast_products": contestant.fast,
            "gap": gaps.get(contestant.name.removesuffix(" fast")),
        }
        for contestant in contestants
    }


def tasks(shape: tuple[int, ...]) -> dict[str, tuple[Field, Inputs]]:
    """Every comparison: its contestants and what they compute on."""
    q, k, v = (torch.randn(shape) for _ in range(3))
    raw, unit = (q, k, v), (q, functional.normalize(k, dim=-1), v, torch.rand(shape[:3]))
    mapped = (functional.elu(q) + 1, functional.elu(k) + 1, v)
    far = torch.arange(shape[2])[:, None] - torch.arange(shape[2])
    masked = partial(softmax_masked, mask=(far >= 0) & (far < WINDOW))
    idiap = linear_idiap()
    linear: Field = {
        "ours": (linear_ours, "mapped"),
        "ours with elu + 1": (linear_mapped, "raw"),
        **({"idiap C++ with elu + 1": (idiap, "raw")} if idiap else {}),
        "SDPA causal (other)": (softmax_sdpa, "raw"),
    }
    delta: Field = {"ours": (delta_ours, "unit"), "textbook chunkwise": (delta_textbook, "unit")}
    softmax: Field = {"ours": (softmax_ours, "raw"), "SDPA causal": (softmax_sdpa, "raw")}
    window: Field = {
        "ours": (partial(softmax_ours, behind=WINDOW - 1), "raw"),
        "SDPA with a mask": (masked, "raw"),
        "SDPA causal (other)": (softmax_sdpa, "raw"),
    }
    both = {"raw": Input(raw, linear_quadratic_mapped), "mapped": Input(mapped, linear_quadratic)}
    return {
        "linear": (linear, both),
        "delta": (delta, {"unit": Input(unit, delta_textbook)}),
        "softmax": (softmax, {"raw": Input(raw, softmax_sdpa)}),
        "window": (window, {"raw": Input(raw, masked)}),
    }


def main() -> None:
    options = prepare(arguments(__doc__))
    shape = (1, 2, 512, 64) if options.quick else (1, 8, 4096, 64)
    rounds = options.rounds or (2 if options.quick else 15)
    results: dict[str, Any] = {}
    for task, (field, inputs) in tasks(shape).items():
        results[task] = race(task, field, inputs, rounds)
        target = f", to reach {ELSEWHERE[task]:.0f} ms" if task in ELSEWHERE else ""
        rows = [[name, row["milliseconds"], row["gap"]] for name, row in results[task].items()]
        show(f"{task} at {' x '.join(map(str, shape))}{target}", ("contestant", "ms", "gap"), rows)
    result = {"shape": shape, "dtype": "float32", "rounds": rounds, "window": WINDOW, "results": results}
    save(options, "kernels", result)


if __name__ == "__main__":
    main()
