"""How a count and its noun are written in a message."""

from __future__ import annotations

import re


def plural(count: int, noun: str) -> str:
    """Return ``count`` with its ``noun``, a regular one, which stands in the plural unless the count is 1."""
    if count != 1:
        noun = re.sub(r"(?<=[^aeou])y$", "ie", re.sub(r"(s|x|ch)$", r"\1e", noun)) + "s"
    return f"{count:,} {noun}"
