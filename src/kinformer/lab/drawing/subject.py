"""The subject of a drawing, a member, a run, or a kind of pattern or position; and its drawing into a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from kinformer.core.config import Config, field_types, from_dict, override
from kinformer.core.contract import CausalMixer, ReadsSource
from kinformer.core.encoder import EncoderMixer
from kinformer.core.parts import PatternConfig, Position, PositionConfig
from kinformer.core.pattern import Pattern
from kinformer.core.stack import EmbeddingConfig, ModelConfig
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.table import FAMILY, nearest_member
from kinformer.kernels.block_sparse import explain
from kinformer.lab.drawing import runs
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.panels import (
    LENGTH,
    Encoding,
    FullSequence,
    OneToken,
    Panel,
    PatternPanel,
    Placed,
    describe,
    encoding_panels,
    field_panel,
    global_token_words,
    grid,
    heads_of,
    in_text,
    influence_panel,
    numbered,
    parts_of,
    raster,
    shares_of,
)
from kinformer.lab.drawing.pictures import Picture, picture_of
from kinformer.lab.drawing.plots import check
from kinformer.lab.runs.run import CONFIG, open_run
from kinformer.models.decoder import Decoder
from kinformer.models.encoder import Encoder
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, marked, nearest, plural
from kinformer.runtime.parsing import JsonObject, parse_json

M = TypeVar("M", bound="nn.Module")
DIM, NUM_HEADS, HEAD_DIM, DEPTH = 512, 8, 64, 1
"""The sizes of a position or an embedding without a model."""
TITLE = 36
POSITIONLESS = ("lookup", "adaptive")
"""Embeddings that do not depend on positions."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The parts to draw.

    patterns: (pattern, name, place) of each different head or layer.
    others: (mixer, name, place, width) of each mixer without a pattern.
    untrained: the kinds of encodings with random numbers before training, which are not drawn.
    """

    kind: str
    title: str
    options: DrawOptions
    patterns: list[tuple[Pattern, str, str]] = field(default_factory=list)
    encodings: list[Encoding] = field(default_factory=list)
    others: list[tuple[CausalMixer | EncoderMixer, str, str, int]] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)

    def add_position(self, config: Config, position: Position | None, place: str = "", **sizes: int) -> None:
        """Add an encoding of positions; ``position`` None means that its numbers are random before training."""
        if position is None:
            self.untrained.append(config.kind)
        else:
            self.encodings.append(Encoding(position=position, name=describe(config), place=place, **sizes))

    def add_embedding(self, config: Config, embedding: nn.Module | None, place: str = "") -> None:
        """Add an embedding of tokens and positions; None means that its numbers are random before training."""
        if embedding is not None:
            name = f"{describe(config)}\none token at every position"
            self.encodings.append(Encoding(position=OneToken(embedding), name=name, place=place))
        elif config.kind not in POSITIONLESS:
            self.untrained.append(config.kind)

    def panels(self) -> list[Panel]:
        """Return all panels of the picture, patterns first."""
        options, panels = self.options, list[Panel]()
        tokens, cells = grid(options.length, [pattern for pattern, _, _ in self.patterns])
        for pattern, name, place in self.patterns:
            sized, length = pattern.sized(tokens * cells), tokens * cells
            shares = shares_of(sized, tokens, cells)
            panel = PatternPanel(
                place=place,
                name=name,
                shares=shares,
                tokens_per_cell=tokens,
                causal=pattern.ahead == 0,
                length=length,
                allowed_pairs=round(float(shares.sum()) * tokens**2),
                computed_pairs=None if isinstance(pattern, FullSequence) else round(explain(sized, length).computed),
            )
            panels.append(panel)
            if (image := raster(pattern, options.image_width)) is not None:
                panels.append(field_panel(pattern, "what one token sees of an image", place, *image))
        for mixer, name, place, dim in self.others:
            panels.append(influence_panel(mixer, name, place, dim, options.length, trained=self.kind == "run"))
        for encoding in self.encodings:
            panels += encoding_panels(encoding, options.length or LENGTH)
        return panels


def find(options: DrawOptions) -> Subject:
    """Return the member, run, pattern or position ``options.subject``, in this order unless an option names one."""
    name = options.subject
    if options.pattern and options.position:
        raise KinformerError("`pattern` and `position` contradict; give one.")
    if name.lstrip().startswith("{"):
        try:
            data = parse_json(options.subject)
        except ValueError as error:
            raise KinformerError(
                f'{options.subject}: is not JSON ({error}); write as in {{"kind": "local"}}.'
            ) from None
        if not isinstance(data, dict) or str(data.get("kind")) not in (table := _parts(options)):
            near = nearest(str(data.get("kind")), table)
            raise KinformerError(f"{options.subject}: does not name a pattern or a position; {near}")
        return _part(options, data)
    named, table = not (options.pattern or options.position), _parts(options)
    # The name of a member means a part of the same name if --set changes only fields that models do not have.
    changed = {path.split(".")[0] for path in options.set}
    owned = {*field_types(Decoder.Config), *field_types(Encoder.Config)}
    means_part = bool(changed) and name in table and not changed & owned
    if named and name in FAMILY and not means_part:
        config = configure(name, options.recipe, None, options.set)
        return _model("member", f"{name} ({options.recipe})", config, None, options)
    if named and (Path(name) / CONFIG).is_file():
        run = open_run(name)
        model = run.model(options.set)
        return _model("run", f"{run.folder.name} ({run.member}, trained)", model.config, model, options)
    if name in table:
        return _part(options, {"kind": name})
    if named and "/" in name:
        open_run(name)  # raises the error about a folder without a run
    wanted = "a pattern" if options.pattern else "a position"
    wanted = "a member, a run folder, a pattern or a position" if named else wanted
    other, names = nearest_member(name) if named else None, [*table, *(FAMILY if named else ())]
    near = other.sentence if other else f"{nearest(name, names)} See: kinformer list."
    raise KinformerError(f"{name!r} is not {wanted} to draw; {near}")


# A pattern or a position without a model.


def _parts(options: DrawOptions) -> dict[str, str]:
    """Return the slot of every kind of part that can be drawn alone; a kind in two slots counts as a pattern."""
    slots = ["pattern"] if options.pattern else ["position", "embedding"]
    if not (options.pattern or options.position):
        slots.append("pattern")
    return {kind: slot for slot in slots for kind in kinds()[slot]}


def _part(options: DrawOptions, data: JsonObject) -> Subject:
    """Return the subject of one pattern or position, with the changes of --set."""
    slot, changes = _parts(options)[data["kind"]], options.set
    flat = {name: value for name, value in changes.items() if "." not in name}
    inner = {path: value for path, value in changes.items() if "." in path}
    bases = {"pattern": PatternConfig, "position": PositionConfig, "embedding": EmbeddingConfig}
    config = override(from_dict(bases[slot], data | flat, kinds(), f"the {slot} {data['kind']!r}"), inner, kinds())
    name = describe(config)
    title = name if len(name) <= TITLE else config.kind.replace("_", " ")
    subject = Subject(kind="pattern" if slot == "pattern" else "position", title=title, options=options)
    if isinstance(config, PatternConfig):
        subject.patterns.extend(_heads(Placed(config, config, "", None), options))
    elif isinstance(config, EmbeddingConfig):
        subject.add_embedding(config, _built(lambda: config.build(1, DIM)))
    elif isinstance(config, PositionConfig) and config.kind != "none":
        # A position that acts inside attention raises here, and is built for heads below.
        with suppress(KinformerError):
            subject.add_position(config, _built(lambda: config.build_model(DIM, DEPTH)), depth=DEPTH)
            return subject
        position = _built(lambda: config.build_heads(NUM_HEADS * HEAD_DIM, NUM_HEADS, HEAD_DIM))
        subject.add_position(config, position, head_dim=HEAD_DIM)
    return subject


# The patterns, positions and other mixers of a model.


class _Side(NamedTuple):
    """A model, or its encoder: the config, the width, the trained module or None, and the prefix of places' names."""

    config: Any
    dim: int
    model: nn.Module | None
    name: str

    def at(self, place: str) -> str:
        return ", ".join(filter(None, (self.name, place)))


