"""What does a state of so many bytes remember? Multi-query associative recall (Arora et al. 2023) by one recipe.

Each member's mixer as its page has it, but of one head, in two layers of width 64 without feed-forwards and positions:
a causal convolution of four tokens, then the mixer, each behind a norm and in a residual (the setting in which Zoology
compares recall and state; a convolution of a mixer's own is left out). Weights begin as PyTorch's modules do: from
N(0, 0.02) the delta rules know 2 % after 1,000 steps in which they learn 92 % here. 256 symbols, 64 tokens, 8 pairs;
AdamW with weight decay 0.1, one cycle of the learning rate, clipping at 1; training ends when 99 % of a validation are
right (--pairs and --length change the rows). The learning rate is swept with the first seed until one gets there, the
best one is run with further seeds, and the last weights are measured on new rows.

It can be stopped at any time: every finished run is in the result file, and the next call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common import RESULTS, arguments, prepare, save, show
from kinformer.blocks.layer import DecoderLayer
from kinformer.blocks.residual import Initialisation
from kinformer.core.contract import CausalMixer, Chunk, MixerConfig, real_resets, select_valid
from kinformer.core.learning import OnlineLearner, Resampled, due_for_resampling
from kinformer.core.model import modules_of
from kinformer.core.parts import FeedForwardConfig
from kinformer.core.state import nbytes
from kinformer.family.build import configure
from kinformer.heads.language import LanguageModelHead
from kinformer.inputs.tokens import Tokens
from kinformer.lab.data.mqar import Recall
from kinformer.lab.drawing.plots import FAINT, QUIET, SERIES, bare, figure
from kinformer.lab.drawing.plots import save as save_figure
from kinformer.lab.tasks.answers import ScoredBatch, answers
from kinformer.lab.tasks.recall import RecallLoss
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.models.decoder import Decoder
from kinformer.parts.output_parts import ShortConvolution
from kinformer.parts.positions import NoPosition

DIM, DEPTH, WIDTH, SYMBOLS = 64, 2, 4, 256
MEMBERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "local": {"pattern.window": 16},
    "linear-transformer": {},
    "performer": {},
    "rfa": {},
    "retnet": {"value_dim": 128},
    "gla": {"head_dim": 32, "value_dim": 64},
    "fast-weights": {},
    "gated-deltanet": {"convolution": 0},
    "kda": {"convolution": 0},
    "mamba2": {"convolution": 0},
    "rwkv7": {},
    "forgetting": {},
    "mla": {},
    "moba": {"block": 8, "count": 3},
    "nsa": {"block": 8, "count": 4, "window": 8, "shared_choice": False, "projection": "multi_head"},
    "reformer": {"num_buckets": 8, "chunk_size": 8, "rounds": 4},
    "routing": {"local_heads": 0, "num_clusters": 8, "window": 8},
}
"""What is changed of each member's mixer beside the number of heads; windows are shorter than a row."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rfa, no gate": ("rfa", {"decay": "none"}),
    "rfa, gate of temperature 16": ("rfa", {"decay.temperature": 16.0}),
    "forgetting, gate of temperature 16": ("forgetting", {"decay.temperature": 16.0}),
    "routing, one cluster": ("routing", {"local_heads": 0, "num_clusters": 1, "window": 64}),
    "routing, two clusters, windows of 32": ("routing", {"local_heads": 0, "num_clusters": 2, "window": 32}),
    **{name: (name, {"convolution": 0}) for name in ("comba", "gdn2", "mesanet")},
    **{name: (name, {}) for name in ("rope", "path", "dsa", "ttt")},
}
"""Changes of members that have not begun to recall: which of their parts is it? Then the members of `since_2025.py`.
They run only where --members names them."""
RATES, SEEDS = (3e-3, 1e-2, 1e-3), (0, 1, 2)
SOLVED, EXAM, PATIENCE = 0.99, 512, 100


class Recent(NamedTuple):
    """The last tokens [batch, 1, WIDTH - 1, dim]."""

    tokens: Tensor


class Convolution(CausalMixer):
    """A causal convolution of each channel, and SiLU."""

    growth = "constant"

    class Config(MixerConfig):
        kind = "short_convolution"

        def build(self, dim: int) -> Convolution:
            return Convolution(dim)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.convolution = dim, ShortConvolution(WIDTH, 1, dim)

    def initial_state(self, batch: int, *, device: Any = None, dtype: Any = None) -> Recent:
        return Recent(torch.zeros(batch, 1, WIDTH - 1, self.dim, device=device, dtype=dtype))

    def forward(self, chunk: Chunk, state: Recent) -> tuple[Tensor, Recent]:
        y, recent = self.convolution(chunk.x[:, None], state.tokens, chunk.valid, real_resets(chunk))
        return select_valid(y[:, 0], chunk.valid), Recent(recent)

    def state_bytes(self, length: int, *, dtype: torch.dtype = torch.float32) -> int:
        return (WIDTH - 1) * self.dim * dtype.itemsize


