"""Changing a field of a config changes something (weights, outputs, state, gradients), or is an error.

From the smallest config of every kind, and from each that differs from it in one choice (a flag, a word), every field
is set to other values. Those that build must compute something else.
"""

import typing
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kinformer.adaptive.rules import AtExit, Saturation
from kinformer.blocks.feed_forward import MLP
from kinformer.blocks.layer import DecoderLayer, EncoderLayer
from kinformer.core.config import Config, field_types
from kinformer.core.contract import Chunk, ReadsSource
from kinformer.core.encoder import GridOnly, SequenceContext
from kinformer.core.parts import Likelihood
from kinformer.core.state import tensors
from kinformer.family.kinds import kinds
from kinformer.heads.classes import PooledHead
from kinformer.heads.language import LanguageModelHead
from kinformer.inputs.images import Patches, Tiles
from kinformer.inputs.signals import Frames, Observations, Steps
from kinformer.inputs.tokens import AdaptiveEmbedding, ExtraTokens, Lookup, Tokens
from kinformer.lab.estimation.parts import outputs
from kinformer.mixers.bidirectional import BidirectionalAttention
from kinformer.mixers.buckets import BidirectionalLSH
from kinformer.mixers.compressive import Compressive, Convolution, Pool
from kinformer.mixers.cross import CrossAttention
from kinformer.mixers.linear import LinearAttention
from kinformer.mixers.memory import SingleHead
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.models.decoder import Decoder
from kinformer.models.encoder import Encoder, SourceEncoder
from kinformer.parts.decays import LowRank, Softplus
from kinformer.parts.feature_maps import Unit
from kinformer.parts.patterns.sequence import Causal, Local, Window
from kinformer.parts.positions import NoPosition
from kinformer.parts.projections import Grouped, MultiHeadGlobal
from kinformer.parts.relative_positions import Rope
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.sequential import Universal

from ..inputs.made import steps_like