def _built(build: Callable[[], M], model: nn.Module | None = None, path: str = "") -> M | None:
    """Return the module at ``path`` of a trained model, or without a model a new module; None for a new module whose
    numbers depend on the seed, because random numbers show nothing."""
    if model is not None:
        return _module_at(model, path)
    built = []
    for seed in (0, 1):
        with private_numbers(seed):
            built.append(build())
    values = [module.state_dict() for module in built]
    return built[0] if all(torch.equal(values[0][name], values[1][name]) for name in values[0]) else None


def _module_at(model: nn.Module, path: str) -> Any:
    """Return the module of the part of the config at ``path``."""
    return model.get_submodule(f"stack.{path}" if path.startswith("layers.") else path)


def _place_of(placed: Placed) -> str:
    """Return the place of a part in words."""
    return "in the input" if placed.path.startswith("input.") else numbered("layer", placed.layers or ())


def _model(kind: str, title: str, config: ModelConfig, model: nn.Module | None, options: DrawOptions) -> Subject:
    """Return the patterns and positions of a model's config; a trained ``model`` gives its learnt positions."""
    depth = len(config.layers)
    if options.layer is not None and options.layer > depth:
        raise KinformerError(f"`layer` {options.layer}: {title} has {plural(depth, 'layer')}; give 1 to {depth}.")
    subject = Subject(kind=kind, title=title, options=options)
    _add(subject, _Side(config, config.dim, model, ""))
    if (encoder := getattr(config, "encoder", None)) is not None:
        trained = None if model is None else _module_at(model, "encoder")
        _add(subject, _Side(encoder, config.dim, trained, "encoder"))
    return subject


