"""Random compositions for the soak: any mixer, stack, layer and head with any parts in them, in tiny sizes."""

from __future__ import annotations

import random
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

from combinations import DIM, NEEDED, OWN_SIZES, SMALL, VOCAB, stands_at_tokens
from kinformer.core.config import Config, field_types, to_dict
from kinformer.family.kinds import kinds
from kinformer.inputs.tokens import Tokens
from kinformer.models.decoder import Decoder
from kinformer.models.encoder import Encoder, EncoderDecoder, SourceEncoder
from kinformer.parts.patterns.sequence import Causal, Intersection
from kinformer.parts.positions import NoPosition
from kinformer.runtime.errors import KinformerError

SIZES: dict[str, Any] = SMALL | {
    "hidden_dim": DIM, "chunk_size": 3, "num_buckets": 4, "rounds": 2, "num_clusters": 3, "local_heads": 1, "rank": 3,
    "memory_size": 12, "topk": 3, "compressed": 4, "max_length": 48, "num_keys": 6, "key_dim": 8,
    "max_span": 12, "ramp": 4, "multiple": 4, "rate": 2, "steps": 3, "num_heads": 2, "kernel": 3, "dropout": 0.0,
    "iterations": 2, "redraw": 0, "impl": "auto", "cut": 0, "noise": False,
    "cache": "full",  # an int8 past is read by later chunks alone, so that outputs depend on where a text is cut
}  # fmt: skip
"""Sizes that a sequence of some forty tokens crosses more than once, and what is not drawn, by the names of fields."""
OF_KINDS: dict[str, dict[str, Any]] = {
    **OWN_SIZES,
    "favor": {"redraw": 1000, "features": 6},
    "random_fourier": {"features": 4},
    "t5": {"num_buckets": 8},
    "compressive": {"memory": 6},
    "memorizing": {"topk": 4, "segment": 8, "memory_size": 16},
    "rope": {"scaling": "none"},
    "geometric": {"thresholds": (0.5,)},
    "sinkhorn": {"max_length": 48},
    "causal_sinkhorn": {"max_length": 48},
}
OPTIONAL = {"decay": "decay", "halting": "halting", "rule": "exit_rule", "span": "span"}
"""Fields that hold a part of a slot, or none."""
SURPRISE = 0.3
"""How often a field that is no size differs from its default."""
MIXERS = {"softmax": 5, "linear": 5, "segment_memory": 1, "compressive": 1, "lsh": 1, "lstm": 1, "single_head": 1}
MIXERS |= {
    "chosen_blocks": 1,
    "latent": 1,
    "causal_sinkhorn": 1,
    "memorizing": 1,
    "outer_product": 1,
    "routing": 1,
    "tensorized": 1,
}


def draw(random_: random.Random, slot: str, kind: str | None = None) -> Any:
    """A part of ``slot``, of any kind if none is given, whose fields differ from their defaults now and then."""
    table = kinds()[slot]
    config = table[kind or random_.choice(sorted(table))]
    values, types = dict(NEEDED.get(config.kind, {})), field_types(config)
    sizes = SIZES | OF_KINDS.get(config.kind, {})
    for field in fields(config):
        if field.name in values:
            continue
        if field.name in sizes and field.name not in OPTIONAL:
            values[field.name] = sizes[field.name]
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(f"{slot} {config.kind} needs {field.name}: say one in benchmarks/soak_parts.py")
        else:
            other = _other(random_, field, types[field.name])
            if other is not MISSING:
                values[field.name] = other
    return config(**values)


def _other(random_: random.Random, field: Any, kind: Any) -> Any:
    """A value of ``field`` that may differ from its default, or MISSING to leave it."""
    if isinstance(field.default, Config):
        part = type(field.default).kind if random_.random() > 2 * SURPRISE else None
        return draw(random_, field.default.slot, part)
    if field.name in OPTIONAL and field.default is None and random_.random() < 0.5:
        return draw(random_, OPTIONAL[field.name]) if random_.random() < 2 * SURPRISE else MISSING
    if random_.random() > SURPRISE:
        return MISSING
    if kind is bool:
        return not field.default
    return random_.choice(get_args(kind)) if get_origin(kind) is Literal else MISSING


