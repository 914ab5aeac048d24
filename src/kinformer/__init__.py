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

PyTorch is imported when a function first needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinformer.core import config

if TYPE_CHECKING:
    from typing import Unpack

    import numpy as np
    import torch
    from torch import Tensor

    from kinformer.core.config import Kinds
    from kinformer.core.model import CausalModel
    from kinformer.family.record import Member
    from kinformer.generation.sampling import SamplingOptions
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
    from kinformer.nn.modules import CausalLayer, LayerRecord


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


def layer(
    name: str | config.Config,
    dim: int,
    *,
    whole: bool = False,
    causal: bool | None = None,
    recipe: str = "small",
    set: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: object,
) -> CausalLayer | Any:  # a BidirectionalLayer by the name of an encoder; type checkers then require no check
    """Build one layer of a member for a model of your own: a module [batch, time, dim] -> [batch, time, dim].

        layer = kinformer.layer("gated-deltanet", dim=512, num_heads=8)
        y = layer(x)                                             # a full sequence
        y, state = layer(x, state=None, return_state=True)       # any chunk; see ``kinformer.nn.CausalLayer``

    name: a member or mixer (see :func:`layers`), or a config of parts, such as ``kinformer.nn.SoftmaxAttention(...)``.
    dim: the width.
    whole: build the member's whole layer, with norms, residuals and feed-forward, instead of its mixer alone.
    causal: False for the bidirectional form, which reads whole sequences, where the mechanism has one.
    recipe: the recipe of the member for missing settings. If its number of heads does not divide dim, the next smaller
        divisor is taken.
    settings: settings of the mixer and of the parts inside by name, such as ``num_heads``, ``window``, ``num_kv_heads``
        and ``features``; with ``whole`` also the layer's. A part may be a name (``position="rope"``), a mapping
        (``pattern={"kind": "local", "window": 64}``) or a config.
    set: settings inside parts by their paths, such as ``{"pattern.window": 64}``.
    device, dtype: the device and type of the weights, which PyTorch's global generator initialises.

    Positions that a member adds to its tokens, outside attention, are not part of a layer.

    Errors: ``KinformerError`` for unknown names and settings, and sizes that do not fit each other.
    """
    from kinformer.nn.modules import layer

    return layer(name, dim, whole=whole, causal=causal, recipe=recipe, set=set, device=device, dtype=dtype, **settings)


def layers() -> list[LayerRecord]:
    """Return records of the names that :func:`layer` takes: ``.title``, ``.causal``, ``.growth``, ``.settings``.

    ``print(kinformer.layers())`` shows which are causal, bidirectional, or both; ``print(record)`` also shows the
    settings and their defaults.
    """
    from kinformer.nn.modules import layers

    return layers()


def generate(
    model: CausalModel | Decoder | Encoder,
    prompt_tokens: Tensor | np.ndarray | Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    valid: Tensor | None = None,
    draft: object = None,
    draft_length: int = 4,
    weights: str | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Tensor:
    """Continue prompts and return the new tokens [batch, new] int64.

    model: a causal model.
    prompt_tokens: ids [batch, time]: an int64 tensor, a NumPy array, or lists of one length.
    max_new_tokens: the most tokens to draw for each row; if not given, 256, or fewer where the model's positions end.
    stop: sequences of ids; each ends a row as soon as the row has produced it.
    valid: [batch, time] bool, the real tokens of prompts of different lengths.
    draft: "ngram", "mtp" or a smaller model, which guesses ``draft_length`` tokens at most; see ``generation.drafts``.
    weights: "fp32", "bf16" or "int8", the type of the weights in memory; if not given, the model's. On a CPU, the model
        stores the copy that draws the tokens, so its weights are in memory twice until the model is freed or changed.
    sampling: ``temperature`` (1.0; 0 takes the most probable), ``top_k``, ``top_p``, ``min_p``,
        ``repetition_penalty`` (1.0), ``seed``.
    """
    from kinformer.generation.generate import generate

    causal: Any = model
    return generate(
        causal, prompt_tokens, max_new_tokens=max_new_tokens, stop=stop, valid=valid, draft=draft,
        draft_length=draft_length, weights=weights, **sampling,
    )  # fmt: skip


def __getattr__(name: str) -> object:
    """Return a function of :mod:`kinformer.lab.commands`, which is imported at the first use."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kinformer.lab import commands

    return getattr(commands, name)


def __dir__() -> list[str]:
    """Return the public names, sorted, for ``dir``."""
    return sorted(__all__)
