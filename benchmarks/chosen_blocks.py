"""From which length on does attention to chosen blocks pay, in training and for one token?

    python benchmarks/chosen_blocks.py --threads 1        # some ten minutes

One layer of width 256 with 4 heads of 64 in float32, rotary positions: MoBA (4 blocks of 256 tokens; 8 of 64), NSA (16
blocks of 64, means, a window of 512, one head of keys) and softmax attention with as many heads of keys: the processor
time of the forward and backward of a whole text, and of a token after it, in turns. Where all blocks are seen, the
layers must give softmax attention's outputs and gradients, and the tiles must give the reference's elsewhere.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import arguments, gate_equal, medians, prepare, save, show
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import nbytes, reserve
from kinformer.mixers.chosen_blocks import ChosenBlocks
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.projections import Grouped
from kinformer.parts.relative_positions import Rope

DIM, HEADS, TOLERANCE = 256, 4, 1e-4
LONG = 4096
"""Texts beyond are trained on once, without a step before that warms up."""
ONE = Grouped.Config(num_kv_heads=1)
SOFTMAX = SoftmaxAttention.Config(num_heads=HEADS, position=Rope.Config())
MOBA = ChosenBlocks.Config(num_heads=HEADS, position=Rope.Config(), block=256, count=4)
NSA = MOBA.replace(
    projection=ONE, block=64, count=16, first=1, near=1, shared_choice=True, compression="mean", window=512
)
LAYERS: dict[str, Any] = {
    "softmax, 4 heads of keys": SOFTMAX,
    "moba, 4 blocks of 256": MOBA,
    "moba, 8 blocks of 64": MOBA.replace(block=64, count=8),
    "softmax, 1 head of keys": SOFTMAX.replace(projection=ONE),
    "nsa": NSA,
}


def built(config: Any) -> CausalMixer:
    torch.manual_seed(0)
    mixer: CausalMixer = config.build(DIM)
    return mixer


def learned(mixer: CausalMixer, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = mixer(Chunk(x), mixer.initial_state(len(x)))[0]
    return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


def gate() -> float:
    """Hold chosen blocks to softmax attention where all are seen, and tiles to the reference; return the largest
    gap."""
    x, pairs = torch.randn(1, 700, DIM), []
    for config, full in ((MOBA.replace(count=9), SOFTMAX), (MOBA.replace(block=64, count=11), SOFTMAX)):
        pairs.append((f"{config.block} tokens a block", learned(built(config), x), learned(built(full), x)))
    for config in (MOBA.replace(block=64, count=3), NSA.replace(count=4, window=64)):
        pairs.append(("tiles", learned(built(config), x), learned(built(config.replace(impl="reference")), x)))
    return max(gate_equal(name, *pair, TOLERANCE) for name, got, want in pairs for pair in zip(got, want, strict=True))


def training_times(length: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a forward and backward of a text of ``length`` tokens."""
    x, short = torch.randn(1, length, DIM), length <= LONG
    steps = {name: partial(learned, built(config), x) for name, config in LAYERS.items()}
    return medians(steps, rounds if short else 1, short)


def run(mixer: CausalMixer, state: Any, x: Tensor) -> None:
    """Absorb x [1, steps, dim] token by token, in a reserved state."""
    for token in x.split(1, 1):
        _, state = mixer(Chunk(token), state)


def step_times(past: int, rounds: int, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a token after ``past`` others, in reserved states, and the bytes a token of those states.

    Softmax attention goes on from the keys and values of the layer with as many heads of keys."""
    x, states, remembered = torch.randn(1, past, DIM), {}, {}
    with torch.no_grad():
        for name, config in LAYERS.items():
            if isinstance(config, ChosenBlocks.Config):
                mixer = built(config)
                states[name] = mixer(Chunk(x), mixer.initial_state(1))[1]
        for name, other in (("softmax, 4 heads of keys", "moba, 4 blocks of 256"), ("softmax, 1 head of keys", "nsa")):
            states[name] = states[other].attention
        tokens, taken = x[:, :steps], {}
        for name, config in LAYERS.items():
            remembered[name] = (nbytes(states[name]) - 8) / past
            mixer = built(config)
            taken[name] = [
                medians({name: partial(run, mixer, reserve(states[name], steps), tokens)}, 1, False)[name] / steps
                for _ in range(rounds + 1)
            ][1:]
    return {name: statistics.median(values) for name, values in taken.items()}, remembered


def main() -> None:
    options = prepare(arguments(__doc__))
    quick, rounds = options.quick, options.rounds or (1 if options.quick else 3)
    lengths = [128] if quick else [1024, 2048, 4096, 8192, 16384, 32768]
    gap = gate()
    training = {length: training_times(length, rounds) for length in lengths}
    tokens = {length: step_times(length, rounds, 4 if quick else 32) for length in lengths}
    for name, times in (
        ("forward and backward, ms", training),
        ("one token, ms", {length: pair[0] for length, pair in tokens.items()}),
    ):
        rows = [[layer, *(times[length][layer] for length in lengths)] for layer in LAYERS]
        show(name, ("layer", *map(str, lengths)), rows)
    result = {
        "shape": {"dim": DIM, "heads": HEADS},
        "rounds": rounds,
        "gap": gap,
        "training": training,
        "tokens": {length: pair[0] for length, pair in tokens.items()},
        "bytes_a_token": tokens[lengths[-1]][1],
    }
    save(options, "chosen_blocks", result)


if __name__ == "__main__":
    main()
