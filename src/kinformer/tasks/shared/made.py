"""The output of tasks that generate something other than continued text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Made:
    """What a run generated: ``facts`` for JSON, ``text`` for people."""

    facts: Mapping[str, object]
    text: str
    interrupted: bool = False
