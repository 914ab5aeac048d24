"""Figures and tables of the chapter on attention and the plain Transformer."""

import json
from pathlib import Path

import torch

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def scale(figure):
    """The largest weight of a softmax over 64 random keys, and the size of its gradient, by the width of a head."""
    widths = [4, 8, 16, 32, 64, 128, 256, 512]
    left, right = figure.subplots(1, 2)
    for name, power, style in (("q · k", 0, "--"), ("q · k / √d", -0.5, "-")):
        largest, slopes = [], []
        for width in widths:
            q, k = torch.randn(256, 1, width), torch.randn(256, 64, width)
            weights = ((q @ k.mT)[:, 0] * width**power).softmax(-1)
            largest.append(weights.amax(-1).mean().item())
            slopes.append((weights * (1 - weights)).sum(-1).mean().item())
        left.plot(widths, largest, style, marker=".", label=name)
        right.plot(widths, slopes, style, marker=".", label=name)
    left.set(xscale="log", ylim=(0, 1), xlabel="width d of a head", title="largest weight of 64 keys")
    right.set(xscale="log", ylim=(0, 1), xlabel="width d of a head", title="sum of the softmax's slopes p (1 - p)")
    left.legend()


def masks(figure):
    """Which keys a query sees in the three uses of attention."""
    time, source = torch.arange(12), torch.arange(8)
    panels = {
        "encoder: all pairs": torch.ones(12, 12),
        "decoder: the past": time[:, None] >= time,
        "cross: the source": torch.ones(12, len(source)),
    }
    for axes, (title, visible) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axes.imshow(visible, cmap="Blues", vmin=0, vmax=1.6)
        axes.set(title=title, xlabel="key", ylabel="query")
        axes.set_xticks(torch.arange(visible.shape[1]) - 0.5, labels=[])
        axes.set_yticks(torch.arange(12) - 0.5, labels=[])
        axes.grid(color="white", linewidth=1)
        axes.tick_params(length=0)


def norms(figure):
    """Sizes of the gradients by layer at the first step, and training without a warm-up; from the result file."""
    result = json.loads((RESULTS / "normalisation.json").read_text())
    left, right = figure.subplots(1, 2)
    for wiring, style in (("pre", "-"), ("post", "--")):
        values = result["gradients"]["norms"][wiring]["24"]
        left.plot(range(1, len(values) + 1), values, style, label=f"{wiring}-norm")
    left.set(xlabel="layer of 24", ylabel="size of the gradient", title="before the first step", ylim=(0, None))
    for run in result["training"]:
        label = f"{run['wiring']}-norm, {'warm-up' if run['warmup'] else 'no warm-up'}"
        style = "-" if run["wiring"] == "pre" else ":" if run["warmup"] else "--"
        right.plot(*zip(*run["curve"], strict=True), style, label=label)
    right.set(xlabel="step", ylabel="nats per byte", title="12 layers, learning rate 1e-3")
    left.legend()
    right.legend()


def costs(figure):
    """Operations of a layer by the length of a text, and numbers in its cache."""
    dim, lengths = 512, torch.logspace(7, 16, 50, base=2)
    left, right = figure.subplots(1, 2)
    for name, values, style in (
        ("feed-forward", 16 * dim**2 + 0 * lengths, "-."),
        ("projections", 8 * dim**2 + 0 * lengths, "--"),
        ("attention", 2 * dim * lengths, "-"),
    ):
        left.plot(lengths, values / 1e6, style, label=name)
    left.set(xscale="log", yscale="log", xlabel="tokens", title="million operations a token, width 512")
    left.legend()
    right.plot(lengths, 2 * dim * lengths * 2 / 2**20, label="keys and values")
    right.axhline(12 * dim**2 * 2 / 2**20, color="grey", linestyle=":", label="weights of the layer")
    right.set(xscale="log", yscale="log", xlabel="tokens", title="MiB of a layer in bfloat16")
    right.legend()


def members():
    """The plain members of the comparison at equal minutes."""
    result = json.loads((RESULTS / "causal_members.json").read_text())
    found = {each["name"]: each for each in result["members"]}
    lines = ["| member | bits per byte | steps | ms a step |", "| --- | ---: | ---: | ---: |"]
    for name in ("primer", "macaron", "gpt", "post-ln", "deep-char"):
        bits = found[name]["bits_per_byte"].values()
        mean, milliseconds = sum(bits) / len(bits), 1000 * found[name]["seconds_per_step"]
        lines.append(f"| `{name}` | {mean:.3f} | {found[name]['steps']} | {milliseconds:.0f} |")
    return "\n".join(lines)


FIGURES = {"scale": scale, "masks": masks, "norms": norms, "costs": costs}
TABLES = {"members": members}