def _add(subject: Subject, side: _Side) -> None:
    """Add all parts of a side that can be drawn."""
    config, dim, model, _ = side
    options = subject.options
    for placed in _of_layer(parts_of(config, "pattern"), options):
        for head, name, place in _heads(placed, options):
            pattern = in_text(head, config)
            words = f"\n{global_token_words(pattern)}" if isinstance(pattern, FullSequence) else ""
            subject.patterns.append((pattern, name + words, side.at(place)))
    for placed in _apart(_of_layer(parts_of(config, "position"), options), model):
        if placed.part.kind != "none":
            _add_position(subject, placed, side)
    for placed in parts_of(config, "embedding") if options.layer is None else ():
        build = partial(placed.part.build, placed.owner.vocab_size, dim)
        subject.add_embedding(placed.part, _built(build, model, "input.embedding"), side.at(""))
    mixers = [*parts_of(config, "mixer"), *parts_of(config, "encoder_mixer")]
    for placed in _apart(_of_layer(mixers, options), model):
        width = config.stack.widths(dim, len(config.layers))[(placed.layers or (0,))[0]]
        mixer = placed.part.build(width) if model is None else _module_at(model, placed.path)
        # A mixer that reads the source sees the whole source, so its picture would be one filled square.
        if not hasattr(placed.part, "pattern") and not isinstance(mixer, ReadsSource):
            subject.others.append((mixer, describe(placed.part), side.at(_place_of(placed)), width))


def _add_position(subject: Subject, placed: Placed, side: _Side) -> None:
    """Add a position at the tokens or in the heads of a mixer."""
    config, dim, model, _ = side
    if placed.layers is None:
        depth = len(config.uses)
        position = _built(lambda: config.position.build_model(dim, depth), model, "position")
        subject.add_position(placed.part, position, side.at("at the tokens"), depth=depth)
        return
    heads = placed.owner.num_heads
    head_dim = placed.owner.head_dim or dim // heads
    position = _built(lambda: placed.part.build_heads(dim, heads, head_dim), model, placed.path)
    subject.add_position(placed.part, position, side.at(_place_of(placed)), head_dim=head_dim)


