"""What was measured: the result files of ``benchmarks/`` with their question, date and machine, and who is in them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kinformer.family.table import MEMBERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Result(NamedTuple):
    """A result file: its name without ending, the script that wrote it, its question, when and where it was made, whom
    it names, its figure, and what benchmarks/README.md says of it."""

    name: str
    script: str
    question: str
    date: str
    machine: str
    members: frozenset[str]
    picture: Path | None
    told: tuple[str, ...]


@cache
def results() -> list[Result]:
    """All of them, by name."""
    return [_read(path) for path in sorted((BENCHMARKS / "results").glob("*.json"))]


def _read(path: Path) -> Result:
    data = json.loads(path.read_text(encoding="utf-8"))
    pictures = sorted(path.parent.glob(f"{path.stem}*.png"))
    return Result(
        name=path.stem,
        script=(script := data.get("benchmark", path.stem)),
        question=questions().get(script, ""),
        date=data.get("date", ""),
        machine=_machine(data.get("machine", {})),
        members=frozenset(_named(data)),
        picture=pictures[0] if pictures else None,
        told=tuple(text for text in _paragraphs() if f"{path.stem}." in text),
    )


def _machine(machine: dict[str, Any]) -> str:
    torch = machine.get("versions", {}).get("torch")
    threads = f"{machine.get('threads', '?')} of {machine.get('cores', '?')} cores"
    return ", ".join(filter(None, [machine.get("processor"), threads, f"torch {torch}" if torch else ""]))


def _named(data: Any) -> set[str]:
    """The members that stand in the data as keys or as values."""
    if isinstance(data, dict):
        return {key for key in data if key in MEMBERS}.union(*map(_named, data.values()))
    if isinstance(data, list):
        return set().union(*map(_named, data))
    return {data} & MEMBERS.keys() if isinstance(data, str) else set()


@cache
def questions() -> dict[str, str]:
    """Benchmark -> question, off the table of benchmarks/README.md."""
    rows = re.findall(r"^\| `(\w+)\.py[^|]*\| ([^|]+) \|", _text(), re.MULTILINE)
    return {name: question.strip() for name, question in reversed(rows)}


@cache
def _paragraphs() -> tuple[str, ...]:
    """What benchmarks/README.md says, without tables, code and pictures."""
    blocks = re.split(r"\n\s*\n", _text())
    return tuple(block for block in blocks if not block.startswith(("|", "#", "    ", "![", "- ")))


@cache
def _text() -> str:
    return (BENCHMARKS / "README.md").read_text(encoding="utf-8")
