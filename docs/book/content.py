"""Figures and tables of the chapter on choosing by content."""

import json
import math
from pathlib import Path

import torch

import kinformer
from kinformer.mixers.buckets import Hashes
from kinformer.mixers.sinkhorn import sinkhorn

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def _read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def hashing(figure):
    """The chance that two vectors share a bucket, by their angle."""
    axes = figure.subplots()
    angle = torch.linspace(0, math.pi, 60)
    pairs = torch.linalg.qr(torch.randn(500, 16, 2))[0]  # two orthogonal directions each
    turned = pairs[..., :1] * angle.cos() + pairs[..., 1:] * angle.sin()
    buckets = Hashes(1, 16, 8, 8)(torch.stack([pairs[..., :1].expand_as(turned), turned]).mT.reshape(2, 1, -1, 16))
    same = (buckets[0] == buckets[1]).view(8, 500, 60)
    for rounds, style in ((1, "-"), (2, "--"), (4, "-."), (8, ":")):
        axes.plot(angle.rad2deg(), same[:rounds].any(0).float().mean(0), style, label=f"rounds: {rounds}")
    axes.axhline(1 / 8, color="grey", linewidth=0.5)
    axes.set(xlabel="angle in degrees", ylabel="chance to share a bucket", xticks=range(0, 181, 30), ylim=(0, 1.05))
    axes.legend()


def choices(figure):
    """The tokens that each token sees in three layers: where the gradient of its output is not zero."""
    topics = torch.tensor([0, 1, 2, 0, 2, 1, 0, 3, 1, 2, 3, 0]).repeat_interleave(8)
    x = (torch.randn(4, 64)[topics] + 0.5 * torch.randn(len(topics), 64))[None]
    layers = {
        "reformer": {"num_heads": 1, "num_buckets": 4, "chunk_size": 16, "rounds": 1},
        "routing": {"num_heads": 1, "local_heads": 0, "num_clusters": 4, "window": 32},
        "moba": {"num_heads": 1, "block": 8, "count": 4},
    }
    axes = figure.subplots(1, 3)
    for panel, (name, sizes) in zip(axes, layers.items(), strict=True):
        layer = kinformer.layer(name, 64, **sizes)
        rows = x.expand(len(topics), -1, -1).clone().requires_grad_()  # row i for the output of token i
        layer(rows).diagonal().sum().backward()
        panel.imshow(rows.grad.abs().sum(-1) > 0, cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
        panel.set(title=name, xticks=[], yticks=[])
        for change in range(8, len(topics), 8):
            panel.axvline(change - 0.5, color="grey", linewidth=0.2)
    axes[0].set(xlabel="key", ylabel="query")


def balance(figure):
    """A matrix of scores on its way to a permutation."""
    logits = torch.randn(8, 8)
    panels = {
        "softmax of rows": logits.softmax(-1),
        "1 iteration": sinkhorn(logits, 1),
        "8 iterations": sinkhorn(logits, 8),
        "temperature 0.1": sinkhorn(logits / 0.1, 200),
    }
    figure.set_size_inches(7, 2.4)
    for axes, (title, weights) in zip(figure.subplots(1, 4), panels.items(), strict=True):
        axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        error = (weights.sum(0) - 1).abs().max() + (weights.sum(1) - 1).abs().max()
        axes.set_title(f"{title}\nsums off by {error:.2f}", fontsize="medium")


def growth(figure):
    """Seconds of a step by length."""
    left, right = figure.subplots(1, 2)
    for (name, each), style in zip(_read("hashing")["growth"].items(), ("o-", "s--", "k:"), strict=True):
        left.plot(each["lengths"], each["processor_seconds"], style, label=f"{name}: length^{each['slope']:.2f}")
    left.set(xscale="log", yscale="log", xlabel="tokens", title="a training step, processor seconds")
    left.legend(loc="lower right", fontsize="small")
    training = _read("chosen_blocks")["training"]
    names = ("moba, 8 blocks of 64", "moba, 4 blocks of 256", "softmax, 4 heads of keys")
    for name, style in zip(names, ("o-", "s--", "k:"), strict=True):
        points = [(int(length), each[name] / 1000) for length, each in training.items()]
        right.plot(*zip(*points, strict=True), style, label=name)
    right.set(xscale="log", yscale="log", xlabel="tokens", title="a layer, both passes, seconds")
    right.legend(loc="lower right", fontsize="small")


def recall():
    """How much of a text members recall."""
    names = {
        "gpt": "full attention",
        "nsa": "NSA",
        "moba": "MoBA",
        "reformer": "Reformer",
        "local": "a window of 16",
        "routing": "Routing, 8 clusters",
    }
    measured = {each["member"]: each for each in _read("mqar")["summary"] + _read("mqar_variants")["summary"]}
    names |= {
        "routing, two clusters, windows of 32": "Routing, 2 clusters, one seed",
        "routing, one cluster": "Routing, 1 cluster, one seed",
    }
    lines = ["| | right, least and most | steps |", "| --- | ---: | ---: |"]
    for name, label in names.items():
        each = measured[name]
        least, most = (f"{100 * each[key]:.0f}" for key in ("least", "most"))
        lines.append(f"| {label} | {least if least == most else f'{least} to {most}'} % | {each['steps']:,} |")
    return "\n".join(lines)


def tokens():
    """The time of one token after a past, in a layer."""
    measured = _read("chosen_blocks")["tokens"]
    lengths = ("1024", "4096", "8192", "32768")
    lines = [f"| ms a token after | {' | '.join(f'{int(each):,}' for each in lengths)} |", "| --- |" + " ---: |" * 4]
    for name in ("softmax, 4 heads of keys", "moba, 4 blocks of 256", "softmax, 1 head of keys", "nsa"):
        lines.append(f"| {name} | {' | '.join(f'{measured[each][name]:.1f}' for each in lengths)} |")
    return "\n".join(lines)


FIGURES = {"hashing": hashing, "choices": choices, "balance": balance, "growth": growth}
TABLES = {"recall": recall, "tokens": tokens}
