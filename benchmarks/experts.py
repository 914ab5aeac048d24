"""What does a mixture of experts cost beside a feed-forward that computes as much, and one that has as many weights?

    python benchmarks/experts.py                # some two minutes on two cores

Feed-forwards of width 512 in float32, 8 experts of which a token uses 2: ours, transformers' block of Mixtral with the
same weights (as it comes, and by grouped products), a SwiGLU with the operations of 2 experts, and one with the weights
of 8. Timed in rounds: forward and backward of so many tokens, and the forward of one. Ours and transformers' must give
the same.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common import Contestant, arguments, gate_equal, interleave, peer, prepare, save, show
from kinformer.blocks.feed_forward import Experts, SwiGLU

DIM, HIDDEN, EXPERTS, TOPK, TOLERANCE = 512, 688, 8, 2, 1e-4


def blocks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    ours = Experts.Config(num_experts=EXPERTS, topk=TOPK, hidden_dim=HIDDEN, balance=0.0).build(DIM)
    built: dict[str, nn.Module] = {
        "experts, 2 of 8": ours,
        "SwiGLU, as many operations": SwiGLU.Config(hidden_dim=TOPK * HIDDEN).build(DIM),
        "SwiGLU, as many weights": SwiGLU.Config(hidden_dim=EXPERTS * HIDDEN).build(DIM),
    }
    if peer("transformers") is not None:
        from transformers.models.mixtral import modeling_mixtral as theirs

        for way in ("eager", "grouped_mm"):
            config = theirs.MixtralConfig(
                hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOPK
            )
            config._experts_implementation = way
            block = theirs.MixtralSparseMoeBlock(config)
            with torch.no_grad():
                block.gate.weight.copy_(ours.router.weight)
                block.experts.gate_up_proj.copy_(ours.gate_up.mT)
                block.experts.down_proj.copy_(ours.down.mT)
            built[f"transformers, {way}"] = block
    return built


def learned(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = block(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def operations(block: nn.Module, tokens: int) -> int:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        block.to("meta")(torch.empty(1, tokens, DIM))
    return int(counter.get_total_flops())


def main() -> None:
    options = prepare(arguments(__doc__))
    rounds = options.rounds or (1 if options.quick else 7)
    built, gap = blocks(), 0.0
    x = torch.randn(2, 100, DIM)
    for name in (name for name in built if name.startswith("transformers")):
        pair = learned(built["experts, 2 of 8"], x), learned(built[name], x)
        gap = max(gap, *(gate_equal(name, *values, TOLERANCE) for values in zip(*pair, strict=True)))
    times: dict[str, dict[str, float]] = {name: {} for name in built}
    for tokens in (64,) if options.quick else (512, 4096):
        x = torch.randn(1, tokens, DIM)
        contestants = [Contestant(name, partial(learned, block, x)) for name, block in built.items()]
        interleave(contestants, rounds)
        for each in contestants:
            times[each.name][f"training_{tokens}"] = each.median * 1000
    x, repeats = torch.randn(1, 1, DIM), 5 if options.quick else 100

    def repeated(block: nn.Module) -> None:
        for _ in range(repeats):
            block(x)

    with torch.no_grad():
        contestants = [Contestant(name, partial(repeated, block)) for name, block in built.items()]
        interleave(contestants, rounds)
    for each in contestants:
        times[each.name]["step"] = each.median * 1000 / repeats
    for name, block in built.items():
        times[name]["weights"] = sum(parameter.numel() for parameter in block.parameters())
    for name in ("experts, 2 of 8", "SwiGLU, as many operations", "SwiGLU, as many weights"):
        times[name]["mflop_a_token"] = operations(blocks()[name], 256) / 256 / 1e6
    columns = list(times["experts, 2 of 8"])
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in times.items()]
    show("feed-forwards, milliseconds", ("feed-forward", *columns), rows)
    shape = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS, "topk": TOPK}
    save(options, "experts", {"shape": shape, "rounds": rounds, "gap": gap, "times": times})


if __name__ == "__main__":
    main()
