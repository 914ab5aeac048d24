"""The way to the table of kinds of parts, for parts that are named in Python: core itself knows no kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinformer.core.config import Kinds

find: Callable[[], Kinds] = dict
"""Return the table, slot -> kind -> config class; the package puts its own function here."""
