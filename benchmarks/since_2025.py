"""What do mechanisms published since 2025 recall and learn, and what do a token and a state cost?

    python benchmarks/since_2025.py                                             # bytes of states, and times of a token
    python benchmarks/since_2025.py --recall                                    # 4 to 256 pairs
    python benchmarks/since_2025.py --book book.txt --runs FOLDER --threads 1   # a book in equal minutes

States and tokens are of one layer of width 256 with 4 heads of 64 in float32, as the member's recipe `small` has it;
a token follows 1,024, 8,192 or 65,536 others, in processor time. Recall is the task and the model of `mqar.py`, two
layers of width 64 with one head, at 1,024 symbols and four tokens a pair. A model learns 4 pairs first and goes on to
16, 64, 128 and 256, a curriculum that saves most of the steps; the first stage chooses the learning rate. The book is
`causal_members.py`'s: 800,000 parameters, as many steps as the minutes of processor time buy at speeds measured in
turns.

A finished row is written at once, into the result file and into the page's tables, and the next call computes the
missing rows. The result file has the load of the machine beside a time: processor time does not count what other
programs take, but these use the caches and the memory too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import equal_minutes
import mqar
from common import RESULTS, arguments, medians, prepare, save, show
from kinformer.core.contract import CausalMixer, Chunk
from kinformer.core.state import reserve
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.table import MEMBERS
from kinformer.lab.comparison.options import CompareOptions
from kinformer.lab.comparison.plan import Contestant, still_in
from kinformer.lab.comparison.record import Cache
from kinformer.lab.comparison.speed import stepper
from kinformer.lab.runs.minutes import spelled_minutes
from kinformer.models.decoder import Decoder

NAME = "since_2025"
BESIDE = ("rope", "mamba2", "gated-deltanet", "kda")
RECENT = ("comba", "gdn2", "mesanet", "path", "dsa", "ttt")
NAMES = [name for name in (*BESIDE, *RECENT) if name in MEMBERS]
LAYERS = [*NAMES, "gated_convolution"]
"""The members, and LFM2's mixer, which reads three tokens: of this one only the bytes and the times are measured."""
DIM, HEADS = 256, 4
LENGTHS, STEPS, PIECE = (1024, 8192, 65_536), 16, 2048
SYMBOLS, RATES, SEEDS, ASKED, ENOUGH = 1024, (1e-2, 3e-3), (0,), 8192, 0.9
PAGE = Path(__file__).parent / "pages" / f"{NAME}.md"

Row = dict[str, Any]


class Stage(NamedTuple):
    """A part of a training on recall: at most so many ``steps`` with so many ``rows`` of ``pairs``."""

    pairs: int
    rows: int
    steps: int


STAGES = Stage(4, 128, 1500), Stage(16, 32, 400), Stage(64, 8, 400), Stage(128, 4, 200), Stage(256, 2, 200)


