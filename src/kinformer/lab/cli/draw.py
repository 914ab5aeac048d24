"""``kinformer draw MEMBER|PATTERN|POSITION|DIR``: attention patterns and encodings of positions as a picture."""

from __future__ import annotations

from dataclasses import dataclass

from kinformer.lab.cli.options import CommonOptions
from kinformer.lab.cli.output import print_json
from kinformer.lab.drawing.options import DrawOptions


@dataclass(frozen=True, kw_only=True)
class Draw(DrawOptions, CommonOptions):
    """Draw who sees whom, and where things are: heads and layers side by side where they differ, once where not."""

    def run(self) -> int:
        """Draw the picture, print its file name, and return the exit status."""
        from kinformer.lab.drawing.subject import draw

        drawing = draw(self)
        if self.json:
            print_json(drawing.facts)
        else:
            print(f"{drawing.out}: {drawing.title}", *drawing.lines, sep="\n  ")
        return 0
