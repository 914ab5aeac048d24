"""A member at a glance: its block as a small SVG in which what it changes of the plain Transformer is coloured.

What is plain follows from the configs of the plain members: boxes that those have too are grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from html import escape
from typing import Any, NamedTuple

from generator.block import PARTS, sublayers
from generator.facts import config_of
from kinformer.core.config import Config
from kinformer.family.record import Member

PLAIN = {"decoder": "gpt", "encoder": "bert", "encoder_decoder": "vanilla"}
WIDTH, LINE, PAD, GAP, LETTERS = 170, 12, 6, 7, 26
NAMES = {
    "softmax": "softmax attention",
    "bidirectional": "softmax attention",
    "segment_memory": "attention with a memory",
    "compressive": "attention, two memories",
    "memorizing": "attention and look-ups",
    "routing": "attention in clusters",
    "etc": "attention by kinds",
    "linformer": "low-rank attention",
    "star": "ring and relay",
    "sinkhorn": "sorted blocks",
    "causal_sinkhorn": "sorted blocks",
    "windows": "shifted windows",
    "outer_product": "fast weights",
    "tensorized": "tensor attention",
    "single_head": "one head of attention",
    "separable_convolution": "convolution",
    "lstm": "LSTM",
    "rwkv7": "RWKV-7",
    "cross": "attention to the source",
    "product_keys": "product-key memory",
    "linear": "kernel attention",
    "lsh": "hashed attention",
    "mlp": "feed-forward",
    "language": "next token",
    "masked_language": "masked tokens",
    "masked_patches": "masked patches",
    "patch_colours": "patch colours",
    "linear_classification": "classes",
    "classification": "classes",
    "distilled": "classes, and a teacher's",
    "ctc": "characters (CTC)",
    "spalm": "next token, with neighbours",
    "modulus": "next token, of moduli",
}
SIGN = 44, 18
"""Width and height of a sign of the legend."""
SPACE, HEAD = 22, 24
"""Of a row of cards: between two, and over one for its name."""
PAPER = (
    "text{font:9.5px system-ui,sans-serif;text-anchor:middle;fill:#57606a}.new{fill:#1b1f24;font-weight:600}"
    ".title{font-size:13px;font-weight:600;fill:#1b1f24}.paper{fill:#fff}.plain{fill:none;stroke:#d8dee4}"
    ".changed{fill:#d9e9fb;stroke:#0062a3}path{stroke:#57606a;fill:none}"
)
USUAL = ("tokens", "+ learned positions", "+ sinusoidal positions")
"""Inputs of plain members; without positions, something else says where a token stands."""


class Box(NamedTuple):
    """One box from below: its lines, and whether it is as in the plain Transformer."""

    lines: tuple[str, ...]
    kind: str
    plain: bool


def boxes(member: Member) -> list[Box]:
    """Input, sublayers of the layer that shows the mechanism, and head, from below."""
    config = config_of(member.name)
    plain = config_of(PLAIN[config.kind])
    usual = {tuple(each) for each in _lines(plain, plain.layers[0])}
    usual |= {USUAL[:1], USUAL[:2], (USUAL[0], USUAL[2]), ("norm",)}
    found = [
        Box(tuple(lines), kind, tuple(lines) in usual)
        for lines, kind in zip(_lines(config, config.layers[member.layer]), _kinds(config, member.layer), strict=True)
    ]
    repeats = _repeats(config)
    if member.growth == "store":
        found[-1] = Box((*found[-1].lines, "and a datastore"), "end", False)
    return [*found[:-1], Box((repeats,), "times", repeats.endswith("layers")), found[-1]]


def _lines(config: Any, layer: Any) -> list[list[str]]:
    """The lines of every box, with names of parts but without sizes."""
    position = getattr(config, "position", None)
    first = [_name(config.input.kind)]
    if (embedding := getattr(config.input, "embedding", None)) is not None and embedding.kind != "lookup":
        first.append(_name(embedding.kind))
    if position is not None and position.kind != "none":
        first.append(f"+ {_name(position.kind)} positions")
    middle = [list(_inner(config, layer, lines)) for sublayer in sublayers(layer) for lines in _ordered(sublayer)]
    return [first, *middle, [_name(config.head.kind)]]


def _ordered(sublayer: Any) -> list[tuple[str, ...]]:
    joint = [(f"{sublayer.joint} gate",)] if sublayer.joint not in ("", "+") else []
    after = [(f"{sublayer.after} behind the sum",)] if sublayer.after else []
    return [*sublayer.boxes, *joint, *after]


def _inner(config: Any, layer: Any, lines: tuple[str, ...]) -> Iterator[str]:
    """A mixer by its name and its parts, a feed-forward by its kind; a norm as it is."""
    title = lines[0]
    if _kind(title) != "mixer":
        yield title
        return
    mixers = [layer.mixer, *getattr(layer, "further_mixers", ())]
    if getattr(layer, "attention", None) is not None:
        mixers.append(layer.attention)
    kind = title.removeprefix("mixer: ").replace(" ", "_")
    mixer = next((each for each in mixers if each.kind == kind), layer.mixer)
    yield _name(mixer.kind)
    known = {each.name: each for each in fields(mixer)}
    for slot in PARTS:
        part = getattr(mixer, slot, None)
        if not isinstance(part, Config) or part.kind in ("none", "causal", "full"):
            continue
        if slot in ("pattern", "feature_map", "decay") or part.kind != getattr(known[slot].default, "kind", None):
            yield f"{slot.replace('_', ' ')}: {part.kind.replace('_', ' ')}"
    if getattr(mixer, "rule", "linear") != "linear":
        yield f"rule: {mixer.rule}"
    if getattr(mixer, "differential", None) is not None:
        yield "difference of two softmaxes"


def _kinds(config: Any, number: int) -> list[str]:
    layer = config.layers[number]
    return ["end", *(_kind(lines[0]) for sublayer in sublayers(layer) for lines in _ordered(sublayer)), "end"]


def _kind(title: str) -> str:
    if title.startswith("feed-forward"):
        return "feed"
    return "norm" if title.startswith(("norm", "relu")) or title.endswith("gate") else "mixer"


def _repeats(config: Any) -> str:
    stack = getattr(config, "stack", None)
    layers = f"\N{MULTIPLICATION SIGN} {len(config.uses)} layers"
    return layers if stack is None or stack.kind == "sequential" else f"{layers}, {stack.kind.replace('_', ' ')}"


def _name(kind: str) -> str:
    return NAMES.get(kind, kind.replace("_", " "))


def picture(member: Member) -> str:
    """The card's SVG, in the colours of the page."""
    drawn, height = _drawn(member)
    return (
        f'<svg class="card" viewBox="0 {1 - height:g} {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(words(member))}">{drawn}</svg>'
    )


