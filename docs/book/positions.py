"""Figures and tables of the chapter on positions."""

import json
from pathlib import Path

import torch

from kinformer import nn
from kinformer.parts.relative_positions import buckets, frequencies

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = {
    "sinusoidal": "sinusoids",
    "rope": "RoPE",
    "rope-yarn": "RoPE, YaRN",
    "t5": "T5",
    "da": "distance-aware",
    "xl": "Transformer-XL",
    "alibi": "ALiBi",
}


def waves(figure):
    """The table of sinusoids, and the products of one row with all others."""
    table = nn.SinusoidalPositions().build(64).embed(torch.arange(128))
    left, right = figure.subplots(1, 2)
    left.imshow(table.T, cmap="RdBu", aspect="auto", vmin=-1, vmax=1)
    left.set(xlabel="position", ylabel="feature", title="sines and cosines")
    for position in (30, 80):
        right.plot(table @ table[position] / 32, label=f"position {position}")
    right.set(xlabel="position of the other token", title="products of two rows", ylim=(0, 1.05))
    right.legend(loc="lower right")


def biases(figure):
    """What is added to a score, or multiplies it, by distance."""
    distance = torch.arange(128)
    lines, steps, factors = figure.subplots(1, 3)
    alibi = nn.AlibiBias().build_heads(64, 4, 16).relative(0, 127).bias
    for head, style in enumerate(("-", "--", "-.", ":")):
        lines.plot(distance, alibi[head], style, label=f"head {head}")
    lines.set(title="ALiBi: a bias", xlabel="distance", ylim=(-12, 0.5))
    lines.legend()
    steps.step(distance, buckets(nn.T5Bias(), distance), where="post")
    steps.set(title="T5: a bucket", xlabel="distance", ylabel="bucket of 32")
    scaling = nn.DistanceAwareScaling().build_heads(64, 4, 16)
    for head, style in enumerate(("-", "--", "-.", ":")):
        factors.plot(distance, scaling.relative(0, 127).factor[head].detach(), style)
    factors.set(title="DA: a factor", xlabel="distance", ylim=(0, None))


def turns(figure):
    """The product of a rotated vector with itself by distance, and the rates under three ways of stretching."""
    left, right = figure.subplots(1, 2)
    rates = frequencies(nn.RotaryPositions(), 64)
    distance = torch.arange(257)
    for pair, style in ((4, ":"), (12, "--"), (20, "-.")):
        left.plot(distance, (distance * rates[pair]).cos(), style, linewidth=1, label=f"pair {pair}")
    left.plot(distance, (distance[:, None] * rates).cos().mean(-1), color="black", label="mean of 32")
    left.set(xlabel="distance", title="products of equal vectors")
    left.legend(loc="lower right", fontsize="small")
    for name, style in (("linear", ":"), ("ntk", "--"), ("yarn", "-")):
        config = nn.RotaryPositions(scaling=name, factor=8.0, original_length=None if name != "yarn" else 2048)
        right.plot(frequencies(config, 64) / rates, style, marker=".", label=name)
    right.set(xlabel="pair (0 turns fastest)", title="rate, of the trained rate", ylim=(0, 1.05))
    right.legend()


def lengths(figure):
    """Bits per byte of models trained at 128 tokens, by the length of the window; from the result file."""
    measured = json.loads((RESULTS / "extrapolation.json").read_text())["measured"]
    axes = figure.subplots()
    for (key, name), style in zip(NAMES.items(), ("-", "-", "--", "-.", ":", "--", "-"), strict=True):
        points = [(point["context"], point["bits_per_byte"]) for point in measured[key]["lengths"]]
        axes.plot(*zip(*points, strict=True), style, marker=".", label=name)
    axes.axvline(128, color="grey", linestyle=":")
    axes.set(xscale="log", xlabel="tokens in the window", ylabel="bits per byte")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def extrapolation():
    """Bits per byte of some of these windows."""
    measured = json.loads((RESULTS / "extrapolation.json").read_text())["measured"]
    contexts = (128, 256, 512, 2048, 8192)
    lines = [f"| position | {' | '.join(f'{context:,}' for context in contexts)} |", "| --- |" + " ---: |" * 5]
    for key, name in NAMES.items():
        bits = {point["context"]: point["bits_per_byte"] for point in measured[key]["lengths"]}
        lines.append(f"| {name} | {' | '.join(f'{bits[context]:.2f}' for context in contexts)} |")
    return "\n".join(lines)


FIGURES = {"waves": waves, "biases": biases, "turns": turns, "lengths": lengths}
TABLES = {"extrapolation": extrapolation}
