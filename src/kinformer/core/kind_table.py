"""The way to the table of kinds of parts, for parts that are named in Python: core itself knows no kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

find: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
"""Return the table, slot -> kind -> config class; the package puts its own function here."""
