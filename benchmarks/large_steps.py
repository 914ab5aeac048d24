"""How fast is a training step with a large vocabulary, long rows, or a big model, beside the peers as they come best?

    python benchmarks/large_steps.py --threads 2          # half an hour on two slow cores
    python benchmarks/large_steps.py --points long-rows --longest

Forward, cross entropy, backward and fused AdamW in float32, all contestants of a point in turns. Ours are trained as
`kinformer train` does; peers are tuned (oneDNN's products, their own fused attention). `compiled` is `torch.compile` of
the same model, for the first point alone: its compiler takes minutes. `--longest` adds rows of 65,536 tokens, one step
of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common import Contestant, arguments, gate_learning, interleave, of_width, prepare, products, save, show
from kinformer.family.build import configure
from kinformer.lab.tasks.next_token import NextTokenLoss, TokenBatch
from kinformer.lab.training.data_module import ObjectiveModule
from peers import PeerShape, hugging_face, idiap, x_transformers
from training_step import Training


class Point(NamedTuple):
    """The sizes of a model, and what it learns from in a step."""

    vocab: int
    layers: int
    dim: int
    batch: int
    length: int

    @property
    def shape(self) -> PeerShape:
        return PeerShape(
            layers=self.layers, dim=self.dim, heads=self.dim // 64, head_dim=64, hidden=4 * self.dim,
            length=self.length, vocab=self.vocab,
        )  # fmt: skip


POINTS = {
    "vocabulary": Point(32_000, 4, 256, 8, 512),
    "long-rows": Point(256, 4, 256, 1, 16_384),
    "big-model": Point(32_000, 12, 768, 1, 1024),
}
LONGEST = Point(256, 4, 256, 1, 65_536)
MEMBERS = ("gpt", "linear-transformer", "gated-deltanet", "local")
PEERS = {"x-transformers": partial(x_transformers, flash=True), "GPT-2 (transformers)": hugging_face, "idiap": idiap}
SOFTMAX, LINEAR = ("x-transformers", "GPT-2 (transformers)"), ("idiap",)
RIVALS = {"gpt": SOFTMAX, "local": SOFTMAX, "linear-transformer": LINEAR, "gated-deltanet": LINEAR}


class Ours:
    """A member as `kinformer train` trains it; a call makes one step and returns the loss before it."""

    def __init__(self, member: str, point: Point) -> None:
        changes: dict[str, Any] = of_width(point.dim) | {"layers": point.layers}
        if member == "gpt":
            changes["position.max_length"] = point.length
        torch.manual_seed(0)
        model = configure(member, "small", point.vocab, changes).build().train()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.engine = ObjectiveModule(model, NextTokenLoss(), "fp32")
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def __call__(self, window: Tensor) -> float:
        loss = self.engine(TokenBatch(window), None, 0.0)[0]
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss.detach())


class Compiled(nn.Module):
    """The weights of ``model`` behind what its compiler made of it."""

    def __init__(self, model: nn.Module, compiled: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.compiled = model, compiled

    def forward(self, tokens: Tensor) -> Tensor:
        return self.compiled(tokens)


def contestants_of(point: Point, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Builders of all that are timed, by name."""
    builders: dict[str, Callable[[], Any]] = {member: partial(Ours, member, point) for member in MEMBERS}

    def tuned(build: Callable[[PeerShape], nn.Module | None], compiles: bool = False) -> Training | None:
        model = build(point.shape)
        if model is None:
            return None
        model = Compiled(model, torch.compile(model)) if compiles else model
        return Training(model, model, fused=True, bf16=False)

    builders |= {name: partial(tuned, build) for name, build in PEERS.items()}
    if compiled:
        for name in SOFTMAX:
            builders[f"{name}, compiled"] = partial(tuned, PEERS[name], True)
        for member in ("gpt", "linear-transformer"):
            builders[f"{member}, compiled"] = partial(compiled_member, member, point)
    return builders


def compiled_member(member: str, point: Point) -> Training:
    """A member compiled from tokens to logits, all of which it then makes at once."""
    model = Ours(member, point).engine.model
    whole = Compiled(model, torch.compile(lambda tokens: model(tokens)[0]))
    return Training(whole, whole, fused=True, bf16=False)


def measure(point: Point, rounds: int, compiled: bool) -> dict[str, Any]:
    """Time all contestants of a point in turns; those that fail say why and are left out."""
    window = torch.randint(point.vocab, (point.batch, point.length + 1), generator=torch.Generator().manual_seed(0))
    rows: dict[str, dict[str, Any]] = {}
    contestants = []
    for name, build in contestants_of(point, compiled).items():
        training = build()
        if training is None:
            continue
        begun = time.perf_counter()
        with products(fast=True):
            losses = [training(window) for _ in range(2 if rounds > 1 else 1)]
        gate = gate_learning(name, losses) if len(losses) > 1 else {"first_loss": losses[0]}
        rows[name] = {"parameters": training.parameters, "gate": gate, "first_seconds": time.perf_counter() - begun}
        contestants.append(Contestant(name, partial(training, window), fast=True))
    interleave(contestants, rounds, warm_up=0)
    tokens = point.batch * point.length
    for each in contestants:
        rows[each.name] |= {"seconds": each.median, "tokens_per_second": tokens / each.median}
    return point._asdict() | {"rounds": rounds, "contestants": rows, "ratios": ratios(rows)}


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times as fast a member is as the best peer of its kind, however it was set up."""
    found = {}
    for member, kinds in RIVALS.items():
        rivals = [row["tokens_per_second"] for name, row in rows.items() if name.startswith(kinds)]
        if rivals and member in rows:
            found[member] = rows[member]["tokens_per_second"] / max(rivals)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--points", nargs="+", choices=list(POINTS), default=list(POINTS), help="only these")
    parser.add_argument("--longest", action="store_true", help="one step at 65,536 tokens, too")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = prepare(parser)
    chosen = {name: POINTS[name] for name in options.points} | ({"longest": LONGEST} if options.longest else {})
    if options.quick:
        chosen = {"vocabulary": Point(4096, 2, 64, 2, 64)}
    results = {}
    for name, point in chosen.items():
        rounds = 1 if name == "longest" else options.rounds or (2 if options.quick else 3)
        results[name] = measure(point, rounds, compiled=name == "vocabulary" and not options.no_compile)
        rows = [
            [key, row["parameters"], row["seconds"], row["tokens_per_second"]]
            for key, row in results[name]["contestants"].items()
        ]
        show(f"{name}: {point}", ("contestant", "parameters", "seconds", "tokens/s"), rows)
        show("of the best peer of its kind", ("member", "times as fast"), list(results[name]["ratios"].items()))
    save(options, "large_steps", {"dtype": "float32", "points": results})


if __name__ == "__main__":
    main()
