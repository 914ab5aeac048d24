"""The subject of a drawing: a member, a run, or a kind of pattern or position."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from kinformer.core.config import Config, field_types, from_dict, override
from kinformer.core.contract import CausalMixer, ReadsSource
from kinformer.core.encoder import EncoderMixer
from kinformer.core.parts import PatternConfig, Position, PositionConfig
from kinformer.core.pattern import Pattern
from kinformer.core.stack import EmbeddingConfig
from kinformer.family.elsewhere import nearest_member
from kinformer.kernels.block_sparse import explain
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.panels import (
    LENGTH,
    Encoding,
    FullSequence,
    OneToken,
    Panel,
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
    pattern_panel,
    raster,
)
from kinformer.lab.runs.run import CONFIG, open_run
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, nearest, plural
from kinformer.runtime.parsing import JsonObject, parse_json

if TYPE_CHECKING:
    from torch import nn

    from kinformer.core.stack import ModelConfig

# Encodings of positions to draw: those of a trained model, or untrained ones that are no random numbers.


M = TypeVar("M", bound="nn.Module")
DIM, NUM_HEADS, HEAD_DIM, DEPTH = 512, 8, 64, 1


class Side(NamedTuple):
    """A model, or the encoder that reads its source: config, width, and the trained module or None."""

    config: Any
    dim: int
    model: nn.Module | None


def undrawn(build: Callable[[], M]) -> M | None:
    """Return what ``build`` makes, or None if its numbers depend on the seed: before training they say nothing."""
    built = []
    for seed in (0, 1):
        with private_numbers(seed):
            built.append(build())
    values = [module.state_dict() for module in built]
    return built[0] if all(torch.equal(values[0][name], values[1][name]) for name in values[0]) else None


def alone(config: PositionConfig | EmbeddingConfig) -> Encoding | None:
    """Return an encoding outside of any model: at the tokens where it can stand there, else in eight heads of 64
    features; None where it is learnt."""
    if isinstance(config, EmbeddingConfig):
        return one_token(undrawn(lambda: config.build(1, DIM)), config)
    position: Position | None
    with suppress(KinformerError):  # it acts inside attention
        position = undrawn(lambda: config.build_model(DIM, DEPTH))
        return None if position is None else Encoding(position=position, name=describe(config), place="", depth=DEPTH)
    position = undrawn(lambda: config.build_heads(NUM_HEADS * HEAD_DIM, NUM_HEADS, HEAD_DIM))
    return None if position is None else Encoding(position=position, name=describe(config), place="", head_dim=HEAD_DIM)


def encoding_of(placed: Placed, side: Side) -> Encoding | None:
    """Return the encoding of a part of a model's config; None where it is learnt and the model untrained."""
    config, dim, model = side
    depth, name, place = len(config.uses), describe(placed.part), place_of(placed)
    if placed.layers is None:
        if model is None:
            position = undrawn(lambda: config.position.build_model(dim, depth))
        else:
            position = module_at(model, "position")
        return None if position is None else Encoding(position=position, name=name, place="at the tokens", depth=depth)
    heads = placed.owner.num_heads
    head_dim = placed.owner.head_dim or dim // heads
    if model is None:
        position = undrawn(lambda: placed.part.build_heads(dim, heads, head_dim))
    else:
        position = module_at(model, placed.path)
    return None if position is None else Encoding(position=position, name=name, place=place, head_dim=head_dim)


def one_token(embedding: nn.Module | None, config: Config) -> Encoding | None:
    """Return the encoding of an embedding of tokens and positions, shown for one token; None without an embedding."""
    if embedding is None:
        return None
    return Encoding(position=OneToken(embedding), name=f"{describe(config)}\none token at every position", place="")


def module_at(model: nn.Module, path: str) -> Any:
    """Return the module that was built of the part of the config at ``path``."""
    return model.get_submodule(f"stack.{path}" if path.startswith("layers.") else path)


def place_of(placed: Placed) -> str:
    """Return in words where a part stands."""
    return "in the input" if placed.path.startswith("input.") else numbered("layer", placed.layers or ())


