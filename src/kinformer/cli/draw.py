"""``kinformer draw MEMBER|PATTERN|POSITION|DIR``: attention patterns and encodings of positions as a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from kinformer.cli.options import Changes, CommonOptions, asked
from kinformer.cli.output import print_json
from kinformer.runs.drawing.options import DrawOptions
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.figures.panels import Panel

MOST_PANELS = 24


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
    from kinformer.figures.style import check

    out = Path(options.out or f"{_file_name(options.subject)}.png")
    check(out)
    import torch

    torch.manual_seed(options.seed)
    if options.image is not None:
        return _image(options, out)
    if options.exits and not options.spans:
        return _exits(options, out)
    if options.data is not None and not options.spans:
        raise KinformerError(f"--data {options.data}: is for --exits; add --exits, or leave it out.")
    from kinformer.figures.draw import draw
    from kinformer.runs.drawing.subject import find

    subject = find(asked(DrawOptions, options))
    panels = subject.panels()
    if not panels:
        raise KinformerError(f"{options.subject}: has neither a pattern nor positions to draw; choose another member.")
    draw(panels[:MOST_PANELS], subject.title, out)
    if options.json:
        print_json(
            {"subject": options.subject, "kind": subject.kind, "out": str(out), "drawn": len(panels[:MOST_PANELS])}
            | {"panels": [_facts(panel) for panel in panels]}
        )
        return 0
    more = f" ({MOST_PANELS} of {len(panels)}; choose with --layer and --head)" if len(panels) > MOST_PANELS else ""
    print(f"{out}: {subject.title}{more}")
    _list(panels[:MOST_PANELS])
    return 0


def _exits(options: Options, out: Path) -> int:
    from kinformer.figures.exits import draw_exits
    from kinformer.runs.drawing.exits import coloured_text

    text = coloured_text(asked(DrawOptions, options))
    draw_exits(text, out)
    if options.json:
        print_json({"subject": options.subject, "kind": "run", "out": str(out)} | text.exited.facts)
    else:
        print(f"{out}: {text.title}\n  {text.exited.text}")
    return 0


def _image(options: Options, out: Path) -> int:
    from kinformer.figures.image import draw_image
    from kinformer.runs.drawing.image import looked_at

    drawing = looked_at(asked(DrawOptions, options))
    draw_image(drawing, out)
    names = [panel.name.replace("\n", ", ") for panel in drawing.panels]
    if options.json:
        print_json(
            {"subject": options.subject, "kind": "run", "out": str(out), "image": drawing.title, "panels": names}
        )
    else:
        print(f"{out}: {drawing.title}", *names, sep="\n  ")
    return 0


def _list(panels: Sequence[Panel]) -> None:
    from kinformer.figures.panels import PatternPanel

    for panel in panels:
        line = ", ".join(part.replace("\n", ", ") for part in (panel.place, panel.name) if part)
        if isinstance(panel, PatternPanel):
            share = panel.allowed_pairs / panel.length**2
            line += f" ({panel.allowed_pairs:,} of {panel.length**2:,} pairs of {panel.length} tokens, {share:.1%})"
        print(f"  {line}")


def _facts(panel: Panel) -> dict[str, Any]:
    """For JSON: a panel without its numbers."""
    import numpy as np

    shown = {name: value for name, value in asdict(panel).items() if not isinstance(value, np.ndarray)}
    return {"panel": type(panel).__name__.removesuffix("Panel").lower()} | shown


def _file_name(subject: str) -> str:
    return (
        re.sub(r"[^\w-]+", "-", Path(subject).name if not subject.startswith("{") else "pattern").strip("-")
        or "drawing"
    )