DIM, VOCAB, TIME, PLACES = 16, 23, 26, 40
MIXER = SoftmaxAttention.Config()
TWO_SIDED = BidirectionalAttention.Config(pattern=Window(window=2))
SMALL = {
    "window": 4, "stride": 3, "block": 4, "segment": 6, "memory": 6, "summary": 2, "random": 1, "max_distance": 9,
    "num_buckets": 8, "max_length": 32, "height": 6, "width": 6, "block_height": 2, "block_width": 2,
    "flange_height": 1, "flange_width": 1, "compressed": 3, "rate": 2, "topk": 4, "memory_size": 12,
    "num_keys": 4, "rank": 4, "key_dim": 8, "cutoffs": (5, 11), "divisor": 2, "classes": 3, "vocab_size": VOCAB,
    "dim": DIM, "starts": (7,), "hidden_dim": 32, "pattern": Local.Config(window=3),
    "patterns": (Local.Config(window=2), Local.Config(window=5)) * 2, "position": NoPosition.Config(),
    "input": Tokens.Config(vocab_size=VOCAB), "feed_forward": MLP.Config(hidden_dim=8),
    "head": LanguageModelHead.Config(),
}  # fmt: skip
"""Sizes that ``TIME`` tokens cross more than once, and parts, by the names of fields."""
OWN = {
    ("mixer", "softmax"): {"pattern": Causal.Config()},
    ("mixer", "memorizing"): {"topk": 2},
    ("mixer", "cross_linformer"): {"rank": 4, "max_length": 8},
    ("mixer", "chosen_blocks"): {"block": 3},
    ("mixer", "causal_sinkhorn"): {"max_length": 32},
    ("encoder_mixer", "routing"): {"num_clusters": 3, "window": 4},
    ("mixer", "routing"): {"num_clusters": 3, "window": 4},
    ("encoder_mixer", "lsh"): {"num_buckets": 4, "chunk_size": 4, "rounds": 2},
    ("mixer", "lsh"): {"num_buckets": 2, "chunk_size": 2, "rounds": 2},
    ("mixer", "compressive"): {"segment": 8, "memory": 8, "compression": Convolution.Config(rate=2)},
    ("feed_forward", "boom"): {"hidden_dim": 32},
    ("exit_rule", "softmax_response"): {"thresholds": (0.6,)},
    ("exit_rule", "saturation"): {"thresholds": (0.1,)},
    ("exit_rule", "classifier"): {"thresholds": (0.6,)},
    ("exit_rule", "geometric"): {"thresholds": (0.6,)},
    ("stack", "exits"): {"rule": Saturation.Config(thresholds=(0.6,))},
    ("span", "soft_span"): {"max_span": 12, "ramp": 3, "initial": 0.25, "multiple": 5},
    ("span", "dynamic_span"): {"max_span": 12, "ramp": 3, "initial": 0.25, "multiple": 5},
    ("projection", "convolved"): {"width": 3},
    ("embedding", "adaptive"): {"width": None},
    ("head", "adaptive"): {"width": None},
    ("input", "patches"): {"size": (6, 6), "patch": 3},
    ("input", "tiles"): {
        "size": (12, 12),
        "encoder": Encoder.Config(
            input=Patches.Config(size=(4, 4), patch=2),
            dim=4,
            layers=(EncoderLayer.Config(mixer=TWO_SIDED.replace(num_heads=2)),),
            position=NoPosition.Config(),
            head=PooledHead.Config(),
        ),
    },
    ("head", "modulus"): {"inner": LanguageModelHead.Config(tied=False)},
    ("input", "steps"): {"state_dim": 3, "action_dim": 2, "timesteps": 4},
    ("head", "continuous_actions"): {"action_dim": 2},
    ("head", "masked_patches"): {"layers": (EncoderLayer.Config(mixer=TWO_SIDED),)},
    ("head", "discrete_actions"): {"actions": 3},
    ("input", "observations"): {"observation_dim": 3},
    ("pattern", "random_blocks"): {"count": 1},
    ("global_input", "sentences"): {"length": 4},
    ("global_input", "extra"): {"count": 3},
    ("layer", None): {"mixer": MIXER},
    ("encoder_layer", None): {"mixer": BidirectionalAttention.Config()},
    ("model", "decoder"): {"layers": (DecoderLayer.Config(mixer=MIXER),) * 2},
    ("model", "encoder"): {"layers": (EncoderLayer.Config(mixer=TWO_SIDED),)},
    ("model", "encoder_decoder"): {
        "layers": (DecoderLayer.Config(mixer=MIXER, further_mixers=(CrossAttention.Config(),)),) * 2,
        "encoder": SourceEncoder.Config(
            layers=(EncoderLayer.Config(mixer=TWO_SIDED),), position=NoPosition.Config(), global_tokens=1
        ),
    },
}
OTHER = {
    "cutoffs": [(4, 9)],
    "starts": [(9,), (3, 7)],
    "dilations": [(1, 2, 1, 3), (1, 1, 1, 1)],
    "thresholds": [(0.4,), (0.6, 0.1)],
    "decay_tokens": [3.0, 30.0],
    "after": [(1,), (2, 3)],
    "permutations": [((1, 0),), ((0, 1), (1, 0))],
    "patterns": [(Local.Config(window=4), Local.Config(window=6)) * 2],
    "further_mixers": [(MIXER,)],
    "head_dim": [2, 8],
    "index_dim": [2, 8],
    "value_dim": [2, 8],
    "rotary_dim": [4, 6],
    "features": [3, 8],
    "floor": [3.0, 8.0],
    "key_heads": [1, 2],
    "lower_bound": [-5.0, -0.5],
    "seed": [1, 2],
    "eps": [0.1],
    "norm_eps": [0.1, 1.0],
    "base": [100.0, 30.0],
    "beta_fast": [8.0],
    "beta_slow": [4.0],
    "original_length": [30, 100],
    "factors": [(3.0,) * 8],
    "fraction": [0.5],
    "state_mean": [(1.0, 2.0, 3.0)],
    "state_std": [(0.5, 2.0, 3.0)],
    "low": [(-2.0, -3.0)],
    "high": [(2.0, 3.0)],
    "size": [(8, 6), (12, 12)],
    "mean": [(0.1, 0.2, 0.3)],
    "std": [(0.1, 0.2, 0.3)],
    "kernel": [3, 5],
}
"""Other values of fields whose type does not say them."""
BASES = {
    ("position", "rope"): [
        {"scaling": "yarn", "factor": 2.0, "original_length": 1000, "base": 100.0},
        {"scaling": "linear", "factor": 2.0},
        {"scaling": "ntk", "factor": 2.0},
        {"scaling": "llama3", "factor": 2.0, "original_length": 20, "base": 100.0},
        {"scaling": "longrope", "original_length": 20, "factors": (1.0,) * 7 + (2.0,)},
    ],
    ("input", "patches"): [{"positions": False}],
    ("input", "tiles"): [{"positions": False}],
    ("position", "t5"): [{"bidirectional": True, "num_buckets": 8}],
    ("mixer", "linear"): [
        {
            "rule": "delta",
            "normaliser": "none",
            "feature_map": Unit.Config(),
            "decay": Softplus.Config(),
            "convolution": 3,
            "value_dim": 3,
        },
        {"floor": 5.0, "decay": LowRank.Config()},
        {"rule": "mesa", "normaliser": "none", "feature_map": Unit.Config(), "iterations": 2},
        {"gate": True, "head_norm": "rms"},
    ],
    ("mixer", "compressive"): [{"compression": Pool.Config(rate=2)}],
    ("feed_forward", "experts"): [{"groups": 4, "topk_groups": 2, "topk": 3}],
    ("mixer", "latent"): [{"position": Rope.Config(layout="interleaved"), "rotary_dim": 4, "query_latent_dim": 6}],
    ("mixer", "chosen_blocks"): [{"projection": Grouped.Config(num_kv_heads=2), "compression": "mean", "block": 6}],
    ("mixer", "indexed"): [{"position": Rope.Config(layout="interleaved"), "rotary_dim": 4, "query_latent_dim": 6}],
    ("layer", "sha_rnn"): [{"attention": SingleHead.Config(memory=5)}],
    ("pattern", "fixed"): [{"slices": 2, "num_heads": 4}],
    ("head", "continuous_actions"): [{"low": (-1.0, -2.0), "high": (1.0, 2.0)}],
    ("input", "pixels"): [{"channels": 3}, {"channels": 3, "joint": True}, {"classes": 30}],
    ("model", "encoder"): [{"global_tokens": 2}, {"global_input": ExtraTokens.Config(count=2)}],
}
"""Further configs to begin from: fields that differ from the smallest."""
UNSEEN = {
    (
        "fixed",
        "local",
    ): "the parts of one pattern are told by one config, and the local one is the segment",
    ("patches", "size"): "the size that images are brought to; positions, which would be learned for it, are not",
    ("tiles", "size"): "the same",
    "policy": "the head of an answer is the same product as that of two actions",
    ("tiles", "encoder"): "what is dropped out where it learns is not while it is frozen",
    "impl": "implementations give the same",
    "form": "the same",
    "balance": "what the trainer adds to the loss",
    "bias_rate": "what the trainer does between its steps",
    "multi_label": "what probabilities and losses are made of the logits",
    "checkpoint": "what is kept between forward and backward, not what is computed",
    "recompute": "the same",
    "stochastic_depth": "what training drops (tests/stacks/test_stochastic_depth.py)",
    "chunks": "the same",
    "multiple": "how far behind a soft span is computed, where every weight is 0",
    "centroid_decay": "what the trainer does between its steps",
    "penalty": "what the trainer adds to the loss",
    "state_penalty": "what the trainer adds to the loss",
    "redraw": "what the trainer does between its steps",
    "weights": "which exits' losses count how much in training",
    "oracle": "what the loss of an exit rule is",
    "smoothing": "the same",
    "alpha": "the same",
    "since": "the same",
    "samples": "how often the objective of a training step runs the model",
    "mask_token": "data is prepared with it, and the model treats it as any other token",
    "bos_token": "the same",
    "eos_token": "the same",
    "share_biases": "seen where layers share: below",
    "shared": "seen where layers share: below",
    "share_layers": "seen where layers share: below",
}
"""Fields that change nothing here, and why."""