TITLE = 36
POSITIONLESS = ("lookup", "adaptive")
"""Embeddings that do not look at positions."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is drawn: (pattern, name, place) of each head or layer that differs, encodings, and as ``others`` (mixer,
    name, place, width) without a pattern. ``untrained``: kinds of encodings that are random before training."""

    kind: str
    title: str
    options: DrawOptions
    patterns: list[tuple[Pattern, str, str]] = field(default_factory=list)
    encodings: list[Encoding] = field(default_factory=list)
    others: list[tuple[CausalMixer | EncoderMixer, str, str, int]] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)

    def panels(self) -> list[Panel]:
        """Return all panels of the picture, patterns first."""
        options, panels = self.options, []
        tokens, cells = grid(options.length, [pattern for pattern, _, _ in self.patterns])
        for pattern, name, place in self.patterns:
            panel = pattern_panel(pattern, name, place, tokens, cells)
            if not isinstance(pattern, FullSequence):
                computed = explain(pattern.sized(panel.length), panel.length).computed
                panel = replace(panel, computed_pairs=round(computed))
            panels.append(panel)
            if (image := raster(pattern, options.image_width)) is not None:
                panels.append(field_panel(pattern, "what one token sees of an image", place, *image))
        for mixer, name, place, dim in self.others:
            panels.append(influence_panel(mixer, name, place, dim, options.length, trained=self.kind == "run"))
        for encoding in self.encodings:
            panels += encoding_panels(encoding, options.length or LENGTH)
        return panels


def find(options: DrawOptions) -> Subject:
    """Return what ``options.subject`` names: a member, else a run folder, a pattern or a position, or what an option
    says it is."""
    from kinformer.family.table import FAMILY

    name = options.subject
    if options.pattern and options.position:
        raise KinformerError("`pattern` and `position` contradict; give one.")
    if name.lstrip().startswith("{"):
        return _expression(options)
    named = not (options.pattern or options.position)
    if named and name in FAMILY and not _means_part(options):
        return _member(options)
    if named and (Path(name) / CONFIG).is_file():
        return _run(options)
    table = _parts(options)
    if name in table:
        return _part(options, {"kind": name})
    if named and "/" in name:
        open_run(name)  # which says why it is none
    kinds = (
        "a member, a run folder, a pattern or a position" if named else "a pattern" if options.pattern else "a position"
    )
    other, names = nearest_member(name) if named else None, [*table, *(FAMILY if named else ())]
    raise KinformerError(f"{name!r} is not {kinds} to draw; {other.sentence if other else nearest(name, names)}")


def _parts(options: DrawOptions) -> dict[str, str]:
    """Return the slots, by kind, of all parts that can be drawn alone, or of those that an option names; of a kind in
    two slots, the pattern."""
    from kinformer.family.kinds import kinds

    slots = ["pattern"] if options.pattern else ["position", "embedding"]
    if not (options.pattern or options.position):
        slots.append("pattern")
    return {kind: slot for slot in slots for kind in kinds()[slot]}


def _means_part(options: DrawOptions) -> bool:
    """Return whether the name is that of a pattern or a position too, and --set changes nothing that a model has."""
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder

    changed = {path.split(".")[0] for path in options.set}
    owned = {*field_types(Decoder.Config), *field_types(Encoder.Config)}
    return bool(changed) and options.subject in _parts(options) and not changed & owned


def _expression(options: DrawOptions) -> Subject:
    try:
        data = parse_json(options.subject)
    except ValueError as error:
        raise KinformerError(f'{options.subject}: is not JSON ({error}); write as in {{"kind": "local"}}.') from None
    if not isinstance(data, dict) or str(data.get("kind")) not in (table := _parts(options)):
        raise KinformerError(
            f"{options.subject}: does not say what is to be drawn; {nearest(str(data.get('kind')), table)}"
        )
    return _part(options, data)


def _part(options: DrawOptions, data: JsonObject) -> Subject:
    """Return a pattern or a position by itself, with the options that --set gives it."""
    from kinformer.family.kinds import kinds

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
    elif isinstance(config, PositionConfig | EmbeddingConfig) and config.kind != "none":
        _keep(subject, alone(config), config)
    return subject


def _member(options: DrawOptions) -> Subject:
    from kinformer.family.build import configure

    config = configure(options.subject, options.recipe, None, options.set)
    return _model("member", f"{options.subject} ({options.recipe})", config, None, options)


def _run(options: DrawOptions) -> Subject:
    run = open_run(options.subject)
    model = run.model(options.set)
    return _model("run", f"{run.folder.name} ({run.member}, trained)", model.config, model, options)


