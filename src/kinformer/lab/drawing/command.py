"""The drawing of a subject into a file, with lines and facts about the picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.pictures import Picture, picture_of
from kinformer.lab.drawing.runs import (
    chosen_blocks,
    learnt_spans,
    looked_at,
    text_by_buckets,
    text_by_exits,
    text_by_experts,
)
from kinformer.lab.drawing.style import check
from kinformer.lab.drawing.subject import find
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, marked

TEXTS: dict[str, Callable[[DrawOptions], Picture]] = {
    "exits": text_by_exits,
    "buckets": text_by_buckets,
    "experts": text_by_experts,
    "blocks": chosen_blocks,
}
"""Options that draw a text, or a model's choices on a text, and their functions."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture in the file ``out``: its ``title``, ``lines`` that describe each part, and the same as ``facts`` for
    JSON."""

    out: Path
    title: str
    lines: tuple[str, ...]
    facts: dict[str, object]


def draw(options: DrawOptions) -> Drawing:
    """Draw a subject into a file; the public form is :func:`kinformer.draw`."""
    out = Path(options.out or f"{_file_name(options.subject)}.png")
    check(out)
    picture = _picture(options)
    picture.write(out)
    facts = {"subject": options.subject, "kind": picture.kind, "out": str(out), **picture.facts}
    return Drawing(out=out, title=picture.title + picture.more, lines=tuple(picture.lines), facts=facts)


def _picture(options: DrawOptions) -> Picture:
    """Return the picture of the options' subject."""
    if options.image is not None:
        return looked_at(options)
    texts = [name for name in TEXTS if getattr(options, name)]
    if len(texts) > 1:
        raise KinformerError(f"{' and '.join(map(marked, texts))} contradict; give one.")
    if options.spans:
        return learnt_spans(options)
    if texts:
        return TEXTS[texts[0]](options)
    if options.data is not None:
        raise KinformerError(
            f"`data` {options.data}: is for {', '.join(map(marked, TEXTS))}; add one, or leave it out."
        )
    with private_numbers(options.seed):
        subject = find(options)
        panels = subject.panels()
    if panels:
        return picture_of(subject.kind, subject.title, panels)
    if subject.untrained:
        raise KinformerError(
            f"{options.subject}: the positions {', '.join(subject.untrained)} are learnt, and before training they are "
            "random numbers; draw the folder of a run with these positions."
        )
    raise KinformerError(f"{options.subject}: has neither a pattern nor positions to draw; choose another member.")


def _file_name(subject: str) -> str:
    name = "pattern" if subject.startswith("{") else Path(subject).name
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "drawing"
