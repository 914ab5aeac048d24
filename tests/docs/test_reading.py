"""The reading path: every line that it names defines the name beside it."""

import ast
import re
from pathlib import Path

from tests.docs.written import DOCS

PAGE = DOCS / "reading.md"
SOURCE = DOCS.parent / "src" / "kinformer"
ENTRY = re.compile(r"`([\w/]+\.py):(\d+)` `([\w.]+)`")


def definitions(path: Path) -> dict[str, int]:
    """Return the line of every function, class, method and assigned name at the top of a file."""
    lines = {}

    def visit(body, before=""):
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                lines[before + node.name] = node.lineno
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{before}{node.name}.")
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                lines[before + node.targets[0].id] = node.lineno

    visit(ast.parse(path.read_text(encoding="utf-8")).body)
    return lines


def test_lines_of_the_reading_path_define_what_it_names():
    entries = ENTRY.findall(PAGE.read_text(encoding="utf-8"))
    assert len(entries) >= 15
    wrong = {
        f"{file}:{number} {name}": line
        for file, number, name in entries
        if (line := definitions(SOURCE / file).get(name)) != int(number)
    }
    assert not wrong, f"docs/reading.md: write the lines {wrong}"
