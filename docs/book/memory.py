"""Figures and tables of the chapter on longer memory."""

import json
from pathlib import Path

import torch

import kinformer
from kinformer import nn

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def reach(figure):
    """The tokens that a layer sees, and which tokens act on the last output of one, two and three layers."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
    i, j = torch.arange(96)[:, None], torch.arange(96)
    start = i // 32 * 32
    left.imshow(torch.where(j >= start, 2, 1).masked_fill((j > i) | (j < start - 32), 0), cmap="Blues")
    left.set(title="memory, and own segment", xlabel="key", ylabel="query", xticks=(0, 32, 64), yticks=(0, 32, 64))
    settings = {"num_heads": 2, "segment": 32, "memory": 32}
    layers = [kinformer.layer("transformer-xl", 16, **settings).requires_grad_(False) for _ in range(3)]
    x = torch.randn(1, 160, 16)
    changed = x.repeat(160, 1, 1)
    changed[torch.arange(160), torch.arange(160)] += 1
    for depth, style in enumerate((":", "--", "-"), 1):
        before, after = x, changed
        for layer in layers[:depth]:
            before, after = before + layer(before), after + layer(after)
        effect = (after - before)[:, -1].norm(dim=-1)
        right.semilogy(effect.where(effect > 1e-6, torch.nan), style, label=f"{depth} layer{'s' * (depth > 1)}")
    for edge in (32, 64, 96, 128):
        right.axvline(edge - 0.5, color="gray", linewidth=0.5)
    right.set(title="change of the last output", xlabel="changed token")
    right.legend(loc="upper center", fontsize="small")


def slots(figure):
    """Bytes of one layer's state while a text is read, and the age of the tokens that each slot stands for."""
    left, right = figure.subplots(1, 2)
    sizes = {"segment": 64, "memory": 64}
    layers = {
        "gpt": kinformer.layer("gpt", 32, num_heads=2),
        "transformer-xl, memory 64": kinformer.layer("transformer-xl", 32, num_heads=2, **sizes),
        "compressive, 64 and 64": kinformer.layer("compressive", 32, num_heads=2, compressed=64, **sizes),
    }
    with torch.no_grad():
        for (name, layer), style in zip(layers.items(), ("-", "--", "-."), strict=True):
            state, counts = None, []
            for _ in range(16):
                _, state = layer(torch.randn(1, 32, 32), state, return_state=True)
                counts.append(nn.states.nbytes(state) / 1024)
            left.plot(range(32, 513, 32), counts, style, label=name)
    left.set(xlabel="tokens read", title="KiB of state, a layer of width 32")
    left.legend()
    exact = torch.arange(128)
    right.plot(exact, exact, label="segment and memory")
    for rate, style in ((2, "--"), (4, "-.")):
        right.step(128 + torch.arange(64), 128 + rate * torch.arange(64), style, label=f"compressed, rate {rate}")
    right.set(xlabel="slot, from the newest", title="tokens back")
    right.legend()


def search(figure):
    """The share of the best memories that a search by buckets finds, and the weight that they carry."""
    sizes, best = (64, 128, 256, 512, 1024, 2048, 4096), 32
    q = torch.nn.functional.normalize(torch.randn(64, 32), dim=-1) * 12
    found, carried = [], []
    for size in sizes:
        k = torch.nn.functional.normalize(torch.randn(size, 32), dim=-1)
        scores = q @ k.T
        top = scores.topk(best).indices
        chosen = scores.unflatten(-1, (-1, best)).argmax(1) * best + torch.arange(best)
        found.append((top[..., None] == chosen[:, None]).any(-1).float().mean().item())
        exact, approximate = (scores.gather(1, each).exp().sum(1) for each in (top, chosen))
        carried.append((approximate / exact).mean().item())
    axes = figure.subplots()
    axes.plot(sizes, carried, marker=".", label="weight, of the weight of the true best")
    axes.plot(sizes, found, marker=".", linestyle="--", label="share of the 32 best found")
    axes.axhline(1 - torch.e**-1, color="grey", linestyle=":", label="1 − 1/e")
    axes.set(xscale="log", xlabel="memories", ylim=(0, 1))
    axes.legend(loc="lower left")


def datastore(figure):
    """Bits per byte of an unseen text by the entries of the datastore, and by its weight; from the result file."""
    result = json.loads((RESULTS / "knn_domain.json").read_text())
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot(*zip(*((size["entries"], size["bits_per_byte"]) for size in result["sizes"]), strict=True), marker=".")
    left.axhline(result["bits_per_byte_alone"], color="grey", linestyle=":", label="the model alone")
    left.set(xscale="log", xlabel="entries", ylabel="bits per byte", title="at the tuned weight")
    left.legend(loc="lower left")
    right.plot(*zip(*result["weights"], strict=True), marker=".")
    right.set(xlabel="weight λ of the datastore", title=f"at {result['entries']:,} entries")


def segments():
    """Members with a memory beside the plain decoder, in equal time: means of the seeds."""
    runs = json.loads((RESULTS / "memory_quality.json").read_text())["runs"]
    lines = ["| member | tokens that a layer reaches | steps | bits per byte |", "| --- | ---: | ---: | ---: |"]
    for member in ("gpt", "transformer-xl", "compressive"):
        own = [run for run in runs if run["member"] == member]
        bits = sum(run["bits_per_byte"]["as trained"] for run in own) / len(own)
        lines.append(f"| `{member}` | {own[0]['reach']['layer']} | {own[0]['steps']} | {bits:.3f} |")
    return "\n".join(lines)


def neighbours():
    """Two ways to use neighbours, from the result file."""
    (run,) = json.loads((RESULTS / "spalm.json").read_text())["runs"]
    rows = [f"| {name} | {way['bits_per_byte']:.3f} |" for name, way in run["ways"].items()]
    return "\n".join(["| model | bits per byte |", "| --- | ---: |", *rows])


FIGURES = {"reach": reach, "slots": slots, "search": search, "datastore": datastore}
TABLES = {"segments": segments, "neighbours": neighbours}
