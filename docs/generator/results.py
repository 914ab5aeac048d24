"""Results: the files of ``benchmarks/results`` with date and machine, and their pages in ``benchmarks/pages``."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kinformer.family.table import MEMBERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OTHERS = ("causal_families",)
"""Results whose names are those of another library's models."""


class Result(NamedTuple):
    """A result file and its page.

    ``name``: the file's, without ending. ``call`` and ``headline``: from the table of ``benchmarks/README.md``, the
    script with its options and the main metric. ``members``: those that the file names. ``pictures``: files beside it.
    ``question``: the page's title. ``verdict``: its first paragraph. ``body``: the rest of it, as Markdown. ``data``:
    the content of the file.
    """

    name: str
    call: str
    headline: str
    date: str
    machine: str
    members: frozenset[str]
    pictures: tuple[Path, ...]
    question: str
    verdict: str
    body: str
    data: dict[str, Any]


@cache
def results() -> list[Result]:
    """All of them, by name."""
    paths = sorted((BENCHMARKS / "results").glob("*.json"))
    names = [path.stem for path in paths]
    return [_read(path, names) for path in paths]


def _read(path: Path, names: list[str]) -> Result:
    data, row = json.loads(path.read_text(encoding="utf-8")), index()[path.stem]
    title, verdict, body = (BENCHMARKS / "pages" / f"{path.stem}.md").read_text(encoding="utf-8").split("\n\n", 2)
    return Result(
        name=path.stem,
        call=row.call,
        headline=row.headline,
        date=data.get("date", ""),
        machine=_machine(data.get("machine", {})),
        members=frozenset() if path.stem in OTHERS else frozenset(_members_in(data)),
        pictures=tuple(picture for picture in sorted(path.parent.glob("*.png")) if _owner(picture, names) == path.stem),
        question=title.removeprefix("# "),
        verdict=verdict,
        body=body,
        data=data,
    )


def _owner(picture: Path, names: list[str]) -> str:
    """The result that a picture is of: the longest name that the picture's begins with."""
    return max((name for name in names if f"{picture.stem}_".startswith(f"{name}_")), key=len, default="")


def _machine(machine: dict[str, Any]) -> str:
    torch = machine.get("versions", {}).get("torch")
    threads = f"{machine.get('threads', '?')} of {machine.get('cores', '?')} cores"
    return ", ".join(filter(None, [machine.get("processor"), threads, f"torch {torch}" if torch else ""]))


def _members_in(data: Any) -> set[str]:
    """The members that stand in the data as keys or as values."""
    if isinstance(data, dict):
        return {key for key in data if key in MEMBERS}.union(*map(_members_in, data.values()))
    if isinstance(data, list):
        return set().union(*map(_members_in, data))
    return {data} & MEMBERS.keys() if isinstance(data, str) else set()


class Row(NamedTuple):
    """A row of the table in ``benchmarks/README.md``."""

    question: str
    call: str
    headline: str


@cache
def index() -> dict[str, Row]:
    """Result -> its row."""
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| `(\w+\.py[^`]*)` \| `(\w+)\.json` \| (.+?) \| \[", text, re.MULTILINE)
    return {name: Row(question, call, headline) for question, call, name, headline in rows}
