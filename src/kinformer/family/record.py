"""The record of a member, and its recipes. The command line reads records without importing PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from kinformer.core.config import field_types, parse_slot
from kinformer.family.kinds import BUILTIN
from kinformer.runtime.errors import KinformerError, spelled

if TYPE_CHECKING:
    from kinformer.core.stack import ModelConfig


Growth = Literal["none", "constant", "window", "linear", "store"]
Cost = Literal["linear", "between", "quadratic"]


class MemberSheet(TypedDict):
    """The facts of a member that reports show, as data for JSON."""

    name: str
    title: str
    paper: str
    year: int
    axes: Sequence[str]
    causal: bool
    growth: str
    departures: Sequence[str]
    exact_limit: str


class MemberFacts(MemberSheet):
    """A member's record as data for JSON."""

    use_when: str
    avoid_when: str
    cost: str
    recipes: list[str]


@dataclass(frozen=True, kw_only=True)
class Member:
    """The record of a member: its paper, its facts and its recipes.

    ``year`` is the first year in ``paper`` unless given. ``axes`` are the changed parts of the Transformer: projection,
    position, pattern, score, memory, rank, kernel, depth, recurrence, domain. ``growth`` is the growth of the state
    with the number of absorbed tokens: "none" where ``causal`` is False. ``departures`` are the differences from the
    paper. ``exact_limit`` is the case in which the member equals exact attention. ``parity`` lists other
    implementations with the same outputs for the same weights, and the test of each. ``results`` are files of
    ``benchmarks/results`` that measured the member but do not contain its name. ``use_when`` and ``avoid_when`` are
    clauses, founded on costs and measurements.

    ``recipes``: name -> :class:`~kinformer.family.record.Recipe`, or any function of a vocabulary size (None: the
    recipe's own) that returns a model config. ``layer``: the number of the layer that shows the mechanism in the recipe
    ``small``, where layers differ.

    ``objective``: the loss of training, unless set otherwise (see ``lab.training.settings``). ``needs``: options of
    training that the member requires, such as ``{"segments": True}``; a budget of minutes chooses the others (see
    ``lab.runs.minutes``). ``training``: recipe -> the options with which the paper trained it, as defaults. ``cost``:
    how the operations of a whole sequence grow with its length, if not as :attr:`growth_of_cost` derives it. ``task``:
    the usual task, if it is neither the next token nor masked tokens.
    """

    name: str
    title: str
    paper: str
    year: int = 0
    axes: tuple[str, ...]
    causal: bool = True
    growth: Growth = "linear"
    departures: tuple[str, ...]
    exact_limit: str
    use_when: str = ""
    avoid_when: str = ""
    parity: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    recipes: Mapping[str, Callable[[int | None], ModelConfig]]
    objective: Literal["next-token", "deep-supervision", "exits"] = "next-token"
    needs: Mapping[str, object] = field(default_factory=dict)
    training: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    cost: Cost | None = None
    task: str | None = None
    layer: int = 0

    def __post_init__(self) -> None:
        years = re.findall(r"\b(?:19|20)\d\d\b(?!\.\d)", self.paper)  # arXiv 2009.14794 is not of 2009
        if not self.year and not years:
            raise KinformerError(f"the paper of the member {self.name!r} does not have a year; give year.")
        object.__setattr__(self, "year", self.year or int(years[0]))
        if not self.causal:
            object.__setattr__(self, "growth", "none")

    @property
    def usual_task(self) -> str:
        """Return the task that the member is trained for by default."""
        return self.task or ("next-token" if self.causal else "mlm")

    @property
    def growth_of_cost(self) -> Cost:
        """Return how the operations of a whole sequence grow with its length; without ``cost``, from ``growth``."""
        return self.cost or ("linear" if self.growth in ("constant", "window") else "quadratic")

    @property
    def sheet(self) -> MemberSheet:
        """Return the facts of the member that reports show."""
        facts = {name: getattr(self, name) for name in MemberSheet.__annotations__}
        return cast("MemberSheet", facts | {"departures": tuple(map(spelled, self.departures))})

    @property
    def facts(self) -> MemberFacts:
        """Return the record as data for JSON."""
        return {
            **self.sheet,
            "use_when": self.use_when,
            "avoid_when": self.avoid_when,
            "cost": self.growth_of_cost,
            "recipes": list(self.recipes),
        }


# Recipes: model configs as data, which become configs when they are called with the size of a vocabulary.

