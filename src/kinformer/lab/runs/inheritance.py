"""The model of one member that begins with a run of another: the run's body with the member's attention.

Examples are a model without memory that is fine-tuned to use one (Wu et al. 2022, section 4.6), softmax attention that
becomes linear (Kasai et al. 2021), and a short encoder that becomes a long one (Beltagy et al. 2020, section 5). The
width, depth, heads, vocabulary, norms and feed-forwards come from the run. The member's mechanism comes from its
recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kinformer.core.config import Config, field_types
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from torch import Tensor

    from kinformer.core.stack import ModelConfig


PLAIN: Mapping[str, frozenset[str]] = {
    "layer": frozenset({"decoder", "encoder", "parallel"}),
    "residual": frozenset({"pre", "post", "res_post", "sandwich"}),
    "feed_forward": frozenset({"mlp", "swiglu", "geglu"}),
    "head": frozenset({"language", "masked_language"}),
    "projection": frozenset({"multi_head", "grouped", "normalised"}),
    "score": frozenset({"scaled_dot", "capped"}),
}
"""Plain kinds by slot: they do not characterise a member. Where both models have a plain kind, the run's kind stays."""

SIZES = ("num_heads", "head_dim", "bias", "dropout")
"""Settings that keep the run's values where the mixers of both models have them."""


def inherited_config(base: ModelConfig, recipe: ModelConfig, place: Path | str) -> ModelConfig:
    """Return the config ``base`` of the run at ``place`` with the mixers, positions, stack and global input of
    ``recipe``, and with its other parts whose kinds are not plain (see ``PLAIN``)."""
    old, new = _fields(base), _fields(recipe)
    if type(base) is not type(recipe):
        raise KinformerError(
            f"{place}: is a run of a model {base.kind!r}, which {recipe.kind!r} cannot begin with; give another run."
        )
    places = places_of(recipe.layers, len(base.layers))
    layers = tuple(_layer(layer, recipe.layers[at]) for layer, at in zip(base.layers, places, strict=True))
    position = _position(old["position"], new["position"])
    stack = old["stack"] if old["stack"].kind == new["stack"].kind else new["stack"]
    head = old["head"] if new["head"].kind in PLAIN["head"] else new["head"]
    if stack is new["stack"] and not getattr(new["head"], "tied", True) and hasattr(old["head"], "tied"):
        head = head.replace(tied=False)  # early exits with separate heads need an untied head
    changes: dict[str, object] = {"layers": _seeded(layers), "position": position, "stack": stack, "head": head}
    changes |= {name: new[name] for name in ("global_input", "global_tokens") if name in new}
    if all(_fields(layer)["mixer"] == before.mixer for layer, before in zip(layers, base.layers, strict=True)):
        changes["norm"] = new["norm"]
    return base.replace(**changes)


def places_of(layers: Sequence[object], depth: int) -> list[int]:
    """Return, for every layer of a model of ``depth`` layers, the number of the layer at its place in ``layers``. The
    only layer of its kind, such as the layer with memories, also stands once in a deeper model."""
    count = len(layers)
    kinds = [tuple(getattr(getattr(layer, name, None), "kind", "") for name in _MADE_OF) for layer in layers]
    places: list[int] = []
    for index in range(depth):
        at = index * count // depth
        if at in places and count > 1 and kinds.count(kinds[at]) == 1:
            at += 1 if at + 1 < count else -1
        places.append(at)
    return places


_MADE_OF = ("mixer", "feed_forward", "residual")


def _layer(base: Config, recipe: Config) -> Config:
    """Return the layer ``base`` with the mixer of ``recipe``, and with its other parts whose kinds are not plain. Where
    both have the same mixer, norms stand as in the recipe, because their place may be the only difference."""
    old, new = _fields(base), _fields(recipe)
    mixer, layer = _mixer(old["mixer"], new["mixer"]), _chosen(base, recipe)
    changes: dict[str, Any] = {name: old[name] for name in _in_both(("norm", "dropout"), old, new)}
    changes |= {name: _chosen(old[name], new[name]) for name in _in_both(("residual", "feed_forward"), old, new)}
    if "feed_forward" in changes and "hidden_dim" in _fields(changes["feed_forward"]):
        hidden_dim = getattr(old["feed_forward"], "hidden_dim", None)
        changes["feed_forward"] = changes["feed_forward"].replace(hidden_dim=hidden_dim)
    if mixer == old["mixer"] and "residual" in new:
        changes["residual"] = new["residual"]
    return layer.replace(mixer=mixer, **changes)


