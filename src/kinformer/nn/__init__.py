"""One layer for anyone's model: every mechanism of the family as a plain ``nn.Module``.

    from kinformer.nn import layer

    attention = layer("gated-deltanet", dim=512, num_heads=8)
    y = attention(x)                                              # [batch, time, dim] -> the same
    y, state = attention(x, state=None, return_state=True)        # any chunk, and the state after it

``layer`` takes the name of a member or a config of parts; ``layers`` lists the names and their settings; ``stack``
joins layers; ``MultiheadAttention`` has the interface of PyTorch's; ``attention`` is a function of q, k and v;
``states`` holds what can be done with any state. The configs of all parts are here under the field's
names, such as ``RotaryPositions``; each page of parts lists its own (``kinformer.family.kinds``).

Importing this module imports nothing; a name is imported when it is first used. Type checkers read ``__init__.pyi``,
which ``python tests/nn/test_names.py`` writes.
"""

from __future__ import annotations

from importlib import import_module

_MODULES = {
    "BidirectionalLayer": "modules",
    "CausalLayer": "modules",
    "MultiheadAttention": "multihead_attention",
    "attention": "multihead_attention",
    "layer": "modules",
    "layers": "modules",
    "stack": "modules",
}
"""The module of each name; the names of configs are looked up in the registry of parts."""


def __getattr__(name: str) -> object:
    """Return a name of this module, which is imported when it is first used."""
    if name == "states":
        return import_module("kinformer.nn.states")
    if name in _MODULES:
        value = getattr(import_module(f"kinformer.nn.{_MODULES[name]}"), name)
    elif name.startswith("_") or (value := _config(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _config(name: str) -> object:
    """Return the config of a part by its name here, or None."""
    from kinformer.family.kinds import named_parts

    return next((config for part, config in named_parts() if part == name), None)


def __dir__() -> list[str]:
    """Return the public names, sorted, for ``dir``."""
    from kinformer.family.kinds import named_parts

    return sorted({*_MODULES, *(name for name, _ in named_parts()), "states"})
