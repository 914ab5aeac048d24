"""Figures and tables of the chapter on adaptive computation."""

import json
import math
from pathlib import Path

import torch

from kinformer import nn
from kinformer.parts.scores import log_mask

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def _read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@torch.no_grad()
def halting(figure):
    """The weights of the steps of a token whose probability of halting is constant, and measured steps by place."""
    left, right = figure.subplots(1, 2)
    x = torch.zeros(1, 1, 8)
    for number, chance in enumerate((0.7, 0.35, 0.2)):
        act = nn.ACT(bias=math.log(chance / (1 - chance))).build(8)
        progress, halted = act.begin(x, None), [0.0]
        while progress.running.any():
            progress = act(progress, x, x).progress
            halted.append(progress.halted.item())
        weights = torch.tensor(halted).diff()
        steps = torch.arange(1, len(weights) + 1) + 0.27 * (number - 1)
        left.bar(steps, weights, width=0.25, label=f"p = {chance}")
    left.set(xlabel="step", ylabel="weight", title="weights of the steps", xticks=range(1, 6))
    left.legend()
    for name, label, style in (("ponder_copy", "copying", "-"), ("ponder", "reversal", "--")):
        for number, run in enumerate(_read(name)["runs"]["act"]):
            (ten,) = (each for each in run["by_digits"] if each["digits"] == 10)
            points = [(each["place"], each["ponder_steps"]) for each in ten["by_place"]]
            colour = "C0" if name == "ponder_copy" else "C1"
            right.plot(*zip(*points, strict=True), style, color=colour, label=None if number else label)
    right.set(xlabel="place in the answer", ylabel="steps", title="steps that tokens took, three seeds", ylim=(1, 6))
    right.legend()


def exits(figure):
    """Bits per byte by layers per token: one exit for all tokens, and a learnt exit for each."""
    axes = figure.subplots()
    for name, colour in (("tied", "C1"), ("separate", "C0")):
        run = _read("depth")["runs"][name]
        for key, style, label in (("exits", "o:", "one exit for all tokens"), ("rule", ".-", "a learnt exit by token")):
            points = [(each["layers_per_token"], each["bits_per_byte"]) for each in run[key]]
            heads = "one head" if name == "tied" else "a head for each exit"
            axes.plot(*zip(*points, strict=True), style, color=colour, label=f"{label}, {heads}")
    axes.set(xlabel="layers per token", ylabel="bits per byte")
    axes.legend()


def calibration(figure):
    """The measured loss of each tested threshold."""
    axes = figure.subplots()
    for name, style in (("textual", "o-"), ("risk", ".--")):
        tested = _read("calm")["calibration"][name]["tested"]
        axes.plot([1 - each["threshold"] for each in tested], [each["risk"] for each in tested], style, label=name)
    axes.axhline(0.05, color="grey", linestyle=":")
    axes.set(
        xscale="log", ylim=(0, 0.06), xlabel="1 - threshold (cautious on the left)", ylabel="mean loss, 1,000 samples"
    )
    axes.legend(title="consistency", loc="lower right")


def spans(figure):
    """The soft mask of a span, and the spans that heads learnt."""
    left, right = figure.subplots(1, 2)
    for z, style in ((0.0, "-"), (30.0, "--"), (80.0, "-.")):
        left.plot(range(1, 181), log_mask(torch.tensor(z), torch.arange(180), 32).exp(), style, label=f"z = {z:g}")
    left.set(xlabel="distance", title="mask, ramp R = 32")
    left.legend()
    learnt = _read("spans")["spans"]
    for layer, heads in enumerate(learnt, 1):
        right.plot([layer] * len(heads), heads, "o", color="C0", alpha=0.6)
    right.set(xlabel="layer", ylabel="span z in tokens", title="four heads a layer; 1,024 allowed", ylim=(-2, None))


def speed():
    """Speed and quality of early exits, of all three choices of a threshold."""
    result = _read("calm")
    lines = [
        "| | layers per token | speed | bits per byte | loss on unseen text |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in ("all layers", "textual", "risk"):
        each, unseen = result["generation"][name], result["unseen"].get(name)
        loss = "" if unseen is None else f"{unseen['loss']:.1%}".replace("%", " %")
        lines.append(
            f"| {name if name == 'all layers' else name + ' consistency'} | {each['layers_per_token']:.1f} | "
            f"{each['speedup']:.2f} | {result['bits_per_byte'][name]:.2f} | "
            f"{loss} |"
        )
    return "\n".join(lines)


def memory():
    """Learnt spans beside full spans."""
    result = _read("spans")
    lines = ["| | learnt spans | full spans |", "| --- | ---: | ---: |"]
    rows = (
        ("bits per byte", "bits_per_byte", 1, ".3f"),
        ("state, MB", "state_bytes", 1e-6, ".2f"),
        ("encoding, ms", "read_seconds", 1e3, ".0f"),
        ("training step, ms", "step_seconds", 1e3, ".0f"),
    )
    for label, key, scale, form in rows:
        values = [f"{result[key][way] * scale:{form}}" for way in ("adaptive", "full")]
        lines.append(f"| {label} | {values[0]} | {values[1]} |")
    return "\n".join(lines)


FIGURES = {"halting": halting, "exits": exits, "calibration": calibration, "spans": spans}
TABLES = {"speed": speed, "memory": memory}
