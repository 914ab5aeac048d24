"""What do Muon's update and dropout cost in steps of small models? Ours beside PyTorch's, matrices of four layers.

    Muon       matrices of one shape in one product (lab/training/optimisers.py), beside torch.optim.Muon, one by one
    dropout    16 random bits an element (runtime/draws.py), beside torch.nn.Dropout; forward and backward

The same weights after three updates, the same share of zeros, or they are not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Muon

from common import Contestant, arguments, gate_equal, interleave, prepare, save, show
from kinformer.lab.training.optimisers import StackedMuon
from kinformer.runtime.draws import Dropout
from kinformer.runtime.process import keep_memory

LAYERS, TOKENS, P = 4, 1024, 0.1


def matrices(dim: int) -> list[Tensor]:
    """The matrices of ``LAYERS`` layers of a decoder so wide."""
    torch.manual_seed(0)
    shapes = LAYERS * ((3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim))
    return [torch.randn(shape).mul_(dim**-0.5).requires_grad_() for shape in shapes]


def update(optimiser: Callable[..., torch.optim.Optimizer], dim: int) -> tuple[Callable[[], None], list[Tensor]]:
    """A step of ``optimiser`` and the weights that it moves, whose gradients stay what they are."""
    weights = matrices(dim)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return optimiser(weights).step, weights


def race(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    timed = [Contestant(name, step, fast=True) for name, step in contestants.items()]
    interleave(timed, rounds, warm_up=3)
    found = {each.name: 1000 * each.median for each in timed}
    ours, theirs = found.values()
    return found | {"times as fast": theirs / ours}


def muon(dim: int, rounds: int) -> dict[str, float]:
    ours, stacked = update(lambda weights: StackedMuon([{"params": weights}], 5e-3), dim)
    theirs, single = update(lambda weights: Muon(weights, lr=5e-3, adjust_lr_fn="match_rms_adamw"), dim)
    for _ in range(3):
        ours()
        theirs()
    for a, b in zip(stacked, single, strict=True):
        gate_equal("Muon", a.detach(), b.detach(), 5e-3)  # ours may iterate in float32, PyTorch's in bfloat16
    return race({"ours ms": ours, "PyTorch's ms": theirs}, rounds)


def dropout(dim: int, rounds: int) -> dict[str, float]:
    x = torch.randn(TOKENS, dim).bfloat16().requires_grad_()

    def both(module: nn.Module) -> Tensor:
        y = module(x)
        y.backward(y)
        return y

    ours, theirs = Dropout(P), nn.Dropout(P)
    share = float((both(ours) == 0).double().mean())
    if abs(share - P) > 0.01:
        raise SystemExit(f"dropout zeroes {share:.3f} of all elements, expected {P:g}; not timed.")
    return race({"ours ms": lambda: both(ours), "PyTorch's ms": lambda: both(theirs)}, rounds)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", help="widths of the model (128 192 256 512)")
    options = prepare(parser)
    keep_memory()
    rows = []
    for threads in (options.threads,) if options.threads else (1, 2):
        torch.set_num_threads(threads)
        for dim in options.dims or ((64,) if options.quick else (128, 192, 256, 512)):
            for what, measure in (("muon", muon), ("dropout", dropout)):
                found = measure(dim, options.rounds or (3 if options.quick else 31))
                rows.append({"what": what, "threads": torch.get_num_threads(), "dim": dim} | found)
    show("milliseconds", list(rows[0]), [list(row.values()) for row in rows])
    save(options, "small_operations", {"layers": LAYERS, "tokens": TOKENS, "p": P, "rows": rows})


if __name__ == "__main__":
    main()
