"""Figures and tables of the chapter on low rank and kernels."""

import json
from pathlib import Path

import torch
from generator.text import table
from torch.nn import functional as F

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = {
    "gpt": "softmax (gpt)",
    "gla": "GLA",
    "gated-deltanet": "Gated DeltaNet",
    "kda": "KDA",
    "linear-transformer": "Linear Transformer",
    "retnet": "RetNet",
}


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def rank(figure):
    errors = result("linformer_rank")["errors"]
    axes = figure.subplots()
    labels = {"best": "best matrices for this text", "mean": "means of neighbours", "fitted means": "fitted means"}
    for key, label in labels.items():
        points = [row for row in errors if row["rank"] < 256]
        axes.plot([row["rank"] for row in points], [row[key] for row in points], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="summaries of 256 tokens", ylabel="relative error", ylim=(0, 0.85))
    axes.legend()


def weights(figure):
    q, k = torch.randn(2, 32, 16).unbind()
    k[12] = 2 * q[28]
    future = torch.ones(32, 32, dtype=torch.bool).triu(1)
    sharp = (q @ k.T / 4).masked_fill(future, -torch.inf).softmax(-1)
    flat = ((F.elu(q) + 1) @ (F.elu(k) + 1).T).tril()
    flat = flat / flat.sum(-1, keepdim=True)
    left, right = figure.subplots(1, 2)
    for axes, shown, title in ((left, sharp, "softmax"), (right, flat, "elu + 1")):
        image = axes.imshow(shown, vmin=0, vmax=0.5)
        axes.set(title=title, xlabel="key", ylabel="query")
    figure.colorbar(image, ax=[left, right], label="weight")


def features(figure):
    rows = [row for row in result("approximation")["rows"] if row["orthogonal"]]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, spread in zip(panels, (0.5, 1.0)):
        for name in ("Performer, positive", "Performer, sin/cos", "RFA, sin/cos"):
            points = [row for row in rows if row["features_of"] == name and row["spread"] == spread]
            axes.loglog([row["features"] for row in points], [row["error"] for row in points], marker="o", label=name)
        axes.axhline(1, color="grey", linestyle=":")
        axes.set(title=f"standard deviation {spread:g}", xlabel="features")
    panels[0].set_ylabel("squared error")
    panels[0].legend(fontsize="small")


def capacity(figure):
    panels = figure.subplots(1, 2, sharey=True)
    runs = result("capacity")["results"]
    shown = {"elu": "elu + 1 (64)", "dpfp-1": "DPFP (128)", "dpfp-2": "DPFP (256)"}
    for axes, setting, title in zip(panels, ("capacity", "update"), ("every key once", "keys come again")):
        for colour, (key, label) in enumerate(shown.items()):
            for rule, style in (("sum", "-"), ("delta", "--")):
                points = [r for r in runs if (r["setting"], r["features"], r["rule"]) == (setting, key, rule)]
                if points:
                    keys, losses = [r["num_keys"] for r in points], [r["loss"] for r in points]
                    axes.plot(keys, losses, style, color=f"C{colour}", marker="o", label=f"{label}, {rule}")
        axes.set(title=title, xlabel="keys")
        axes.legend(fontsize="small")
    panels[0].set_ylabel("loss")


def decays(figure):
    from kinformer.parts.decays import Fixed

    left, right = figure.subplots(1, 2)
    distance = torch.arange(256)
    gammas = Fixed.Config().build(64, 4, 16)(torch.zeros(1, 1, 64))
    for head, log_gamma in enumerate(gammas.flatten().tolist()):
        left.plot(distance, (log_gamma * distance).exp(), label=f"head {head}")
    left.set(title="RetNet: by the clock", xlabel="distance", ylabel="kept of a token")
    left.legend(fontsize="small")
    kept = torch.full((64,), 0.995)
    kept[40] = 0.05
    fade = kept.log().cumsum(0)
    right.imshow((fade[:, None] - fade[None]).clamp(max=0).exp().tril(), vmin=0, vmax=1)
    right.set(title="gated: token 40 clears the state", xlabel="key", ylabel="query")


def recall(figure):
    axes = figure.subplots()
    for run in result("mqar_16")["runs"]:
        steps, right = zip(*run["curve"])
        axes.plot(steps, right, label=NAMES[run["member"]])
    axes.set(xlabel="steps of training", ylabel="right answers, 16 pairs", ylim=(0, 1.02))
    axes.legend(fontsize="small")


def lengths(figure):
    training = result("modern_lengths")["training"]
    axes = figure.subplots()
    names = {"softmax": "softmax", "gated-deltanet": "Gated DeltaNet", "kda": "KDA", "mamba2": "Mamba-2"}
    for key, label in {**names, "rwkv7": "RWKV-7"}.items():
        axes.loglog([int(n) for n in training], [row[key] / 1000 for row in training.values()], marker="o", label=label)
    axes.set(xlabel="tokens", ylabel="seconds of a training step")
    axes.legend(fontsize="small")


def price():
    lengths, cost, recall = result("modern_lengths"), result("kernel_attention")["times"], result("mqar_16")
    right = {row["member"]: row for row in recall["summary"]}
    plain = lengths["training"]["32768"]["softmax"]
    rows = []
    for name, shown in NAMES.items():
        at_length = lengths["training"]["32768"].get("softmax" if name == "gpt" else name)
        shares = cost.get("SDPA causal" if name == "gpt" else name, {}).get("times_sdpa")
        rows.append(
            (
                f"[{shown}](../members/{name}.md)",
                f"{shares:.2f}" if shares else "",
                f"{at_length / plain:.2f}" if at_length else "",
                f"{right[name]['accuracy']:.0%} after {right[name]['steps']:,}",
                f"{right[name]['state_bytes']:,}",
            )
        )
    headers = ("layer", "time, 4,096 tokens", "time, 32,768 tokens", "16 pairs recalled", "bytes of state")
    return table(headers, rows, (1, 2, 3, 4))


FIGURES = {
    "rank": rank,
    "weights": weights,
    "features": features,
    "capacity": capacity,
    "decays": decays,
    "recall": recall,
    "lengths": lengths,
}
TABLES = {"price": price}
