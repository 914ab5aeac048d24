"""Parts that all layers have in common, such as one table of biases for a whole model."""

from __future__ import annotations

from typing import Any

from torch import nn


def share(layers: nn.ModuleList) -> nn.ModuleList:
    """Make one of all parts in ``layers`` that are ``shared`` and have equal configs and shapes, for the model to own.

    A part of a mixer says so by its attributes ``shared`` and ``config``. The layers go on calling it, but it is no
    longer among their submodules: it is saved, counted, moved and sharded once, with the module that keeps the result.
    """
    shared: dict[Any, nn.Module] = {}
    for owner in list(layers.modules()):
        for name, part in list(owner.named_children()):
            if getattr(part, "shared", False):
                key = (type(part), part.config, *(parameter.shape for parameter in part.parameters()))
                delattr(owner, name)
                object.__setattr__(owner, name, shared.setdefault(key, part))
    return nn.ModuleList(shared.values())
