"""What the theme's pages lack for those who read by keys or by ear: levels of headings, names of landmarks, and a stop
of the tab key at everything that scrolls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REPLACED = (
    (r'role="heading">', 'role="heading" aria-level="2">'),
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    (r'<aside class="toc-drawer([^"]*)">', r'<aside class="toc-drawer\1" aria-label="On this page">'),
    (r"<pre>", '<pre tabindex="0">'),
    (r'<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    (r'<th class="head([^"]*)"><p></p></th>', r'<td class="head\1"></td>'),
    (r'(?<!</h1>)<div id="search-results">', '<h1>Search</h1><div id="search-results">'),
    (r"(?<=</li>)\s*<ul>|</ul>(?=\s*(?:<li>|</ul>))", ""),  # lists of modules, whose lists stand between items
)
"""Pattern -> what stands in its place; none matches its own result, so that pages may be read again."""


def accessible(page: str) -> str:
    """The HTML of a page with what it lacked."""
    for pattern, result in REPLACED:
        page = re.sub(pattern, result, page)
    return page


def finish(app: Any, error: Exception | None) -> None:
    """For ``build-finished``: rewrites the pages that lack something."""
    if error is not None or app.builder.name != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        if "_static" not in path.parts:
            text = path.read_text(encoding="utf-8")
            if (result := accessible(text)) != text:
                path.write_text(result, encoding="utf-8")
