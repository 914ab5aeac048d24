"""The drawing of a model: its layers as boxes along the residual stream, from the input below to the head above.

It is SVG to stand in a page, whose colours are the page's. Sublayers are drawn as their residual applies them: a norm
before the sublayer, behind it or on the stream itself, a sum or a gate where both meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from textwrap import wrap
from typing import Any

from kinformer.core.config import Config
from kinformer.lab.drawing.panels import describe, numbered

WIDTH, GAP, STEM = 260, 40, 50
LINE, PAD, SPACE = 15, 9, 14
LETTERS = 32
DETAILS = ("num_heads", "window", "segment", "memory", "rule", "hidden_dim", "activation", "rounds", "clusters", "rank")
"""Settings that are told of a box, where it has them."""
PARTS = ("feature_map", "decay", "projection", "position", "pattern", "score", "span", "compression")
BRANCHES = {
    "pre": (["norm"], [], "+", ""),
    "post": ([], [], "+", "norm"),
    "res_post": ([], ["norm"], "+", ""),
    "sandwich": (["norm"], ["norm"], "+", ""),
    "reordered": (["norm"], ["relu"], "+", ""),
    "gated": (["norm"], ["relu"], "gate", ""),
}
"""Of a residual: what stands before the sublayer and behind it, where they meet the stream, and what follows on it."""


@dataclass(frozen=True)
class Sublayer:
    """``boxes`` from below, each some lines of text; ``joint``: how they meet the stream ("" where they are it)."""

    boxes: Sequence[tuple[str, ...]]
    joint: str
    after: str = ""


@dataclass
class Pencil:
    """Draws upwards from the bottom of a column; ``top`` counts from 0 upwards."""

    left: float
    top: float = 0.0
    out: list[str] = field(default_factory=list)

    @property
    def stream(self) -> float:
        return self.left + STEM / 2

    def line(self, x1: float, y1: float, x2: float, y2: float, arrow: bool = False) -> None:
        end = ' marker-end="url(#tip)"' if arrow else ""
        self.out.append(f'<line x1="{x1}" y1="{-y1}" x2="{x2}" y2="{-y2}"{end}/>')

    def box(self, lines: Sequence[str], kind: str, left: float, width: float) -> None:
        height = LINE * len(lines) + PAD
        self.out.append(
            f'<rect class="{kind}" x="{left}" y="{-self.top - height}" width="{width}" height="{height}" rx="6"/>'
        )
        for number, text in enumerate(lines):
            y = -self.top - height + PAD / 2 + LINE * (number + 0.75)
            weight = ' class="name"' if number == 0 else ""
            self.out.append(f'<text{weight} x="{left + width / 2}" y="{y:g}">{escape(text)}</text>')
        self.top += height

    def rise(self, height: float = SPACE) -> None:
        self.line(self.stream, self.top, self.stream, self.top + height, arrow=height >= SPACE)
        self.top += height


def drawing(config: Any) -> str:
    """The model of a config as an SVG element."""
    columns = []
    if config.kind == "encoder_decoder":
        columns.append((config.encoder, "encoder of the source", False))
    columns.append((config, "", True))
    out: list[str] = []
    left = 0.0
    height = 0.0
    for model, title, whole in columns:
        for layers, groups in _shown(model):
            pencil = Pencil(left)
            _column(pencil, model, layers, title or groups, whole)
            out += pencil.out
            left, height = left + WIDTH + GAP, max(height, pencil.top)
    width = left - GAP + 12
    return (
        f'<svg class="block" viewBox="-6 {-height - 6:g} {width:g} {height + 12:g}" style="max-width:{width:g}px" '
        f'role="img" aria-label="{escape(_told(config))}"><defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" '
        'markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0 6 3 0 6z"/></marker></defs>'
        + "".join(out)
        + "</svg>"
    )


def _told(config: Any) -> str:
    kinds = " and ".join(dict.fromkeys(layer.mixer.kind.replace("_", " ") for layer in config.layers))
    return f"Drawing of the model: {config.input.kind}, {len(config.uses)} layers of {kinds}, head {config.head.kind}."


MOST_COLUMNS = 3


def _shown(model: Any) -> list[tuple[Any, str]]:
    """The layers that differ in what is drawn of them, with where they stand; three at most."""
    groups: dict[str, tuple[Any, list[int]]] = {}
    for index, layer in enumerate(model.layers):
        groups.setdefault(repr(list(sublayers(layer))), (layer, []))[1].append(index)
    found = [(layer, numbered("layer", indices)) for layer, indices in groups.values()]
    return found[:MOST_COLUMNS] if len(groups) > 1 else [(found[0][0], "")]


def _column(pencil: Pencil, model: Any, layer: Any, title: str, whole: bool) -> None:
    """Input, one layer in a frame that says how often it is applied, the end."""
    full = WIDTH
    position = getattr(model, "position", None)
    read = getattr(model, "input", None)
    first = ["source" if read is None else f"input: {read.kind}"]
    if position is not None and position.kind != "none":
        first += _wrapped(f"+ {describe(position)}")
    pencil.box(first, "end", pencil.left, full)
    pencil.rise()
    bottom = pencil.top
    pencil.rise(LINE)
    for sublayer in sublayers(layer):
        _sublayer(pencil, sublayer)
    frame = pencil.top - bottom
    pencil.out.insert(
        0, f'<rect class="layer" x="{pencil.left}" y="{-pencil.top}" width="{full}" height="{frame}" rx="10"/>'
    )
    label = title or f"{_times(model)}"
    pencil.out.append(f'<text class="times" x="{pencil.left + full - 8}" y="{-bottom - 4:g}">{escape(label)}</text>')
    pencil.rise()
    if getattr(model, "norm", None) is not None:
        pencil.box(["norm"], "norm", pencil.left, full)
        pencil.rise()
    if whole:
        pencil.box([f"head: {model.head.kind.replace('_', ' ')}"], "end", pencil.left, full)
    else:
        pencil.box(["to the cross-attention of every layer"], "end", pencil.left, full)


def _times(model: Any) -> str:
    stack = getattr(model, "stack", None)
    count = len(model.uses) if hasattr(model, "uses") else len(model.layers)
    kind = "" if stack is None or stack.kind == "sequential" else f", {stack.kind}"
    return f"\N{MULTIPLICATION SIGN} {count}{kind}"


def _sublayer(pencil: Pencil, sublayer: Sublayer) -> None:
    """Boxes beside the stream that leaves it below and joins it above; on the stream where there is no joint."""
    stream, start = pencil.stream, pencil.top
    if not sublayer.joint:
        for lines in sublayer.boxes:
            pencil.box(lines, _class(lines), pencil.left + 8, WIDTH - 16)
            pencil.rise()
        return
    left, width = pencil.left + STEM, WIDTH - STEM - 10
    middle = left + width / 2
    pencil.line(stream, start, middle, start)
    for lines in sublayer.boxes:
        pencil.line(middle, pencil.top, middle, pencil.top + SPACE, arrow=True)
        pencil.top += SPACE
        pencil.box(lines, _class(lines), left, width)
    pencil.line(middle, pencil.top, middle, pencil.top + SPACE)
    pencil.top += SPACE
    wide = 10 if sublayer.joint == "+" else 17
    pencil.line(middle, pencil.top, stream + wide, pencil.top, arrow=True)
    pencil.line(stream, start, stream, pencil.top - 9, arrow=True)
    pencil.out.append(
        f'<rect class="joint" x="{stream - wide}" y="{-pencil.top - 9}" width="{2 * wide}" height="18" rx="9"/>'
        f'<text class="name" x="{stream}" y="{-pencil.top + 4}">{sublayer.joint}</text>'
    )
    pencil.line(stream, pencil.top + 9, stream, pencil.top + 9 + SPACE)
    pencil.top += 9 + SPACE
    if sublayer.after:
        pencil.box([sublayer.after], "norm", pencil.left + 8, WIDTH - 16)
        pencil.rise()


def _class(lines: Sequence[str]) -> str:
    return "norm" if lines[0] in ("norm", "relu") else "feed" if lines[0].startswith("feed-forward") else "mixer"


def sublayers(layer: Any) -> Iterator[Sublayer]:
    """What a layer's config applies, in order."""
    mixers = [layer.mixer, *getattr(layer, "further_mixers", ())]
    if layer.kind == "sha_rnn":
        yield Sublayer([("norm",), _box(layer.mixer)], "")
        if layer.attention is not None:
            yield Sublayer([_box(layer.attention)], "")
        yield Sublayer([("norm",), _feed_forward(layer.feed_forward, "")], "+")
        return
    if not hasattr(layer, "residual"):
        yield from (Sublayer([_box(mixer)], "") for mixer in mixers)
        return
    half = ", half a step" if layer.kind == "macaron" else ""
    last = _feed_forward(layer.feed_forward, half)
    boxes = [last] if half else []
    for lines in [*boxes, *map(_box, mixers), last]:
        yield _joined(layer.residual, lines)


