"""The options of ``kinformer draw``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from kinformer.cli.options import Changes, Common, Count, Text


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Draw who sees whom, and where things are: heads and layers side by side where they differ, once where not."""

    subject: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER|PATTERN")]
    """A member of the family, a run folder, a kind of pattern or position, or one as JSON, as in
    '{"kind": "union", "patterns": [{"kind": "local", "window": 4}, {"kind": "columns", "stride": 8}]}'."""
    pattern: bool = False
    """Take the name for a kind of pattern, where a member has it too."""
    position: bool = False
    """Take the name for a kind of position, where a member has it too."""
    recipe: str = "small"
    """Which of the member's recipes."""
    set: Changes = ()
    """Change the recipe, or an option of the pattern or position, as in --set window=8; may be given again."""
    length: Count = None
    """Tokens in the picture; if not given, as many as it takes to see the structure."""
    layer: Count = None
    """Only this layer, counted from 1."""
    head: Count = None
    """Only this head, counted from 1."""
    image_width: Count = None
    """Also show what one query sees of an image so wide, its positions being pixels line by line."""
    out: Text = None
    """The picture's name, which ends in .png or .svg; NAME.png in this folder if not given."""
