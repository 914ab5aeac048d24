"""From which length on does DeepSeek's sparse attention pay, and does its indexer find what attention reads?

    python benchmarks/indexer.py --threads 1        # some ten minutes

Times: one layer of width 256 with 4 heads of 64 in float32, a latent of 128 numbers and 32 rotary features: latent
attention, the same with an indexer (4 heads of 32) that learns and chooses 256 tokens, and its warm-up, in which all
tokens are read. Processor time of the forward and backward of a whole text, and of a token after it, in turns. With as
many tokens to choose as the text has, the layer must give latent attention's outputs and gradients.

The indexer: two layers of width 128 learn to predict the bytes of the documentation, first with dense attention while
the indexers learn from it, then with 32 chosen tokens of 512. The share of dense attention's weight that the chosen
tokens hold is compared with the share of the last tokens, and with the largest share of so many tokens.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import kinformer
from common import arguments, gate_equal, medians, prepare, save, show
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.probe import weights_of
from kinformer.core.state import nbytes, pop_aux, reserve
from kinformer.mixers.latent import IndexedAttention, LatentAttention

DIM, TOPK, TOLERANCE, STEPS = 256, 256, 1e-4, 32
LATENT = LatentAttention.Config(num_heads=4, latent_dim=128, rotary_dim=32)
INDEXED = IndexedAttention.Config(num_heads=4, latent_dim=128, rotary_dim=32, topk=TOPK, index_heads=4, index_dim=32)
LAYERS: dict[str, Any] = {
    "latent attention": LATENT,
    "256 chosen tokens": INDEXED,
    "warm-up": INDEXED.replace(topk=None),
}
LENGTH, CHOSEN, SIZES = 512, 32, (8, 32, 128)
MODEL = {
    "dim": 128,
    "layers.*.mixer.num_heads": 4,
    "layers.*.mixer.latent_dim": 64,
    "layers.*.mixer.index_heads": 4,
    "layers.*.mixer.index_dim": 16,
}
LONG = 2048
"""Texts beyond are trained on once, without a step before that warms up."""


def built(config: Any) -> CausalMixer:
    torch.manual_seed(0)
    mixer: CausalMixer = config.build(DIM)
    return mixer


def learned(mixer: CausalMixer, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y, state = mixer(Chunk(x), mixer.initial_state(len(x)))
    costs = pop_aux(state)[0].values()
    return y.detach(), torch.autograd.grad(y.square().sum() + sum(cost.sum() for cost in costs), x)[0]


def gate() -> float:
    """Hold the layer to latent attention where all tokens are chosen; return the largest gap."""
    x, full, mixer = torch.randn(1, TOPK, DIM), built(LATENT), built(INDEXED)
    mixer.load_state_dict(full.state_dict(), strict=False)
    pairs = zip(learned(mixer, x), learned(full, x), strict=True)
    return max(gate_equal("all tokens chosen", *pair, TOLERANCE) for pair in pairs)


def training_times(length: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a forward and backward of a text of ``length`` tokens."""
    x, short = torch.randn(1, length, DIM), length <= LONG
    steps = {name: partial(learned, built(config), x) for name, config in LAYERS.items()}
    return medians(steps, rounds if short else 1, short)


def run(mixer: CausalMixer, state: Any, x: Tensor) -> None:
    """Absorb x [1, steps, dim] token by token, in a reserved state."""
    for token in x.split(1, 1):
        _, state = mixer(Chunk(token), state)