def built(name: str, dim: int) -> CausalMixer:
    torch.manual_seed(0)
    if name not in MEMBERS:
        mixer: CausalMixer = kinds()["mixer"][name]().build(dim)
        return mixer
    changes = {"layers.0.mixer.num_heads": dim // 64}
    layer: CausalMixer = configure(name, "small", set=changes).layers[0].mixer.build(dim)
    return layer


def token_row(name: str, length: int, dim: int, rounds: int) -> Row:
    """Milliseconds of a token behind ``length`` others, absorbed some thousand at a time, and the load meanwhile."""
    mixer, state = built(name, dim).eval(), None
    with torch.inference_mode():
        state = mixer.initial_state(1)
        for start in range(0, length, PIECE):
            x = torch.randn(1, min(PIECE, length - start), dim)
            _, state = mixer(Chunk(x), state)
        tokens = torch.randn(1, STEPS, dim).split(1, 1)

        def run() -> None:
            at = reserve(state, STEPS)
            for token in tokens:
                _, at = mixer(Chunk(token), at)

        return {"ms": medians({name: run}, rounds, True)[name] / STEPS, "load": round(os.getloadavg()[0], 2)}


def recall_rows(name: str, seed: int, stages: Sequence[Stage]) -> list[Row]:
    """A row for each stage of a model's training. The first stage chooses the learning rate."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    tried: dict[float, tuple[Decoder, Row]] = {}
    for rate in RATES:
        torch.manual_seed(seed)
        model = mqar.build(name, SYMBOLS).to(device)
        tried[rate] = model, stage_row(model, mqar.Run(name, rate, seed), stages[0], device)
        if tried[rate][1]["accuracy"] >= ENOUGH:
            break
    rate = max(tried, key=lambda rate: tried[rate][1]["accuracy"])
    model, first = tried[rate]
    first["tried"] = {each: row["accuracy"] for each, (_, row) in tried.items()}
    return [first, *(stage_row(model, mqar.Run(name, rate, seed), stage, device) for stage in stages[1:])]


def stage_row(model: Decoder, run: mqar.Run, stage: Stage, device: str) -> Row:
    pairs, rows, steps = stage
    row = mqar.learn(model, run, mqar.Recipe(pairs, 4 * pairs, rows, steps, device, SYMBOLS, max(8, ASKED // pairs)))
    kept = {key: row[key] for key in ("accuracy", "steps", "state_bytes", "parameters", "seconds", "curve")}
    return {"what": "recall", "member": run.member, "size": pairs, "rate": run.rate, "seed": run.seed} | kept


class Results:
    """The rows of the result file. A new row is written at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        path = options.out or RESULTS / f"{NAME}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and not options.quick else {}
        self.rows: list[Row] = known.get("rows", [])
        self.book: Row | None = known.get("book")
        self.names = options.members or NAMES

    def of(self, what: str, name: str | None = None, size: int | None = None) -> list[Row]:
        wanted = {"what": what, "member": name, "size": size}
        return [row for row in self.rows if all(value in (None, row[key]) for key, value in wanted.items())]

    def add(self, row: Row) -> None:
        key = ("what", "member", "size", "rate", "seed")
        self.rows = [old for old in self.rows if any(old.get(part) != row.get(part) for part in key)] + [row]
        self.write()

    def write(self) -> None:
        shape = {"dim": DIM, "heads": HEADS, "symbols": SYMBOLS, "stages": [stage._asdict() for stage in STAGES]}
        save(self.options, NAME, {"shape": shape, "rows": self.rows, "book": self.book})
        if not self.options.quick and not self.options.out:
            write_page(self)


def layers(results: Results, lengths: Sequence[int], dim: int, rounds: int) -> None:
    """Measure the missing states and tokens."""
    names = results.options.members or LAYERS
    for length in lengths:
        for name in names:
            if not results.of("state", name, length):
                size = built(name, dim).state_bytes(length)
                results.rows.append({"what": "state", "member": name, "size": length, "bytes": size})
    results.write()
    if results.options.states:
        return
    for length in lengths:
        for name in names:
            if not results.of("token", name, length):
                results.add({"what": "token", "member": name, "size": length, **token_row(name, length, dim, rounds)})
                print(f"a token of {name} after {length}: {results.rows[-1]['ms']:.2f} ms", flush=True)


def recall(results: Results, stages: Sequence[Stage]) -> None:
    """Train the missing models."""
    options, begun = results.options, time.monotonic()
    for seed in SEEDS:
        done = {row["member"] for row in results.of("recall", size=stages[-1].pairs) if row["seed"] == seed}
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            running = {}
            for name in results.names:
                if name not in done and time.monotonic() - begun < 60 * options.limit:
                    running[pool.submit(recall_rows, name, seed, stages)] = name
            for future in as_completed(running):
                for row in future.result():
                    results.add(row)
                    print(row["member"], row["size"], row["rate"], f"{row['accuracy']:.1%}", flush=True)


def processor_speeds(entrants: Sequence[Contestant], settings: CompareOptions, _: Cache) -> None:
    """Record the processor time of a training step of each entrant, measured in turns."""
    entrants = still_in(entrants)
    files = [entrant.options(Path(), settings.middle, settings.seed, 1) for entrant in entrants]
    steps = {entrant.name: stepper(file, "cpu") for entrant, file in zip(entrants, files, strict=True)}
    taken = medians(steps, settings.rounds, True)
    for entrant in entrants:
        entrant.note(training={"seconds": taken[entrant.name] / 1000})


def book(results: Results) -> None:
    """Measure the speeds of members without one, and train the missing seeds."""
    options = results.options
    options.data, options.runs = options.book, options.runs or Path("since_2025_runs")
    known = results.book or {"members": []}
    rows = {row["name"] for row in known["members"]}
    if missing := [name for name in results.names if name not in rows]:
        # with the first one again, whose speed tells how the machine differs
        measured = equal_minutes.begun(
            options, options.runs, list(dict.fromkeys([NAMES[0], *missing])), {}, processor_speeds
        )
        new = [row for row in measured["members"] if row["name"] not in rows]
        results.book = measured | known | {"members": [*known["members"], *new]}
        results.write()
    result = results.book
    assert result is not None
    todo = equal_minutes.jobs(options, result, results.names, {})
    for job, values in equal_minutes.train(options, options.runs, todo, result["minutes"]):
        row = next(row for row in result["members"] if row["name"] == job.name)
        row["bits_per_byte"][str(job.seed)] = values.bits
        result["baselines"] |= values.baselines
        results.write()


# The tables, of the screen and of the page.


def per_size(results: Results, what: str, sizes: Iterable[int], cell: Callable[[Row], str]) -> dict[str, list[str]]:
    """The cells of every member, by size: of the best row where there are several."""
    table = {}
    for name in NAMES if what == "recall" else LAYERS:
        chosen = [results.of(what, name, size) for size in sizes]
        best = [max(rows, key=lambda row: row.get("accuracy", 0)) if rows else None for rows in chosen]
        table[name] = ["" if row is None else cell(row) for row in best]
    return table


def state_cell(row: Row) -> str:
    size = row["bytes"]
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 1024:.0f} KiB"


