"""Pieces of Markdown as MyST reads it, and files that are written where they changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kinformer.runtime.errors import as_flags, spelled


def escaped(text: str) -> str:
    """Plain text, whose stars, bars, underscores, brackets and dollars mean nothing; ``code`` stays code, and marked
    options are flags, which are code."""
    with as_flags():
        parts = re.split(r"(``[^`]+``|`[^`]+`)", spelled(text))
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"`{part.strip('`')}`"
        else:
            plain = re.sub(r"([\\*_|\[\]<>#$~])", r"\\\1", part)
            parts[index] = re.sub(r"(?<![\w-])--[a-z][\w-]*", lambda flag: f"`{flag[0]}`", plain)
    return "".join(parts)


def papers(text: str) -> str:
    """Markdown in which the numbers of papers on arXiv are links."""
    return re.sub(r"arXiv\s(?:# )?(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table; cells are Markdown, the columns in ``numeric`` are aligned to the right."""
    rule = ["---:" if index in numeric else "---" for index in range(len(headers))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, rule, *rows))


def literal(text: str, language: str = "text") -> str:
    """Text in a typewriter's letters."""
    return f"```{language}\n{text.rstrip()}\n```"


def html(text: str) -> str:
    """HTML as it is."""
    return f"```{{raw}} html\n{text}\n```"


def figure(name: str, alt: str, caption: str = "") -> str:
    """A picture with what is told to those who do not see it."""
    return f"```{{figure}} {name}\n:alt: {' '.join(alt.split())}\n:class: drawing\n\n{caption}\n```"


def contents(*pages: str, caption: str = "", hidden: bool = True) -> str:
    """A table of contents."""
    options = [f":caption: {caption}"] * bool(caption) + [":hidden:"] * hidden + [":maxdepth: 1"]
    return "\n".join(["```{toctree}", *options, "", *pages, "```"])


def page(*blocks: str) -> str:
    """Blocks with an empty line between them; empty ones are left out."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file unless it is the same already, so that Sphinx reads again only what changed."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
