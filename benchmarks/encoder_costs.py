"""What do Star-Transformer, Sinkhorn and Tensorized attention save of what their papers say, at small size?

Star-Transformer (Guo et al. 2019): attention in linear time. Sinkhorn (Tay et al. 2020): each block sees itself and one
sorted to it, so that the time of attention is linear in the number of blocks but for their sorting. Tensorized (Ma et
al. 2019): fewer weights in attention. Times a training step (forward and backward) of one text by two layers of 256
numbers at several lengths, in turns, behind a check that outputs and gradients are finite, and counts the weights of
attention: tensorized beside multi-head attention of the same width.
"""

from __future__ import annotations

from functools import partial
from math import log
from typing import Any

import torch

import kinformer
from common import Contestant, arguments, interleave, prepare, save, show

MEMBERS = ("bert", "star", "sinkhorn")
LENGTHS = (512, 1024, 2048, 4096)
WIDTHS = (256, 512, 1024)
SIZES = {"32 tokens": "small", "128 tokens": "benchmark"}  # of the tensor, by recipe


def step(model: Any, tokens: torch.Tensor) -> None:
    model.zero_grad()
    model(tokens).square().mean().backward()


def weights_of_attention(member: str, recipe: str, dim: int) -> int:
    """Weights of the mixer of one layer."""
    model = kinformer.build(member, recipe=recipe, set={"layers": 1, "dim": dim})
    return sum(weight.numel() for weight in model.stack.layers[0].mixer.parameters())


def main() -> None:
    options = prepare(arguments(__doc__))
    lengths, rounds = (LENGTHS[:2], 1) if options.quick else (LENGTHS, options.rounds or 3)
    torch.manual_seed(0)
    models = {name: kinformer.build(name, recipe="benchmark", set={"layers": 2}) for name in MEMBERS}
    seconds: dict[str, dict[int, float]] = {name: {} for name in MEMBERS}
    for length in lengths:
        tokens = torch.randint(256, (1, length))
        for model in models.values():
            step(model, tokens)
            assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
        contestants = [Contestant(name, partial(step, model, tokens), fast=True) for name, model in models.items()]
        interleave(contestants, rounds)
        for each in contestants:
            seconds[each.name][length] = each.median
    growth = {name: log(t[lengths[-1]] / t[lengths[0]]) / log(lengths[-1] / lengths[0]) for name, t in seconds.items()}
    attention = {
        dim: {name: weights_of_attention("tensorized", recipe, dim) for name, recipe in SIZES.items()} for dim in WIDTHS
    }
    for dim, counts in attention.items():
        counts["multi-head"] = weights_of_attention("gpt", "benchmark", dim)
    columns = ("", *map(str, lengths), "exponent")
    show("seconds of a training step", columns, [[name, *t.values(), growth[name]] for name, t in seconds.items()])
    rows = [[dim, *counts.values(), counts["32 tokens"] / counts["multi-head"]] for dim, counts in attention.items()]
    show("weights of attention, a layer", ("width", *SIZES, "multi-head", "share of 32 tokens"), rows)
    save(options, "encoder_costs", {"lengths": lengths, "seconds": seconds, "exponents": growth, "weights": attention})


if __name__ == "__main__":
    main()
