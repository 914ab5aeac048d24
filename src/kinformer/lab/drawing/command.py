"""Drawing into a file, with lines and facts about what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kinformer.lab.drawing.draw import draw as draw_panels
from kinformer.lab.drawing.image import draw_image
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.panels import Panel, PatternPanel
from kinformer.lab.drawing.runs import looked_at, text_by_exits
from kinformer.lab.drawing.style import check
from kinformer.lab.drawing.subject import find
from kinformer.lab.drawing.text import ColouredText, draw_text
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, marked, plural, spelled

MAX_PANELS = 24


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture in the file ``out``: its ``title``, ``lines`` that say what each part shows, and all of it as ``facts``
    for JSON."""

    out: Path
    title: str
    lines: tuple[str, ...]
    facts: dict[str, object]


def draw(options: DrawOptions) -> Drawing:
    """Draw a subject into a file; the public form is :func:`kinformer.draw`."""
    out = Path(options.out or f"{_file_name(options.subject)}.png")
    check(out)
    if options.image is not None:
        return _image(options, out)
    texts = [name for name in TEXTS if getattr(options, name)]
    if len(texts) > 1:
        raise KinformerError(f"{' and '.join(map(marked, texts))} contradict; give one.")
    if texts and not options.spans:
        return TEXTS[texts[0]](options, out)
    if options.data is not None and not options.spans:
        raise KinformerError(
            f"`data` {options.data}: is for {', '.join(map(marked, TEXTS))}; add one, or leave it out."
        )
    with private_numbers(options.seed):
        subject = find(options)
        panels = subject.panels()
    if not panels and subject.untrained:
        raise KinformerError(
            f"{options.subject}: the positions {', '.join(subject.untrained)} are learnt, and before training they are "
            "random numbers; draw the folder of a run that has them."
        )
    if not panels:
        raise KinformerError(f"{options.subject}: has neither a pattern nor positions to draw; choose another member.")
    return _panels(options, out, (subject.kind, subject.title), panels)


def _panels(options: DrawOptions, out: Path, subject: tuple[str, str], panels: Sequence[Panel]) -> Drawing:
    """Draw the first ``MAX_PANELS`` panels of a ``subject``, its kind and its title."""
    kind, title = subject
    shown, more = panels[:MAX_PANELS], ""
    draw_panels(shown, title, out)
    if len(panels) > len(shown):
        more = spelled(f" ({len(shown)} of {len(panels)}; choose with `layer` and `head`)")
    facts = {"drawn": len(shown), "panels": [_facts(panel) for panel in panels]}
    return _drawing(options, out, kind, title + more, list(_lines(shown)), facts)


def _exits(options: DrawOptions, out: Path) -> Drawing:
    text, exited = text_by_exits(options)
    draw_text(text, out)
    return _drawing(options, out, "run", text.title, [exited.text], exited.facts)


def _buckets(options: DrawOptions, out: Path) -> Drawing:
    from kinformer.lab.drawing.runs import text_by_buckets

    return _coloured(options, out, *text_by_buckets(options))


def _experts(options: DrawOptions, out: Path) -> Drawing:
    from kinformer.lab.drawing.runs import text_by_experts

    return _coloured(options, out, *text_by_experts(options))


def _blocks(options: DrawOptions, out: Path) -> Drawing:
    from kinformer.lab.drawing.runs import chosen_panels

    panels, title = chosen_panels(options)
    return _panels(options, out, ("run", title), panels)


def _coloured(options: DrawOptions, out: Path, text: ColouredText, facts: dict[str, object]) -> Drawing:
    draw_text(text, out)
    return _drawing(options, out, "run", text.title, [], facts)


TEXTS = {"exits": _exits, "buckets": _buckets, "experts": _experts, "blocks": _blocks}
"""Options that draw a text, or what happens in one, and what draws it."""


def _image(options: DrawOptions, out: Path) -> Drawing:
    drawing = looked_at(options)
    draw_image(drawing, out)
    names = [panel.name.replace("\n", ", ") for panel in drawing.panels]
    return _drawing(options, out, "run", drawing.title, names, {"image": drawing.title, "panels": names})


def _drawing(
    options: DrawOptions, out: Path, kind: str, title: str, lines: Sequence[str], facts: dict[str, object]
) -> Drawing:
    facts = {"subject": options.subject, "kind": kind, "out": str(out)} | facts
    return Drawing(out=out, title=title, lines=tuple(lines), facts=facts)


def _lines(panels: Sequence[Panel]) -> Iterator[str]:
    for panel in panels:
        line = ", ".join(part.replace("\n", ", ") for part in (panel.place, panel.name) if part)
        if isinstance(panel, PatternPanel):
            share = panel.allowed_pairs / panel.length**2
            line += (
                f" ({panel.allowed_pairs:,} of {plural(panel.length**2, 'pair')} of {plural(panel.length, 'token')}, "
                f"{share:.1%})"
            )
        yield line


def _facts(panel: Panel) -> dict[str, object]:
    """Return a panel as data for JSON, without its arrays."""
    shown = {name: value for name, value in asdict(panel).items() if not isinstance(value, np.ndarray)}
    return {"panel": type(panel).__name__.removesuffix("Panel").lower()} | shown


def _file_name(subject: str) -> str:
    name = "pattern" if subject.startswith("{") else Path(subject).name
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "drawing"
