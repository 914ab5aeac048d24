"""One layer for anyone's model: every mechanism of the family as a plain ``nn.Module``.

    from kinformer.nn import layer

    attention = layer("gated-deltanet", dim=512, num_heads=8)
    y = attention(x)                                              # [batch, time, dim] -> the same
    y, state = attention(x, state=None, return_state=True)        # any chunk, and the state after it

``layer`` takes the name of a member or a config of parts; ``layers`` lists the names and their settings; ``stack``
joins layers; ``MultiheadAttention`` has the interface of PyTorch's; ``attention`` is a function of q, k and v;
``states`` holds what can be done with any state. All parts are here under the field's names, such as
``RotaryPositions``.

Importing this module imports nothing; a name is imported when it is first used. Type checkers read ``__init__.pyi``.
"""

from __future__ import annotations

from importlib import import_module

_MODULES = {
    "BidirectionalLayer": "bidirectional",
    "CausalLayer": "causal",
    "MultiheadAttention": "multihead_attention",
    "attention": "attention",
    "layer": "factory",
    "layers": "factory",
    "stack": "factory",
}
"""The module of each name that is no config."""
_CONFIGS = ("blocks", "parts")
"""The modules of the configs."""


def __getattr__(name: str) -> object:
    """Return a name of this module, which is imported when it is first used."""
    if name == "states":
        return import_module("kinformer.nn.states")
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in (_MODULES[name],) if name in _MODULES else _CONFIGS:
        value = getattr(import_module(f"kinformer.nn.{module}"), name, None)
        if value is not None:
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, sorted, for ``dir``."""
    configs = (name for module in _CONFIGS for name in import_module(f"kinformer.nn.{module}").__all__)
    return sorted({*_MODULES, *configs, "states"})