def _mixer(base: Config, recipe: Config) -> Config:
    old, new = _fields(base), _fields(recipe)
    changes = {name: old[name] for name in _in_both(SIZES, old, new)}
    if new.get("value_dim") and new.get("head_dim") and "head_dim" in old:
        width = old["head_dim"]
        changes["value_dim"] = None if width is None else width * new["value_dim"] // new["head_dim"]
    if "position" in old and "position" in new:
        changes["position"] = _position(old["position"], new["position"])
    changes |= {name: _chosen(old[name], new[name]) for name in _in_both(("projection", "score"), old, new)}
    if "projection" in new:
        projection, source = changes.get("projection", new["projection"]), old.get("projection", base)
        if "bias" in _fields(projection) and hasattr(source, "bias"):
            changes["projection"] = projection.replace(bias=source.bias)
    return recipe.replace(**changes)


def _seeded(layers: tuple[Config, ...]) -> tuple[Config, ...]:
    """Return ``layers`` whose random patterns have their layer's number as seed and their mixer's number of heads."""
    made = []
    for index, layer in enumerate(layers):
        mixer = _fields(layer)["mixer"]
        pattern = getattr(mixer, "pattern", None)
        settings = {} if pattern is None else _fields(pattern)
        changes = {"seed": index} if "seed" in settings else {}
        changes |= {"num_heads": mixer.num_heads} if settings.get("num_heads") else {}
        if pattern is not None and changes:
            layer = layer.replace(mixer=mixer.replace(pattern=pattern.replace(**changes)))
        made.append(layer)
    return tuple(made)


def _position(base: Config, recipe: Config) -> Config:
    """Return the position of ``recipe``, or ``base`` where it is of the same kind and reaches as far."""
    reach = [getattr(config, "max_length", None) or 0 for config in (base, recipe)]
    return base if base.kind == recipe.kind and reach[0] >= reach[1] else recipe


def _chosen(base: Config, recipe: Config) -> Config:
    """Return ``base`` where both are of one kind, or plain, else ``recipe``."""
    plain = PLAIN.get(recipe.slot, frozenset())
    return base if base.kind == recipe.kind or {base.kind, recipe.kind} <= plain else recipe


def _in_both(names: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name in old and name in new]


def _fields(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in field_types(type(config))}


# The weights that a model takes from a run of another member, the new weights, and the weights that the run keeps.
#
# A weight is taken where the run has a weight of the same name and shape, in a part of the same kind. Queries, keys and
# values are taken head by head, wherever both models have them (see ``LAYOUTS``). A longer table of positions repeats
# the rows of the run's table (Beltagy et al. 2020, section 5), and a second projection begins as a copy of the first
# (section 3.1).

POSITIONS, HEAD = "position.table", "head."
TABLE = "input.embedding.weight"
UNTIED = re.compile(r"(head|exit_heads\.\d+)\.output\.weight")
"""Weights that a tied head has in its table of embeddings."""
MIXER = re.compile(r"((?:encoder\.)?stack\.layers\.(\d+)\.(?:further_mixers\.\d+|\w+))\.(.+)\.(weight|bias)")
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "projection": {"projection.qkv": "qkv"},
    "sinkhorn": {"projection.qkv": "qkv"},
    "memorizing": {"qkv": "qkv"},
    "linear": {"qkv": "qkv"},
    "delta": {"qkv": "heads"},
    "linformer": {"query": "q", "key": "k", "value": "v"},
    "windows": {"query": "q", "key": "k", "value": "v"},
    "lsh": {"qv": "kv"},
    "etc": {"projection.qkv": "qkv"},
}
"""Projections by kind of mixer, and the order of their rows. "projection" is any mixer with a part ``projection``, and
"delta" is linear attention with the delta rule. "qkv": all heads of the queries, then of the keys, then of the values.
"heads": head by head, with the strength of writing (beta) after the value. The shared queries and keys of LSH count as
keys."""
FURTHER: Mapping[str, Mapping[str, str]] = {
    "multi_head_global": {f"projection.of_global.{name}": name[0] for name in ("query", "key", "value")},
    "etc": {"projection.of_global.qkv": "qkv", "projection.l2g": "kv", "projection.g2l": "kv"},
}
"""Second copies, by kind of mixer or projection."""
OUTPUTS = ("out", "global_out")

Shape = tuple[int, ...]


class Rows(NamedTuple):
    """Rows ``first`` to ``last`` of the run's weight ``name``."""

    name: str
    first: int
    last: int


class Block(NamedTuple):
    """The rows of head number ``head`` of ``heads`` in a projection; ``role``: q, k, v or beta."""

    role: str
    head: int
    heads: int
    size: int


Origin = str | tuple[Rows | int, ...]
"""A whole weight of the run, or rows of its weights and numbers of new rows."""


