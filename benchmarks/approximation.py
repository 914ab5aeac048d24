"""How near do random features come to softmax attention, by their number? RFA's and Performer's, in float64.

Queries, keys and values of 1,024 tokens and width 16 are normal, queries and keys of standard deviation 1 or 1/2.
What is approximated is softmax attention over all keys, by scores q . k / sqrt(16) for Performer (Choromanski et al.
2021, figure 4) and by the scores of vectors of length 1, q' . k', for RFA (Peng et al. 2021, section 3). Error: the
squared distance of outputs, by the squared length of the exact ones; the median and the middle half over draws of the
features. The number of features is that of a key in the state, so that sin/cos has half as many random directions as
positive features have. A gate comes first: the mean kernel of 400 draws of the most features gives the attention.
"""

from __future__ import annotations

import math
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, arguments, prepare, save, show
from kinformer.core.parts import FeatureMap
from kinformer.lab.drawing.plots import BLUE, FAINT, GREEN, QUIET, RED, bare, figure
from kinformer.lab.drawing.plots import save as save_figure
from kinformer.parts.feature_maps import Favor, RandomFourier

LENGTH, WIDTH, SPREADS = 1024, 16, (1.0, 0.5)
SIZES = (16, 32, 64, 128, 256, 512, 1024)
MAPS = {
    "Performer, positive": (lambda count, orthogonal: Favor.Config(features=count, orthogonal=orthogonal, eps=0.0), 1),
    "Performer, sin/cos": (
        lambda count, orthogonal: Favor.Config(features=count, orthogonal=orthogonal, form="trigonometric"),
        2,
    ),
    "RFA, sin/cos": (lambda count, orthogonal: RandomFourier.Config(features=count, orthogonal=orthogonal), 2),
}
"""The config of so many directions, and how many features each gives."""
COLOURS = {"Performer, positive": BLUE, "Performer, sin/cos": RED, "RFA, sin/cos": GREEN}


def exact(name: str, q: Tensor, k: Tensor) -> Tensor:
    """The scores [queries, keys] that the features are for."""
    if name.startswith("Performer"):
        return q @ k.mT / q.shape[-1] ** 0.5
    q, k = (x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-3) for x in (q, k))
    return q @ k.mT


def kernel(phi: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    """phi(q) . phi(k) [queries, keys], each row up to a factor."""
    features, logarithm = phi.keys(k[None, None])
    if logarithm is not None:
        features = features * (logarithm - logarithm.amax()).exp().unsqueeze(-1)
    return (phi.queries(q[None, None]) @ features.mT)[0, 0]


def build(name: str, size: int, orthogonal: bool, seed: int) -> Any:
    config, each = MAPS[name]
    phi: Any = config(size // each, orthogonal).build_heads(1, WIDTH).double()
    phi.draw(seed)
    return phi


def gate(q: Tensor, k: Tensor, draws: int) -> dict[str, float]:
    """How far (total variation) attention by the mean of many draws' kernels is from the exact one."""
    found = {}
    for name in MAPS:
        scores = exact(name, q, k)
        want = scores.softmax(-1)
        mean = sum(_scaled(name, build(name, SIZES[-1], True, seed), q, k) for seed in range(draws)) / draws
        found[name] = float(0.5 * (mean / mean.sum(-1, keepdim=True) - want).abs().sum(-1).mean())
        if found[name] > 0.1:
            raise SystemExit(f"{name}: the mean kernel is off by {found[name]:.3g}")
    return found


def _scaled(name: str, phi: FeatureMap, q: Tensor, k: Tensor) -> Tensor:
    """The kernel, with the factors of rows that positive features leave out, so that draws have a mean."""
    y = kernel(phi, q, k)
    if name != "Performer, positive":
        return y
    weight: Any = phi.weight
    own = (q * WIDTH**-0.25) @ weight.mT
    keys = (k * WIDTH**-0.25) @ weight.mT
    left_out = keys.amax(-1) - k.square().sum(-1) / (2 * WIDTH**0.5)
    return y * own.amax(-1, keepdim=True).exp() * left_out.amax().exp()


def error(name: str, phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor) -> float:
    weights = kernel(phi, q, k)
    got = (weights @ v) / weights.sum(-1, keepdim=True)
    want = exact(name, q, k).softmax(-1) @ v
    return float((got - want).square().sum() / want.square().sum())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Error against the number of features, by the spread of queries and keys; dashed: independent directions."""
    with figure(9.6, 4.2) as drawn:
        for axes, spread in zip(drawn.subplots(1, len(SPREADS), sharey=True), SPREADS, strict=True):
            _panel(axes, [row for row in rows if row["spread"] == spread])
            axes.set_title(f"queries and keys of standard deviation {spread:g}")
        drawn.axes[0].set_ylabel("squared error of outputs (1: that of zeros)")
        drawn.axes[-1].legend(fontsize=7.5, frameon=False, bbox_to_anchor=(1.0, 0.5), loc="center left")
        drawn.tight_layout()
        save_figure(drawn, path)
    print(f"wrote {path}")


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    bare(axes, "left", "bottom")
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axhline(1, color=QUIET, linewidth=0.9, linestyle=(0, (2, 2)))
    for name in MAPS:
        for orthogonal in (True, False):
            own = [row for row in rows if (row["features_of"], row["orthogonal"]) == (name, orthogonal)]
            sizes, low, middle, high = ([row[key] for row in own] for key in ("features", "low", "error", "high"))
            style = {"color": COLOURS[name], "linestyle": "-" if orthogonal else (0, (4, 2))}
            label = f"{name}, {'orthogonal' if orthogonal else 'independent'}"
            axes.plot(sizes, middle, marker="o", markersize=3, linewidth=1.4, label=label, **style)
            axes.fill_between(sizes, low, high, alpha=0.12, color=COLOURS[name], linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="features of a key")
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.minorticks_off()


@torch.no_grad()
def main() -> None:
    options = prepare(arguments(__doc__))
    draws = 2 if options.quick else options.rounds or 15
    length = 64 if options.quick else LENGTH
    q, k, v = torch.randn(3, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    off = {}
    for spread in SPREADS:
        a, b = spread * q, spread * k
        off[str(spread)] = gate(a[:64], b[:64], 400)
        for name, orthogonal, size in product(MAPS, (True, False), SIZES):
            found = [error(name, build(name, size, orthogonal, seed), a, b, v) for seed in range(draws)]
            assert all(map(math.isfinite, found))
            low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
            facts = {"spread": spread, "features_of": name, "orthogonal": orthogonal, "features": size}
            rows.append(facts | {"error": middle, "low": low, "high": high})
    show("squared error of outputs by the squared length of the exact", tuple(rows[0]), [[*r.values()] for r in rows])
    save(options, "approximation", {"length": length, "width": WIDTH, "draws": draws, "gate": off, "rows": rows})
    if not options.quick or options.out:
        draw(rows, (options.out or RESULTS / "approximation.json").with_suffix(".png"))


if __name__ == "__main__":
    main()