@torch.no_grad()
def step_times(past: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a token after ``past`` others, the least of some rounds, and the bytes a token of the states."""
    taken, remembered = {}, {}
    for name, config in LAYERS.items():
        mixer = built(config)
        state = mixer.initial_state(1)
        for _ in range(past // 512):  # the past's content does not change times
            _, state = mixer(Chunk(torch.randn(1, 512, DIM)), state)
        remembered[name] = (nbytes(state) - 8) / past
        tokens = torch.randn(1, STEPS, DIM)
        steps = {str(one): partial(run, mixer, reserve(state, STEPS), tokens) for one in range(rounds + 1)}
        taken[name] = min(medians(steps, 1, False).values()) / STEPS
    return taken, remembered


def rows(text: Tensor, count: int, length: int) -> Tensor:
    starts = torch.randint(len(text) - length, (count,)).tolist()
    return torch.stack([text[start : start + length + 1] for start in starts])


@torch.no_grad()
def shares(model: Any, tokens: Tensor) -> dict[str, dict[int, float]]:
    """The share of dense attention's weight that so many tokens hold: a mean over heads, layers and the later half."""
    inputs: list[tuple[Any, Tensor]] = []
    mixers = [layer.mixer for layer in model.stack.layers]
    hooks = [mixer.register_forward_pre_hook(lambda mixer, call: inputs.append((mixer, call[0].x))) for mixer in mixers]
    for mixer in mixers:
        mixer.topk = None
    model(tokens)
    for hook in hooks:
        hook.remove()
    names = "best", "chosen", "last"
    held: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in names}
    for mixer, x in inputs:
        for row in x.split(1):
            call, late = (Chunk(row), mixer.initial_state(1)), slice(row.shape[1] // 2, None)
            mixer.topk = None
            dense = weights_of(mixer, call).weights.mean(0)
            for mixer.topk in SIZES:
                chosen = weights_of(mixer, call).weights.amax(0) > 0
                last = torch.ones_like(chosen).tril().triu(1 - mixer.topk)
                held["best"][mixer.topk].append(float(dense.topk(mixer.topk).values.sum(-1)[late].mean()))
                held["chosen"][mixer.topk].append(float((dense * chosen).sum(-1)[late].mean()))
                held["last"][mixer.topk].append(float((dense * last).sum(-1)[late].mean()))
    return {name: {size: sum(x) / len(x) for size, x in sizes.items()} for name, sizes in held.items()}


@torch.no_grad()
def bits(model: Any, tokens: Tensor, topk: int | None) -> float:
    """Bits a byte of the later half of rows, with ``topk`` tokens read."""
    for layer in model.stack.layers:
        layer.mixer.topk = topk
    logits, half = model(tokens[:, :-1])[0], tokens.shape[1] // 2
    return float(cross_entropy(logits[:, half:].flatten(0, 1), tokens[:, half + 1 :].flatten())) / math.log(2)


def taught(steps: int) -> dict[str, Any]:
    """Train on the documentation in two stages; return shares and bits a byte at their ends."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = torch.tensor(list("".join(page.read_text(encoding="utf-8") for page in pages).encode()))
    cut = len(text) * 9 // 10
    torch.manual_seed(0)
    model: Any = kinformer.build("dsa", recipe="tiny", vocab_size=256, set=MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tests, result = rows(text[cut:], 8, LENGTH), {}
    result["shares, untrained"] = shares(model, tests[:2, :-1])
    for stage, topk in (("after the warm-up", None), ("after the sparse stage", CHOSEN)):
        for _ in range(steps):
            for layer in model.stack.layers:
                layer.mixer.topk = topk
            tokens = rows(text[:cut], 8, LENGTH)
            logits, state = model(tokens[:, :-1])
            cost = pop_aux(state)[0]["indexer"].mean() / LENGTH
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + cost
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        result[f"shares, {stage}"] = shares(model, tests[:2, :-1])
        result[f"bits a byte, {stage}"] = {str(size): bits(model, tests, size) for size in (None, CHOSEN)}
    return result


def main() -> None:
    options = prepare(arguments(__doc__))
    quick, rounds = options.quick, options.rounds or (1 if options.quick else 2)
    lengths = [512] if quick else [1024, 4096, 16384]
    gap = gate()
    training = {length: training_times(length, rounds) for length in lengths}
    tokens = {length: step_times(length, rounds) for length in ([512] if quick else [1024, 8192, 32768])}
    learning = taught(4 if quick else 150)
    show(
        "forward and backward, ms",
        ("layer", *map(str, lengths)),
        [[layer, *(training[length][layer] for length in lengths)] for layer in LAYERS],
    )
    show(
        "one token, ms",
        ("layer", *map(str, tokens)),
        [[layer, *(times[layer] for times, _ in tokens.values())] for layer in LAYERS],
    )
    for name, values in learning.items():
        print(name, values)
    result = {
        "shape": {"dim": DIM, "topk": TOPK},
        "rounds": rounds,
        "gap": gap,
        "training": training,
        "tokens": {length: pair[0] for length, pair in tokens.items()},
        "bytes_a_token": list(tokens.values())[-1][1],
        "learning": learning,
    }
    save(options, "indexer", result)


if __name__ == "__main__":
    main()
