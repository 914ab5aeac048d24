"""From which length on does attention to chosen blocks pay, in training and for one token?

    python benchmarks/chosen_blocks.py --threads 1        # some ten minutes

One layer of width 256 with 4 heads of 64 in float32, rotary positions: MoBA (4 blocks of 256 tokens; 8 of 64), NSA (16
blocks of 64, means, a window of 512, one head of keys) and softmax attention with as many heads of keys. Timed in
rounds: the forward and backward of a whole text, and a token after it. Where all blocks are seen, the layers must give
softmax attention's outputs and gradients, and the tiles must give the reference's elsewhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import Contestant, arguments, gate_equal, interleave, prepare, save, show
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import nbytes, reserve
from kinformer.mixers.chosen_blocks import ChosenBlocks
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.positions.rope import Rope
from kinformer.projections.grouped import Grouped

DIM, HEADS, TOLERANCE = 256, 4, 1e-4
ONE = Grouped.Config(num_kv_heads=1)
SOFTMAX = SoftmaxAttention.Config(num_heads=HEADS, position=Rope.Config())
MOBA = ChosenBlocks.Config(num_heads=HEADS, position=Rope.Config(), block=256, count=4)
NSA = MOBA.replace(
    projection=ONE, block=64, count=16, first=1, near=1, shared_choice=True, compression=True, window=512
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
    x = torch.randn(1, length, DIM)
    contestants = [Contestant(name, partial(learned, built(config), x)) for name, config in LAYERS.items()]
    interleave(contestants, rounds)
    return {each.name: each.median * 1000 for each in contestants}


def step_times(past: int, rounds: int, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a token after ``past`` others, in reserved states, and the bytes a token of those states."""
    x, contestants, remembered = torch.randn(1, past, DIM), [], {}

    def run(mixer: CausalMixer, state: Any) -> None:
        after = reserve(state, 2 * steps)
        for token in x[:, :steps].split(1, 1):
            _, after = mixer(Chunk(token), after)

    with torch.no_grad():
        for name, config in LAYERS.items():
            mixer = built(config)
            state = mixer(Chunk(x), mixer.initial_state(1))[1]
            remembered[name] = (nbytes(state) - 8) / past
            contestants.append(Contestant(name, partial(run, mixer, state)))
        interleave(contestants, rounds)
    return {each.name: each.median * 1000 / steps for each in contestants}, remembered


def main() -> None:
    options = prepare(arguments(__doc__))
    quick, rounds = options.quick, options.rounds or (1 if options.quick else 3)
    lengths = [128] if quick else [1024, 2048, 4096, 8192, 16384, 32768]
    gap = gate()
    training = {length: training_times(length, 1 if length > 8192 else rounds) for length in lengths}
    tokens = {length: step_times(length, rounds, 4 if quick else 64) for length in lengths}
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
