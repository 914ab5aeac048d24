"""Checkpoints of other libraries, read without running anything that they hold, and loaded models of transformers
whose attention is replaced.

``read_checkpoint`` reads a folder. ``patch`` replaces the attention of a loaded model, ``patched_layers`` says how, and
``convert`` also trains the model for it; these three need transformers and are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kinformer.interop.checkpoint import Imported, read_checkpoint
from kinformer.runtime.errors import KinformerError

if TYPE_CHECKING:
    from kinformer.interop.conversion import Conversion, Phase, convert
    from kinformer.interop.patching import PatchedLayer, patch, patched_layers

__all__ = ["Conversion", "Imported", "PatchedLayer", "Phase", "convert", "patch", "patched_layers", "read_checkpoint"]
_MODULES = dict.fromkeys(("Conversion", "Phase", "convert"), "conversion")
_MODULES |= dict.fromkeys(("PatchedLayer", "patch", "patched_layers"), "patching")


def __getattr__(name: str) -> object:
    """Return a name that needs transformers."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"kinformer.interop.{_MODULES[name]}")
    except ImportError as error:
        raise KinformerError(
            f"{name} needs transformers ({error}); get it with: pip install 'kinformer[transformers]'."
        ) from error
    globals()[name] = getattr(module, name)
    return globals()[name]