Settings = dict[str, Any]

DECODER: Settings = {
    "kind": "decoder",
    "vocab_size": 256,
    "input": "tokens",
    "position": "none",
    "head": {"kind": "language", "tied": True},
    "layer": "decoder",
    "mixer": "softmax",
    "feed_forward": "mlp",
    "activation": "gelu",
    "residual": "pre",
}
"""A decoder with pre-norm layers and a head tied to the embeddings. Every recipe changes this base."""
POST_NORM: Settings = {"residual": "post", "activation": "relu"}
"""Sublayers as Vaswani et al. 2017 have them."""
ENCODER: Settings = {
    "kind": "encoder",
    "vocab_size": 259,
    "head": "masked_language",
    "layer": "encoder",
    "mixer": "bidirectional",
    "residual": "post",
}
"""An encoder below a masked-language-model head. The vocabulary's last three ids are the mask, [CLS] and [SEP]."""
IMAGES: Settings = {
    **ENCODER,
    "residual": "pre",
    "embedding_norm": None,
    "norm": {"kind": "layer_norm", "eps": 1e-6},
    "layers.*.norm": {"kind": "layer_norm", "eps": 1e-6},
    "initialisation": {"scheme": "xavier", "residual": "plain"},
}
"""An encoder of patches."""
SPEECH: Settings = {
    **ENCODER,
    "residual": "pre",
    "input": {"kind": "frames", "convolutions": 2},
    "position": "sinusoidal",
    "norm": "layer_norm",
    "head": {"kind": "ctc", "classes": 29},
    "initialisation": {"scheme": "framework"},
}
"""An encoder of frames of sound. Each convolution of its input halves the number of positions."""
SIZES = {"tiny": (32, 2, 2), "small": (256, 4, 4), "benchmark": (256, 4, 4)}
"""Width, depth and heads of the recipes that all members have, unless the member's record says otherwise."""


class Recipe:
    """A model config as data: sizes, and the differences from :data:`DECODER`.

    Later settings replace earlier ones. A setting is one of

    - a field of the model, such as ``head``: a value, a kind, or a mapping (see :func:`part`);
    - a field of every layer: ``mixer``, ``feed_forward``, ``residual``, and ``layer``, the kind of the layers;
    - ``hidden_dim`` (4 * dim if not given) and ``activation`` of the feed-forward, ``vocab_size``;
    - a path, as ``set`` takes it. A path may begin with ``mixer`` or ``feed_forward``, and the number of an item may be
      a slice: ``layers.3::4.mixer`` is the mixer of every fourth layer. Paths are applied after all other settings.

    Mixers without ``num_heads`` get the recipe's. An encoder-decoder is made by :func:`translating`.
    """

    def __init__(self, dim: int, depth: int, num_heads: int, *settings: Settings, **more: Any) -> None:
        self.dim, self.depth, self.num_heads = dim, depth, num_heads
        self.settings: dict[str, Any] = {}
        for changes in (DECODER, *settings, more):
            self.settings |= changes

    def but(self, *settings: Settings, **more: Any) -> Recipe:
        """Return this recipe with further settings."""
        return Recipe(self.dim, self.depth, self.num_heads, self.settings, *settings, **more)

    def __call__(self, vocab_size: int | None = None) -> ModelConfig:
        """Return the model config; ``vocab_size`` None is the recipe's own. The parts are imported."""
        return cast("ModelConfig", parse_slot("model", self.data(vocab_size), BUILTIN, "recipe"))

    def data(self, vocab_size: int | None = None) -> dict[str, Any]:
        """Return the config in the form of ``core.config.to_dict``, and leave out fields with default values."""
        settings = {name: _plain(value) for name, value in self.settings.items()}
        paths = {name: settings.pop(name) for name in self.settings if "." in name}
        size, source = settings.pop("vocab_size"), settings.pop("encoder", {})
        slot = "encoder_layer" if settings["kind"] == "encoder" else "layer"
        layer = _layer(settings, self.dim, slot)
        data = settings | {"dim": self.dim, "layers": [layer] * self.depth}
        _read_tokens(data, vocab_size or size, shared="input" not in source)
        if data["kind"] == "encoder_decoder":
            data["layers"] = [layer | {"further_mixers": [source.get("cross", "cross")]}] * self.depth
            reader = layer | {"kind": source.get("layer", "encoder"), "mixer": source.get("mixer", "bidirectional")}
            data["encoder"] = {
                "input": source.get("input"),
                "layers": [reader] * source.get("depth", self.depth),
                "position": data["position"],
                "norm": data.get("norm", "layer_norm"),
            }
        for path, value in paths.items():
            keys = path.split(".")
            data = _set(data, ["layers", "*", *keys] if keys[0] in ("mixer", "feed_forward") else keys, value)
        data["layers"] = [self._with_heads(slot, layer) for layer in data["layers"]]
        if "encoder" in data:
            data["encoder"]["layers"] = [self._with_heads("encoder_layer", item) for item in data["encoder"]["layers"]]
        return data

    def _with_heads(self, slot: str, layer: dict[str, Any]) -> dict[str, Any]:
        """Return a layer whose mixers have a number of heads, if their kind has heads."""

        def with_heads(mixer: Any) -> dict[str, Any]:
            mixer = part(mixer) if isinstance(mixer, str) else mixer
            has_heads = "num_heads" in _fields(slot.replace("layer", "mixer"), mixer["kind"])
            return {"num_heads": self.num_heads} | mixer if has_heads else mixer

        further = [with_heads(mixer) for mixer in layer.get("further_mixers", ())]
        return layer | {"mixer": with_heads(layer["mixer"])} | ({"further_mixers": further} if further else {})


