"""The page of papers: their claims beside our measurements, and their recipes with the training that they bring."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generator.results import BENCHMARKS, results
from generator.text import escaped, page, table, write
from kinformer.family.table import MEMBERS
from kinformer.runtime.errors import spelled

USUAL = re.compile(r"the recipe (.*) is trained by the usual settings: (.*)")
"""The departure of recipes without a training."""
UNCONFIRMED = re.compile(r".* of the recipe (.*) is not confirmed against the paper")
RECALLED = " (not confirmed against the paper)"
ANSWER = re.compile(r"(Yes|No): ")
"""The answer of a verdict to the question of its page, which may ask for the opposite of the claim."""


def generate(docs: Path) -> None:
    """Write ``docs/results/papers.md``."""
    claims = list(_claims())
    count = {verdict: sum(row[4] == verdict for row in claims) for verdict in ("yes", "partly", "no")}
    text = page(
        "(papers)=\n# Papers: claims and recipes",
        f"Of {len(claims)} claims of papers that we measured, {count['yes']} hold at the sizes that we train, "
        f"{count['partly']} hold in part, and {count['no']} do not. Most papers train far larger models for far "
        "longer; a claim that does not hold here may hold there. Claims without a figure are in our words.",
        table(("member", "claim", "in the paper", "here", "holds", "command"), claims),
        "## Recipes",
        "A recipe whose name begins with paper has the sizes of its paper, and the training that the paper or the "
        "authors' code states, unless the table says that it is not confirmed. `kinformer train MEMBER --recipe paper` "
        "uses both; an option on the command line wins.",
        table(("member", "recipe", "training", "source"), _recipes()),
    )
    write(docs / "results" / "papers.md", text)


def _claims() -> Iterator[tuple[str, ...]]:
    found = {result.name: result for result in results()}
    for row in tomllib.loads((BENCHMARKS / "claims.toml").read_text(encoding="utf-8"))["claims"]:
        result = found[row["result"]]
        verdict = ANSWER.sub("", " ".join(result.verdict.split()))
        yield (
            _link(row["member"]),
            escaped(row["claim"]),
            escaped(row["there"] + RECALLED * row.get("recalled", False)),
            f"[{verdict[0].upper()}{verdict[1:]}]({result.name}.md)",
            row["holds"],
            f"`benchmarks/{result.call}`",
        )


def _recipes() -> Iterator[tuple[str, ...]]:
    for name, record in MEMBERS.items():
        departures = [spelled(each) for each in record.departures]
        without = {recipe: match[2] for match in map(USUAL.fullmatch, departures) if match for recipe in _names(match)}
        recalled = {recipe for match in map(UNCONFIRMED.fullmatch, departures) if match for recipe in _names(match)}
        for recipe in record.recipes:
            if recipe.startswith("paper"):
                words = _words(record.training.get(recipe, {}))
                yield (
                    _link(name),
                    recipe,
                    escaped((words or f"the usual settings: {without[recipe]}") + RECALLED * (recipe in recalled)),
                    escaped(record.paper),
                )


def _names(match: re.Match[str]) -> list[str]:
    return match[1].split(", ")


def _words(training: Mapping[str, Any]) -> str:
    options = {key: value for key, value in training.items() if key not in ("stages", "set")}
    words = [f"{key.replace('_', ' ')} {_value(value)}" for key, value in options.items()]
    for number, stage in enumerate(training.get("stages", ()), 1):
        words.append(f"in stage {number} {_words(stage)}")
    return ", ".join(words)


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


def _link(member: str) -> str:
    return f"[{member}](../members/{member}.md)"
