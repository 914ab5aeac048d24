"""How much faster is generation with drafts, and where does it lose? One sequence on a CPU, models trained for it.

Two sorts of bytes: text (Python's language reference, as pydoc holds it) and code (Python's sources); --text FILE and
--code FILE take others. For each a small ``linear-transformer`` is trained as the draft, and ``gpt``,
``linear-transformer`` and ``gated-deltanet`` with three further tokens (``ahead``). Held-out excerpts are continued

    plain     token by token, by recorded steps
    ngram     by look-up in the text so far
    model     by the small model
    mtp       by the model's own heads of further tokens
    in Python token by token, without recordings: what a pass costs that gives one token

greedily and at temperature 0.8. Gate: in float64 every way draws the tokens of the plain one.

    python benchmarks/drafts.py --runs DIR --train NAME     # one of the runs; without NAME all of them
    python benchmarks/drafts.py --runs DIR                  # measures them
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import Contestant, arguments, interleave, of_width, prepare, save, sets, show, train
from kinformer.generation.drafts import DraftedSession
from kinformer.generation.generate import session_of
from kinformer.generation.weights import pack
from kinformer.lab.data import open_corpus
from kinformer.lab.runs.run import open_run

MEMBERS = ("gpt", "linear-transformer", "gated-deltanet")
DRAFT = "draft"
SORTS = ("text", "code")
AHEAD = 3
STEPS, ROWS, LENGTH = 700, 2, 256
CODE_BYTES = 4_000_000
PROMPT, EXCERPTS, NEW = 96, 3, 160
LENGTHS = {"ngram": (4, 8), "model": (3, 5), "mtp": (AHEAD,)}
TEMPERATURES = (0.0, 0.8)


def sources(options: Any) -> dict[str, Path]:
    """The two files of bytes, written where they are not there."""
    files = {sort: Path(getattr(options, sort) or options.runs / f"{sort}.txt") for sort in SORTS}
    if not files["text"].is_file():
        from pydoc_data.topics import topics

        files["text"].write_text("\n\n".join(topics.values()), encoding="utf-8")
    if not files["code"].is_file():
        data = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
        files["code"].write_bytes(data[:CODE_BYTES])
    return files


def trained(options: Any, name: str) -> None:
    """Train the run ``name``, as in text-gpt, unless it is there."""
    sort, _, member = name.partition("-")
    words: list[Any] = ["--data", sources(options)[sort], "--holdout", 0.05, "--device", "cpu", "--seed", 0, "--quiet"]
    words += ["--length", LENGTH, "--batch-size", ROWS, "--optimizer", "muon", "--lr", 5e-3, "--ema", 0.07]
    words += ["--steps", 4 if options.quick else STEPS]
    if member == DRAFT:
        train("linear-transformer", options.runs / name, 1, *words, *sets({**of_width(64), "layers": 1}))
    else:
        words += ["--objective", "multi-token"]
        train(member, options.runs / name, 1, *words, *sets({**of_width(128), "layers": 4, "ahead": AHEAD}))


def excerpts(options: Any, sort: str) -> list[Tensor]:
    """Held-out prompts [1, PROMPT]."""
    split = open_corpus(str(sources(options)[sort]), holdout=0.05).splits["test"]
    starts = (len(split) - PROMPT) * np.arange(1, EXCERPTS + 1) // (EXCERPTS + 1)
    return list(torch.from_numpy(split.rows(starts, PROMPT)).split(1))


def drawn(model: Any, prompts: list[Tensor], way: dict[str, Any], temperature: float, new: int) -> dict[str, Any]:
    """Continue every prompt by ``new`` tokens; the tokens, the seconds of the steps alone, and what drafts did."""
    result: dict[str, Any] = {"tokens": [], "seconds": 0.0, "passes": 0, "guessed": 0, "accepted": 0}
    for prompt in prompts:
        settings = {"room": new, "temperature": temperature, "seed": 1, "recorded": not way.get("in_python", False)}
        session = session_of(model, 1, way.get("draft"), way.get("length", 1), settings)
        session.feed(prompt)
        begun = time.perf_counter()
        result["tokens"].append([int(session.step()) for _ in range(new)])
        result["seconds"] += time.perf_counter() - begun
        if isinstance(session, DraftedSession):
            facts = session.drafting.facts
            for name in ("passes", "guessed", "accepted"):
                result[name] += facts[name]
        else:
            result["passes"] += new
    return result


def ways(draft: Any) -> dict[str, dict[str, Any]]:
    """The ways by name: what guesses, and how many tokens."""
    found: dict[str, dict[str, Any]] = {"plain": {}, "in Python": {"in_python": True}}
    for name, lengths in LENGTHS.items():
        for length in lengths:
            found[f"{name} {length}"] = {"draft": draft if name == "model" else name, "length": length}
    return found


def gate(model: Any, draft: Any, prompts: list[Tensor]) -> None:
    """Stop unless all ways draw the same tokens in float64, greedily and not."""
    model, draft = (copy.deepcopy(each).double() for each in (model, draft))
    for temperature in TEMPERATURES:
        tokens = {name: drawn(model, prompts[:1], way, temperature, 48)["tokens"] for name, way in ways(draft).items()}
        wrong = [name for name, row in tokens.items() if row != tokens["plain"]]
        if wrong:
            raise SystemExit(f"{', '.join(wrong)}: other tokens than without drafts at temperature {temperature:g}.")


def points(options: Any, sort: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the result for one sort of bytes."""
    prompts, new = excerpts(options, sort), 24 if options.quick else NEW
    draft = open_run(options.runs / f"{sort}-{DRAFT}").model().eval()
    for member in MEMBERS:
        run = open_run(options.runs / f"{sort}-{member}")
        model = run.model().eval()
        gate(model, draft, prompts)
        packed, small = pack(model), pack(draft)
        for temperature in TEMPERATURES:
            found = ways(small)
            last: dict[str, Any] = {}

            def once(name: str, way: dict[str, Any], model: Any = packed, temperature: float = temperature) -> None:
                last.setdefault(name, []).append(drawn(model, prompts, way, temperature, new))  # noqa: B023

            contestants = [Contestant(name, partial(once, name, way), fast=True) for name, way in found.items()]
            interleave(contestants, rounds)
            plain = sorted(result["seconds"] for result in last["plain"][1:])[rounds // 2]
            for name in found:
                results = last[name]
                seconds = sorted(result["seconds"] for result in results[1:])[rounds // 2]
                end, total = results[-1], new * len(prompts)
                yield {
                    "data": sort, "member": member, "temperature": temperature, "way": name,
                    "ms_per_token": 1000 * seconds / total, "speed": plain / seconds,
                    "tokens_per_pass": total / end["passes"],
                    "right": end["accepted"] / end["guessed"] if end["guessed"] else None,
                    "same_tokens": end["tokens"] == last["plain"][-1]["tokens"],
                }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the runs, and of the two files")
    parser.add_argument("--train", nargs="?", const="all", help="train a run, such as text-gpt, or all, and end")
    for sort in SORTS:
        parser.add_argument(f"--{sort}", help=f"the file of {sort} (Python's own if not given)")
    options = prepare(parser)
    options.runs.mkdir(parents=True, exist_ok=True)
    if options.train:
        every = [f"{sort}-{member}" for sort in SORTS for member in (DRAFT, *MEMBERS)]
        for name in every if options.train == "all" else [options.train]:
            trained(options, name)
        return
    rounds = options.rounds or (1 if options.quick else 3)
    rows = [row for sort in SORTS for row in points(options, sort, rounds)]
    header = ("data", "member", "temperature", "way", "ms a token", "x plain", "tokens a pass", "right", "same")
    show(f"{NEW} tokens behind {PROMPT}, {EXCERPTS} excerpts", header, [list(row.values()) for row in rows])
    sizes = {}
    for name in (f"{SORTS[0]}-{member}" for member in (DRAFT, *MEMBERS)):
        sizes[name.partition("-")[2]] = sum(
            weight.numel() for weight in open_run(options.runs / name).model().parameters()
        )
    result = {
        "parameters": sizes, "steps": STEPS, "ahead": AHEAD, "prompt": PROMPT, "new": NEW, "excerpts": EXCERPTS,
        "rounds": rounds, "points": rows,
    }  # fmt: skip
    save(options, "drafts", result)


if __name__ == "__main__":
    main()
