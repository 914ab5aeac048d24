"""The chapters of the book: their figures are drawn, their tables have rows, and both stand in the text."""

import re
import runpy

import pytest

from tests.docs.written import DOCS

CHAPTERS = sorted((DOCS / "book").glob("*.py"))


@pytest.mark.parametrize("source", CHAPTERS, ids=lambda source: source.stem)
def test_figures_and_tables_stand_in_the_text(source, tmp_path):
    pytest.importorskip("matplotlib")
    from generator.book import draw

    text, computed = source.with_suffix(".md").read_text(encoding="utf-8"), runpy.run_path(str(source))
    for fill in computed["FIGURES"].values():
        draw(fill, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    shown = {f"{source.stem}_{name}.png" for name in computed["FIGURES"]}
    assert shown == set(re.findall(r"\{figure\} (\S+)", text))
    included = {f"{source.stem}_{name}.txt" for name in computed["TABLES"]}
    assert included == set(re.findall(r"\{include\} (\S+)", text)) and included
    assert all(len(compute().splitlines()) > 2 for compute in computed["TABLES"].values())


@pytest.mark.parametrize("source", CHAPTERS, ids=lambda source: source.stem)
def test_formulas_are_typeset(source):
    from generator.annotated import with_mathml

    assert "$" not in re.sub(
        r"```.*?```|`[^`]+`", "", with_mathml(source.with_suffix(".md").read_text()), flags=re.DOTALL
    )