def smallest(config: type[Config]) -> Config:
    sizes = SMALL | OWN.get((config.slot, None), {}) | OWN.get((config.slot, config.kind), {})
    return config(**{field.name: sizes[field.name] for field in fields(config) if field.name in sizes})


def others(config: Config, name: str) -> list:
    """Other values of a field."""
    value, hint = getattr(config, name), field_types(type(config)).get(name)
    if name in ("initialisation", "encoder"):
        return [value.replace(**{field.name: each}) for field in fields(value) for each in others(value, field.name)]
    if name == "layers":
        return [value * 2]
    if name in OTHER and (value is None or isinstance(OTHER[name][0], type(value))):
        return [each for each in OTHER[name] if each != value]
    if isinstance(value, bool):
        return [not value]
    literals = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is typing.Literal]
    choices = [each for part in literals for each in typing.get_args(part)]
    if choices:
        return [each for each in choices if each != value]
    if isinstance(value, Config) or (isinstance(hint, type) and issubclass(hint, Config)):
        slot = hint.slot if isinstance(hint, type) else value.slot
        return [each for kind in kinds()[slot] if (each := smallest(kinds()[slot][kind])) != value]
    parts = [part for part in typing.get_args(hint) if isinstance(part, type) and issubclass(part, Config)]
    if value is None and parts:
        return [smallest(kinds()[parts[0].slot][kind]) for kind in kinds()[parts[0].slot]]
    if isinstance(value, float):
        return [2 * value + 0.3, 0.5 * value + 0.1]
    if value is None:
        return [2, 4, 8]
    return [each for each in (value + 1, 2 * value + 2, value // 2) if each != value] if isinstance(value, int) else []


def variants(config: Config) -> list[Config]:
    """``config``, and those that differ from it in one choice."""
    found = [config, *(config.replace(**changes) for changes in BASES.get((config.slot, config.kind), ()))]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in UNSEEN and isinstance(value, (bool, str)):
            found += [each for other in others(config, field.name) if (each := changed(config, field.name, other))]
    return found


def changed(config: Config, name: str, value: object) -> Config | None:
    """``config`` with another value that it takes and builds with, or None."""
    try:
        other = config.replace(**{name: value})
        seen(other)
    except KinformerError:
        return None
    return other


# What a config computes: shapes of weights, outputs, states and gradients, in training mode and in float64.


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found(module, *run) -> tuple:
    """Of ``run``: functions of a module that give tensors."""
    module = module.double().train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    torch.manual_seed(2)
    with torch.set_grad_enabled(_WITH_SLOPES[-1]):
        outputs = [each for function in run for each in function(module)]
    weights = dict(module.named_parameters())
    if not _WITH_SLOPES[-1]:
        return [(name, tuple(weight.shape)) for name, weight in weights.items()], outputs
    parts = [y for y in outputs if y.is_floating_point()]
    loss = sum(((y * torch.arange(y.numel()).cos().view(y.shape)).sum() for y in parts), torch.zeros(()))
    known = [weight for weight in weights.values() if weight.requires_grad] if loss.requires_grad else []
    slopes = torch.autograd.grad(loss, known, allow_unused=True, materialize_grads=True) if known else ()
    slopes = [each.to_dense() if each.is_sparse else each for each in slopes]
    return [(name, tuple(weight.shape)) for name, weight in weights.items()], [*outputs, *slopes]


def absorbed(mixer) -> list[Tensor]:
    given = {"source": numbers(2, 5, DIM, seed=4)} if isinstance(mixer, ReadsSource) else {}
    state, outputs = mixer.initial_state(2, dtype=torch.float64, **given), []
    for x in numbers(2, TIME, DIM).split([15, TIME - 15], 1):
        y, state = mixer(Chunk(x), state)
        outputs.append(y)
    return [*outputs, *tensors(state)]


def read(mixer) -> list[Tensor]:
    if isinstance(mixer, GridOnly):
        return [mixer(numbers(2, 30, DIM), SequenceContext(grid=(5, 6)))]
    if isinstance(mixer, BidirectionalLSH):
        return [mixer(numbers(2, TIME, DIM))]
    own = torch.arange(TIME).mul(3).div(TIME, rounding_mode="floor")
    sentences = torch.cat([torch.arange(3), own]).expand(2, -1)
    texts = [
        SequenceContext(),
        SequenceContext(None, torch.tensor([[0, 9], [4, -1]]), None, 0),
        SequenceContext(None, None, sentences, 3),
    ]
    return [mixer(numbers(2, text.num_global + TIME, DIM), text) for text in texts if reads(mixer, text)]


def reads(mixer, text: SequenceContext) -> bool:
    try:
        mixer.check(text.global_positions is not None, text.num_global > 0)
    except KinformerError:
        return False
    return True


def mapped(module) -> list[Tensor]:
    return [module(numbers(2, TIME, DIM))]


def called(model) -> list[Tensor]:
    tokens = torch.randint(VOCAB, (2, TIME), generator=torch.Generator().manual_seed(5))
    found = [outputs(model, tokens), outputs(model.eval(), tokens)]
    return [each for logits, state in found for each in (logits, *tensors(() if state is None else state))]


def predicted(config: Config) -> tuple:
    same = {name: getattr(config, name) for name in ("cutoffs", "divisor", "width") if hasattr(config, name)}
    embedding = AdaptiveEmbedding.Config(**same) if same else Lookup.Config()
    input = Tokens.Config(vocab_size=VOCAB, embedding=embedding).build(DIM).double()
    input = Patches.Config(distillation_token=True).build(DIM) if config.kind == "distilled" else input
    if config.kind in ("masked_patches", "patch_colours"):  # a token, and five rows of five patches
        input = Patches.Config(size=(10, 10), patch=2).build(DIM)
    config.check(DIM, input)
    more = {"neighbours": torch.tensor([[3, 5, -1]]).expand(2, TIME, -1)} if config.kind == "spalm" else {}

    def outputs(head):
        logits = head(numbers(2, TIME, DIM), input, None, **more)
        scored = (
            [head.nats(6 * logits, (torch.arange(TIME) % VOCAB).expand(2, -1))] if isinstance(head, Likelihood) else []
        )
        return [logits, *scored]

    return found(config.build(DIM, input), outputs)


def entered(config: Config) -> tuple:
    """Vectors of values, and of pixels the order in which an image becomes a sequence."""

    def vectors(input):
        if isinstance(input, Steps):
            return [input(steps_like(input, 2, 5, seed=6), torch.arange(5).expand(2, -1))]
        if isinstance(input, Patches | Tiles):
            images = numbers(2, input.config.channels, 7, 9)
            return [input(images, torch.arange(input.length(images)).expand(2, -1))]
        if isinstance(input, Frames | Observations):
            return [input(numbers(*input.example(2, 5).shape), torch.arange(5).expand(2, -1))]
        times = (2, TIME, input.example(1, 1)[0].numel())
        values = (torch.arange(2 * TIME).view(2, TIME, 1).expand(times) * torch.arange(1, times[2] + 1)) % VOCAB
        values = values if input.example(1, 1).dim() == 3 else values[..., 0]
        return [input(values, torch.arange(TIME).expand(2, -1))]

    order = [torch.from_numpy(config.raster.order())] if hasattr(config, "raster") else []
    weights, outputs = found(config.build(DIM), vectors)
    return weights, [*outputs, *order]


def told(config: Config) -> tuple:
    """Who sees whom."""
    pattern = config.build().sized(PLACES)
    places = torch.arange(PLACES)
    return [], [pattern.at(head).allowed(places[:, None], places[None]) for head in range(pattern.num_heads or 1)] + [
        torch.tensor(pattern.num_heads or 0)
    ]


def placed(config: Config) -> tuple:
    try:
        position = config.build_model(DIM, 2)
    except KinformerError:  # it acts inside attention
        return seen(MIXER.replace(position=config, num_heads=2))
    positions = torch.arange(TIME).expand(2, -1)

    def hooks(position):
        every = [position.embed(positions), *(position.layer_input(positions, layer) for layer in range(2))]
        return [torch.tensor(position.max_length or 0), *(each for each in every if each is not None)]

    return found(position, hooks)


def left(config: Config) -> tuple:
    """Which of many tokens leave by each of two exits, on the way to a third."""
    x, logits, positions = numbers(900, DIM), numbers(900, VOCAB).mul(3), torch.arange(900) % TIME
    earlier = (x + x.roll(1, 1)).sin()
    at = [AtExit(number, x.roll(number, 0), earlier, positions, lambda: logits, x) for number in range(2)]
    return found(config.build(DIM, 3), lambda rule: [rule(each) for each in at if rule.asks(each.number)])


def encoder(**settings) -> Config:
    return smallest(Encoder.Config).replace(**settings)


MEASURES = {
    "mixer": lambda config: found(config.build(DIM), absorbed),
    "layer": lambda config: found(config.build(DIM), absorbed),
    "encoder_mixer": lambda config: found(config.build(DIM), read),
    "encoder_layer": lambda config: found(
        config.build(DIM), lambda layer: [layer(numbers(2, TIME, DIM), SequenceContext())]
    ),
    "feed_forward": lambda config: found(config.build(DIM), mapped),
    "norm": lambda config: found(config.build(DIM), mapped),
    "residual": lambda config: seen(DecoderLayer.Config(mixer=MIXER, residual=config)),
    "position": placed,
    "pattern": told,
    "span": lambda config: seen(MIXER.replace(span=config)),
    "score": lambda config: seen(MIXER.replace(score=config)),
    "projection": lambda config: seen(
        BidirectionalAttention.Config(projection=config)
        if isinstance(config, MultiHeadGlobal.Config)
        else MIXER.replace(projection=config)
    ),
    "feature_map": lambda config: seen(
        LinearAttention.Config(
            feature_map=config, normaliser="none" if config.kind in ("identity", "unit", "random_fourier") else "sum"
        )
    ),
    "decay": lambda config: seen(LinearAttention.Config(decay=config)),
    "compression": lambda config: seen(smallest(Compressive.Config).replace(compression=config)),
    "head": predicted,
    "embedding": lambda config: seen(Tokens.Config(vocab_size=VOCAB, embedding=config)),
    "input": entered,
    "global_input": lambda config: seen(encoder(global_input=config)),
    "stack": lambda config: seen(
        smallest(Decoder.Config).replace(
            stack=config, head=LanguageModelHead.Config(tied=False), layers=(DecoderLayer.Config(mixer=MIXER),) * 3
        )
    ),
    "exit_rule": left,
    "halting": lambda config: seen(Universal.Config(steps=3, halting=config)),
    "model": lambda config: found(config.build(), called),
}
_SEEN: dict[tuple[Config, bool], tuple] = {}
_WITH_SLOPES = [False]
"""Whether gradients are measured too, last: only where outputs agree does it depend on them."""


def seen(config: Config) -> tuple:
    """What ``config`` computes, once."""
    key = config, _WITH_SLOPES[-1]
    if key not in _SEEN:
        torch.manual_seed(0)
        _SEEN[key] = MEASURES[config.slot](config)
    return _SEEN[key]


def same(one: tuple, two: tuple) -> bool:
    if one[0] != two[0] or len(one[1]) != len(two[1]):
        return False
    return all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))