def token_cell(row: Row) -> str:
    return f"{row['ms']:.1f}"


def recall_cell(row: Row) -> str:
    return f"{100 * row['accuracy']:.0f} %"


def book_cells(results: Results) -> dict[str, list[str]]:
    cells = {name: ["", "", ""] for name in NAMES}
    for row in (results.book or {"members": []})["members"]:
        if bits := list(row.get("bits_per_byte", {}).values()):
            spread = f"{max(bits) - min(bits):.3f}" if len(bits) > 1 else ""
            cells[row["name"]] = [f"{statistics.mean(bits):.3f}", spread, f"{row['steps']:,}"]
    return cells


def tables(results: Results) -> dict[str, tuple[list[str], dict[str, list[str]]]]:
    """Title -> the columns and the cells of every member."""
    lengths = [f"{length:,}" for length in LENGTHS]
    minutes = spelled_minutes(results.book["minutes"]) if results.book else "some minutes"
    return {
        "Bytes of the state of a layer, by the tokens that it has read": (
            lengths, per_size(results, "state", LENGTHS, state_cell),
        ),
        "Milliseconds of a token in processor time, by the tokens before it": (
            lengths, per_size(results, "token", LENGTHS, token_cell),
        ),
        "Right answers of associative recall, by pairs in a row": (
            [f"{stage.pairs} pairs" for stage in STAGES],
            per_size(results, "recall", [stage.pairs for stage in STAGES], recall_cell),
        ),
        f"Bits per byte of a book's held-out text, after {minutes} of processor time": (
            ["bits per byte", "spread", "steps"], book_cells(results),
        ),
    }  # fmt: skip


def write_page(results: Results) -> None:
    """Put the tables between the page's headings "Result" and "What it shows"; a table without a row is left out."""
    parts = []
    for title, (columns, cells) in tables(results).items():
        if any(map(any, cells.values())):
            lines = [f"| member | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
            lines += [f"| `{name}` | {' | '.join(cell or 'not run' for cell in row)} |" for name, row in cells.items()]
            parts.append("\n".join([f"{title}:", "", *lines]))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("## Result\n")
    after = rest.partition("## What it shows")[2]
    body = "\n\n".join(parts)
    PAGE.write_text(f"{before}## Result\n\n{body}\n\n## What it shows{after}", encoding="utf-8")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--states", action="store_true", help="only the bytes of states")
    parser.add_argument("--recall", action="store_true", help="only recall")
    parser.add_argument("--book", help="only the book in this text file")
    parser.add_argument("--runs", type=Path, help="where the book's runs are kept")
    parser.add_argument("--members", nargs="+", help="only these")
    parser.add_argument("--limit", type=float, default=float("inf"), help="minutes after which no recall begins")
    parser.add_argument("--minutes", type=float, default=1.0, help="the budget of each run on the book")
    parser.add_argument("--seed", type=int, default=0, help="the book's first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds of the book")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each of one thread")
    parser.add_argument("--device", default="auto", help="of the book: cpu or cuda; a GPU if there is one")
    options = prepare(parser)
    results = Results(options)
    if options.book:
        book(results)
    elif options.recall:
        recall(results, [Stage(8, 4, 20), Stage(16, 2, 20)] if options.quick else STAGES)
    else:
        lengths = (64, 128) if options.quick else LENGTHS
        layers(results, lengths, DIM, options.rounds or (1 if options.quick else 5))
    for title, (columns, cells) in tables(results).items():
        show(title, ("member", *columns), [[name, *row] for name, row in cells.items()])


if __name__ == "__main__":
    main()
