"""Kinformer: the Transformer family in one library and one command line.

    import kinformer
    kinformer.members()                                      # the family
    model = kinformer.build("linear-transformer", recipe="tiny", vocab_size=256)
    logits, state = model(tokens)                            # tokens [batch, time] int64
    logits, state = model(tokens[:, -1:], state)             # continue with any chunk length
    run = kinformer.train("linear-transformer", data="stdlib", out="runs/linear", steps=500)
    kinformer.evaluate("runs/linear").metrics                # {"bits_per_byte": ...}
    kinformer.predict("runs/reviews", ["A fine film."])      # [{"text": ..., "classes": [...]}]
    vectors = kinformer.embed("runs/linear", ["A text."])    # [texts, dim]
    kinformer.trace("runs/gpt", "A text.").attention[0].weights      # [heads, queries, keys] of the first layer
    model = kinformer.load("runs/linear")                    # a trained run's model, in eval mode
    new = kinformer.generate(model, prompt, max_new_tokens=100, temperature=0.8, seed=1)
    kinformer.estimate("gpt", length=1024, batch_size=8).train_bytes
    kinformer.compare(["gpt", "linear-transformer"], data="stdlib", steps=500).finished
    layer = kinformer.layer("gated-deltanet", dim=512, num_heads=8)     # one layer for a model of your own
    y, state = layer(x, return_state=True)                   # [batch, time, dim] -> the same

PyTorch is imported with the first function that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from kinformer.core import config

if TYPE_CHECKING:
    from kinformer.core.config import Kinds
    from kinformer.family.record import Member
    from kinformer.generation.generate import generate
    from kinformer.lab.commands import (
        bench,
        calibrate,
        check_shards,
        compare,
        draw,
        embed,
        estimate,
        evaluate,
        export,
        import_checkpoint,
        index,
        load,
        open_run,
        pack,
        predict,
        register,
        serve,
        show,
        stream,
        tasks,
        trace,
        train,
        verify,
    )
    from kinformer.models.decoder import Decoder
    from kinformer.models.encoder import Encoder
    from kinformer.nn.modules import layer, layers


def _kinds() -> Kinds:
    from kinformer.family.kinds import kinds

    return kinds()


config.find = _kinds
__version__ = "0.3.0"
__all__ = [
    "bench",
    "build",
    "calibrate",
    "check_shards",
    "compare",
    "draw",
    "embed",
    "estimate",
    "evaluate",
    "export",
    "generate",
    "import_checkpoint",
    "index",
    "layer",
    "layers",
    "load",
    "members",
    "open_run",
    "pack",
    "predict",
    "register",
    "serve",
    "show",
    "stream",
    "tasks",
    "trace",
    "train",
    "verify",
]


def members() -> list[Member]:
    """Return the records of all members: first the family in the order of its table, then members of other packages."""
    from kinformer.family.table import members

    return members()


def build(
    name: str, *, recipe: str = "small", vocab_size: int | None = None, set: Mapping[str, object] | None = None
) -> Decoder | Encoder:
    """Build a new model, randomly initialised from PyTorch's global generator.

    name: a member of the family (see :func:`members`).
    recipe: the name of a recipe; every member has ``tiny``, ``small`` and ``benchmark``, and most have ``paper``.
    vocab_size: the number of token ids; the recipe's number if not given.
    set: overrides of the recipe by their paths, such as ``{"dim": 256, "layers.*.mixer.num_heads": 8}``.

    A causal member becomes a ``Decoder``: ``logits, state = model(tokens, state)``. Any other member becomes an
    ``Encoder``: ``logits = model(tokens, valid=, kinds=)``. An ``EncoderDecoder`` is a ``Decoder`` whose first state
    holds the source: ``model.begin(source, valid)``.
    """
    from kinformer.family.build import build

    return build(name, recipe, vocab_size, set)


_HOMES = {"layer": "nn.modules", "layers": "nn.modules", "generate": "generation.generate"}
"""The modules of the functions that do not stand in :mod:`kinformer.lab.commands`."""


def __getattr__(name: str) -> object:
    """Return a public function, whose module is imported at the first use."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"kinformer.{_HOMES.get(name, 'lab.commands')}"), name)


def __dir__() -> list[str]:
    """Return the public names, sorted, for ``dir``."""
    return sorted(__all__)
