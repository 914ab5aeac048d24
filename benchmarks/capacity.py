"""How many pairs does a memory hold, and can it change its mind? The synthetic task of the fast-weight paper.

Schlag, Irie and Schmidhuber 2021, section 6.1, with Kinformer's kernels and feature maps. One layer: keys are computed
from key and value, values are one-hot and stored as they are, d = 64 before the feature map, Adam at 1e-3, loss = half
the squared error of the retrieved value (0.5: knows nothing), stop at 0.001 or when it no longer falls.

    capacity   S pairs, every key once        sum rule and softmax: what fits is the number of features
    update     2 S writes to S keys           sum rule against delta rule: only the latter overwrites

Differs from the authors' script: a step takes 8 sequences and asks each for 64 keys (theirs 32 and one), steps are
limited, and every evaluation uses the same sequences. No result depends on the clock; every case has one thread.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from associative import AssociativeRetrieval, Retrieval
from common import RESULTS, arguments, prepare, save, show
from kinformer.core.parts import FeatureMapConfig
from kinformer.kernels.attention import Scoring, Visibility, attention
from kinformer.kernels.delta import delta_rule
from kinformer.kernels.linear import LinearState, linear_attention
from kinformer.parts.feature_maps import Dpfp, Elu, Relu

WIDTH, RATE, SOLVED = 64, 1e-3, 1e-3
FEATURES: dict[str, FeatureMapConfig] = {
    "elu": Elu.Config(),
    "relu": Relu.Config(),
    **{f"dpfp-{nu}": Dpfp.Config(nu=nu) for nu in (1, 2, 3)},
}
COLOURS = {"softmax": "0.4", "relu": "C4", "elu": "C0", "dpfp-1": "C1", "dpfp-2": "C2", "dpfp-3": "C3"}
CAPACITY = {
    "softmax": (40, 120, 240, 320),
    "elu": (20, 40, 60, 80, 120),
    "relu": (20, 40, 60, 80, 120),
    "dpfp-1": (60, 80, 100, 120, 160),
    "dpfp-2": (120, 160, 200, 240),
    "dpfp-3": (200, 240, 320),
}
UPDATE = {
    ("elu", "sum"): (20, 40, 80),
    ("elu", "delta"): (20, 40, 60, 80),
    ("dpfp-1", "sum"): (20, 60, 120),
    ("dpfp-1", "delta"): (20, 40, 60, 80, 120),
    ("dpfp-2", "sum"): (20, 60, 120),
    ("dpfp-2", "delta"): (20, 60, 120, 160),
}


@dataclass(frozen=True)
class Case:
    """A model (``features`` and ``rule``; softmax has neither) at ``num_keys``, in one of the two settings."""

    setting: str
    features: str
    rule: str
    num_keys: int


class Retriever(nn.Module):
    """One layer that stores value one-hots under phi(key) and reads them with phi(query)."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.num_keys, self.rule = case.num_keys, case.rule
        width = int(2 * case.num_keys * 1.1)
        self.embedding = nn.Embedding(case.num_keys, width)
        self.key = nn.Linear(case.num_keys + width, WIDTH)
        self.query = nn.Linear(width, WIDTH)
        self.strength = nn.Linear(case.num_keys + width, 1) if case.rule == "delta" else None
        self.phi = FEATURES[case.features].build(WIDTH) if case.features in FEATURES else nn.Identity()
        for linear in (self.key, self.query):
            nn.init.uniform_(linear.weight, -(WIDTH**-0.5), WIDTH**-0.5)

    def forward(self, example: Retrieval) -> Tensor:
        """The retrieved values [rows, asked, num_keys]."""
        k = self.phi(self._of_pairs(self.key, example))
        q = self.phi(self.query(self.embedding.weight)[example.queries])
        v = functional.one_hot(example.values, self.num_keys).to(k.dtype)
        if self.rule == "softmax":
            return attention(q[:, None], k[:, None], v[:, None], Visibility(), Scoring(WIDTH**-0.5)).out[:, 0]
        if self.rule == "sum":
            return self._sum(q, k, v)
        return self._delta(q, k, v, self._of_pairs(self.strength, example)[..., 0].sigmoid())

    def _of_pairs(self, linear: nn.Linear, example: Retrieval) -> Tensor:
        """``linear`` of [one-hot value; key embedding]: a row for the value plus a row for the key."""
        value, key = linear.weight.T.split([self.num_keys, self.embedding.embedding_dim])
        return value[example.values] + (self.embedding.weight @ key + linear.bias)[example.keys]

    def _sum(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, _, features = k.shape
        empty = LinearState(k.new_zeros(rows, 1, features, self.num_keys), k.new_zeros(rows, 1, features))
        y, _ = linear_attention(_after(k, q), _before(k, q), _before(v, q), empty)
        return y[:, 0, k.shape[1] :]

    def _delta(self, q: Tensor, k: Tensor, v: Tensor, strength: Tensor) -> Tensor:
        q, k = (x / (x.sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
        empty = k.new_zeros(k.shape[0], 1, k.shape[2], self.num_keys)
        y, _ = delta_rule(_after(k, q), _before(k, q), _before(v, q), _before(strength, q), empty)
        return y[:, 0, k.shape[1] :]


def _before(x: Tensor, queries: Tensor) -> Tensor:
    """``x`` [rows, writes, ...] with zeros for the steps that only read, as one head."""
    return torch.cat([x, x.new_zeros(x.shape[0], queries.shape[1], *x.shape[2:])], dim=1)[:, None]


def _after(writes: Tensor, queries: Tensor) -> Tensor:
    """The queries with zeros for the steps that only write, as one head."""
    return torch.cat([torch.zeros_like(writes), queries], dim=1)[:, None]


def loss_of(model: Retriever, example: Retrieval) -> Tensor:
    """Half the squared error of a retrieved value, mean over queries."""
    target = functional.one_hot(example.targets, model.num_keys)
    return 0.5 * (model(example) - target).square().sum(dim=-1).mean()


def train(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Train until solved, out of patience or out of steps; the curve and the last loss on sequences not trained on."""
    seed, steps = options.seed, 30 if options.quick else options.steps
    torch.manual_seed(seed)
    model = Retriever(case)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    task = AssociativeRetrieval(case.num_keys, case.setting == "update", seed=2 * seed)
    exam = AssociativeRetrieval(case.num_keys, case.setting == "update", seed=2 * seed + 1).batch(20, case.num_keys)
    curve, best, since, begun = [], float("inf"), 0, time.monotonic()
    for step in range(1, steps + 1):
        loss_of(model, task.batch(options.rows, min(options.asked, task.writes))).backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % 100 == 0 or step == steps:
            with torch.no_grad():
                curve.append((step, float(loss_of(model, exam))))
            best, since = (curve[-1][1], 0) if curve[-1][1] < best else (best, since + 1)
            if curve[-1][1] <= SOLVED or since >= options.patience:
                break
    last, loss = curve[-1]
    print(*vars(case).values(), f"loss {loss:.4f} after {last} steps, {time.monotonic() - begun:.0f} s", flush=True)
    return vars(case) | {"loss": loss, "steps": last, "solved": loss <= SOLVED, "curve": curve}


def cases(quick: bool) -> list[Case]:
    capacity = [
        Case("capacity", name, "softmax" if name == "softmax" else "sum", num_keys)
        for name, counts in CAPACITY.items()
        for num_keys in counts
    ]
    update = [Case("update", name, rule, num_keys) for (name, rule), counts in UPDATE.items() for num_keys in counts]
    return [case for case in (*capacity, *update) if case.num_keys <= 20] if quick else [*capacity, *update]


def _size(name: str) -> str:
    return f" ({FEATURES[name].build(WIDTH).size(WIDTH)} features)" if name in FEATURES else ""


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Both settings side by side: the loss left, on a logarithmic axis, against the number of keys."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    titles = {"capacity": "capacity: every key is written once", "update": "update: keys are written again"}
    places = {"capacity": {"loc": "upper right"}, "update": {"loc": "center right", "bbox_to_anchor": (1.0, 0.64)}}
    for axis, (setting, title) in zip(axes, titles.items(), strict=True):
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for result in results:
            if result["setting"] == setting:
                point = result["num_keys"], max(result["loss"], SOLVED)
                lines.setdefault((result["features"], result["rule"]), []).append(point)
        for (name, rule), points in lines.items():
            dashed = setting == "update" and rule == "sum"
            label = f"{name}{_size(name)}" + (f", {rule} rule" if setting == "update" else "")
            style = {"marker": "o", "markersize": 4, "linestyle": "--" if dashed else "-", "color": COLOURS[name]}
            axis.plot(*zip(*points, strict=True), label=label, **style)
        axis.axhline(SOLVED, color="0.75", linewidth=0.8, linestyle=":", zorder=0)
        axis.set(title=title, xlabel="number of keys S", yscale="log", ylim=(SOLVED * 0.7, 0.7))
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8, **places[setting])
    axes[0].set_ylabel("retrieval loss (0.5: knows nothing, 0.001: solved)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=800, help="steps at most (the authors: 100,000)")
    parser.add_argument("--rows", type=int, default=8, help="sequences per step (the authors: 32)")
    parser.add_argument("--asked", type=int, default=64, help="keys that each sequence is asked (the authors: 1)")
    parser.add_argument("--patience", type=int, default=4, help="evaluations without gain (the authors: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side, one thread each")
    options = prepare(parser)
    every, spawn = cases(options.quick), get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn, torch.set_num_threads, (1,)) as pool:
        results = list(pool.map(train, every, [options] * len(every)))
    columns = ("setting", "features", "rule", "num_keys", "loss", "steps", "solved")
    show("associative retrieval", columns, [[result[name] for name in columns] for result in results])
    settings = {name: getattr(options, name) for name in ("steps", "rows", "asked", "patience", "seed")}
    save(options, "capacity", {"settings": settings, "results": results})
    if not options.quick:
        draw(results, (options.out or RESULTS / "capacity.json").with_suffix(".png"))


if __name__ == "__main__":
    main()