def _joined(residual: Config, lines: tuple[str, ...]) -> Sublayer:
    before, behind, joint, after = BRANCHES.get(residual.kind, ([], [], residual.kind, ""))
    gate = getattr(residual, "gate", joint)
    boxes = [*((each,) for each in before), lines, *((each,) for each in behind)]
    return Sublayer(boxes, gate[:5] if joint == "gate" else joint, after)


def _feed_forward(config: Any, half: str) -> tuple[str, ...]:
    name = "" if config.kind == "mlp" else f" ({config.kind.replace('_', ' ')})"
    return (f"feed-forward{name}{half}", *_wrapped(_settings(config)))


def _box(mixer: Any) -> tuple[str, ...]:
    """A mixer's name, its sizes, and its parts that are not as always."""
    name = mixer.kind.replace("_", " ")
    lines = [name if "attention" in name else f"mixer: {name}", *_wrapped(_settings(mixer))]
    known = {each.name: each for each in fields(mixer)}
    for slot in PARTS:
        part = getattr(mixer, slot, None)
        if isinstance(part, Config) and part.kind != "none" and (slot == "pattern" or part != known[slot].default):
            lines += _wrapped(f"{slot.replace('_', ' ')} {describe(part)}")
    return tuple(lines)


def _settings(config: Any) -> str:
    found = ((name, getattr(config, name, None)) for name in DETAILS)
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found if value not in (None, 0, ""))


def _wrapped(text: str) -> list[str]:
    lines = wrap(text, LETTERS)
    return lines if len(lines) < 4 else [*lines[:2], f"{lines[2]} ..."]
