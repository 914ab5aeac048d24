"""What a task's generating gives where that is no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Made:
    """What a run generated: ``facts`` for JSON, ``text`` for people."""

    facts: Mapping[str, Any]
    text: str
    interrupted: bool = False
