"""How a count and its noun are written in a message."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return ``count`` with its ``noun``, which stands in the plural unless the count is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
