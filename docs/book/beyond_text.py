"""Figures and tables of the chapter on images, speech and acting."""

import json
from pathlib import Path
from statistics import mean

import torch
from generator.text import table

from kinformer.blocks.residual import Gated, LayerNorm
from kinformer.mixers.encoders import apart, joined
from kinformer.nn import Image1DPattern, Image2DPattern

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SPEECH = {
    "speech-lstm": "LSTM in both directions",
    "speech-lsh": "hashed attention",
    "speech-softmax": "softmax attention",
    "speech-linear": "linear attention",
}


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def pixels(figure):
    side, block = 24, 6
    places = torch.arange(side * side).view(side, side)
    tiles = places.view(side // block, block, side // block, block).transpose(1, 2).flatten()
    one = Image1DPattern(block=2 * side).build()
    two = Image2DPattern(
        height=side, width=side, block_height=block, block_width=block, flange_height=3, flange_width=3
    ).build()
    cell = 15 * side + 10
    rank = torch.empty_like(tiles)
    rank[tiles] = torch.arange(side * side)
    shown = {
        "all earlier values": places <= cell,
        "1D: blocks of two rows": one.allowed(torch.tensor([cell]), torch.arange(side * side)).view(side, side),
        "2D: a block and its flanges": two.allowed(rank[cell][None], rank).view(side, side),
    }
    for axes, (title, seen) in zip(figure.subplots(1, 3), shown.items()):
        image = seen.float()
        image.view(-1)[cell] = 2
        axes.imshow(image)
        axes.set(title=title, xticks=[], yticks=[])


def drawing(figure):
    found = result("image_generation_mnist")["contestants"]
    names = ["linear", "softmax, cached", "LSH, 1 round", "LSH, 4 rounds", "softmax, recomputed"]
    axes = figure.subplots()
    bars = axes.barh(names[::-1], [found[name]["images_per_second"] for name in names[::-1]])
    axes.bar_label(bars, fmt="%.3g")
    axes.set(xscale="log", xlabel="images of MNIST a second, one thread", xlim=(0.01, 30))


def teacher(figure):
    runs = result("distillation")["runs"]
    names = ["convformer", "vit", "deit, soft", "deit, hard"]
    axes = figure.subplots()
    for place, name in enumerate(names):
        values = [run["accuracy"] for run in runs if run["name"] == name]
        axes.bar(place, mean(values), color=f"C{place}")
        axes.plot([place] * len(values), values, "k.", alpha=0.6)
    axes.set(xticks=range(4), xticklabels=names, ylabel="right test images", ylim=(0, 1))


def windows(figure):
    side, grid, shift = 4, (12, 12), 2
    for axes, by in zip(figure.subplots(1, 3), (0, shift, None)):
        if by is None:
            mask = apart(grid, side, shift, torch.device("cpu"))
            axes.imshow(mask[-1, 0].float())
            axes.set(title="pairs in the last window", xlabel="patch", ylabel="patch")
        else:
            number = torch.arange(9).view(9, 1, 1).expand(9, side * side, 1)
            image = joined(number.contiguous(), side, grid).roll((by, by), (1, 2))
            axes.imshow(image[0, ..., 0], cmap="tab10", vmax=9)
            axes.set(title=f"windows, shifted by {by}", xticks=[], yticks=[])


def pyramid(figure):
    accuracy = result("pyramid")["accuracy"]
    axes = figure.subplots()
    for offset, (key, label) in enumerate((("frozen", "HIPT, levels below frozen"), ("mean", "mean of the regions"))):
        values = [accuracy[key][labels] for labels in ("64 labels", "256 labels")]
        axes.bar([x + 0.4 * offset for x in range(2)], [mean(each) for each in values], 0.4, label=label)
        for x, each in enumerate(values):
            axes.plot([x + 0.4 * offset] * len(each), each, "k.", alpha=0.6)
    axes.axhline(0.25, color="grey", linestyle=":", label="chance")
    axes.set(xticks=[0.2, 1.2], xticklabels=["64 labels", "256 labels"], ylabel="right test images", ylim=(0, 1))
    axes.legend(fontsize="small")


def alignment(figure):
    frames, target = 30, torch.tensor([[1, 2, 2]])
    logits = torch.zeros(frames, 1, 3)
    for symbol, begin, end in ((1, 4, 9), (2, 13, 16), (2, 21, 25)):
        logits[begin:end, 0, symbol] = 2.5
    logits.requires_grad_()
    nats = torch.nn.functional.ctc_loss(
        logits.log_softmax(-1), target, torch.tensor([frames]), torch.tensor([3]), reduction="sum"
    )
    (gradient,) = torch.autograd.grad(nats, logits)
    share = (logits.softmax(-1) - gradient)[:, 0].detach()
    axes = figure.subplots()
    axes.imshow(share.T, aspect="auto", vmin=0, vmax=1)
    axes.set(xlabel="frame", yticks=range(3), yticklabels=["blank", "one", "two"])


def returns(figure):
    panels = figure.subplots(1, 2)
    for axes, env in zip(panels, ("CartPole-v1", "Pendulum-v1")):
        runs = [run for run in result("returns")["runs"] if run["env"] == env]
        for run in runs:
            asked = [each["target"] for each in run["returns"]]
            axes.plot(asked, [each["mean"] for each in run["returns"]], marker="o", label=f"seed {run['seed']}")
        axes.plot(asked, asked, ":", color="grey")
        axes.set(title=env, xlabel="return asked for")
    panels[0].set_ylabel("mean return")
    panels[0].legend(fontsize="small")


def gates(figure):
    x, y = torch.randn(256, 32), torch.randn(256, 32)
    biases = torch.linspace(-2, 6, 17)
    moved = []
    for bias in biases.tolist():
        torch.manual_seed(0)
        gate = Gated.Config(bias=bias).build(32, LayerNorm(), 0.0)
        with torch.no_grad():
            moved.append(((gate.leave(x, y) - x).norm() / x.norm()).item())
    axes = figure.subplots()
    axes.plot(biases, moved, marker="o")
    axes.axvline(2, color="grey", linestyle=":")
    axes.set(xlabel="bias of the gate", ylabel="change of the stream", ylim=(0, None))


def speech():
    data = result("speech")
    errors = {each["member"]: each for each in data["errors"]}
    rows = [
        (
            f"[{label}](../members/{name}.md)",
            f"{errors[name]['error_rate']:.1%}",
            *(f"{1000 * each['members'][name]['step']:.0f}" for each in data["times"]),
        )
        for name, label in SPEECH.items()
    ]
    frames = [f"{each['frames']:,} frames, ms" for each in data["times"]]
    return table(("member", "digits wrong", *frames), rows, range(1, 5))


FIGURES = {
    "pixels": pixels,
    "drawing": drawing,
    "teacher": teacher,
    "windows": windows,
    "pyramid": pyramid,
    "alignment": alignment,
    "returns": returns,
    "gates": gates,
}
TABLES = {"speech": speech}