def legend() -> str:
    """What the signs of the cards mean, once for all of them, in the colours of the page."""
    wide, high = SIGN
    box = f'<rect class="{{look}}" x="1" y="1" width="{wide - 2}" height="{high - 2}" rx="4"/>'
    name = f'<text{{weight}} x="{wide / 2}" y="{high / 2 + 3.5:g}">{{text}}</text>'
    bold = ' class="new"'
    plain = ", ".join(f"<code>{name}</code>" for name in PLAIN.values())
    signs = (
        (box.format(look="plain") + name.format(weight="", text="norm"), f"as in the plain Transformer ({plain})"),
        (box.format(look="changed") + name.format(weight=bold, text="kernel"), "changed or added by the member"),
        (f'<path d="M{wide / 2} {high}V0"/>', "the way of a token, upwards; residual sums are not drawn"),
        (name.format(weight="", text="\N{MULTIPLICATION SIGN} 4"), "how often the layer is applied"),
        (
            name.format(weight=bold, text="\N{MULTIPLICATION SIGN} 4"),
            "applied by the stack that is named",
        ),
    )
    rows = "".join(
        f'<li><svg class="card" viewBox="0 0 {wide} {high}" aria-hidden="true">{sign}</svg><span>{text}</span></li>'
        for sign, text in signs
    )
    return f'<ul class="legend" aria-label="What the cards show">{rows}</ul>'


def row(members: Sequence[Member]) -> str:
    """Cards in a row as an SVG that stands alone, on paper."""
    drawn = [_drawn(member) for member in members]
    tall = max(height for _, height in drawn) + HEAD
    width = len(drawn) * (WIDTH + SPACE) - SPACE
    out = [
        f'<g transform="translate({number * (WIDTH + SPACE)} {tall:g})">{part}'
        f'<text class="title" x="{WIDTH / 2}" y="{-height - 8:g}">{escape(member.name)}</text></g>'
        for number, (member, (part, height)) in enumerate(zip(members, drawn, strict=True))
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {width + 16:g} {tall + 16:g}" width="{width + 16:g}" '
        f'height="{tall + 16:g}"><style>{PAPER}</style><rect class="paper" x="-8" y="-8" width="{width + 16:g}" '
        f'height="{tall + 16:g}" rx="6"/>{"".join(out)}</svg>\n'
    )


def _drawn(member: Member) -> tuple[str, float]:
    """The card's shapes, from 0 upwards, and their height."""
    out, y = [], 0.0
    found = boxes(member)
    for box in found:
        height = LINE * len(box.lines) + PAD if box.kind != "times" else LINE
        top = -y - height
        if box.kind != "times":
            look = "plain" if box.plain else "changed"
            out.append(f'<rect class="{look}" x="1" y="{top:g}" width="{WIDTH - 2}" height="{height}" rx="4"/>')
        for number, line in enumerate(box.lines):
            at = top + (PAD / 2 if box.kind != "times" else 0) + LINE * (number + 0.78)
            weight = "" if box.plain else ' class="new"'
            out.append(f'<text{weight} x="{WIDTH / 2}" y="{at:g}">{escape(line[: LETTERS + 4])}</text>')
        y += height + GAP
        if box is not found[-1]:
            out.append(f'<path d="M{WIDTH / 2} {-y + GAP:g}v{-GAP}"/>')
    return "".join(out), y - GAP + 2


def words(member: Member) -> str:
    """What the picture shows: the boxes that are not the plain Transformer's."""
    changed = [", ".join(box.lines) for box in boxes(member) if not box.plain]
    return f"Changed: {'; '.join(changed)}" if changed else "The plain Transformer"
