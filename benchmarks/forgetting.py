"""What does a forget gate cost softmax attention, and which way to it is the fastest?

    python benchmarks/forgetting.py --threads 1        # some three minutes

4 heads of 64 in float32, gates with a half-life of some 5 and of some 350 tokens: milliseconds of processor time of the
forward and backward of a text, and of a token after it, in turns: without a decay, by two more features of queries and
keys (what ``impl="auto"`` does), and by a bias of all pairs. Numbers below 2^-126 are flushed to 0, as in all commands,
but for the row that says so. All must give the reference's outputs in float64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from common import arguments, gate_equal, prepare, save, show
from kinformer.core.pattern import Band
from kinformer.kernels.attention import Scoring, Visibility, attention

HEADS, WIDTH, TOLERANCE = 4, 64, 1e-4
SCALE, CAUSAL = WIDTH**-0.5, Visibility(Band(), None, True)
GATES = {"fast": 2.0, "slow": 6.0}
DENSE = 2048
"""Tokens up to which a bias of all pairs is tried."""


def operands(length: int, bias: float) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v, and the sums of the gates' logarithms."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
    return qkv, logsigmoid(torch.randn(1, HEADS, length) + bias).double().cumsum(-1)


def plain(qkv: list[Tensor], _: Tensor) -> Tensor:
    return attention(*qkv, CAUSAL, Scoring(SCALE)).out


def decayed(qkv: list[Tensor], c: Tensor) -> Tensor:
    return attention(*qkv, CAUSAL, Scoring(SCALE, decay=c)).out


def dense(qkv: list[Tensor], c: Tensor) -> Tensor:
    length = c.shape[-1]
    seen = Visibility(attn_mask=torch.ones(length, length, dtype=torch.bool).tril()[None, None])
    return attention(*qkv, seen, Scoring(SCALE, bias=(c[..., :, None] - c[..., None, :]).float())).out


def learned(way: Callable[..., Tensor], qkv: list[Tensor], c: Tensor) -> None:
    torch.autograd.grad(way(qkv, c).square().sum(), qkv)


def stepped(way: Callable[..., Tensor], qkv: list[Tensor], c: Tensor) -> None:
    with torch.no_grad():
        way([qkv[0][:, :, -1:], *qkv[1:]], c)


def medians(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of processor time of each step, the median of ``rounds`` in turns, after one that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name, step in steps.items():
            begun = time.process_time()
            step()
            if index:
                taken[name].append((time.process_time() - begun) * 1000)
    return {name: statistics.median(values) for name, values in taken.items()}


def times(length: int, rounds: int) -> dict[str, dict[str, float]]:
    training: dict[str, float] = {}
    token: dict[str, float] = {}
    for name, bias in GATES.items():
        call = operands(length, bias)
        ways: dict[str, Any] = {"plain": plain} if not training else {}
        ways |= {f"two features, {name}": decayed}
        ways |= {f"bias of all pairs, {name}": dense} if length <= DENSE else {}
        training |= medians({way: partial(learned, of, *call) for way, of in ways.items()}, rounds)
        if name == "fast":
            some = {"plain": plain, "decay": decayed}
            token = medians({way: partial(stepped, of, *call) for way, of in some.items()}, 8 * rounds)
            torch.set_flush_denormal(False)
            training |= medians({"two features, fast, not flushed": partial(learned, decayed, *call)}, 1)
            torch.set_flush_denormal(True)
    return {"training": training, "token": token}


def gate(length: int) -> float:
    """Hold all ways to the reference in float64; return the largest gap."""
    gaps = []
    for bias in GATES.values():
        qkv, c = operands(length, bias)
        exact = [x.double() for x in qkv]
        want = attention(*exact, CAUSAL, Scoring(SCALE, decay=c), impl="reference").out.float()
        gaps += [gate_equal(way.__name__, way(qkv, c).detach(), want.detach(), TOLERANCE) for way in (decayed, dense)]
    return max(gaps)


def main() -> None:
    options = prepare(arguments(__doc__))
    lengths, rounds = ((256,), 1) if options.quick else ((1024, 2048, 4096), options.rounds or 3)
    torch.set_flush_denormal(True)
    gap = gate(300 if options.quick else 2500)
    found = {str(length): times(length, rounds) for length in lengths}
    for kind in ("training", "token"):
        names = list(dict.fromkeys(name for at in found.values() for name in at[kind]))
        rows = [[name, *(f"{at[kind].get(name, float('nan')):.2f}" for at in found.values())] for name in names]
        show(f"{kind}, ms", ["way", *found], rows)
    save(options, "forgetting", {"gap": gap, "milliseconds": found})


if __name__ == "__main__":
    main()
