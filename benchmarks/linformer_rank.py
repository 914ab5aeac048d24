"""Linformer: how near to exact attention by rank, and how its time grows with the length.

    python benchmarks/linformer_rank.py            # about five minutes on two cores

The first part takes one layer of exact attention with random weights on embedded bytes of text, 256 tokens at a time,
and asks how far a layer with the same weights and ``rank`` summaries is from it, on text that was not fitted: the
relative error of its outputs. ``begin``: E and F as training begins with them; ``fitted``: from there, to the exact
outputs by Adam, all other weights as they are; ``mean``: means of neighbours; ``fitted means``: E and F fitted from
there; ``best``: each matrix of probabilities replaced by its largest singular values, as many as the rank. At rank =
length the means must be exact attention.

The second part takes the processor time of forward and backward of layers for growing lengths, rank 256, beside exact
attention, in rounds, and gives the slope of its logarithm against that of the length: 1 is linear, 2 quadratic.
Processor time, as that of one thread depends little on what else the machine does: give --threads 1.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common import arguments, gate_equal, prepare, products, save, show, slope, text_bytes
from kinformer.core.encoder import EncoderMixer
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.encoders import Linformer
from kinformer.parts.positions import Sinusoidal

LENGTH, DIM, HEADS, ROWS, HELD_OUT = 256, 64, 4, 8, 32
RATE = 2e-3
SHARPNESS = 3.0
"""How far scores are spread: queries and keys have this standard deviation."""
TIMED = {"dim": 256, "heads": 4, "rank": 256}


def texts(count: int, skip: int) -> Tensor:
    """Embedded bytes [count, LENGTH, DIM] with positions, from ``skip`` texts on."""
    tokens = text_bytes(None, (skip + count) * LENGTH)[skip * LENGTH :].view(count, LENGTH)
    table = torch.randn(256, DIM, generator=torch.Generator().manual_seed(0))
    return table[tokens] + Sinusoidal.Config().build(DIM).embed(torch.arange(LENGTH))


def exact_layer() -> BidirectionalAttention:
    """Random products, of which the output's is 1: queries and keys of standard deviation about SHARPNESS."""
    torch.manual_seed(0)
    layer = BidirectionalAttention.Config(num_heads=HEADS, bias=False).build(DIM)
    with torch.no_grad():
        weight = torch.randn(3 * DIM, DIM) / DIM**0.5
        weight[: 2 * DIM] *= (SHARPNESS / 1.5) ** 0.5
        layer.projection.qkv.weight.copy_(weight)  # type: ignore[union-attr,operator]
        layer.projection.qkv.bias.zero_()  # type: ignore[union-attr,operator]
        layer.out.weight.copy_(torch.eye(DIM))  # type: ignore[operator]
    return layer


def low_rank(exact: BidirectionalAttention, rank: int, method: Any) -> Linformer:
    """Linformer with the weights of ``exact``."""
    layer = Linformer.Config(num_heads=HEADS, rank=rank, max_length=LENGTH, method=method, bias=False).build(DIM)
    query, key, value = exact.projection.qkv.weight.chunk(3)  # type: ignore[union-attr,operator]
    with torch.no_grad():
        for product, weight in ((layer.query, query), (layer.key, key), (layer.value, value)):
            product.weight.copy_(weight)
        layer.out.weight.copy_(exact.out.weight)  # type: ignore[arg-type]
    return layer


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def best(exact: BidirectionalAttention, x: Tensor, rank: int) -> float:
    """The relative error of the best matrices of ``rank`` in place of the probabilities."""
    q, k, v = exact.projection(x)
    probabilities = (q @ k.mT * exact.score.scale).softmax(-1)
    u, s, vh = torch.linalg.svd(probabilities)
    return error((u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :] @ v, probabilities @ v)


def fitted(layer: Linformer, exact: BidirectionalAttention, steps: int) -> None:
    """E and F after ``steps`` of Adam on other texts, at a rate that falls to zero."""
    assert layer.length is not None
    adam = torch.optim.Adam([layer.length.weight], lr=RATE)
    for step in range(steps):
        x = texts(ROWS, HELD_OUT + step * ROWS)
        with torch.no_grad():
            want = exact(x)
        adam.param_groups[0]["lr"] = RATE * (1 - step / steps)
        adam.zero_grad()
        functional.mse_loss(layer(x), want).backward()
        adam.step()