def _of_layer(placed_parts: list[Placed], options: DrawOptions) -> list[Placed]:
    """Return the parts of the layer ``options.layer``; all parts if the option is not set."""
    if options.layer is None:
        return placed_parts
    layer = options.layer - 1
    return [Placed(item.part, item.owner, item.path, (layer,)) for item in placed_parts if layer in (item.layers or ())]


def _apart(placed_parts: list[Placed], model: nn.Module | None) -> list[Placed]:
    """Return the parts; a part with different weights in the layers of a trained ``model`` has an entry per layer."""
    separate = []
    for placed in placed_parts:
        layers = placed.layers or ()
        paths = [".".join(("layers", str(layer), *placed.path.split(".")[2:])) for layer in layers]
        modules = [] if model is None else [_module_at(model, path) for path in paths]
        if len(set(map(id, modules))) > 1 and any(True for _ in modules[0].parameters()):
            pairs = zip(paths, layers, strict=True)
            separate += [Placed(placed.part, placed.owner, path, (layer,)) for path, layer in pairs]
        else:
            separate.append(placed)
    return separate


def _heads(placed: Placed, options: DrawOptions) -> list[tuple[Pattern, str, str]]:
    """Return the different patterns of the heads, or the pattern of the head ``options.head``."""
    groups = heads_of(placed.part)
    alike = not groups[0][2]
    count = getattr(placed.owner, "num_heads", None) if alike else sum(len(heads) for _, _, heads in groups)
    if options.head is not None and count is not None and options.head > count:
        raise KinformerError(f"`head` {options.head}: the pattern is for {plural(count, 'head')}; give 1 to {count}.")
    if options.head is not None and not alike:
        head = options.head - 1
        groups = [(pattern, name, (head,)) for pattern, name, heads in groups if head in heads]
    where = _place_of(placed)
    return [(item, name, ", ".join(filter(None, (where, numbered("head", heads))))) for item, name, heads in groups]


# The drawing of a subject into a file, with lines and facts about the picture.

TEXTS: dict[str, Callable[[DrawOptions], Picture]] = {
    "exits": runs.text_by_exits,
    "buckets": runs.text_by_buckets,
    "experts": runs.text_by_experts,
    "blocks": runs.chosen_blocks,
}
"""Options that draw a text, or a model's choices on a text, and their functions."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture in the file ``out``: its ``title``, ``lines`` about each part, and the same as ``facts`` for JSON."""

    out: Path
    title: str
    lines: tuple[str, ...]
    facts: dict[str, object]


def draw(options: DrawOptions) -> Drawing:
    """Draw a subject into a file; the public form is :func:`kinformer.draw`."""
    subject = "pattern" if options.subject.startswith("{") else Path(options.subject).name
    name = re.sub(r"[^\w-]+", "-", subject).strip("-") or "drawing"
    out = Path(options.out or f"{name}.png")
    check(out)
    picture = _picture(options)
    picture.write(out)
    facts = {"subject": options.subject, "kind": picture.kind, "out": str(out), **picture.facts}
    return Drawing(out=out, title=picture.title + picture.more, lines=tuple(picture.lines), facts=facts)


def _picture(options: DrawOptions) -> Picture:
    if options.image is not None:
        return runs.looked_at(options)
    if options.curve:
        return runs.learning_curve(options)
    texts = [name for name in TEXTS if getattr(options, name)]
    if len(texts) > 1:
        raise KinformerError(f"{' and '.join(map(marked, texts))} contradict; give one.")
    if options.spans:
        return runs.learnt_spans(options)
    if texts:
        return TEXTS[texts[0]](options)
    if options.data is not None:
        texts = [marked(name) for name in TEXTS]
        raise KinformerError(f"`data` {options.data}: is for {', '.join(texts)}; add one, or leave it out.")
    with private_numbers(options.seed):
        subject = find(options)
        panels = subject.panels()
    if panels:
        return picture_of(subject.kind, subject.title, panels)
    if subject.untrained:
        names = ", ".join(subject.untrained)
        raise KinformerError(f"{options.subject}: the positions {names} are learnt; draw the folder of a trained run.")
    raise KinformerError(f"{options.subject}: has neither a pattern nor positions to draw; choose another member.")
