"""Docstrings as reStructuredText: what is indented is a formula or an example, signs mean themselves, and lines that
say what parameters are (``name: text``) become a table with their types and defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

BEGINS = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")


class Parameter(NamedTuple):
    """Its ``type`` as written, and its ``default`` as written, or "" where it must be given."""

    type: str
    default: str


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For ``autodoc-process-docstring``: rewrites ``lines`` in place."""
    known = lines[:1] and re.fullmatch(r"Alias for field number \d+", lines[0])  # says nothing of a tuple's field
    lines[:] = [] if known else rst("\n".join(lines), parameters(obj)).split("\n")


def parameters(obj: Any) -> dict[str, Parameter]:
    """Those of a function's or class's signature."""
    if not (inspect.isroutine(obj) or inspect.isclass(obj)):
        return {}
    try:
        entries = inspect.signature(obj).parameters.values()
    except (TypeError, ValueError):  # it has none that can be read
        return {}
    return {entry.name: Parameter(_type(entry.annotation), _default(entry)) for entry in entries}


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(entry: inspect.Parameter) -> str:
    if entry.kind in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD):
        return "none"
    if entry.default is entry.empty:
        return ""
    shown = repr(entry.default)
    return "made" if shown.startswith("<") else shown


def rst(text: str, known: Mapping[str, Parameter] | None = None) -> str:
    """Paragraphs that are indented become literal blocks, with those that only hang kept as prose; stars, bars and
    underscores outside of code are escaped. Lines about the parameters that are ``known`` become a table."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        rows = block.split("\n")
        if rows and all(row.startswith("  ") for row in rows):
            begun = "" if blocks and blocks[-1].endswith("::") else "::\n\n"
            blocks.append(begun + "\n".join(f"    {row}" for row in rows))
        else:
            blocks += _prose(rows, known or {})
    return "\n\n".join(blocks) + "\n"


def _prose(rows: list[str], known: Mapping[str, Parameter]) -> Iterator[str]:
    """One paragraph; a line ``name: ...``, an item of a list or a name with two spaces behind it begins a new one."""
    paragraphs: list[list[str]] = [[]]
    for row in rows:
        begins = BEGINS.match(row) or re.match(r"[-*] |``\w+``  ", row)
        if begins and paragraphs[-1]:
            paragraphs.append([])
        paragraphs[-1].append(row.strip())
    entries: list[tuple[list[str], str]] = []
    for paragraph in paragraphs:
        text = " ".join(paragraph)
        match = BEGINS.match(text)
        if match and set(names := match[1].split(", ")) <= known.keys():
            entries.append((names, match[2]))
            continue
        if entries:
            yield _table(entries, known)
            entries = []
        yield f"- {_escaped(text[2:])}" if text.startswith(("- ", "* ")) else _escaped(text)
    if entries:
        yield _table(entries, known)


def _table(entries: list[tuple[list[str], str]], known: Mapping[str, Parameter]) -> str:
    lines = [".. list-table::", "   :header-rows: 1", "   :class: parameters", ""]
    rows = [("parameter", "type", "default", "meaning")]
    for names, meaning in entries:
        types = list(dict.fromkeys(known[name].type for name in names if known[name].type))
        defaults = list(dict.fromkeys(known[name].default for name in names if known[name].default))
        rows.append((_codes(names), _codes(types), _codes(defaults), _escaped(meaning)))
    for row in rows:
        lines += [f"   {'* -' if number == 0 else '  -'} {cell}".rstrip() for number, cell in enumerate(row)]
    return "\n".join(lines)


def _codes(words: list[str]) -> str:
    return ", ".join(f"``{word}``" for word in words)


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