@torch.no_grad()
def outputs(layer: EncoderMixer, x: Tensor) -> Tensor:
    return layer(x)


def by_rank(ranks: Sequence[int], steps: int) -> list[dict[str, float]]:
    exact, x = exact_layer(), texts(HELD_OUT, 0)
    want = outputs(exact, x)
    gate_equal("means of one token", outputs(low_rank(exact, LENGTH, "mean"), x), want, 1e-5)
    rows = []
    for rank in ranks:
        torch.manual_seed(1)
        layer, means = low_rank(exact, rank, "learned"), low_rank(exact, rank, "learned")
        with torch.no_grad():
            means.length.weight.copy_(torch.eye(rank).repeat_interleave(LENGTH // rank, 1) * rank / LENGTH)  # type: ignore[union-attr]
        gate_equal(f"means, rank {rank}", outputs(means, x), outputs(low_rank(exact, rank, "mean"), x), 1e-5)
        row = {"rank": rank, "begin": error(outputs(layer, x), want)}
        fitted(layer, exact, steps)
        row |= {"fitted": error(outputs(layer, x), want), "mean": error(outputs(means, x), want)}
        fitted(means, exact, steps)
        with torch.no_grad():
            rows.append(row | {"fitted means": error(outputs(means, x), want), "best": best(exact, x, rank)})
    return rows


def processor_seconds(layer: EncoderMixer, length: int, dim: int) -> float:
    x = torch.randn(1, length, dim)
    with products(True):
        begun = time.process_time()
        layer(x).sum().backward()
        return time.process_time() - begun


def growth(lengths: Sequence[int], longest_exact: int, rounds: int) -> dict[str, Any]:
    """Median processor seconds of every length, and their slopes."""
    dim, heads, rank = TIMED.values()
    torch.manual_seed(0)
    exact = BidirectionalAttention.Config(num_heads=heads).build(dim)
    layers: dict[tuple[str, int], EncoderMixer] = {
        ("linformer", length): Linformer.Config(num_heads=heads, rank=rank, max_length=length).build(dim)
        for length in lengths
    } | {("exact attention", length): exact for length in lengths if length <= longest_exact}
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name, _ in layers}
    cases = list(layers)
    for index in range(rounds + 1):  # the first warms up
        random.Random(index).shuffle(cases)
        for name, length in cases:
            found = processor_seconds(layers[name, length], length, dim)
            if index:
                seconds[name].setdefault(length, []).append(found)
    result: dict[str, Any] = {}
    for name, by_length in seconds.items():
        medians = {length: statistics.median(values) for length, values in sorted(by_length.items())}
        result[name] = {"processor_seconds": medians, "slope": slope(list(medians), list(medians.values()))}
    return result


def main() -> None:
    options = prepare(arguments(__doc__))
    steps, rounds = 20 if options.quick else 250, options.rounds or (1 if options.quick else 3)
    ranks = (16, 128) if options.quick else (8, 16, 32, 64, 128, 256)
    lengths = [1024, 2048] if options.quick else [2**power for power in range(10, 16)]
    errors = by_rank(ranks, steps)
    show(f"relative error, {LENGTH} tokens", tuple(errors[0]), [list(row.values()) for row in errors])
    times = growth(lengths, 2048 if options.quick else 8192, rounds)
    for name, one in times.items():
        rows = [[length, seconds * 1000] for length, seconds in one["processor_seconds"].items()]
        show(f"{name}: log-log slope {one['slope']:.3f}", ("tokens", "ms of the processor"), rows)
    shape = {"length": LENGTH, "dim": DIM, "heads": HEADS, "fit_steps": steps, "fit_rows": ROWS, "dtype": "float32"}
    save(
        options, "linformer_rank", {"shape": shape, "errors": errors, "timed": TIMED, "rounds": rounds, "times": times}
    )


if __name__ == "__main__":
    main()
