"""The annotated pages as pages of the site: prose and code side by side, formulas typeset, the picture on top."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from generator.facts import config_of
from generator.latex import mathml
from generator.members import part_links
from generator.text import contents, figure, html, literal, page, papers, write
from kinformer.family.kinds import kinds
from kinformer.family.table import MEMBERS

FOLDER = Path(__file__).parents[2] / "annotated"
PROOF = "\n# --- proof ---\n"


class Annotated(NamedTuple):
    """A page: ``name`` (of its file), ``title``, ``members`` (or the mixer that no member has), and the file's text."""

    name: str
    title: str
    members: tuple[str, ...]
    text: str


@cache
def pages() -> tuple[Annotated, ...]:
    """Return all pages, in the order of the family's table; pages of mixers without a member come last."""
    order = {name: number for number, name in enumerate(MEMBERS)}
    found = [_read(path) for path in FOLDER.glob("*.py") if path.stem != "proofs"]
    return tuple(sorted(found, key=lambda each: order.get(each.members[0], len(order))))


def page_of(member: str) -> Annotated | None:
    """Return the page that explains a member, or a mixer without one."""
    return next((each for each in pages() if member in each.members), None)


def _read(path: Path) -> Annotated:
    text = path.read_text(encoding="utf-8")
    title = re.match("# # (.*)", text)
    members = re.search(r"(?:Members|Mixer): (.*?)\.[ *]", text.replace("\n#", ""))
    assert title and members, f"{path.name} does not name its title and its members or mixer"
    return Annotated(path.stem, title[1], tuple(re.findall(r"`([\w-]+)`", members[1])), text)


def generate(docs: Path) -> None:
    """Write ``docs/annotated``."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda each: _draw(each, docs / "annotated"), pages()))
    for each in pages():
        write(docs / "annotated" / f"{each.name}.md", _page(each))
    rows = [f"* [{each.title}]({each.name}.md): {', '.join(f'`{name}`' for name in each.members)}" for each in pages()]
    write(
        docs / "annotated" / "index.md",
        page(
            "# The annotated family",
            "One page of plain PyTorch for each mechanism, to be read from top to bottom. Each page ends with a proof: "
            "with the same weights, the page and the library have the same outputs, gradients and streamed steps.",
            "\n".join(rows),
            contents(*(each.name for each in pages())),
        ),
    )


def _page(each: Annotated) -> str:
    above, proof = each.text.split(PROOF)
    first, commands = each.members[0], [f"python annotated/{each.name}.py --draw"]
    if first in MEMBERS:
        commands += [f"kinformer show {first}", f"kinformer draw {first}"]
        links = ", ".join(f"[`{name}`](../members/{name}.md)" for name in each.members)
        library = f"{links}, made of {part_links(config_of(first))}"
    else:
        library = part_links(kinds()["mixer"][first]())
    return page(
        "---\nhide-toc: true\n---",
        f"# {each.title}",
        figure(f"{each.name}.png", f"What is special about {each.title}", _caption(each)),
        f"In the library: {library}.",
        literal("\n".join(commands), "console"),
        *_sections(_header_links(above.split("\n", 2)[2])),
        "## The proof",
        literal(proof.strip(), "python"),
    )


def _header_links(text: str) -> str:
    """Link the papers and the results that the first paragraph names."""
    header, rest = papers(text).split("*\n#\n", 1)
    before, measured = header.rsplit("Measured:", 1)
    measured = re.sub(r"\b[a-z]\w+\b", lambda name: f"[{name[0]}](../results/{name[0]}.md)", measured)
    return f"{before}Measured:{measured}*\n#\n{rest}"


def _caption(each: Annotated) -> str:
    """Return the first line of the docstring of ``draw``, which says what the picture shows."""
    found = re.search(r'def draw\(.*?\):\n    """(.*?)"""', each.text, re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _sections(text: str) -> Iterator[str]:
    """Pairs of prose and the code below it; a heading stands above its pair."""
    for comment, code in re.findall(r"((?:^#.*\n)+)((?:^(?!#).*\n)*)", f"{text.strip()}\n", re.MULTILINE):
        prose = re.sub(r"^# ?", "", comment, flags=re.MULTILINE).strip()
        if prose.startswith("#"):
            heading, _, prose = prose.partition("\n")
            yield heading
        yield from _pair(with_mathml(prose.strip()), code.strip("\n"))


def _pair(prose: str, code: str) -> Iterator[str]:
    if prose and code:
        yield f":::::{{container}} side\n::::{{container}} prose\n{prose}\n::::\n{literal(code, 'python')}\n:::::"
    elif prose:
        yield prose
    elif code:
        yield literal(code, "python")


def with_mathml(text: str) -> str:
    """Return Markdown with its formulas as MathML."""
    text = re.sub(r"\$\$(.+?)\$\$", lambda match: f"\n{html(mathml(match[1], display=True))}\n", text, flags=re.DOTALL)
    pieces = re.split(r"(```.*?```|`[^`]+`)", text, flags=re.DOTALL)
    return "".join(piece if index % 2 else re.sub(r"\$([^$]+)\$", _inline, piece) for index, piece in enumerate(pieces))


def _inline(match: re.Match[str]) -> str:
    return re.sub(r"[*_\\|~]", lambda sign: f"&#{ord(sign[0])};", mathml(match[1]))


def _draw(each: Annotated, folder: Path) -> None:
    """Draw the picture by the page's own command, unless it was drawn from the same text by the same PyTorch."""
    mark = hashlib.sha256((each.text + (FOLDER / "proofs.py").read_text() + torch.__version__).encode()).hexdigest()
    picture, stamp = folder / f"{each.name}.png", folder / f"{each.name}.sha256"
    if picture.is_file() and stamp.is_file() and stamp.read_text() == mark:
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, FOLDER / f"{each.name}.py", "--draw", picture]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    stamp.write_text(mark)