def _model(kind: str, title: str, config: ModelConfig, model: nn.Module | None, options: DrawOptions) -> Subject:
    """Return the patterns and positions of a model's config; the positions are those of a trained ``model``."""
    depth = len(config.layers)
    if options.layer is not None and options.layer > depth:
        raise KinformerError(f"`layer` {options.layer}: {title} has {plural(depth, 'layer')}; give 1 to {depth}.")
    subject = Subject(kind=kind, title=title, options=options)
    _add(subject, Side(config, config.dim, model), "")
    if (encoder := getattr(config, "encoder", None)) is not None:
        _add(subject, Side(encoder, config.dim, None if model is None else module_at(model, "encoder")), "encoder")
    return subject


def _add(subject: Subject, side: Side, name: str) -> None:
    """Add all that can be drawn of a side, whose places begin with its ``name``."""
    (config, dim, model), options, before = side, subject.options, len(subject.encodings)
    at = lambda place: ", ".join(filter(None, (name, place)))  # noqa: E731
    for placed in _of_layer(parts_of(config, "pattern"), options):
        parts = [(in_text(head, config), called, place) for head, called, place in _heads(placed, options)]
        subject.patterns.extend((item, _with_globals(item, called), at(place)) for item, called, place in parts)
    for placed in _apart(_of_layer(parts_of(config, "position"), options), model):
        if placed.part.kind != "none":
            _keep(subject, encoding_of(placed, side), placed.part)
    for placed in parts_of(config, "embedding") if options.layer is None else ():
        vocab, part = placed.owner.vocab_size, placed.part
        embedding = undrawn(partial(part.build, vocab, dim)) if model is None else module_at(model, "input.embedding")
        _keep(subject, one_token(embedding, part), part)
    subject.encodings[before:] = [replace(item, place=at(item.place)) for item in subject.encodings[before:]]
    mixers = [*parts_of(config, "mixer"), *parts_of(config, "encoder_mixer")]
    for placed in _apart(_of_layer(mixers, options), model):
        width = config.stack.widths(dim, len(config.layers))[(placed.layers or (0,))[0]]
        mixer = placed.part.build(width) if model is None else module_at(model, placed.path)
        if not hasattr(placed.part, "pattern") and not isinstance(mixer, ReadsSource):  # it sees all of that
            subject.others.append((mixer, describe(placed.part), at(place_of(placed)), width))


def _keep(subject: Subject, encoding: Encoding | None, config: Config) -> None:
    if encoding is not None:
        subject.encodings.append(encoding)
    elif config.kind not in POSITIONLESS:
        subject.untrained.append(config.kind)


def _with_globals(pattern: Pattern, name: str) -> str:
    return f"{name}\n{global_token_words(pattern)}" if isinstance(pattern, FullSequence) else name


def _of_layer(placed_parts: list[Placed], options: DrawOptions) -> list[Placed]:
    """Return the parts of the layer that was asked for; all parts if none was."""
    if options.layer is None:
        return placed_parts
    layer = options.layer - 1
    return [Placed(item.part, item.owner, item.path, (layer,)) for item in placed_parts if layer in (item.layers or ())]


def _apart(placed_parts: list[Placed], model: nn.Module | None) -> list[Placed]:
    """Return the parts, those with weights of their own in every layer of a trained ``model`` one by one."""
    separate = []
    for placed in placed_parts:
        layers = placed.layers or ()
        paths = [".".join(("layers", str(layer), *placed.path.split(".")[2:])) for layer in layers]
        modules = [] if model is None else [module_at(model, path) for path in paths]
        if len(set(map(id, modules))) > 1 and any(True for _ in modules[0].parameters()):
            separate += [
                Placed(placed.part, placed.owner, path, (layer,)) for path, layer in zip(paths, layers, strict=True)
            ]
        else:
            separate.append(placed)
    return separate


def _heads(placed: Placed, options: DrawOptions) -> list[tuple[Pattern, str, str]]:
    """Return each pattern that differs among the heads, or that of the head of ``options``."""
    groups = heads_of(placed.part)
    alike = not groups[0][2]
    count = getattr(placed.owner, "num_heads", None) if alike else sum(len(heads) for _, _, heads in groups)
    if options.head is not None and count is not None and options.head > count:
        raise KinformerError(f"`head` {options.head}: the pattern is for {plural(count, 'head')}; give 1 to {count}.")
    if options.head is not None and not alike:
        head = options.head - 1
        groups = [(pattern, name, (head,)) for pattern, name, heads in groups if head in heads]
    named = [(pattern, name, [place_of(placed), numbered("head", heads)]) for pattern, name, heads in groups]
    return [(pattern, name, ", ".join(filter(None, place))) for pattern, name, place in named]