class Nothing(nn.Module):
    """A feed-forward that adds nothing."""

    class Config(FeedForwardConfig):
        kind = "nothing"

        def build(self, dim: int) -> nn.Module:
            return Nothing()

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Run(NamedTuple):
    """A training: of a member, at a learning rate, with a seed."""

    member: str
    rate: float
    seed: int


class Recipe(NamedTuple):
    """What all runs have in common: rows of ``length`` tokens with ``pairs`` keys, ``rows`` of them in each of at most
    ``steps`` steps, on a device; keys and values are among ``symbols``."""

    pairs: int
    length: int
    rows: int
    steps: int
    device: str
    symbols: int = SYMBOLS
    exam: int = EXAM
    """The rows that accuracy is measured on."""

    @property
    def data(self) -> Recall:
        """The rows of the task."""
        return Recall(pairs=(self.pairs,), symbols=self.symbols)

    def batch(self, split: str, part: int, rows: int, seed: int = 0) -> ScoredBatch:
        """Rows on the device."""
        drawn = ScoredBatch.of(self.data.rows(split, part, rows, self.length, seed))
        return ScoredBatch(*(None if x is None else x.to(self.device) for x in drawn))  # type: ignore[arg-type]


def build(member: str, symbols: int) -> Decoder:
    base, further = VARIANTS[member] if member in VARIANTS else (member, MEMBERS[member])
    changes = {f"layers.0.mixer.{path}": value for path, value in {**further, "num_heads": 1}.items()}
    mixer = configure(base, "small", set=changes).layers[0].mixer
    layer = DecoderLayer.Config(mixer=Convolution.Config(), further_mixers=(mixer,), feed_forward=Nothing.Config())
    return Decoder.Config(
        input=Tokens.Config(vocab_size=symbols),
        dim=DIM,
        layers=(layer,) * DEPTH,
        position=NoPosition.Config(),
        head=LanguageModelHead.Config(tied=True),
        initialisation=Initialisation(scheme="framework"),
    ).build()


