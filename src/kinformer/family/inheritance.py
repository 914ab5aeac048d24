"""The model of one member that begins with a run of another: the run's body with the member's attention.

A model without memory that is fine-tuned to use one (Wu et al. 2022, section 4.6), softmax attention that becomes
linear (Kasai et al. 2021), a short encoder that becomes a long one (Beltagy et al. 2020, section 5). What the weights
were trained in (width, depth, heads, vocabulary, norms, feed-forwards) stays; what the member is known for comes from
its recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinformer.core.config import Config, field_types
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.core.model_config import ModelConfig

PLAIN: Mapping[str, frozenset[str]] = {
    "layer": frozenset({"decoder", "encoder", "parallel"}),
    "residual": frozenset({"pre", "post", "res_post", "sandwich"}),
    "feed_forward": frozenset({"mlp", "swiglu", "geglu"}),
    "head": frozenset({"language", "masked_language"}),
    "projection": frozenset({"multi_head", "grouped", "normalised"}),
    "score": frozenset({"scaled_dot", "capped"}),
}
"""Kinds by slot that no member is known for. Where both have one of these, the run's stays."""

SIZES = ("num_heads", "head_dim", "bias", "dropout")
"""What the mixers of both have in common; the run's stays."""


def inherited_config(base: ModelConfig, recipe: ModelConfig, place: Path | str) -> ModelConfig:
    """Return the config ``base`` of the run at ``place`` with the mixers, positions, stack and global input of
    ``recipe``, and with its other parts that are no plain ones (see ``PLAIN``)."""
    old, new = _fields(base), _fields(recipe)
    if type(base) is not type(recipe):
        raise KinformerError(
            f"{place}: is a run of a model {base.kind!r}, which {recipe.kind!r} cannot begin with; begin with another "
            "run, or with none."
        )
    places = places_of(recipe.layers, len(base.layers))
    layers = tuple(_layer(layer, recipe.layers[at]) for layer, at in zip(base.layers, places, strict=True))
    position = _position(old["position"], new["position"])
    stack = old["stack"] if old["stack"].kind == new["stack"].kind else new["stack"]
    head = old["head"] if new["head"].kind in PLAIN["head"] else new["head"]
    if stack is new["stack"] and not getattr(new["head"], "tied", True) and hasattr(old["head"], "tied"):
        head = head.replace(tied=False)  # as early exits with heads of their own need it
    changes: dict[str, object] = {"layers": _seeded(layers), "position": position, "stack": stack, "head": head}
    changes |= {name: new[name] for name in ("global_input", "global_tokens") if name in new}
    if all(_fields(layer)["mixer"] == before.mixer for layer, before in zip(layers, base.layers, strict=True)):
        changes["norm"] = new["norm"]
    return base.replace(**changes)


def places_of(layers: Sequence[object], depth: int) -> list[int]:
    """Return, for every layer of a model of ``depth`` layers, the number of that among ``layers`` at its place.

    The only layer of its kind, such as the one with memories, is a single layer of a deeper model too.
    """
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
    """Return the layer ``base`` with the mixer of ``recipe``, and with its other parts that are no plain ones.

    Where the mixer is that of the run, norms stand where those of the recipe do: they may be all that differs.
    """
    old, new = _fields(base), _fields(recipe)
    mixer = _mixer(old["mixer"], new["mixer"])
    plain = PLAIN["layer"]
    layer = base if base.kind == recipe.kind or {base.kind, recipe.kind} <= plain else recipe
    changes: dict[str, Any] = {name: old[name] for name in ("norm", "dropout") if name in old and name in new}
    for name in ("residual", "feed_forward"):
        if name in old and name in new:
            changes[name] = _chosen(old[name], new[name])
    if "feed_forward" in changes and "hidden_dim" in _fields(changes["feed_forward"]):
        hidden_dim = getattr(old["feed_forward"], "hidden_dim", None)
        changes["feed_forward"] = changes["feed_forward"].replace(hidden_dim=hidden_dim)
    if mixer == old["mixer"] and "residual" in new:
        changes["residual"] = new["residual"]
    return layer.replace(mixer=mixer, **changes)


def _mixer(base: Config, recipe: Config) -> Config:
    """Return the mixer ``recipe`` with the heads of ``base``."""
    old, new = _fields(base), _fields(recipe)
    changes = {name: old[name] for name in SIZES if name in old and name in new}
    if new.get("value_dim") and new.get("head_dim") and "head_dim" in old:
        width = old["head_dim"]
        changes["value_dim"] = None if width is None else width * new["value_dim"] // new["head_dim"]
    if "position" in old and "position" in new:
        changes["position"] = _position(old["position"], new["position"])
    for name in ("projection", "score"):
        if name in old and name in new:
            changes[name] = _chosen(old[name], new[name])
    if "projection" in new:
        projection, source = changes.get("projection", new["projection"]), old.get("projection", base)
        if "bias" in _fields(projection) and hasattr(source, "bias"):
            changes["projection"] = projection.replace(bias=source.bias)
    return recipe.replace(**changes)


def _seeded(layers: tuple[Config, ...]) -> tuple[Config, ...]:
    """Return ``layers`` whose random patterns have the number of their layer as seed, and the heads of their mixer."""
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


def _fields(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in field_types(type(config))}