def part(kind: str, **settings: Any) -> dict[str, Any]:
    """Return the data of a part, its ``kind`` and its settings."""
    return {"kind": kind, **settings}


def sizes(*settings: Settings, **by_name: Settings) -> dict[str, Recipe]:
    """Return the recipes of :data:`SIZES` with these settings; ``by_name`` has further settings of single recipes."""
    assert by_name.keys() <= SIZES.keys()
    return {name: Recipe(*size, *settings, by_name.get(name, {})) for name, size in SIZES.items()}


def llama(eps: float, feed_forward: str, **settings: object) -> Settings:
    """Return the settings of recent language models: RMS norms, this feed-forward, and a head with its own weights."""
    norm = part("rms_norm", eps=eps)
    head = part("language", tied=False)
    return {"feed_forward": part(feed_forward, **settings), "norm": norm, "layers.*.norm": norm, "head": head}


def drop(rate: float) -> Settings:
    """Return the settings of dropout of embeddings, of sublayers and in mixers."""
    return {"dropout": rate, "layers.*.dropout": rate, "mixer.dropout": rate}


def translating(dropout: float = 0.0, **settings: object) -> Settings:
    """Return the settings of an encoder-decoder: a decoder whose layers have attention to a source behind their mixer,
    and an encoder of the source.

    The encoder's layers are like the decoder's, with the mixer "bidirectional". Further settings are ``mixer`` and
    ``layer``, the mixer and the kind of the encoder's layers, ``depth``, their number, ``input``, by which the encoder
    reads unless it shares the decoder's, and ``cross``, the attention to the source. The last two ids of a shared
    vocabulary are BOS and EOS. ``dropout`` falls on embeddings and sublayers.
    """
    paths = ("dropout", "layers.*.dropout", "encoder.dropout", "encoder.layers.*.dropout")
    return {"kind": "encoder_decoder", "vocab_size": 258, "encoder": settings, **dict.fromkeys(paths, dropout)}


def _plain(value: Any) -> Any:
    """Return ``value`` with recipes inside as data, and tuples as lists."""
    if isinstance(value, Recipe):
        return value.data()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _fields(slot: str, kind: str) -> dict[str, object]:
    return field_types(BUILTIN[slot][kind])


def _layer(settings: dict[str, Any], dim: int, slot: str) -> dict[str, Any]:
    """Take the settings of every layer out of ``settings`` and return the layer; some kinds are a mixer alone."""
    feed_forward, activation = settings.pop("feed_forward"), settings.pop("activation")
    feed_forward = part(feed_forward) if isinstance(feed_forward, str) else feed_forward
    hidden_dim = settings.pop("hidden_dim", None) or 4 * dim
    if feed_forward["kind"] in ("mlp", "boom", "channel_mix"):
        feed_forward = {"hidden_dim": hidden_dim} | feed_forward
    if feed_forward["kind"] == "mlp":
        feed_forward = {"activation": activation} | feed_forward
    kind = settings.pop("layer")
    layer = {name: settings.pop(name) for name in ("mixer", "residual")} | {"feed_forward": feed_forward}
    return {"kind": kind} | {name: value for name, value in layer.items() if name in _fields(slot, kind)}