def accuracy(model: Decoder, split: str, recipe: Recipe) -> float:
    """Of new rows of the split."""
    right = queries = 0
    with torch.inference_mode():
        for part in range(8):
            found = answers(model, recipe.batch(split, part, recipe.exam // 8))
            right, queries = right + int(found.right.sum()), queries + len(found.labels)
    return right / queries


def train(run: Run, recipe: Recipe) -> dict[str, Any]:
    """A run's record: accuracy on the test split, the state's bytes after a row, the curve of validation."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    return learn(build(run.member, recipe.symbols).to(recipe.device), run, recipe)


def learn(model: Decoder, run: Run, recipe: Recipe) -> dict[str, Any]:
    """Train a model; return its record."""
    begun, steps = time.monotonic(), recipe.steps
    engine = ObjectiveModule(model, RecallLoss(recipe.data.pairs), "fp32")
    optimiser = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, run.rate, total_steps=steps, pct_start=0.1)
    features, learners, curve = modules_of(model, Resampled), modules_of(model, OnlineLearner), []
    for step in range(steps):
        for number, module in due_for_resampling(features, step):
            module.draw(1000 * (1 + run.seed) + step + number)
        model.train()
        batch = recipe.batch("train", step, recipe.rows, run.seed)
        engine(batch, None, step / steps)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        for module in learners:
            module.learn(lambda sums: sums)
        schedule.step()
        if (step + 1) % PATIENCE == 0 or step + 1 == steps:
            curve.append((step + 1, accuracy(model.eval(), "validation", recipe)))
            if curve[-1][1] >= SOLVED:
                break
    _, state = model(torch.zeros(1, recipe.length, dtype=torch.int64, device=recipe.device))
    return {
        **run._asdict(),
        "accuracy": accuracy(model.eval(), "test", recipe),
        "state_bytes": nbytes(state.layers),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": curve[-1][0],
        "curve": curve,
        "seconds": time.monotonic() - begun,
    }


def best_rate(records: list[dict[str, Any]], member: str) -> float:
    """Of the first seed's runs the one that is right most often, and among equal ones soonest."""
    first = [each for each in records if (each["member"], each["seed"]) == (member, SEEDS[0])]
    return max(first, key=lambda each: (round(each["accuracy"], 2), -each["steps"]))["rate"]


def wanted(records: list[dict[str, Any]], members: list[str], seeds: int) -> Iterator[Run]:
    """What is to be run and can be by now: first the rates, then further seeds at a member's best."""
    done = {Run(each["member"], each["rate"], each["seed"]) for each in records}
    solved = {each["member"] for each in records if each["curve"][-1][1] >= SOLVED}
    sweep = [Run(member, rate, SEEDS[0]) for rate in RATES for member in members if member not in solved]
    yield from (run for run in sweep if run not in done)
    for seed in SEEDS[1:seeds]:
        for member in members:
            if member in solved or all(Run(member, rate, SEEDS[0]) in done for rate in RATES):
                run = Run(member, best_rate(records, member), seed)
                if run not in done:
                    yield run


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each member the accuracies of all seeds at its best rate."""
    rows = []
    for member in dict.fromkeys(each["member"] for each in records):
        rate = best_rate(records, member)
        chosen = [each for each in records if (each["member"], each["rate"]) == (member, rate)]
        found = [each["accuracy"] for each in chosen]
        facts = {"accuracy": statistics.median(found), "least": min(found), "most": max(found), "seeds": len(found)}
        steps = statistics.median(each["steps"] for each in chosen)
        rows.append({"member": member, "state_bytes": chosen[0]["state_bytes"], **facts, "rate": rate, "steps": steps})
    return sorted(rows, key=lambda row: row["state_bytes"])


def draw(rows: list[dict[str, Any]], recipe: Recipe, path: Path) -> None:
    """Accuracy against the bytes of the state, with the spread over seeds."""
    with figure(6.4, 4.0) as drawn:
        axes = drawn.subplots()
        bare(axes, "left", "bottom")
        axes.grid(axis="y", color=FAINT, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.axhline(1 / recipe.pairs, color=QUIET, linewidth=0.9, linestyle=(0, (2, 2)))
        for number, row in enumerate(rows):
            colour, x = SERIES[number % len(SERIES)], row["state_bytes"]
            axes.plot([x, x], [row["least"], row["most"]], color=colour, linewidth=1.6)
            style = {"color": colour, "marker": "os^vD"[number // len(SERIES)], "markersize": 6, "linestyle": ""}
            axes.plot([x], [row["accuracy"]], label=row["member"], **style)
        style = {"textcoords": "offset points", "ha": "right", "color": QUIET, "fontsize": 7.5}
        where = (1, 1 / recipe.pairs)
        axes.annotate("guessing a value of the row", where, (-2, 3), xycoords=("axes fraction", "data"), **style)
        axes.set(xscale="log", ylim=(-0.02, 1.04), xlabel=f"bytes of the state after {recipe.length} tokens")
        ticks = [size * recipe.length // 64 for size in (20_000, 40_000, 80_000)]
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylabel(f"accuracy ({recipe.pairs} pairs, {SYMBOLS} symbols)")
        axes.legend(fontsize=8, frameon=False, bbox_to_anchor=(1.0, 0.5), loc="center left")
        drawn.tight_layout()
        save_figure(drawn, path)
    print(f"wrote {path}")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a result file have in common."""
    chosen = recipe(options)
    return {
        "dim": DIM, "depth": DEPTH, "length": chosen.length, "rows": chosen.rows, "steps": chosen.steps,
        "data": chosen.data.identity,
    }  # fmt: skip


def recipe(options: argparse.Namespace) -> Recipe:
    """The recipe of the options, on a GPU if there is one."""
    steps, rows = (20, 4) if options.quick else (options.steps, options.rows)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Recipe(options.pairs, options.length or 8 * options.pairs, rows, steps, device)


def keep(options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    save(options, "mqar", {"settings": settings(options), "summary": summary(records), "runs": records})


def known(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The finished runs of the result file, if they are of the same settings."""
    path = options.out or RESULTS / "mqar.json"
    if options.quick or not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings(options):
        raise SystemExit(f"{path} is of other settings, {found['settings']}; give another --out, or these.")
    return found["runs"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps of a run at most")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step")
    parser.add_argument("--pairs", type=int, default=8, help="keys of a row; each is asked for once")
    parser.add_argument("--length", type=int, help="tokens of a row (eight for a pair)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this long")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of each member at its best rate")
    parser.add_argument("--members", nargs="+", help="only these, members or variants")
    options = prepare(parser)
    chosen, begun = recipe(options), time.monotonic()
    members = [name for name in (*MEMBERS, *VARIANTS) if name in (options.members or MEMBERS)]
    records = known(options)
    running: dict[Future[dict[str, Any]], Run] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        while True:
            late = time.monotonic() - begun > 60 * options.minutes
            runs = () if late else wanted(records, members, options.seeds)
            open_runs = [run for run in runs if run not in running.values()]
            for run in open_runs[: options.jobs - len(running)]:
                running[pool.submit(train, run, chosen)] = run
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                records.append(done.result())
                print(*running.pop(done), f"{records[-1]['accuracy']:.1%} {records[-1]['seconds']:.0f} s", flush=True)
                keep(options, records)
    found = summary(records)
    if not found:
        return
    show("multi-query associative recall", tuple(found[0]), [list(row.values()) for row in found])
    if not options.quick or options.out:
        draw(found, chosen, (options.out or RESULTS / "mqar.json").with_suffix(".png"))


if __name__ == "__main__":
    main()