def alike(one: Config, two: Config) -> bool:
    """Whether weights, outputs and states are the same, and then gradients too."""
    if not same(seen(one), seen(two)):
        return False
    _WITH_SLOPES.append(True)
    try:
        return same(seen(one), seen(two))
    finally:
        _WITH_SLOPES.pop()


def unseen(config: Config, name: str) -> bool:
    if config.kind in ("patches", "tiles") and name in ("size", "encoder"):
        return config.frozen if name == "encoder" else not config.positions
    return name in UNSEEN or ((config.kind, getattr(config, "part", None)) in UNSEEN and name != "segment")


ALL = [(slot, kind) for slot, table in kinds().items() for kind in table]


@pytest.mark.parametrize(("slot", "kind"), ALL, ids=["-".join(each) for each in ALL])
def test_every_field_changes_something_or_is_refused(slot, kind):
    idle = []
    for config in variants(smallest(kinds()[slot][kind])):
        for field in fields(config):
            if unseen(config, field.name):
                continue
            for value in others(config, field.name):
                other = changed(config, field.name, value)
                if other is not None and alike(config, other):
                    idle.append(f"{field.name} = {value!r} of {config}")
    assert not idle, "\n".join(idle)


@pytest.mark.parametrize(
    ("kind", "field"), [("xl", "share_biases"), ("t5", "shared"), ("distance_keys", "share_layers")]
)
def test_sharing_is_seen_in_two_layers(kind, field):
    def weights(shares):
        position = smallest(kinds()["position"][kind]).replace(**{field: shares})
        layer = DecoderLayer.Config(mixer=MIXER.replace(position=position))
        return [name for name, _ in smallest(Decoder.Config).replace(layers=(layer,) * 2).build().named_parameters()]

    assert len(weights(True)) < len(weights(False))
