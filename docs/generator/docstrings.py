"""Docstrings as reStructuredText: what is indented is a formula or an example, and signs mean themselves."""

from __future__ import annotations

import re
from typing import Any


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For ``autodoc-process-docstring``: rewrites ``lines`` in place."""
    known = lines[:1] and re.fullmatch(r"Alias for field number \d+", lines[0])  # says nothing of a tuple's field
    lines[:] = [] if known else rst("\n".join(lines)).split("\n")


def rst(text: str) -> str:
    """Paragraphs that are indented become literal blocks, with those that only hang kept as prose; stars, bars and
    underscores outside of code are escaped."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        rows = block.split("\n")
        if rows and all(row.startswith("  ") for row in rows):
            begun = "" if blocks and blocks[-1].endswith("::") else "::\n\n"
            blocks.append(begun + "\n".join(f"    {row}" for row in rows))
        else:
            blocks.append(_prose(rows))
    return "\n\n".join(blocks) + "\n"


def _prose(rows: list[str]) -> str:
    """One paragraph; a line ``name: ...``, an item of a list or a name with two spaces behind it begins a new one."""
    paragraphs: list[list[str]] = [[]]
    for row in rows:
        begins = re.match(r"[a-z_]+(?:, [a-z_]+)*: |[-*] |``\w+``  ", row)
        if begins and paragraphs[-1]:
            paragraphs.append([])
        paragraphs[-1].append(row.strip())
    return "\n\n".join(map(_paragraph, paragraphs))


def _paragraph(rows: list[str]) -> str:
    text = " ".join(rows)
    return f"- {_escaped(text[2:])}" if text.startswith(("- ", "* ")) else _escaped(text)


def _escaped(text: str) -> str:
    parts = re.split(r"(:\w+:`[^`]+`|``[^`]+``|`[^`]+`)", text)
    for index, part in enumerate(parts):
        if index % 2 == 0:
            parts[index] = re.sub(r"([\\*|_`])", r"\\\1", part)
        elif part.startswith(":"):
            parts[index] = "``" + re.sub(r"^:\w+:`~?|`$", "", part) + "``"
        elif not part.startswith("``"):
            parts[index] = f"`{part}`"
    return "".join(parts)
