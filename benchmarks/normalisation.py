"""Where does the norm belong? Pre-norm against post-norm without a warm-up (Xiong et al. 2020, section 3).

    pre    x + F(norm(x)), a last norm after the stack        post    norm(x + F(x))

Both are the same decoder (the member post-ln, Xavier weights, ReLU) but for the place of the norms. The text is that
of Python's own sources as bytes, the loss the mean cross-entropy of the next byte.

    gradients    at the first weights: the norm of the gradient of each layer's last feed-forward product, at several
                 depths, mean over seeds. The paper's theory for the last layer: O(1) for post, O(1 / sqrt(L)) for pre
    training     the loss of a deep decoder, Adam (0.9, 0.98) at a constant rate from the first step on, no clipping;
                 beside it post-norm with a linear warm-up

No result depends on the clock.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common import RESULTS, arguments, prepare, save, show, slope
from kinformer.blocks.residual import LayerNorm
from kinformer.family.build import configure
from kinformer.lab.data import RandomWindows, open_corpus
from kinformer.lab.drawing.plots import BLUE, GREEN, PAPER, QUIET, RED, bare, figure
from kinformer.lab.drawing.plots import save as save_figure
from kinformer.models.decoder import Decoder

HEADS, EXAM = 4, 4
TICKS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
COLOURS = {"pre": BLUE, "post": RED, "post, warm-up": GREEN}


@dataclass(frozen=True)
class Case:
    """One training run: the place of the norms, and the steps in which the rate rises (0: none)."""

    wiring: str
    warmup: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.wiring}, warm-up" if self.warmup else self.wiring


def decoder(wiring: str, depth: int, dim: int, seed: int) -> Decoder:
    """The member post-ln at this size, or its pre-norm twin."""
    torch.manual_seed(seed)
    changes = {
        "layers": depth,
        "dim": dim,
        "layers.*.mixer.num_heads": HEADS,
        "layers.*.feed_forward.hidden_dim": 4 * dim,
    }
    config = configure("post-ln", "small", 256, changes | {"layers.*.residual": wiring})
    return (config.replace(norm=LayerNorm()) if wiring == "pre" else config).build()


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    """Nats per byte of ``tokens`` [rows, length + 1]."""
    return cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())


def gradient_norms(wiring: str, depth: int, batches: Sequence[Tensor], dim: int) -> list[float]:
    """Of the last feed-forward product of every layer at the first weights, from below; mean over seeds."""
    total = torch.zeros(depth)
    for seed, tokens in enumerate(batches):
        model = decoder(wiring, depth, dim, seed)
        loss_of(model, tokens).backward()
        total += torch.stack([layer.feed_forward.down.weight.grad.norm() for layer in model.stack.layers])
    return (total / len(batches)).tolist()


def train(case: Case, sampler: RandomWindows, exam: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """The loss on ``exam`` every ``options.every`` steps; None where it is not finite."""
    model = decoder(case.wiring, options.depth, options.dim, case.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=options.rate, betas=(0.9, 0.98))
    curve = []
    for step in range(options.steps + 1):
        if step % options.every == 0:
            with torch.no_grad():
                loss = float(loss_of(model, exam))
            curve.append((step, loss if math.isfinite(loss) else None))
        for group in optimiser.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / max(1, case.warmup))
        optimiser.zero_grad()
        loss_of(model, _batch(sampler, step)).backward()
        optimiser.step()
    told = "diverged" if curve[-1][1] is None else f"{curve[-1][1]:.4f} nats per byte"
    print(f"{case.name}, seed {case.seed}: {told} after {options.steps} steps", flush=True)
    return asdict(case) | {"name": case.name, "loss": curve[-1][1], "curve": curve}


def _batch(sampler: RandomWindows, step: int) -> Tensor:
    return torch.from_numpy(sampler.batch(step))


def study_gradients(options: argparse.Namespace, sampler: RandomWindows) -> dict[str, Any]:
    """Norms by wiring, depth and layer, and how those of the last layer go with the depth."""
    batches = [_batch(sampler, step) for step in range(options.seeds)]
    norms = {
        wiring: {depth: gradient_norms(wiring, depth, batches, options.gradient_dim) for depth in options.depths}
        for wiring in ("pre", "post")
    }
    last = {wiring: [by_layer[-1] for by_layer in of.values()] for wiring, of in norms.items()}
    slopes = {wiring: slope(options.depths, values) for wiring, values in last.items()}
    rows = [
        [wiring, depth, by_layer[0], by_layer[len(by_layer) // 2], by_layer[-1]]
        for wiring, of in norms.items()
        for depth, by_layer in of.items()
    ]
    show("gradient norms at the first weights", ("wiring", "depth", "first layer", "middle", "last layer"), rows)
    print(", ".join(f"{wiring}: last layer ~ depth^{value:.2f}" for wiring, value in slopes.items()))
    return {"norms": norms, "last_layer_exponent": slopes}


def draw(gradients: dict[str, Any], runs: list[dict[str, Any]], options: argparse.Namespace, path: Path) -> None:
    """Gradient norms by layer, those of the last layer by depth, and the losses of the training runs."""
    with figure(12, 3.8) as drawn:
        by_layer, by_depth, losses = drawn.subplots(1, 3)
        _draw_layers(by_layer, gradients["norms"])
        _draw_depths(by_depth, gradients, options.depths)
        _draw_losses(losses, runs, options)
        every = [value for of in gradients["norms"].values() for values in of.values() for value in values]
        low, high = 0.8 * min(every), 1.25 * max(every)
        ticks = [tick for tick in TICKS if low < tick < high]
        for axes in (by_layer, by_depth):
            axes.set(yscale="log", ylim=(low, high))
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        for axes in (by_layer, by_depth, losses):
            axes.minorticks_off()
            axes.grid(alpha=0.25)
            bare(axes, "left", "bottom")
        drawn.tight_layout(w_pad=2.0)
        save_figure(drawn, path)
    print(f"wrote {path}")


def _draw_layers(axes: Any, norms: dict[str, dict[int, list[float]]]) -> None:
    for wiring, of in norms.items():
        for rank, (depth, values) in enumerate(of.items()):
            deepest = rank + 1 == len(of)
            strength, label = 0.35 + 0.65 * (rank + 1) / len(of), f"{wiring}-norm" if deepest else None
            axes.plot(range(1, depth + 1), values, color=COLOURS[wiring], alpha=strength, linewidth=1.4, label=label)
            axes.plot(depth, values[-1], "o", color=COLOURS[wiring], markersize=3)
            offset = (0, 7 if wiring == "post" else -7)
            axes.annotate(
                str(depth), (depth, values[-1]), offset, textcoords="offset points", ha="center", va="center",
                color=COLOURS[wiring], bbox={"color": PAPER, "pad": 0.4, "alpha": 0.8},
            )  # fmt: skip
    axes.set(xlabel="layer, from below", ylabel="gradient norm, last feed-forward weights")
    axes.set_title("at the first weights, by layer (numbers: depth)")
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.6))


def _draw_depths(axes: Any, gradients: dict[str, Any], depths: Sequence[int]) -> None:
    for wiring, of in gradients["norms"].items():
        values = [of[depth][-1] for depth in depths]
        label = f"{wiring}-norm: about depth$^{{{gradients['last_layer_exponent'][wiring]:.2f}}}$"
        axes.plot(depths, values, marker="o", markersize=4, color=COLOURS[wiring], label=label)
        power = 0.5 if wiring == "pre" else 0.0
        theory = [values[-1] * (depths[-1] / depth) ** power for depth in depths]
        name = "theory: 1 / sqrt(depth), and constant" if wiring == "post" else None
        axes.plot(depths, theory, color=QUIET, linestyle=":", label=name, zorder=1)
    axes.set(xscale="log", xlabel="depth in layers", ylabel="gradient norm, last feed-forward weights")
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.set_title("at the first weights, the last layer")
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.62))


def _draw_losses(axes: Any, runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    named: set[str] = set()
    for run in runs:
        name = f"{run['wiring']}-norm" + (f", warm-up of {run['warmup']} steps" if run["warmup"] else "")
        points = [(step, loss) for step, loss in run["curve"] if loss is not None]
        label = None if name in named else name
        axes.plot(*zip(*points, strict=True), color=COLOURS[run["name"]], linewidth=1.4, label=label)
        named.add(name)
    axes.set(xlabel="step", ylabel="held-out loss in nats per byte")
    axes.set_title(f"{options.depth} layers in training, rate {options.rate:g}")
    axes.legend(frameon=False)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48], help="depths of the gradient study")
    parser.add_argument("--gradient-dim", type=int, default=128, help="width of the gradient study")
    parser.add_argument("--seeds", type=int, default=3, help="first weights and batches that norms are averaged over")
    parser.add_argument("--depth", type=int, default=12, help="layers of the decoders that are trained")
    parser.add_argument("--dim", type=int, default=64, help="their width")
    parser.add_argument("--rate", type=float, default=1e-3, help="their learning rate")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks at the held-out loss")
    parser.add_argument("--warmup", type=int, default=150, help="steps of the run that has a warm-up")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--runs", type=int, default=1, help="training runs of each kind, with seeds 0, 1, ...")
    options = prepare(parser)
    if options.quick:
        options.depths, options.seeds, options.steps, options.every, options.runs = [6, 12], 1, 4, 2, 1
    corpus = open_corpus("stdlib")
    sampler = RandomWindows(corpus.splits["train"], options.rows, options.length, seed=0)
    exam = _batch(RandomWindows(corpus.splits["validation"], EXAM * options.rows, options.length, seed=0), 0)
    gradients = study_gradients(options, sampler)
    kinds = (("pre", 0), ("post", 0), ("post", options.warmup))
    cases = [Case(*kind, seed) for kind in kinds for seed in range(options.runs)]
    runs = [train(case, sampler, exam, options) for case in cases]
    show("training", ("run", "seed", "loss"), [[run["name"], run["seed"], run["loss"]] for run in runs])
    names = ("gradient_dim", "seeds", "depth", "dim", "rate", "steps", "warmup", "rows", "length")
    settings = {name: getattr(options, name) for name in names} | {"data": corpus.identity, "heads": HEADS}
    save(options, "normalisation", {"settings": settings, "gradients": gradients, "training": runs})
    if not options.quick:
        draw(gradients, runs, options, (options.out or RESULTS / "normalisation.json").with_suffix(".png"))


if __name__ == "__main__":
    main()