def mixer(random_: random.Random) -> Any:
    """A causal mixer; a pattern that looks ahead stands beside the causal one."""
    found = draw(random_, "mixer", random_.choices(list(MIXERS), list(MIXERS.values()))[0])
    pattern = getattr(found, "pattern", None)
    if pattern is not None and pattern.build().ahead != 0:
        found = found.replace(pattern=Intersection(patterns=(Causal.Config(), pattern)))
    return found


def decoder(random_: random.Random, over_source: bool = False) -> Decoder.Config:
    """One or two different layers, applied in any way, below any head; ``over_source``: all attend to one."""
    layers = []
    for _ in range(random_.choice((1, 1, 2))):
        own: dict[str, Any] = {"mixer": mixer(random_), "norm": draw(random_, "norm")}
        kind = random_.choices(("decoder", "macaron", "sha_rnn"), (8, 1, 0 if over_source else 1))[0]
        if kind != "sha_rnn":
            own |= {"feed_forward": draw(random_, "feed_forward"), "residual": draw(random_, "residual")}
            if over_source:
                own["further_mixers"] = (draw(random_, "mixer", "cross"),)
            elif random_.random() < 0.15:
                own["further_mixers"] = (mixer(random_),)
        layers.append(kinds()["layer"][kind](**own))
    stack = random_.choices(("sequential", "reversible", "universal", "exits"), (5, 2, 2, 2))[0]
    return Decoder.Config(layers=tuple(layers), stack=draw(random_, "stack", stack), **_ends(random_, False))


def encoder(random_: random.Random) -> Encoder.Config:
    """The same of whole sequences."""
    stack = draw(random_, "stack", random_.choice(("sequential", "sequential", "reversible", "universal")))
    return Encoder.Config(layers=(_encoder_layer(random_),), stack=stack, **_ends(random_, True))


def _encoder_layer(random_: random.Random) -> Any:
    parts = {slot: draw(random_, slot) for slot in ("feed_forward", "norm", "residual")}
    mixers = [kind for kind in sorted(kinds()["encoder_mixer"]) if kind not in ("etc", "windows")]
    weights = [6 if kind == "bidirectional" else 1 for kind in mixers]
    chosen = draw(random_, "encoder_mixer", random_.choices(mixers, weights)[0])
    return kinds()["encoder_layer"]["encoder"](mixer=chosen, **parts)


def encoder_decoder(random_: random.Random) -> EncoderDecoder.Config:
    """A decoder whose layers also attend to what an encoder layer makes of a source."""
    base = decoder(random_, over_source=True)
    settings = {field.name: getattr(base, field.name) for field in fields(base)}
    source = SourceEncoder.Config(layers=(_encoder_layer(random_),), position=base.position, norm=base.norm)
    return EncoderDecoder.Config(**settings, encoder=source)


def _ends(random_: random.Random, whole: bool) -> dict[str, Any]:
    """Input, width, position and head; the head fits nearly always."""
    position = draw(random_, "position")
    embedding = draw(random_, "embedding", _often(random_, "lookup"))
    input = Tokens.Config(vocab_size=VOCAB, embedding=embedding, bos_token=VOCAB - 2, eos_token=VOCAB - 1)
    return {
        "dim": DIM,
        "input": input,
        "position": position if stands_at_tokens(position) else NoPosition.Config(),
        "head": _head(random_, input, whole),
    }


def _often(random_: random.Random, kind: str) -> str | None:
    return kind if random_.random() > SURPRISE else None


def _head(random_: random.Random, input: Any, whole: bool) -> Any:
    for _ in range(20):
        head = draw(random_, "head")
        try:
            head.check(DIM, input.build(DIM))
        except KinformerError:
            continue
        if whole or head.per_position:
            return head
    return draw(random_, "head", "masked_language" if whole else "language")


def described(config: Any) -> Any:
    """The composition as data, or its text where a part has none."""
    try:
        return to_dict(config)
    except (KinformerError, TypeError):
        return repr(config)
