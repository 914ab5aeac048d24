"""Figures and tables of the chapter on sparse patterns."""

import json
from pathlib import Path

import torch

from kinformer import nn

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def _allowed(config, length, head=0):
    """The pairs [queries, keys] that a pattern allows a head in a text of some length."""
    place = torch.arange(length)
    return config.build().sized(length).at(head).allowed(place[:, None], place)


def _panels(figure, rows, panels):
    for axes, (title, pairs) in zip(figure.subplots(rows, len(panels) // rows).flat, panels.items(), strict=True):
        axes.imshow(pairs, cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
        axes.set_title(f"{title}\n{pairs.float().mean():.0%} of all pairs", fontsize="medium")
        axes.set(xticks=[], yticks=[])


def causal(figure):
    """Patterns of decoders on 64 tokens."""
    figure.set_size_inches(7, 5)
    image = nn.Image2DPattern(height=8, width=8, block_height=4, block_width=4, flange_height=2, flange_width=2)
    patterns = {
        "window of 8": nn.LocalPattern(window=8),
        "4 sinks and a window of 8": nn.SinksPattern(count=4, window=8),
        "strided, l = 8": nn.StridedPattern(stride=8),
        "fixed, l = 8, c = 2": nn.FixedPattern(segment=8, summary=2),
        "image 1D, blocks of 8": nn.Image1DPattern(block=8),
        "image 2D, 4 x 4 in 8 x 8": image,
    }
    _panels(figure, 2, {title: _allowed(pattern, 64) for title, pattern in patterns.items()})


def encoders(figure):
    """Patterns of encoders on 64 tokens."""
    window, tokens = nn.WindowPattern(window=4), nn.GlobalTokensPattern(count=3)
    patterns = {
        "Longformer": nn.UnionPattern(patterns=(window, tokens)),
        "dilated by 4": nn.WindowPattern(window=4, dilation=4),
        "Big Bird": nn.BigBirdPattern(block=4, random=1),
        "BlockBERT, shift 1": nn.BlockwisePattern(block=16, permutations=((1, 2, 3, 0),)),
    }
    figure.set_size_inches(7, 2.4)
    _panels(figure, 1, {title: _allowed(pattern, 64) for title, pattern in patterns.items()})


def reach(figure):
    """The share of earlier tokens that can influence a token after some layers."""
    length, layers = 256, range(1, 9)
    patterns = {
        "window of 32": nn.LocalPattern(window=32),
        "dilated window, 32 x 4": nn.DilatedPattern(window=32, dilation=4),
        "strided, l = 16": nn.StridedPattern(stride=16),
        "fixed, l = 16, c = 2": nn.FixedPattern(segment=16, summary=2),
    }
    axes = figure.subplots()
    for (title, pattern), style in zip(patterns.items(), ("o-", "s--", "^-.", "v:"), strict=True):
        pairs = _allowed(pattern, length).float()
        reached, shares = torch.eye(length), []
        for _ in layers:
            reached = (reached @ pairs > 0).float()
            shares.append(reached.sum().item() / (length * (length + 1) / 2))
        axes.plot(layers, shares, style, label=f"{title}: {pairs.sum(1).mean():.0f} keys a token")
    axes.set(xlabel="layers", ylabel="share of earlier tokens", title="256 tokens", ylim=(0, 1.05))
    axes.legend()


def tiles(figure):
    """The pairs of patterns by length, and how many the kernels compute for each pair."""
    left, right = figure.subplots(1, 2, width_ratios=[1, 0.8])
    lengths = torch.logspace(10, 20, 40, base=2)
    left.plot(lengths, lengths**2 / 2, label="causal")
    left.plot(lengths, 2 * lengths**1.5, "-.", label="strided, l = √T")
    left.plot(lengths, 256 * lengths, "--", label="window of 256")
    left.set(xscale="log", yscale="log", xlabel="tokens T", title="pairs of a head")
    left.legend()
    counted = json.loads((RESULTS / "sparse.json").read_text())["pairs"]
    names = {
        "causal": "causal",
        "window 256": "window",
        "strided 128": "strided",
        "fixed 128, c = 8": "fixed",
        "window 2 x 128 and 16 global": "Longformer",
        "Big Bird (causal): window, global, random": "Big Bird",
        "image 2D, 16 x 16 and flanges of 8": "image 2D",
    }
    ratios = [counted[name]["computed"] / counted[name]["attended"] for name in names]
    right.barh(list(names.values())[::-1], ratios[::-1], height=0.6)
    right.axvline(1, color="grey", linestyle=":")
    right.set(title="computed for each pair", xlim=(0, 2))


def speed():
    """A causal window and two patterns beside dense attention."""
    milliseconds = json.loads((RESULTS / "sparse.json").read_text())["milliseconds"]
    rows = (
        ("window of 256", "window", "window"),
        ("window of 256, local-attention", "window", "local-attention"),
        ("window of 256, folded into masked SDPA", "window", "fold into SDPA"),
        ("strided, l = 128", "patterns", "strided"),
        ("fixed, l = 128, c = 8", "patterns", "fixed"),
        ("dense causal SDPA", "window", "dense SDPA"),
    )
    lines = ["| 4,096 tokens, 8 heads of 64 | ms, forward and backward | of dense |", "| --- | ---: | ---: |"]
    for label, group, name in rows:
        value, dense = milliseconds[group][name], milliseconds[group]["dense SDPA"]
        lines.append(f"| {label} | {value:.0f} | {value / dense:.2f} |")
    return "\n".join(lines)


def documents():
    """Attention of encoders at 4,096 tokens."""
    results = json.loads((RESULTS / "encoders.json").read_text())["results"]
    lines = [
        "| 4,096 tokens, width 512 | attention, ms | in transformers | layer, ms |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in ("longformer", "big-bird", "bert"):
        attention, layer = (results[name][part]["milliseconds"] for part in ("attention", "layer"))
        values = (attention["kinformer"], attention["transformers"], layer["kinformer"])
        lines.append(f"| `{name}` | {' | '.join(f'{value:,.0f}' for value in values)} |")
    return "\n".join(lines)


FIGURES = {"causal": causal, "encoders": encoders, "reach": reach, "tiles": tiles}
TABLES = {"speed": speed, "documents": documents}