def _read_tokens(data: dict[str, Any], size: int, shared: bool) -> None:
    """Set the vocabulary of an input of tokens and its last special tokens; ``shared``: also an encoder's input."""
    read = part(data["input"]) if isinstance(data["input"], str) else data["input"]
    if read["kind"] != "tokens":
        return
    read = {"vocab_size": size} | read
    if data["kind"] == "encoder":
        read |= {"mask_token": size - 3}
    if data["kind"] == "encoder" or (data["kind"] == "encoder_decoder" and shared):
        read |= {"bos_token": size - 2, "eos_token": size - 1}
    for table in (data["head"], read.get("embedding")):
        if isinstance(table, dict) and "cutoffs" in table:  # a small vocabulary has fewer clusters
            table["cutoffs"] = [cutoff for cutoff in table["cutoffs"] if cutoff < size]
    data["input"] = read


def _set(node: Any, keys: list[str], value: object) -> Any:
    if not keys:
        return value
    key, *rest = keys
    if isinstance(node, list):
        numbers = range(len(node))
        bounds = [int(text) if text else None for text in key.split(":")] if ":" in key else []
        chosen = numbers if key == "*" else numbers[slice(*bounds)] if bounds else [numbers[int(key)]]
        return [_set(item, rest, value) if number in chosen else item for number, item in enumerate(node)]
    node = part(node) if isinstance(node, str) else node or {}
    return node | {key: _set(node.get(key), rest, value)}


# How the papers train their recipes.


def noam(dim: int, warmup: int = 4000, **more: Any) -> Settings:
    """Return the training of Vaswani et al. 2017, section 5.3: rate dim^-0.5 min(step^-0.5, step warmup^-1.5)."""
    return {
        "lr": dim**-0.5 * warmup**-0.5,
        "schedule": "inverse-sqrt",
        "warmup": warmup,
        "beta2": 0.98,
        "min_lr_ratio": 0.0,
        "weight_decay": 0.0,
        "clip": 0.0,
        **more,
    }


T5_TRAINING: Settings = {
    "batch_size": 128,
    "length": 512,
    "optimizer": "adafactor",
    "lr": 0.01,
    "schedule": "inverse-sqrt",
    "warmup": 10_000,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "clip": 0.0,
}
"""The training of Raffel et al. 2020, section 3.1.2. The rate rises to 0.01 in the first 10,000 steps; in the
paper it is 0.01 from the first step on."""


def words_training(length: int) -> Settings:
    """Return the training of models of WikiText-103 by Baevski and Auli 2019 (arXiv 1809.10853), with 73,728 tokens in
    a batch of rows of ``length`` tokens."""
    return {
        "steps": 286_000,
        "batch_size": 73_728 // length,
        "length": length,
        "optimizer": "sgd",
        "momentum": 0.99,
        "lr": 1.0,
        "warmup": 16_000,
        "min_lr_ratio": 1e-4,
        "weight_decay": 0.0,
        "clip": 0.1,
    }


def xl_training(steps: int, batch_size: int, length: int, warmup: int = 0) -> Settings:
    """Return the training of Transformer-XL's scripts, which other authors' scripts copy: Adam, and a cosine to 0."""
    return {
        "steps": steps,
        "batch_size": batch_size,
        "length": length,
        "lr": 2.5e-4,
        "warmup": warmup,
        "beta2": 0.999,
        "min_lr_ratio": 0.0,
        "weight_decay": 0.0,
        "clip": 0.25,
    }


def usual_training(*recipes: str, why: str = "published settings are not at hand") -> str:
    """Return the departure of recipes of a paper that bring no settings of training."""
    return f"the recipe {', '.join(recipes)} is trained by the usual settings: {why}"


def unconfirmed(*recipes: str, what: str = "the training") -> str:
    """Return the departure of recipes with figures that were not looked up in the paper."""
    return f"{what} of the recipe {', '.join(recipes)} is not confirmed against the paper"


def plateau_training(optimizer: str = "radam", lr: float = 1e-4) -> Settings:
    """Return the training of Katharopoulos et al. 2020, section 4.3: the rate halves as the error stays."""
    return {
        "optimizer": optimizer,
        "lr": lr,
        "schedule": "plateau",
        "min_lr_ratio": 0.0,
        "warmup": 0,
        "beta2": 0.999,
        "weight_decay": 0.0,
    }
