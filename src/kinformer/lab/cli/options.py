"""The options that commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from kinformer.runtime.errors import require_seed
from kinformer.runtime.fields import Checked

RunFolder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Hidden = Annotated[Any, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True)
class Printing(Checked):
    """The options of printing, which every command takes."""

    json: bool = False
    """Print one JSON object instead of text."""
    quiet: bool = False
    """Print only the result, without progress or notes."""
    verbose: bool = False
    """Print more: versions, device and threads at first, time and memory at the end, and after an error its traceback
    and, with several processes, PyTorch's messages."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Read options by name from this file, as in: batch_size = 16. Options on the command line take precedence."""


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Printing):
    """The options that every command with random numbers takes."""

    seed: int = 0
    """The seed of all random numbers."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        super().__post_init__()