@dataclass(frozen=True)
class Inheritance:
    """The ``origins``, by weight, of a model of ``shapes`` in a run whose weights have the shapes ``base``."""

    base: Mapping[str, Shape]
    shapes: Mapping[str, Shape]
    origins: Mapping[str, Origin]

    @property
    def new(self) -> tuple[str, ...]:
        """Return the weights without an origin."""
        return tuple(name for name in self.shapes if name not in self.origins)

    @property
    def partly_new(self) -> tuple[str, ...]:
        """Return the weights with both inherited rows and new rows."""
        rows = ((name, origin) for name, origin in self.origins.items() if not isinstance(origin, str))
        return tuple(name for name, origin in rows if any(isinstance(item, int) for item in origin))

    @property
    def left(self) -> tuple[str, ...]:
        """Return the run's weights that the model does not take."""
        used: set[str] = set()
        for origin in self.origins.values():
            used |= {origin} if isinstance(origin, str) else {item.name for item in origin if isinstance(item, Rows)}
        return tuple(name for name in self.base if name not in used)

    @property
    def facts(self) -> dict[str, object]:
        """Return the ``new``, ``partly_new`` and ``left`` weights, and the counts of all and of inherited weights."""
        sizes = {name: prod(shape) for name, shape in self.shapes.items()}
        fresh = sum(sizes[name] for name in self.new)
        for name, origin in self.origins.items():
            rows = sum(item for item in origin if isinstance(item, int))
            fresh += rows * sizes[name] // self.shapes[name][0] if rows else 0
        return {
            "weights": len(self.shapes),
            "copied": len(self.origins),
            "numbers": sum(sizes.values()),
            "copied_numbers": sum(sizes.values()) - fresh,
            "new": list(self.new),
            "partly_new": list(self.partly_new),
            "left": list(self.left),
        }

    def weights(self, tensors: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's weights from the run's ``tensors``; new weights come from ``fresh``."""
        return {name: self._weight(name, tensors, weight) for name, weight in fresh.items()}

    def _weight(self, name: str, tensors: Mapping[str, Tensor], fresh: Tensor) -> Tensor:
        import torch

        origin = self.origins.get(name)
        if origin is None:
            return fresh
        if isinstance(origin, str):
            return tensors[origin]
        parts, at = [], 0
        for item in origin:
            rows = fresh[at : at + item] if isinstance(item, int) else tensors[item.name][item.first : item.last]
            parts.append(rows.to(fresh.dtype))
            at += len(rows)
        return torch.cat(parts)


def inheritance(base: ModelConfig, config: ModelConfig, place: Path | str, head: bool = True) -> Inheritance:
    """Return the weights that a model of ``config`` takes from the run of ``base`` at ``place``; without ``head`` its
    head is new. Nothing is allocated."""
    require_width(base, config, place)
    (before, shared_before), (after, shared) = _described(base), _described(config)
    if not head:
        before = {name: shape for name, shape in before.items() if not name.startswith(HEAD)}
    origins: dict[str, Origin] = {}
    for name, shape in after.items():
        key = name
        if name.startswith("stack.shared."):
            number, rest = name.split(".", 3)[2:]
            same = [other for other, part in shared_before.items() if part == shared[number]]
            key = f"stack.shared.{same[0]}.{rest}" if same else ""
        elif _part(base, name) != _part(config, name):
            key = ""
        origin: Origin | None = key if key and before.get(key) == shape else None
        if origin is None and name == POSITIONS == key and name in before and before[name][1:] == shape[1:]:
            # From its first row, the run's table is repeated.
            starts = range(0, shape[0], before[name][0])
            origin = tuple(Rows(name, 0, min(before[name][0], shape[0] - start)) for start in starts)
        if origin is None and UNTIED.fullmatch(name) and getattr(getattr(base, "head", None), "tied", False):
            origin = TABLE if before.get(TABLE) == shape else None
        if origin is None and (match := MIXER.fullmatch(name)):
            origin = _projected(match, (base, config), before, shape)
        if origin is not None:
            origins[name] = origin
    result = Inheritance(before, after, origins)
    if not any(len(after[name]) > 1 for name in origins):
        raise KinformerError(f"{place}: none of its matrices fits the model to be trained; begin with a nearer member.")
    return result


def require_width(base: ModelConfig, config: ModelConfig, place: Path | str) -> None:
    """Refuse a model of ``config`` whose width or vocabulary differs from the run's at ``place``, ``base``."""
    for what, old, new in (
        ("dim", base.dim, config.dim),
        ("input.vocab_size", *(getattr(model.input, "vocab_size", None) for model in (base, config))),
    ):
        if old != new:
            raise KinformerError(
                f"{place}: has {what} = {old}, but the model to be trained has {new}; leave such a `set` out, or begin "
                "with no run, because a run keeps its width and its vocabulary."
            )


def _described(config: ModelConfig) -> tuple[dict[str, Shape], dict[str, tuple[type, Config]]]:
    """Return the shape of every weight by its name, and the config of every shared part by its number."""
    from kinformer.runtime.compiling import unallocated

    with unallocated():
        model = config.build()
        shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        shared = getattr(getattr(model, "stack", None), "shared", ())
        return shapes, {str(number): (type(part), part.config) for number, part in enumerate(shared)}


def _part(config: Any, name: str) -> str:
    """Return "slot.kind" of the innermost part of ``config`` with the weight ``name``; "" for a layer or the model."""
    keys, node = name.split("."), config
    while keys:
        if keys[0] == "stack" and hasattr(node, "layers"):
            keys = keys[1:]
            if keys[0] != "layers":
                node = node.stack
        child = node[int(keys[0])] if isinstance(node, tuple) and keys[0].isdigit() else getattr(node, keys[0], None)
        if not isinstance(child, tuple) and not hasattr(child, "slot"):
            break
        if isinstance(child, tuple) and len(keys) > 1 and keys[1].isdigit() and int(keys[1]) >= len(child):
            break
        keys, node = keys[1:], child
    slot = getattr(node, "slot", "")
    kind = "latent" if getattr(node, "kind", "") == "indexed" else getattr(node, "kind", "")  # DSA begins from MLA
    return "" if slot in ("", "layer", "model") else f"{slot}.{kind}"


def _projected(
    match: re.Match[str], configs: tuple[ModelConfig, ModelConfig], before: Mapping[str, Shape], shape: Shape
) -> Origin | None:
    """Return the origin of a mixer's projection of ``shape`` in the mixer of the same layer of the run."""
    prefix, layer, name, kind = match.groups()
    if not prefix.endswith(f".{layer}.mixer") or prefix.startswith("encoder."):
        return None
    layers = [model.layers for model in configs]
    if int(layer) >= min(map(len, layers)):
        return None
    base, mixer = (item[int(layer)].mixer for item in layers)
    sources, targets = (_layouts(item, model.dim) for item, model in zip((base, mixer), configs, strict=True))
    if name in OUTPUTS and sources[0] and targets[0]:
        source = f"{prefix}.out.{kind}"
        return source if before.get(source) == shape else None
    blocks = (targets[0] | targets[1]).get(name)
    if blocks is None or sum(block.size for block in blocks) != shape[0]:
        return None
    rows: dict[str, list[Rows]] = {}
    for source, items in sources[0].items():
        at, whole = 0, f"{prefix}.{source}.{kind}"
        for block in items if whole in before and before[whole][1:] == shape[1:] else ():
            rows.setdefault(block.role, []).append(Rows(whole, at, at + block.size))
            at += block.size
    origin = tuple(_block(block, rows) for block in blocks)
    return origin if any(isinstance(item, Rows) for item in origin) else None


def _block(block: Block, rows: Mapping[str, list[Rows]]) -> Rows | int:
    """Return the run's rows for ``block``; a key or value head that several query heads share is copied for each.
    Return the number of new rows where the run does not have such a head of this size."""
    heads = rows.get(block.role) or (rows.get("k", []) if block.role == "q" else [])
    if not heads or block.heads % len(heads):
        return block.size
    chosen = heads[block.head * len(heads) // block.heads]
    return chosen if chosen.last - chosen.first == block.size else block.size


def _layouts(mixer: Any, dim: int) -> tuple[dict[str, list[Block]], dict[str, list[Block]]]:
    """Return the blocks of the projections of ``mixer``, and of its second copies, by their names."""
    projection: Any = getattr(mixer, "projection", None)
    kind, inner = mixer.kind, ""
    while hasattr(projection, "inner"):
        projection, inner = projection.inner, f"{inner}.inner"
    if projection is not None:
        kind = "projection" if projection.kind in ("multi_head", "grouped", "multi_head_global") else ""
    elif getattr(mixer, "rule", None) in ("delta", "comba"):
        kind = "delta"
    grouped = getattr(mixer, "key_heads", None) or getattr(mixer, "steps", 1) > 1
    if kind not in LAYOUTS or grouped:
        return {}, {}
    further = FURTHER.get(mixer.kind if projection is None else projection.kind, {})
    heads = mixer.num_heads
    width = mixer.head_dim or dim // heads
    value = getattr(mixer, "value_dim", None) or width
    shared = getattr(projection, "num_kv_heads", heads)
    roles = {"q": (heads, width), "k": (shared, width), "v": (shared, value), "b": (heads, 1)}

    def blocks(template: str) -> list[Block]:
        if template == "heads":
            return [Block(role, head, heads, roles[role][1]) for head in range(heads) for role in "qkvb"]
        counted = [(role, *roles[role]) for role in template]
        return [Block(role, head, count, size) for role, count, size in counted for head in range(count)]

    first = {name.replace("projection", f"projection{inner}"): blocks(item) for name, item in LAYOUTS[kind].items()}
    return first, {name: blocks(item) for name, item in further.items()}
