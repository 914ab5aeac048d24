"""Figures and tables of the chapter on the layers of today's models."""

import json
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import torch
from generator.text import table

import kinformer
from kinformer.nn import states

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STUDENT = 4.303  # the 97.5 % quantile of Student's t with two degrees of freedom
NAMES = {
    "plain": "plain (`rope`)",
    "parallel": "parallel layers",
    "local": "a window of 64",
    "head_gate": "output gate by head",
    "sink_logit": "sink logit",
    "value_residual": "value residual",
    "qk_norm": "QK-norm",
    "capped": "capped scores",
    "exclusive": "exclusive values (XSA)",
    "element_gate": "output gate by element",
    "mla": "`mla`",
    "gated-deltanet": "`gated-deltanet`",
    "moba": "`moba`",
    "differential": "`differential`",
    "nsa": "`nsa`",
}


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def cache(figure):
    axes = figure.subplots()
    lengths = [10, 100, 1000]
    shown = {
        "8 heads of keys": ("rope", {}),
        "2 heads of keys": ("rope", {"num_kv_heads": 2}),
        "1 head of keys": ("rope", {"num_kv_heads": 1}),
        "latent of 64": ("mla", {"latent_dim": 64}),
        "gated-deltanet": ("gated-deltanet", {}),
    }
    for label, (name, settings) in shown.items():
        layer = kinformer.layer(name, dim=256, num_heads=8, **settings)
        with torch.no_grad():
            sizes = [
                states.nbytes(layer(torch.zeros(1, length, 256), return_state=True)[1]) / 1024 for length in lengths
            ]
        axes.loglog(lengths, sizes, marker="o", label=label)
    axes.set(xlabel="tokens", ylabel="KiB of state, one layer of 256")
    axes.legend(fontsize="small")


def latent(figure):
    data = result("latent")["steps"]
    axes = figure.subplots()
    for name in data["1024"]:
        if "transformers" not in name:
            axes.loglog([int(n) for n in data], [row[name]["milliseconds"] for row in data.values()], "o-", label=name)
    axes.set(xlabel="tokens before", ylabel="ms a token")
    axes.legend(fontsize="small")


def scores(figure):
    left, right = figure.subplots(1, 2)
    s = torch.linspace(-150, 150, 200)
    left.plot(s, s, label="scaled dot product")
    left.plot(s, 50 * (s / 50).tanh(), label="capped at 50")
    for bound, label in ((8, "bounds of QK-norm, heads of 64"), (-8, None)):
        left.axhline(bound, color="C2", linestyle="--", label=label)
    left.set(xlabel="score without a bound", ylabel="score")
    left.legend(fontsize="small")
    scores = torch.linspace(-4, 4, 100)
    for z in (-8, 0, 2):
        right.plot(scores, 8 * scores.exp() / (8 * scores.exp() + torch.tensor(float(z)).exp()), label=f"z = {z}")
    right.set(xlabel="score of each of 8 keys", ylabel="sum of weights")
    right.legend(fontsize="small")


def differential(figure):
    q, k = torch.randn(2, 40, 16).unbind()
    q, k, noise = q * 0.3, k * 0.3, torch.randn(40, 40) * 0.3
    needle = torch.zeros(40, 40)
    needle[:, 7] = 2.5
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    first, second = ((q @ k.T + noise + add).masked_fill(future, -torch.inf).softmax(-1) for add in (needle, 0))
    panels = figure.subplots(1, 3)
    shown = ("first map", first), ("second map", second), ("difference", first - 0.8 * second)
    for axes, (title, weights) in zip(panels, shown):
        image = axes.imshow(weights, vmin=-0.3, vmax=0.3, cmap="RdBu")
        axes.set(title=title, xlabel="key", ylabel="query")
    figure.colorbar(image, ax=list(panels), label="weight")


def forget(figure):
    f = torch.full((60,), 0.97)
    f[25] = f[45] = 0.1
    c = f.log().cumsum(0)
    slope = torch.arange(60.0) * torch.tensor(0.97).log()
    left, right = figure.subplots(1, 2)
    for axes, sums, title in ((left, slope, "ALiBi: a constant f"), (right, c, "forget gates")):
        bias = (sums[:, None] - sums[None]).masked_fill(torch.ones(60, 60, dtype=torch.bool).triu(1), torch.nan)
        image = axes.imshow(bias, vmin=-5, vmax=0)
        axes.set(title=title, xlabel="key", ylabel="query")
    figure.colorbar(image, ax=[left, right], label="added to the score")


def blocks(figure):
    settings = {"moba": {"block": 8, "count": 3}, "nsa": {"block": 8, "count": 4, "window": 8}}
    for axes, (name, more) in zip(figure.subplots(1, 2), settings.items()):
        layer = kinformer.layer(name, dim=16, num_heads=2, num_kv_heads=1, **more)
        for weight in layer.parameters():
            weight.data *= 2
        x = torch.randn(1, 48, 16, requires_grad=True)
        y = layer(x).sum(-1)[0]
        reach = [torch.autograd.grad(each, x, retain_graph=True)[0][0].norm(dim=-1) for each in y]
        axes.imshow(torch.stack(reach).log10(), vmin=-2.5, vmax=0.5)
        axes.set(title=name, xlabel="token that is read", ylabel="token that reads")


def hybrid(figure):
    axes = figure.subplots()
    sizes = result("modern_lengths")["states"]
    lengths = [int(n) for n in sizes]
    softmax, delta = ([row[name] / 2**20 for row in sizes.values()] for name in ("softmax", "gated-deltanet"))
    shown = {
        "softmax in all 12 layers": [12 * s for s in softmax],
        "3 of 12 softmax": [3 * s + 9 * d for s, d in zip(softmax, delta)],
        "gated-deltanet in all 12": [12 * d for d in delta],
    }
    for label, values in shown.items():
        axes.loglog(lengths, values, marker="o", label=label)
    axes.set(xlabel="tokens", ylabel="MiB of state")
    axes.legend(fontsize="small")


def experts(figure):
    times = result("experts")["times"]
    panels = figure.subplots(1, 3)
    titles = {"training_4096": "training, ms", "step": "a token, ms", "weights": "weights, millions"}
    for axes, (key, title) in zip(panels, titles.items()):
        names = [name for name in times if "transformers" not in name]
        values = [times[name][key] / (1e6 if key == "weights" else 1) for name in names]
        axes.bar(["2 of 8", "same\nwork", "same\nweights"], values, color=["C0", "C1", "C2"])
        axes.set_title(title)


def parts():
    members = {each["name"]: each for each in result("modern_parts")["members"]}
    lengths = result("modern_lengths")["training"]["32768"]
    plain = members["plain"]["bits_per_byte"]
    rows = []
    for name, shown in NAMES.items():
        bits = members[name]["bits_per_byte"]
        gaps = [bits[seed] - plain[seed] for seed in plain]
        beside = f"{mean(gaps):+.3f} ± {STUDENT * stdev(gaps) / sqrt(3):.3f}" if name != "plain" else ""
        key = "softmax" if name == "plain" else name
        cost = f"{lengths[key] / lengths['softmax']:.2f}" if key in lengths else ""
        rows.append((shown, f"{mean(bits.values()):.3f}", beside, str(members[name]["steps"]), cost))
    return table(("model", "bits per byte", "beside plain", "steps", "time, 32,768 tokens"), rows, (1, 2, 3, 4))


FIGURES = {
    "cache": cache,
    "latent": latent,
    "scores": scores,
    "differential": differential,
    "forget": forget,
    "blocks": blocks,
    "hybrid": hybrid,
    "experts": experts,
}
TABLES = {"parts": parts}
