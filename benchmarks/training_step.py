"""How fast is a training step, beside the peers? Forward, cross entropy, backward and AdamW, all in one run.

4 layers, dim 256, 4 heads x 64, feed-forward 1024, vocabulary 256, at 8 x 512 and 1 x 4096 tokens.

    kinformer    as `kinformer train` computes: fp32 products through oneDNN, fused AdamW; also bf16-mixed
    as it comes  the peer with PyTorch's default fp32 products and default AdamW
    tuned        the peer with the same products setting and fused AdamW as ours, and its own fused attention
    bf16         the peer under autocast, fused AdamW (only where it runs)

--losses instead trains each member by `kinformer train` in fp32 and in bf16-mixed on real text, from the same weights
and on the same batches, and compares what held-out text costs. (With AdamW and few steps it would compare when each run
leaves the plateau of letter frequencies, which any rounding shifts.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kinformer
from common import (
    Contestant,
    arguments,
    gate_equal,
    gate_learning,
    interleave,
    prepare,
    products,
    save,
    show,
    text_bytes,
)
from common import kinformer as kinformer_command
from peers import PeerShape, copy_gpt2, hugging_face, idiap, x_transformers

MEMBERS = ("gpt", "linear-transformer", "fast-weights")
SHAPES = ((8, 512), (1, 4096))
TARGETS = (
    ("gpt fp32", "best softmax peer as it comes", 1.5),
    ("gpt bf16", "best softmax peer as it comes", 1.7),
    ("linear-transformer fp32", "idiap as it comes", 1.6),
    ("linear-transformer bf16", "idiap as it comes", 2.5),
    ("fast-weights fp32", "linear-transformer fp32", 0.5),
    ("fast-weights bf16", "linear-transformer bf16", 0.5),
)
LOSS_GAP = 0.005
RECIPE = ("--recipe", "small", "--length", "256", "--batch-size", "4", "--optimizer", "muon", "--lr", "3e-3")


class Training:
    """A model and its AdamW; a call makes one step and returns the loss before it."""

    def __init__(self, model: nn.Module, logits: Callable[[Tensor], Tensor], *, fused: bool, bf16: bool) -> None:
        self.model, self.logits, self.bf16 = model.train(), logits, bf16
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    def loss(self, window: Tensor) -> Tensor:
        """Cross entropy in nats of every next token of ``window`` [batch, time + 1]."""
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            logits = self.logits(window[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())

    def __call__(self, window: Tensor) -> float:
        loss = self.loss(window)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss.detach())


def ours(member: str, bf16: bool) -> Training:
    model = kinformer.build(member, recipe="benchmark", vocab_size=256)
    return Training(model, lambda tokens: model(tokens)[0], fused=True, bf16=bf16)


def field(shape: PeerShape) -> dict[str, tuple[Training, bool]]:
    """Name -> (training, whether its fp32 products take oneDNN's path)."""
    torch.manual_seed(0)
    found = {
        f"{member} {name}": (ours(member, name == "bf16"), True) for member in MEMBERS for name in ("fp32", "bf16")
    }
    builders = {"x-transformers": x_transformers, "GPT-2 (transformers)": hugging_face, "idiap": idiap}
    for name, build in builders.items():
        plain = build(shape)
        if plain is None:
            continue
        tuned = x_transformers(shape, flash=True) if build is x_transformers else build(shape)
        assert tuned is not None
        found[f"{name} as it comes"] = Training(plain, plain, fused=False, bf16=False), False
        found[f"{name} tuned"] = Training(tuned, tuned, fused=True, bf16=False), True
        if build is hugging_face:
            mixed = build(shape)
            found[f"{name} bf16"] = Training(mixed, mixed, fused=True, bf16=True), True
    return found


def same_gpt2(shape: PeerShape, window: Tensor) -> float | None:
    """The gap between our gpt and GPT-2 with the same weights; stops the benchmark where it is not rounding."""
    theirs = hugging_face(shape)
    if theirs is None:
        return None
    model = kinformer.build("gpt", recipe="benchmark", vocab_size=256)
    copy_gpt2(theirs, model)
    with torch.no_grad():
        return gate_equal("gpt with GPT-2's weights", model(window)[0], theirs.eval()(window), 1e-4)


def measure(batch: int, length: int, rounds: int) -> dict[str, Any]:
    shape = PeerShape(layers=4, dim=256, heads=4, head_dim=64, hidden=1024, length=max(length, 4096))
    window = text_bytes(None, batch * (length + 1)).view(batch, length + 1)
    gap = same_gpt2(shape, window[:, :length])
    contestants, rows = [], {}
    for name, (training, fast) in field(shape).items():
        with products(fast):
            gate = gate_learning(name, [training(window) for _ in range(3)])
        contestants.append(Contestant(name, lambda training=training: training(window), fast))
        rows[name] = {"parameters": training.parameters, "fast_products": fast, "gate": gate}
    interleave(contestants, rounds)
    for contestant in contestants:
        seconds = contestant.median
        rows[contestant.name] |= {"seconds": seconds, "tokens_per_second": batch * length / seconds}
    speed = {name: row["tokens_per_second"] for name, row in rows.items()}
    sizes = {"batch": batch, "length": length, "rounds": rounds}
    return sizes | {"gpt2_gap": gap, "contestants": rows, "ratios": ratios(speed)}


def ratios(speed: dict[str, float]) -> list[dict[str, Any]]:
    """Every target with what was reached, and beside it the ratio to the fastest peer of the kind however set up.

    An fp32 member is not held against a bf16 peer.
    """
    softmax = {name: value for name, value in speed.items() if name.startswith(("x-transformers", "GPT-2"))}
    linear = {name: value for name, value in speed.items() if name.startswith("idiap")}
    plain = [value for name, value in softmax.items() if name.endswith("as it comes")]
    base = dict(speed) | ({"best softmax peer as it comes": max(plain)} if plain else {})
    found = []
    for name, against, target in TARGETS:
        if against in base:
            kind = softmax if name.startswith("gpt") else linear if name.startswith("linear") else {}
            rivals = [value for rival, value in kind.items() if name.endswith("bf16") or not rival.endswith("bf16")]
            best = speed[name] / max(rivals) if rivals else None
            found.append(
                {"name": name, "against": against, "ratio": speed[name] / base[against], "target": target, "best": best}
            )
    return found


def compare_losses(data: str | None, steps: int, threads: int | None) -> dict[str, Any]:
    """Held-out bits per byte after ``steps`` steps in both precisions, from the same weights and batches."""
    losses: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for member in MEMBERS:
            losses[member] = {}
            for precision in ("fp32", "bf16-mixed"):
                options = ("--data", data or "stdlib", "--holdout", 0.1, "--precision", precision, "--steps", steps)
                out = ("--out", f"{folder}/{member}-{precision}", "--validate-every", steps)
                told = kinformer_command(
                    "train", member, *options, *out, *RECIPE, *(("--threads", threads) * bool(threads))
                )
                losses[member][precision] = told["validation_bits_per_byte"]
            losses[member]["gap"] = abs(losses[member]["bf16-mixed"] / losses[member]["fp32"] - 1)
    return {"steps": steps, "recipe": RECIPE, "tolerance": LOSS_GAP, "bits_per_byte": losses}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--losses", action="store_true", help="compare bf16's loss with fp32's instead of timing")
    parser.add_argument("--data", help="text for --losses (Python's own sources if not given)")
    options = prepare(parser)
    if options.losses:
        result = compare_losses(options.data, 10 if options.quick else 500, options.threads)
        table = [[member, *row.values(), row["gap"] <= LOSS_GAP] for member, row in result["bits_per_byte"].items()]
        columns = ("member", "fp32", "bf16", "gap", "within 0.5 %")
        show(f"held-out bits per byte after {result['steps']} steps", columns, table)
        save(options, "training_losses", result)
        return
    points = []
    for batch, length in ((2, 64),) if options.quick else SHAPES:
        point = measure(batch, length, options.rounds or (2 if options.quick else 15))
        points.append(point)
        rows = [[name, row["seconds"] * 1000, row["tokens_per_second"]] for name, row in point["contestants"].items()]
        show(f"training step at {batch} x {length}", ("contestant", "ms", "tokens/s"), rows)
        columns = ("contestant", "against", "ratio", "target", "to the best of its kind")
        show("ratios", columns, [list(row.values()) for row in point["ratios"]])
    shape = "4 layers, dim 256, 4 heads x 64, feed-forward 1024, vocabulary 256"
    save(options, "training_step", {"dtype": "float32 weights", "shape": shape, "points": points})


if __name__ == "__main__":
    main()
