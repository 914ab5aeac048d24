"""``kinformer draw MEMBER|PATTERN|POSITION|DIR``: attention patterns and encodings of positions as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from kinformer.lab.cli.options import Changes, CommonOptions, options_as
from kinformer.lab.cli.output import print_json
from kinformer.lab.drawing.options import DrawOptions


@dataclass(frozen=True, kw_only=True)
class Options(DrawOptions, CommonOptions):
    """Draw who sees whom, and where things are: heads and layers side by side where they differ, once where not."""

    subject: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MEMBER|PATTERN")]
    """A member of the family, a run folder, a kind of pattern or position, or one as JSON, as in
    '{"kind": "union", "patterns": [{"kind": "local", "window": 4}, {"kind": "columns", "stride": 8}]}'."""
    set: Changes = ()  # type: ignore[assignment]
    """Change the recipe, or an option of the pattern or position, as in --set window=8; may be given again."""


def run(options: Options) -> int:
    """Draw, and print the picture's name."""
    from kinformer.lab.drawing.command import draw

    drawing = draw(options_as(DrawOptions, options))
    if options.json:
        print_json(drawing.facts)
    else:
        print(f"{drawing.out}: {drawing.title}", *drawing.lines, sep="\n  ")
    return 0
